"""A data folder has one owner at a time, and none once that one has ended."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from leveret.broker.config import Settings
from leveret.broker.server import Broker
from leveret.storage.folder_lock import FolderInUse, FolderLock
from tests.support.broker_process import BrokerProcess

HOLDER = """
import sys
from pathlib import Path
from leveret.storage.folder_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
lock.take()
print("taken", flush=True)
sys.stdin.read()
"""


def test_second_owner_is_refused_and_told_who_the_first_is(tmp_path: Path) -> None:
    with (
        FolderLock(tmp_path),
        pytest.raises(FolderInUse, match=f"in use by process {os.getpid()}:"),
    ):
        FolderLock(tmp_path).take()


def test_released_folder_can_be_taken_again(tmp_path: Path) -> None:
    for _ in range(2):
        with FolderLock(tmp_path / "new"):
            pass


def test_release_without_the_lock_does_nothing(tmp_path: Path) -> None:
    with FolderLock(tmp_path):
        other = FolderLock(tmp_path)
        with pytest.raises(FolderInUse):
            other.take()
        other.release()
        with pytest.raises(FolderInUse):
            FolderLock(tmp_path).take()


def test_killed_owner_leaves_no_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "taken\n"
        with pytest.raises(FolderInUse, match=str(holder.pid)):
            FolderLock(tmp_path).take()
        holder.kill()
        holder.wait(20)
        with FolderLock(tmp_path):
            pass


async def test_second_broker_on_a_folder_does_not_start(broker: Broker, settings: Settings) -> None:
    with pytest.raises(FolderInUse):
        await Broker(settings).start()
    # The first has everything it had.
    assert broker.vhosts["/"].database is not None
    await broker.vhosts["/"].database.wait_committed()


async def test_stopped_broker_gives_the_folder_back(settings: Settings) -> None:
    stopped = Broker(settings)
    await stopped.start()
    await stopped.stop()
    # While the object is still there: its end must not be what releases the lock.
    with FolderLock(settings.data):
        pass
    assert stopped.vhosts


async def test_broker_that_cannot_start_gives_the_folder_back(
    broker_process: BrokerProcess, settings: Settings
) -> None:
    failed = Broker(replace(settings, port=broker_process.port))
    with pytest.raises(OSError, match="in use"):
        await failed.start()
    with FolderLock(settings.data):
        pass
    assert failed.vhosts
