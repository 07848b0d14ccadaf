"""kill -9 while messages are dead-lettered: each is in its source or in all targets, once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.durability.audit import audit
from tests.durability.burials import BurialTrial
from tests.durability.targets import LeveretTarget

SEED = 20_261_119


async def run(target: LeveretTarget, kills: int, seed: int = SEED) -> BurialTrial:
    trial = BurialTrial(target, seed)
    await trial.run(kills)
    return trial


async def test_three_kills(tmp_path: Path) -> None:
    target = LeveretTarget(tmp_path)
    trial = await run(target, 3)
    assert trial.book.complaints == []
    assert min(trial.book.buried.values()) > 100, trial.book.buried
    assert trial.unconfirmed > 10, "the kills came when all was quiet"
    assert "Traceback" not in target.read_log()
    assert audit(target.data) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_twenty_kills(tmp_path: Path) -> None:
    target = LeveretTarget(tmp_path)
    trial = await run(target, 20, SEED + 1)
    assert trial.book.complaints == []
    assert min(trial.book.buried.values()) > 1_000, trial.book.buried
    assert audit(target.data) == []


async def test_a_commit_for_each_queue_is_noticed(tmp_path: Path) -> None:
    trial = await run(LeveretTarget(tmp_path, sabotage="split_units"), 10)
    assert any("only" in each or "lost" in each for each in trial.book.complaints)
