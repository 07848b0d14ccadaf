"""kill -9 in the middle of transactions: each has happened in all of its queues, or in none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.durability.audit import audit
from tests.durability.moves import MoveTrial
from tests.durability.targets import LeveretTarget

SEED = 20_261_118


async def run(target: LeveretTarget, kills: int, seed: int = SEED) -> MoveTrial:
    trial = MoveTrial(target, seed)
    await trial.run(kills)
    return trial


async def test_three_kills(tmp_path: Path) -> None:
    target = LeveretTarget(tmp_path)
    trial = await run(target, 3)
    assert trial.book.complaints == []
    assert trial.book.committed > 10
    assert trial.book.unanswered > 10, "the kills came between transactions"
    assert "Traceback" not in target.read_log()
    assert audit(target.data) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_twenty_kills(tmp_path: Path) -> None:
    target = LeveretTarget(tmp_path)
    trial = await run(target, 20, SEED + 1)
    assert trial.book.complaints == []
    assert trial.book.committed > 1_000
    assert trial.book.unanswered > 100, "the kills came between transactions"
    assert audit(target.data) == []


async def test_a_commit_for_each_queue_is_noticed(tmp_path: Path) -> None:
    trial = await run(LeveretTarget(tmp_path, sabotage="split_units"), 10)
    assert any("only" in complaint for complaint in trial.book.complaints)
