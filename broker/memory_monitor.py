"""How much memory the broker uses, and how much of it queues may use [122-123].

Every 2.5 s the memory of this process is held against the watermark, and more often where it
could be reached sooner. Above it, the memory alarm is set. Long before, from half of it on,
queues are told how long their messages in memory may last: each reports how long they would at
its present rates, and the mean of all, made shorter as memory gets short, is the target for every
one. So queues whose messages are gone soon keep them, and those that only grow write theirs to
disk.

Queues are reached through their mailboxes, like by everybody; their reports gather in the
monitor's own and are read at its next look. While memory is plentiful nobody is asked, so that
queues at rest stay at rest.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from leveret.broker.alarms import DISK, MEMORY, Alarms
from leveret.broker.mailbox import Mailbox
from leveret.broker.queues.commands import RamDuration, ReportRamDuration, SetRamDuration

if TYPE_CHECKING:
    from leveret.broker.clock import Clock, Timer

INTERVAL_S = 2.5
REPORT_S = 5.0
# What publishers can fill in a second, and the least time between two looks.
_FAST_BYTES = 400_000_000
_SOON_S = 0.25
# Of the watermark: from here on messages are paged out.
PAGING_RATIO = 0.5
# From here on queues are asked, so that their reports are there when they are needed.
ASKING_RATIO = 0.4
# Below this, the target grows a little at each look: paging is to reach a balance.
_GROWING_RATIO = 0.95
_GROWING_S = 1.0


# --- what this machine has ---------------------------------------------------------------------


def used_memory() -> int:
    """Resident bytes of this process."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * _PAGE_SIZE
    except OSError:
        # Not Linux: the most it ever was is the best there is.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


_PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")


def total_memory(root: Path = Path("/")) -> int:
    """Bytes of the machine, or of the container where that has less."""
    machine = os.sysconf("SC_PHYS_PAGES") * _PAGE_SIZE
    return min([machine, *_cgroup_limits(root)])


