"""Alarms: who is told, what clients are told, and what sets them off."""

from __future__ import annotations

from pathlib import Path

import pytest

from leveret.broker.alarms import DISK, DISK_CHECK_S, MEMORY, Alarms, AlarmsCleared, DiskMonitor
from leveret.broker.clock import VirtualClock
from leveret.broker.mailbox import Mailbox

LIMIT = 50_000_000
PLENTY = 1000 * LIMIT


@pytest.fixture
def alarms() -> Alarms:
    return Alarms()


@pytest.mark.parametrize(
    ("resources", "reason"),
    [
        pytest.param([MEMORY], "low on memory", id="memory"),
        pytest.param([DISK], "low on disk", id="disk"),
        pytest.param([DISK, MEMORY], "low on memory & disk", id="both"),
        pytest.param([DISK, DISK], "low on disk", id="twice-the-same"),
    ],
)
def test_reason(alarms: Alarms, resources: list[str], reason: str) -> None:
    for number, resource in enumerate(resources):
        alarms.set(f"cause {number}", resource)
    assert alarms.reason == reason


def test_those_who_wait_hear_when_the_last_is_cleared(alarms: Alarms) -> None:
    waiting, gone = Mailbox("waiting"), Mailbox("gone")
    alarms.set("a", MEMORY)
    alarms.set("b", DISK)
    alarms.call_when_cleared(waiting)
    alarms.call_when_cleared(gone)
    alarms.forget(gone)
    alarms.clear("a")
    assert alarms.active
    assert not waiting.urgent
    alarms.clear("b")
    assert not alarms.active
    assert waiting.take_urgent() == [AlarmsCleared()]
    assert not gone.urgent
    # Once each.
    alarms.set("a", MEMORY)
    alarms.clear("a")
    assert not waiting.urgent


def test_what_is_not_set_cannot_be_cleared(alarms: Alarms) -> None:
    waiting = Mailbox("waiting")
    alarms.set("a", MEMORY)
    alarms.call_when_cleared(waiting)
    alarms.clear("b")
    assert not waiting.urgent


def test_writes_that_fail(alarms: Alarms) -> None:
    """Of two virtual hosts one may have a disk that works."""
    alarms.on_trouble("/", OSError("full"))
    alarms.on_trouble("/", OSError("still full"))
    alarms.on_trouble("other", OSError("full"))
    assert alarms.reason == "low on disk"
    assert len(alarms.statistics()) == 2
    alarms.on_trouble("/", None)
    assert alarms.statistics() == [{"resource": "disk", "cause": "writes fail in vhost 'other'"}]
    alarms.on_trouble("other", None)
    assert not alarms.active


class Disk:
    """A disk whose room the test decides."""

    def __init__(self, clock: VirtualClock, alarms: Alarms, *, limit: int = LIMIT) -> None:
        self.free: int | None = PLENTY
        self.looks = 0
        self.monitor = DiskMonitor(clock, Path("data"), limit, self._read, alarms)
        self.monitor.start()

    def _read(self, folder: Path) -> int:
        assert folder == Path("data")
        self.looks += 1
        if self.free is None:
            raise OSError("gone")
        return self.free


def test_little_room_on_the_disk(clock: VirtualClock, alarms: Alarms) -> None:
    disk = Disk(clock, alarms)
    assert not alarms.active
    disk.free = LIMIT - 1
    clock.advance(DISK_CHECK_S)
    assert alarms.has(DISK)
    assert disk.monitor.statistics() == {"free": LIMIT - 1, "limit": LIMIT}
    disk.free = LIMIT
    clock.advance(DISK_CHECK_S)
    assert not alarms.active


def test_a_disk_that_is_short_at_the_start(clock: VirtualClock, alarms: Alarms) -> None:
    disk = Disk(clock, Alarms())
    disk.monitor.stop()
    disk.free = 0
    other = DiskMonitor(clock, Path("data"), LIMIT, disk._read, alarms)
    other.start()
    assert alarms.has(DISK)


def test_the_nearer_the_end_the_more_looks(clock: VirtualClock, alarms: Alarms) -> None:
    disk = Disk(clock, alarms)
    clock.advance(10 * DISK_CHECK_S)
    seldom, disk.looks = disk.looks, 0
    disk.free = LIMIT + 100_000_000
    clock.advance(10 * DISK_CHECK_S)
    often, disk.looks = disk.looks, 0
    assert (seldom, often > 100) == (11, True)
    # Once it is known nothing can be missed.
    disk.free = 0
    clock.advance(DISK_CHECK_S)
    disk.looks = 0
    clock.advance(10 * DISK_CHECK_S)
    assert disk.looks == 10


def test_a_disk_that_cannot_be_asked_changes_nothing(clock: VirtualClock, alarms: Alarms) -> None:
    disk = Disk(clock, alarms)
    disk.free = None
    clock.advance(DISK_CHECK_S)
    assert not alarms.active
    disk.free = 0
    clock.advance(DISK_CHECK_S)
    disk.free = None
    clock.advance(DISK_CHECK_S)
    assert alarms.has(DISK)


def test_no_limit_no_looks(clock: VirtualClock, alarms: Alarms) -> None:
    disk = Disk(clock, alarms, limit=0)
    clock.advance(100)
    assert disk.looks == 0


def test_a_monitor_that_was_stopped(clock: VirtualClock, alarms: Alarms) -> None:
    disk = Disk(clock, alarms)
    disk.monitor.stop()
    assert clock.statistics()["timers"] == 0
