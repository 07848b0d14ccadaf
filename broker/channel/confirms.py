"""Publisher confirms: which sequence numbers still wait for which queues [65-68].

Works on ranges, not on single numbers: a run that went to the same queues is one record, split
only when its queues answer for parts of it. ``flush`` sends what was settled since the last time,
coalesced as RabbitMQ does it. A transaction uses the same records to know when it is done.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leveret.broker.mailbox import Mailbox


class _Record:
    """Sequence numbers first..last wait for ``queues``."""

    __slots__ = ("first", "last", "queues")

    def __init__(self, first: int, last: int, queues: set[Mailbox]) -> None:
        self.first = first
        self.last = last
        self.queues = queues


Ranges = list[tuple[int, int]]


class Confirms:
    def __init__(self) -> None:
        # The number the next published message gets; counting starts at 1 with confirm.select.
        self.next_seq = 1
        # In order of sequence numbers, never overlapping.
        self._waiting: list[_Record] = []
        # Settled and not yet told to the publisher.
        self._confirmed: Ranges = []
        self._refused: Ranges = []

    def take_numbers(self, count: int) -> int:
        """The first of ``count`` new sequence numbers."""
        first = self.next_seq
        self.next_seq += count
        return first

    def expect(self, first: int, last: int, queues: Iterable[Mailbox]) -> None:
        self._waiting.append(_Record(first, last, set(queues)))

    def confirm(self, first: int, last: int) -> None:
        """Settled without any queue: nobody was to get it."""
        self._confirmed.append((first, last))

    def confirmed_by(self, queue: Mailbox, first: int, last: int) -> None:
        waiting = self._waiting
        if waiting and waiting[0].first == first and waiting[0].last == last:
            # The common case: the oldest run, answered whole.
            record = waiting[0]
            record.queues.discard(queue)
            if not record.queues:
                del waiting[0]
                self._confirmed.append((first, last))
            return
        done = False
        for record in self._cut_out(first, last):
            if queue in record.queues:
                record.queues.discard(queue)
                if not record.queues:
                    self._confirmed.append((record.first, record.last))
                    done = True
        if done:
            self._waiting = [record for record in self._waiting if record.queues]

    def refused_by(self, queue: Mailbox, first: int, last: int) -> None:
        """One queue that refuses is enough for a nack, whatever the others do [66]."""
        for record in self._cut_out(first, last):
            if queue in record.queues:
                self._refused.append((record.first, record.last))
                record.queues.clear()
        self._waiting = [record for record in self._waiting if record.queues]

    def queue_down(self, queue: Mailbox, *, crashed: bool) -> None:
        """A deleted queue counts as having confirmed; a crashed one has lost everything [67]."""
        settled = self._refused if crashed else self._confirmed
        for record in self._waiting:
            if queue in record.queues:
                record.queues.discard(queue)
                if crashed:
                    record.queues.clear()
                if not record.queues:
                    settled.append((record.first, record.last))
        self._waiting = [record for record in self._waiting if record.queues]

    @property
    def unconfirmed(self) -> int:
        return sum(record.last - record.first + 1 for record in self._waiting)

    @property
    def has_news(self) -> bool:
        return bool(self._confirmed or self._refused)

    def take_settled(self) -> tuple[Ranges, Ranges]:
        """What was confirmed and refused since the last time, each in order."""
        settled = (_merge(self._confirmed), _merge(self._refused))
        self._confirmed, self._refused = [], []
        return settled

    def oldest_waiting(self) -> int:
        """The smallest number not settled yet, or the next one to be given."""
        return self._waiting[0].first if self._waiting else self.next_seq

    def _cut_out(self, first: int, last: int) -> list[_Record]:
        """The records that make up first..last, split at both ends where needed."""
        waiting = self._waiting
        at = max(0, bisect_right(waiting, first, key=lambda record: record.first) - 1)
        found: list[_Record] = []
        while at < len(waiting) and waiting[at].first <= last:
            record = waiting[at]
            if record.last < first:
                at += 1
                continue
            if record.first < first:
                waiting.insert(at, _Record(record.first, first - 1, set(record.queues)))
                record.first = first
                at += 1
            if record.last > last:
                waiting.insert(at + 1, _Record(last + 1, record.last, set(record.queues)))
                record.last = last
            found.append(record)
            at += 1
        return found


def _merge(ranges: Ranges) -> Ranges:
    if len(ranges) < 2:
        return ranges
    ranges.sort()
    merged = [ranges[0]]
    for first, last in ranges[1:]:
        if merged[-1][1] + 1 == first:
            merged[-1] = (merged[-1][0], last)
        else:
            merged.append((first, last))
    return merged


def split_at(ranges: Ranges, cutoff: int) -> tuple[int, list[int]]:
    """The greatest number below ``cutoff`` (0 if none), and all numbers from there on."""
    below = 0
    rest: list[int] = []
    for first, last in ranges:
        if last < cutoff:
            below = last
        elif first >= cutoff:
            rest.extend(range(first, last + 1))
        else:
            below = cutoff - 1
            rest.extend(range(cutoff, last + 1))
    return below, rest
