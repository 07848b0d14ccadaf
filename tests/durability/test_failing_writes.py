"""Writes that fail: nothing is confirmed meanwhile, nothing that was confirmed is lost."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.durability.disk import FailingDisk, SmallDisk
from tests.durability.trial import Trial

SEED = 28
DEADLINE_S = 30.0


async def wait_until(is_true: Callable[[], object], what: str) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + DEADLINE_S
    while not is_true():
        assert loop.time() < deadline, f"never came true: {what}"
        await asyncio.sleep(0.01)


async def load(trial: Trial, confirms: int) -> None:
    """Start to publish; returns with so many more confirmed, and goes on."""
    counts = trial.ledger.counts
    wanted = counts["confirmed"] + confirms
    for publisher in trial.publishers:
        publisher.pump()
    await wait_until(lambda: counts["confirmed"] >= wanted, f"{confirms} confirms")


async def end(trial: Trial) -> None:
    trial.target.kill()
    for link in trial.links:
        await link.lost


async def assert_kept(trial: Trial) -> None:
    await trial.restart_and_check()
    assert not trial.ledger.complaints, trial.ledger.report()
    assert trial.ledger.counts["kept"] > 100
    trial.target.stop()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
async def test_writes_fail_and_work_again(tmp_path: Path, disk_library: Path, error: int) -> None:
    with FailingDisk(tmp_path, disk_library) as disk:
        trial = Trial(disk, SEED)
        await trial.begin()
        await trial.connect()
        await load(trial, 500)
        disk.fail(error)
        # Two for each attempt. By the second, all that was confirmed before has been told.
        await wait_until(lambda: disk.failures >= 4, "failures")
        confirmed = trial.ledger.counts["confirmed"]
        await wait_until(lambda: disk.failures >= 6, "more failures")
        assert trial.ledger.counts["confirmed"] == confirmed
        assert "nothing is confirmed until it works" in disk.read_log()
        disk.recover()
        await load(trial, 2_000)
        assert "writing works again" in disk.read_log()
        await end(trial)
        await assert_kept(trial)


async def test_kill_while_writes_fail(tmp_path: Path, disk_library: Path) -> None:
    with FailingDisk(tmp_path, disk_library) as disk:
        trial = Trial(disk, SEED + 1)
        await trial.begin()
        await trial.connect()
        await load(trial, 1_000)
        disk.fail()
        await wait_until(lambda: disk.failures >= 3, "failures")
        await end(trial)
        disk.recover()
        await assert_kept(trial)


@pytest.mark.slow
async def test_full_filesystem(tmp_path: Path) -> None:
    """A filesystem of its own that fills up, is emptied, fills up again and meets a kill."""
    with SmallDisk(tmp_path) as disk:
        trial = Trial(disk, SEED + 2)
        await trial.begin()
        await trial.connect()
        disk.fill()
        await load(trial, 0)
        await wait_until(lambda: "until it works" in disk.read_log(), "a full disk")
        disk.free()
        await load(trial, 500)
        disk.fill()
        await wait_until(lambda: disk.read_log().count("until it works") > 1, "a full disk again")
        await end(trial)
        disk.free()
        await assert_kept(trial)
