"""Which messages of a queue are due, wherever they stand: for queues with exact TTL.

Owned by a ``variable_queue.py`` that was told to be exact; others have none and pay nothing. For
what has a status in memory there is a heap by due time; for what is in the delta there is the
partial index of the file, and here only the earliest time at which that can have something.

The heap is lazy: an entry whose message has left its place is dropped when it comes up, and all of
them are made anew when most are stale.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from leveret.storage.msg_status import MsgStatus

# So many stale entries are kept before the heap is made anew.
_STALE = 1_000


class ExactExpiry:
    __slots__ = ("_heap", "delta_due_ms")

    def __init__(self) -> None:
        # (due, position) of messages with a status; more than there are.
        self._heap: list[tuple[int, int]] = []
        # Nothing in the delta is due before; None: nothing there ever is.
        self.delta_due_ms: int | None = None

    def add(self, statuses: Iterable[MsgStatus]) -> None:
        """They are ready, and not in the delta."""
        heap = self._heap
        for status in statuses:
            if status.expires_at_ms is not None:
                heappush(heap, (status.expires_at_ms, status.seq_id))

    def add_to_delta(self, statuses: Iterable[MsgStatus]) -> None:
        for status in statuses:
            self.note_delta_due(status.expires_at_ms)

    def note_delta_due(self, due_ms: int | None) -> None:
        if due_ms is not None and (self.delta_due_ms is None or due_ms < self.delta_due_ms):
            self.delta_due_ms = due_ms

    def next_ms(self) -> int | None:
        """Nothing is due before; something may be due then."""
        first = self._heap[0][0] if self._heap else None
        if first is None or (self.delta_due_ms is not None and self.delta_due_ms < first):
            return self.delta_due_ms
        return first

    def pop_due(self, now_ms: int, limit: int) -> list[tuple[int, int]]:
        """(due, position), in order; whether they are still there is for the queue to say."""
        heap = self._heap
        due: list[tuple[int, int]] = []
        while heap and len(due) < limit and heap[0][0] <= now_ms:
            due.append(heappop(heap))
        return due

    def is_stale(self, count: int) -> bool:
        """Most entries are of messages that are gone; ``count`` are there."""
        return len(self._heap) > 2 * count + _STALE

    def rebuild(self, statuses: Iterable[MsgStatus]) -> None:
        self._heap = [
            (status.expires_at_ms, status.seq_id)
            for status in statuses
            if status.expires_at_ms is not None
        ]
        heapify(self._heap)
