"""What is known of every queue, window by window, from summaries that come in batches.

A batch of segments ends wherever the broker sealed one, so the parts of a window may come in two
batches: counts are added up, and waiting times are kept as a histogram, because percentiles cannot
be added. A window is closed, and read once, when something later than it has been seen.

Upstream: ``tail_summary.py`` makes the summaries in Spark. Downstream: ``alert_rules.py`` judges
readings, ``tail_screen.py`` shows them. Invariant: windows are closed in order, each once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

# Waiting times of one bucket differ by two in a hundred: percentiles are right to one.
BUCKET_RATIO: Final = 1.02
_PERCENTILE: Final = 0.99
# A queue that is empty and silent for so many windows is forgotten.
_FORGOTTEN_AFTER: Final = 360


class Subject(NamedTuple):
    """A queue; or, with unroutable messages, an exchange and no queue."""

    vhost: str
    queue: str
    exchange: str


@dataclass(frozen=True, slots=True)
class Summary:
    """A part of one window of one subject."""

    # Its beginning, in microseconds.
    window: int
    subject: Subject
    # Of the first deliveries whose wait this part is about; None in the part about all else.
    bucket: int | None
    waits: int
    came: float
    went: float
    # Deliveries, also repeated ones.
    gave: int
    most_deliveries: int
    unroutable: float
    # Whether the queue came to be, and so began empty.
    is_new: bool
    # The last depth that the broker stamped in the window so far, in this part or in those of other
    # waiting times, and where in the log.
    depth: int | None
    depth_at: tuple[int, int]
    # What came less what went since that stamp, in this part.
    after: float


@dataclass(frozen=True, slots=True)
class Reading:
    """One window of one subject."""

    window: int
    vhost: str
    queue: str
    exchange: str
    came_per_s: float
    went_per_s: float
    gave: int
    # None if nothing was delivered for the first time.
    wait_p99_ms: float | None
    # None as long as the log has not said it.
    depth: int | None
    # Of the depth, per second, since the window before.
    slope: float
    most_deliveries: int
    unroutable_per_minute: float


@dataclass(slots=True)
class _Sum:
    waits: Counter[int] = field(default_factory=Counter)
    came: float = 0
    went: float = 0
    gave: int = 0
    most_deliveries: int = 0
    unroutable: float = 0
    is_new: bool = False
    depth: int | None = None
    depth_at: tuple[int, int] = (-1, -1)
    after: float = 0

    def add(self, part: Summary) -> None:
        if part.bucket is not None:
            self.waits[part.bucket] += part.waits
        self.came += part.came
        self.went += part.went
        self.gave += part.gave
        self.most_deliveries = max(self.most_deliveries, part.most_deliveries)
        self.unroutable += part.unroutable
        self.is_new = self.is_new or part.is_new
        if part.depth is None or part.depth_at == self.depth_at:
            self.after += part.after
        elif part.depth_at > self.depth_at:
            self.depth, self.depth_at, self.after = part.depth, part.depth_at, part.after


@dataclass(slots=True)
class _Past:
    """What goes over from one window of a subject to the next."""

    depth: int | None = None
    silent: int = 0


class Windows:
    def __init__(self, window_s: int, *, gap: int) -> None:
        """After a silence of the whole log ``gap`` empty windows are read, not all there were."""
        self._length = window_s * 1_000_000
        self._window_s = window_s
        self._gap = gap
        # By beginning: the windows that may still get parts.
        self._open: dict[int, dict[Subject, _Sum]] = {}
        self._past: dict[Subject, _Past] = {}
        # Beginning of the last window that was read.
        self._read_to: int | None = None
        # Events that came after their window had been read.
        self.late = 0

    def add(self, parts: Iterable[Summary]) -> None:
        for part in parts:
            if self._read_to is not None and part.window <= self._read_to:
                self.late += round(part.came + part.went)
                continue
            sums = self._open.setdefault(part.window, {})
            sums.setdefault(part.subject, _Sum()).add(part)

    def close(self) -> Iterator[list[Reading]]:
        """Readings of all subjects for every window that is complete, the oldest first."""
        if not self._open:
            return
        newest = max(self._open)
        while (oldest := min(self._open)) < newest:
            yield from self._silence(oldest)
            yield self._read(oldest, self._open.pop(oldest))
        yield from self._silence(newest)

    def _silence(self, until: int) -> Iterator[list[Reading]]:
        if self._read_to is None:
            return
        first = self._read_to + self._length
        for window in range(first, min(until, first + self._gap * self._length), self._length):
            yield self._read(window, {})

    def _read(self, window: int, sums: dict[Subject, _Sum]) -> list[Reading]:
        self._read_to = window
        for subject in sums:
            self._past.setdefault(subject, _Past())
        readings = []
        for subject, past in list(self._past.items()):
            total = sums.get(subject)
            past.silent = past.silent + 1 if total is None else 0
            readings.append(self._reading(window, subject, total or _Sum(), past))
            if past.silent > _FORGOTTEN_AFTER and not past.depth:
                del self._past[subject]
        return readings

    def _reading(self, window: int, subject: Subject, total: _Sum, past: _Past) -> Reading:
        before = 0 if past.depth is None and total.is_new else past.depth
        if total.depth is not None:
            past.depth = max(round(total.depth + total.after), 0)
        elif before is not None:
            # Not every event is stamped, so it goes on from the last that was.
            past.depth = max(round(before + total.came - total.went), 0)
        if before is not None and past.depth is not None:
            grew = float(past.depth - before)
        else:
            grew = total.came - total.went
        return Reading(
            window,
            *subject,
            came_per_s=total.came / self._window_s,
            went_per_s=total.went / self._window_s,
            gave=total.gave,
            wait_p99_ms=_percentile_ms(total.waits),
            depth=past.depth,
            slope=grew / self._window_s,
            most_deliveries=total.most_deliveries,
            unroutable_per_minute=total.unroutable * 60 / self._window_s,
        )


def _percentile_ms(waits: Counter[int]) -> float | None:
    rank = math.ceil(waits.total() * _PERCENTILE)
    if rank == 0:
        return None
    for bucket in sorted(waits):
        rank -= waits[bucket]
        if rank <= 0:
            return bucket_middle_us(bucket) / 1000
    return None


def bucket_middle_us(bucket: int) -> float:
    """The waiting time that stands for all of a bucket."""
    return float(BUCKET_RATIO ** (bucket + 0.5))