def _cgroup_limits(root: Path) -> Iterator[int]:
    """Every limit that holds for this process: each group's above its own counts as well."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # Inside a container the path may be the host's, and only its top is to be seen.
        group = Path(path.lstrip("/"))
        for folder in (group, *group.parents):
            # No limit is the word "max", or (v1) a number that no machine has.
            with contextlib.suppress(OSError, ValueError):
                yield int((top / folder / name).read_text())


def free_disk(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def release_memory() -> None:
    """Give back what is free inside the process: else what was paged out still counts as used."""
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


class Probes(NamedTuple):
    """How the broker looks at its machine; tests have their own."""

    used_memory: Callable[[], int] = used_memory
    total_memory: Callable[[], int] = total_memory
    free_disk: Callable[[Path], int] = free_disk
    release_memory: Callable[[], None] = release_memory


# --- the monitor -------------------------------------------------------------------------------


class _Known:
    """What the monitor knows of a queue."""

    __slots__ = ("reported", "sent")

    def __init__(self) -> None:
        self.reported = math.inf
        # The target it has.
        self.sent = math.inf


class MemoryMonitor:
    CAUSE = "memory is above the watermark"

    def __init__(
        self,
        clock: Clock,
        watermark: float,
        probes: Probes,
        queues: Callable[[], Iterable[Mailbox]],
        alarms: Alarms,
    ) -> None:
        """``watermark``: up to 1 a share of all memory, above it bytes."""
        self._clock = clock
        self._probes = probes
        self._queues = queues
        self._alarms = alarms
        self.limit = int(watermark * probes.total_memory() if watermark <= 1 else watermark)
        self.used = 0
        # How long messages may stay in memory, in seconds.
        self.target = math.inf
        # Where queues put their reports.
        self.mailbox = Mailbox("memory monitor")
        self._known: dict[Mailbox, _Known] = {}
        # When targets are worked out next: looks in between are for the alarm alone.
        self._target_at = -math.inf
        # Queues are asked again when this time has come.
        self._ask_at = -math.inf
        self._timer: Timer | None = None

    def start(self) -> None:
        self._look()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        now = self._clock.monotonic()
        is_due = now >= self._target_at
        if is_due:
            self._target_at = now + INTERVAL_S
        self._watch(is_due=is_due)
        until_s = self._target_at - now
        if self.used <= self.limit:
            # The time in which half of what is left could be filled.
            until_s = min(until_s, max(_SOON_S, (self.limit - self.used) / (2 * _FAST_BYTES)))
        self._timer = self._clock.call_at(now + until_s, self._look)
        if is_due:
            self._share_out(now)

    def _watch(self, *, is_due: bool) -> None:
        self.used = self._probes.used_memory()
        is_short = self.used > self.limit
        if self.used >= PAGING_RATIO * self.limit if is_due else is_short:
            self._probes.release_memory()
            self.used = self._probes.used_memory()
        if self.used > self.limit:
            details = f"{self.used} bytes used, {self.limit} allowed"
            self._alarms.set(self.CAUSE, MEMORY, details)
        else:
            self._alarms.clear(self.CAUSE)

    def _share_out(self, now: float) -> None:
        reporters = self._take_reports()
        self._change_target()
        # The others learn of a target that has changed in their favour: the answer to a report.
        for mailbox in reporters:
            self._send(mailbox, self._known[mailbox])
        self._ask(now)

    @property
    def _ratio(self) -> float:
        return self.used / self.limit if self.limit else math.inf

    def _take_reports(self) -> list[Mailbox]:
        reporters = []
        for report in self.mailbox.take_urgent():
            assert isinstance(report, RamDuration)
            known = self._known.get(report.queue)
            if known is not None:
                known.reported = report.duration_s
                reporters.append(report.queue)
        for mailbox in [mailbox for mailbox in self._known if mailbox.is_closed]:
            del self._known[mailbox]
        return [mailbox for mailbox in reporters if mailbox in self._known]

    def _change_target(self) -> None:
        """Who must page more is told at once; under a disk alarm, who may page less."""
        before, self.target = self.target, self._wanted_target()
        is_disk_short = self._alarms.has(DISK)
        if self.target == before or (self.target > before) != is_disk_short:
            return
        for mailbox, known in self._known.items():
            if is_disk_short or self.target < min(known.sent, known.reported):
                self._send(mailbox, known)

    def _wanted_target(self) -> float:
        if self._alarms.has(DISK):
            # What is paged out goes to that disk.
            return math.inf
        ratio = self._ratio
        if ratio < PAGING_RATIO:
            return math.inf
        durations = [known.reported for known in self._known.values() if known.reported != math.inf]
        if not durations:
            # Nothing moves. While publishers are blocked it stays so: then only paging helps.
            return 0.0 if ratio > 1 and self._known else math.inf
        total = sum(durations)
        if ratio < _GROWING_RATIO:
            total += _GROWING_S
        return total / len(durations) / ratio

    def _send(self, mailbox: Mailbox, known: _Known) -> None:
        if known.sent != self.target:
            known.sent = self.target
            mailbox.put_urgent(SetRamDuration(self.target))

    def _ask(self, now: float) -> None:
        # A target that was set is taken back only where somebody is asked.
        if self._ratio < ASKING_RATIO and all(
            known.sent == math.inf for known in self._known.values()
        ):
            return
        if now < self._ask_at:
            return
        self._ask_at = now + REPORT_S
        for mailbox in self._queues():
            if mailbox.put_urgent(ReportRamDuration(self.mailbox)) and mailbox not in self._known:
                self._known[mailbox] = _Known()

    def statistics(self) -> dict[str, object]:
        return {
            "used": self.used,
            "limit": self.limit,
            "ram_duration_target_s": None if self.target == math.inf else self.target,
        }
