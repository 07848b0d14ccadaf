"""kill -9 at random instants, under load: what was confirmed is there after the restart."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.durability.audit import audit
from tests.durability.targets import LeveretTarget, RabbitTarget
from tests.durability.trial import Target, Trial

# Of the kills only: what is published where is the same on each machine, the rest is timing.
SEED = 20_240_229


async def run(target: Target, kills: int, seed: int = SEED) -> Trial:
    trial = Trial(target, seed)
    await trial.run(kills)
    return trial


async def test_five_kills(tmp_path: Path) -> None:
    target = LeveretTarget(tmp_path)
    (await run(target, 5)).assert_kept(5)
    assert "Traceback" not in target.read_log()
    assert audit(target.data) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_thirty_kills(tmp_path: Path) -> None:
    target = LeveretTarget(tmp_path)
    (await run(target, 30, SEED + 1)).assert_kept(30)
    assert audit(target.data) == []


async def test_confirm_before_commit_is_noticed(tmp_path: Path) -> None:
    trial = await run(LeveretTarget(tmp_path, sabotage="confirm_before_commit"), 10)
    assert "lost" in trial.ledger.kinds()


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_run_that_counts_as_kept_at_its_first_ack_is_noticed(tmp_path: Path) -> None:
    target = LeveretTarget(tmp_path, sabotage="release_at_first_ack")
    # Its commits take half a second: not all kills right after one, which brings most confirms.
    trial = Trial(target, SEED, latest_kill_s=0.4)
    # One in five or so falls between such a confirm and its commit; the first ends the trial.
    await trial.run(40)
    # A message that was confirmed is gone, or acks came undone that its confirm vouched for.
    assert trial.ledger.kinds() & {"lost", "returned"}


@pytest.mark.slow
async def test_forgotten_acks_are_noticed(tmp_path: Path) -> None:
    trial = await run(LeveretTarget(tmp_path, sabotage="forget_acks"), 10)
    assert "returned" in trial.ledger.kinds()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not RabbitTarget.is_here(), reason="RabbitMQ is not installed")
async def test_rabbitmq_keeps_the_same_promise() -> None:
    """Else the checker would ask for more than clients are used to."""
    # Not in pytest's folder, into which another user may not look.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        (await run(RabbitTarget(Path(folder)), 4)).assert_kept(4)
