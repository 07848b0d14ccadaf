"""How much memory the broker uses, and how much of it queues may use [122-123].

Every 2.5 s the memory of this process is held against the watermark, and more often where it
could be reached sooner. Above it, the memory alarm is set. Long before, from half of it on,
queues are told how long their messages in memory may last: each reports how long they would at
its present rates, and the mean of all, made shorter as memory gets short, is the target for every
one. So queues whose messages are gone soon keep them, and those that only grow write theirs to
disk.

A publisher fills a few hundred megabytes in the time RabbitMQ takes for one such round. So the
whole round, not only the look at the memory, is made as often as the room that is left asks for,
as long as memory moves; how much a target may grow in a round goes by how long the round was.

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
_SOON_S = 0.05
# Between two attempts to give memory back while it is short: they take a while.
_RELEASE_S = 0.5
# Memory that has moved by less since queues were asked calls for no other round.
_STEADY_BYTES = 1 << 20
# Asking a queue costs it a turn: so much time goes by for each before all are asked again.
_ASKING_S_PER_QUEUE = 0.0005
# Of the watermark: from here on messages are paged out.
PAGING_RATIO = 0.5
# From here on queues are asked, so that their reports are there when they are needed.
ASKING_RATIO = 0.4
# Below this, the target grows a little in every round: paging is to reach a balance.
_GROWING_RATIO = 0.95
# How much it grows in INTERVAL_S.
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
        # When the next look is due that also ends an alarm; those in between come sooner.
        self._due_at = -math.inf
        # When targets were worked out last.
        self._shared_at = -math.inf
        # Queues are asked again when this time has come.
        self._ask_at = -math.inf
        # What was used when they were asked last.
        self._asked_used = 0
        self._released_at = -math.inf
        self._timer: Timer | None = None

    def start(self) -> None:
        self._look()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        now = self._clock.monotonic()
        is_due = now >= self._due_at
        if is_due:
            self._due_at = now + INTERVAL_S
        self._watch(now, is_due=is_due)
        # The time in which half of what is left could be filled.
        soon_s = max(_SOON_S, (self.limit - self.used) / (2 * _FAST_BYTES))
        until_s = min(self._due_at - now, soon_s)
        self._timer = self._clock.call_at(now + until_s, self._look)
        has_moved = abs(self.used - self._asked_used) >= _STEADY_BYTES
        if is_due or (has_moved and self._ratio >= ASKING_RATIO):
            self._share_out(now)
            self._ask(now, REPORT_S if soon_s >= INTERVAL_S else until_s)

    def _watch(self, now: float, *, is_due: bool) -> None:
        self.used = self._probes.used_memory()
        wait_s = _RELEASE_S if self.used > self.limit else INTERVAL_S
        if self.used >= PAGING_RATIO * self.limit and now >= self._released_at + wait_s:
            self._released_at = now
            self._probes.release_memory()
            self.used = self._probes.used_memory()
        if self.used > self.limit:
            details = f"{self.used} bytes used, {self.limit} allowed"
            self._alarms.set(self.CAUSE, MEMORY, details)
        elif is_due:
            # Not sooner, or publishers that fill what was freed would be stopped again at once.
            self._alarms.clear(self.CAUSE)

    def _share_out(self, now: float) -> None:
        round_s = min(now - self._shared_at, INTERVAL_S)
        self._shared_at = now
        reporters = self._take_reports()
        self._change_target(round_s)
        # The others learn of a target that has changed in their favour: the answer to a report.
        for mailbox in reporters:
            self._send(mailbox, self._known[mailbox])

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

    def _change_target(self, round_s: float) -> None:
        """Who must page more is told at once; under a disk alarm, who may page less."""
        before, self.target = self.target, self._wanted_target(round_s)
        is_disk_short = self._alarms.has(DISK)
        if self.target == before or (self.target > before) != is_disk_short:
            return
        for mailbox, known in self._known.items():
            if is_disk_short or self.target < min(known.sent, known.reported):
                self._send(mailbox, known)

    def _wanted_target(self, round_s: float) -> float:
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
            total += _GROWING_S * round_s / INTERVAL_S
        return total / len(durations) / ratio

    def _send(self, mailbox: Mailbox, known: _Known) -> None:
        if known.sent != self.target:
            known.sent = self.target
            mailbox.put_urgent(SetRamDuration(self.target))

    def _ask(self, now: float, again_s: float) -> None:
        # A target that was set is taken back only where somebody is asked.
        if self._ratio < ASKING_RATIO and all(
            known.sent == math.inf for known in self._known.values()
        ):
            return
        if now < self._ask_at:
            return
        self._asked_used = self.used
        asked = 0
        for mailbox in self._queues():
            asked += 1
            if mailbox.put_urgent(ReportRamDuration(self.mailbox)) and mailbox not in self._known:
                self._known[mailbox] = _Known()
        self._ask_at = now + min(REPORT_S, max(again_s, asked * _ASKING_S_PER_QUEUE))

    def statistics(self) -> dict[str, object]:
        return {
            "used": self.used,
            "limit": self.limit,
            "ram_duration_target_s": None if self.target == math.inf else self.target,
        }
