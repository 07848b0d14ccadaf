"""Messages that leave when they are due, wherever they stand.

A layer of ``variable_queue.py``, for queues with exact TTL: ``exact_expiry.py`` knows what is due
in memory, the file's partial index what is due in the delta.
"""

from __future__ import annotations

import asyncio
import logging
from operator import attrgetter

from leveret.storage.backing_queue import (
    LOADING,
    Loading,
)
from leveret.storage.exact_expiry import ExactExpiry
from leveret.storage.msg_status import (
    MsgStatus,
    place_of,
)
from leveret.storage.queue_reading import ReadingQueue
from leveret.storage.queue_state import status_at

log = logging.getLogger(__name__)


class ExpiringQueue(ReadingQueue):
    def set_exact(self, *, is_exact: bool) -> None:
        if is_exact == (self._exact is not None):
            return
        for index in (self._index, self._transient):
            if index is not None:
                index.is_exact = is_exact
        if not is_exact:
            self._exact = None
            return
        self._exact = ExactExpiry()
        self._exact.rebuild(self._statuses())
        if self._may_expire:
            # Rows may be unmarked, by a life in which the queue was not exact.
            for index in (self._index, self._transient):
                if index is not None:
                    index.mark_exact()
            if self.delta.count:
                self._exact.note_delta_due(0)

    def next_due_ms(self) -> int | None:
        if self._due_taken:
            return self._due_taken[0][0]
        return None if self._exact is None else self._exact.next_ms()

    def take_due(self, now_ms: int, limit: int) -> list[int] | Loading:
        exact = self._exact
        if exact is None:
            # What was taken while it was exact is still to be given out.
            taken, self._due_taken = sorted(self._due_taken), []
            return [seq_id for _, seq_id in taken]
        if self._read is not None:
            # What is being read must stay where it is.
            self._owes_wake = True
            return LOADING
        if not self._due_taken and exact.delta_due_ms is not None and exact.delta_due_ms <= now_ms:
            if self.delta.count:
                self._owes_wake = True
                self._read = asyncio.get_running_loop().create_task(
                    self._read_due(exact, now_ms, limit)
                )
                return LOADING
            exact.delta_due_ms = None
        statuses = []
        due: list[tuple[int, int]] = []
        # Of what is due already, too, the delta may have more, and so may memory.
        until_ms = now_ms if exact.delta_due_ms is None else min(now_ms, exact.delta_due_ms)
        last: tuple[int, int] | None = None
        while not due and (popped := exact.pop_due(until_ms, limit)):
            last = popped[-1] if len(popped) == limit else None
            for entry in popped:
                status = self._pull_out(entry[1])
                if status is not None and status.expires_at_ms == entry[0]:
                    statuses.append(status)
                    due.append(entry)
        for status in self._took(statuses):
            self._add_due(status)
        self._drop_stale(exact)
        due += self._due_taken
        self._due_taken = [] if last is None else sorted(each for each in due if each > last)
        self._mend_order()
        return [each[1] for each in sorted(due) if last is None or each <= last]

    def _add_due(self, status: MsgStatus) -> None:
        pending = self.disk_pending if status.message is None else self.ram_pending
        pending[status.seq_id] = status
        self._pending_bytes += status.size
        self.memory.count_ack_in(1)

    def _pull_out(self, seq_id: int) -> MsgStatus | None:
        """Take a message out of the queue it stands in, if it stands in any."""
        for queue in (self.q4, self.q3, self.q2, self.q1):
            if queue and queue[0].seq_id <= seq_id <= queue[-1].seq_id:
                place = place_of(seq_id, queue)
                if queue[place].seq_id == seq_id:
                    status = queue[place]
                    del queue[place]
                    if queue is self.q3 and status.message is not None:
                        self._ahead_bytes -= status.size
                    return status
        return None

    async def _read_due(self, exact: ExactExpiry, now_ms: int, limit: int) -> None:
        """What is due in the delta becomes pending, on disk as it is."""
        self._read_is_void = False
        delta = self.delta
        first, end = delta.start, delta.end
        found: list[MsgStatus] = []
        nexts: list[int] = []
        exact.delta_due_ms = None
        self._is_reading_positions = True
        self._settled_meanwhile = set()
        # Those that are pending have rows, too, which may come first.
        enough = limit + len(self.ram_pending) + len(self.disk_pending)
        try:
            try:
                for index in (self._index, self._transient):
                    if index is not None:
                        positions, next_ms = await index.read_due(first, end, now_ms, enough)
                        nexts += () if next_ms is None else (next_ms,)
                        found += [status_at(each, index is self._index) for each in positions]
            finally:
                self._is_reading_positions = False
                later, self._requeue_later = self._requeue_later, []
            self.disk_reads += 1
            if not self._read_is_void:
                for status in found:
                    seq_id = status.seq_id
                    if not (
                        seq_id in self.ram_pending
                        or seq_id in self.disk_pending
                        or seq_id in self._settled_meanwhile
                    ):
                        self._take_from_delta(status)
                for each in nexts:
                    exact.note_delta_due(each)
                if delta.count <= 0:
                    self._correct_count()
                    delta.clear()
            self._put_back(sorted(later, key=attrgetter("seq_id")))
            self._mend_order()
        finally:
            self._read = None
            if self._owes_wake and not self._is_terminated:
                self._owes_wake = False
                self._wake()

    def _take_from_delta(self, status: MsgStatus) -> None:
        delta = self.delta
        delta.count -= 1
        delta.bytes -= status.size
        delta.transient -= not status.is_persistent
        self._len -= 1
        self._ready_bytes -= status.size
        self._add_due(status)
        self._due_taken.append((status.expires_at_ms or 0, status.seq_id))
