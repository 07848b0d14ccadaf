"""What a variable queue is made of: q1, q2, delta, q3, q4, pending acks, counts [105, 106, 116].

The lowest layer of ``variable_queue.py``, which tells what all of it means: where messages stand,
and the moves that keep them in order. Above it: ``queue_paging.py`` (to disk), ``queue_reading.py``
(from disk), ``queue_expiry.py`` (out of turn).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain, groupby
from operator import attrgetter

from leveret.storage.backing_queue import (
    Confirm,
)
from leveret.storage.database import COMMIT_ROWS
from leveret.storage.exact_expiry import ExactExpiry
from leveret.storage.memory_use import MemoryUse
from leveret.storage.message_rows import Position
from leveret.storage.msg_status import (
    Delta,
    MsgStatus,
    merge_into,
    place_of,
)
from leveret.storage.queue_index import CREDIT_BITS, QueueIndex

log = logging.getLogger(__name__)

SEGMENT_SIZE = 16_384


class QueueState:
    def __init__(
        self,
        wake: Callable[[], None],
        index: QueueIndex | None,
        make_transient_index: Callable[[], QueueIndex],
        now: Callable[[], float],
        *,
        spend: Callable[[int], None] = lambda cost: None,
        is_clean: bool = True,
        is_lazy: bool = False,
        segment_size: int = SEGMENT_SIZE,
    ) -> None:
        """``index`` is None for a queue that is not durable.

        ``spend`` is told what rows that were handed to the store cost, in credit. ``is_clean``: the
        broker was stopped in order, so it is known what had been delivered.
        """
        self._wake = wake
        self._index = index
        self._make_transient_index = make_transient_index
        self._transient: QueueIndex | None = None
        self._spend = spend
        self._segment_size = segment_size
        # All goes to disk alone; while a queue that was not turns lazy, the latter is set first.
        self.is_lazy = is_lazy
        self._turns_lazy = False
        self.q1: deque[MsgStatus] = deque()
        self.q2: deque[MsgStatus] = deque()
        self.q3: deque[MsgStatus] = deque()
        self.q4: deque[MsgStatus] = deque()
        self.delta = Delta()
        # Delivered and not settled; those whose message is in memory, and those on disk alone.
        self.ram_pending: dict[int, MsgStatus] = {}
        self.disk_pending: dict[int, MsgStatus] = {}
        self._next_seq = 0
        self._len = 0
        self._ready_bytes = 0
        self._pending_bytes = 0
        # Ready messages that are in memory, and their bytes.
        self.ram_count = 0
        self._ram_bytes = 0
        # The furthest position that ever left: up to it, all that is ready is redelivered.
        self._delivered = -1
        self._confirmed: list[Confirm] = []
        self.memory = MemoryUse(now)
        # The one read under way: a task, and whether what it brings is still wanted.
        self._read: asyncio.Task[None] | None = None
        self._read_is_void = False
        # fetch was refused and must be told when the read is done.
        self._owes_wake = False
        # Positions of the delta are being read.
        self._is_reading_positions = False
        # Meanwhile: what was acked or requeued, and of the latter what belongs into the delta.
        self._settled_meanwhile: set[int] = set()
        self._requeue_later: list[MsgStatus] = []
        # Bytes of the messages in q3 that are in memory: how far was read ahead.
        self._ahead_bytes = 0
        # Paging is not done: go on when woken.
        self._has_to_page = False
        self._is_terminated = False
        # Reads pending messages that had left memory, to be dead-lettered.
        self._pending_read: asyncio.Task[None] | None = None
        # When messages are due, wherever they stand; None unless the queue is exact.
        self._exact: ExactExpiry | None = None
        # Taken from the delta because they are due, as (due, position), and not yet given out.
        self._due_taken: list[tuple[int, int]] = []
        # Some message may have an expiry; until the queue is seen empty.
        self._may_expire = False
        # How often those that were returned and counted came back.
        self._returns: dict[int, int] = {}
        self.disk_reads = 0
        # Counted, but not found on disk: a damaged file, or a mistake of ours.
        self.lost = 0
        # Messages and bytes that left memory, and that came back.
        self.paged: tuple[int, int, int, int] = (0, 0, 0, 0)
        if index is not None:
            self._recover(index, is_clean=is_clean)

    def _recover(self, index: QueueIndex, *, is_clean: bool) -> None:
        """All that survived is in the delta; nothing is read until somebody wants it."""
        totals = index.totals()
        self._next_seq = totals.next_seq
        last = totals.next_seq - 1
        # After an unclean stop nobody knows what was delivered: any may have been.
        self._delivered = min(totals.delivered, last) if is_clean else last
        index.counters.delivered = self._delivered
        if totals.messages > 0:
            delta = self.delta
            delta.start, delta.end = 0, totals.next_seq
            delta.count, delta.bytes = totals.messages, totals.bytes
            self._len, self._ready_bytes = totals.messages, totals.bytes
            self._may_expire = bool(totals.expiring)

    def __len__(self) -> int:
        return self._len

    def is_empty(self) -> bool:
        return not self._len

    def depth(self) -> int:
        return self._len + len(self.ram_pending) + len(self.disk_pending)

    def _head(self) -> MsgStatus | None:
        """The message at the front, if it is in memory."""
        if self.q4:
            return self.q4[0]
        if self.q3 and self.q3[0].message is not None:
            return self.q3[0]
        return None

    def _statuses(self) -> Iterable[MsgStatus]:
        return chain(self.q4, self.q3, self.q2, self.q1)

    def _drop_stale(self, exact: ExactExpiry) -> None:
        """What was consumed long before it is due must not be remembered until then."""
        if exact.is_stale(self._len - self.delta.count):
            exact.rebuild(self._statuses())

    def _took(self, taken: list[MsgStatus]) -> list[MsgStatus]:
        size = sum([status.size for status in taken])
        self._len -= len(taken)
        self._ready_bytes -= size
        in_memory = [status.size for status in taken if status.message is not None]
        self.ram_count -= len(in_memory)
        self._ram_bytes -= sum(in_memory)
        return taken

    def _q1_to_q4(self) -> None:
        if self.q4:
            self.q4.extend(self.q1)
            self.q1.clear()
        else:
            self.q4, self.q1 = self.q1, self.q4

    def _mend_order(self) -> None:
        """After messages left from the middle: q2 needs a delta before it, q1 something on disk."""
        if not self.delta.count and self.q2:
            self.q3.extend(self.q2)
            self.q2.clear()
        if not self.q3 and not self.delta.count:
            self._q1_to_q4()

    def _put_back(self, statuses: list[MsgStatus]) -> None:
        """To their places: q4 before q3's first, q3 before the delta's first, else the delta."""
        if self.delta.count:
            before_delta = place_of(self.delta.start, statuses)
            deltas = statuses[before_delta:]
            statuses = statuses[:before_delta]
            if self._is_reading_positions:
                self._requeue_later += deltas
            else:
                self._to_delta(deltas)
        if self.is_lazy:
            self._write_transients(statuses)
            for status in statuses:
                status.message = None
        # q4 has alphas only, before q3's first: what is not in memory goes into q3, and with it
        # all that comes after it.
        end = place_of(self.q3[0].seq_id, statuses) if self.q3 else len(statuses)
        for place in range(end):
            if statuses[place].message is None:
                end = place
                break
        alphas, betas = statuses[:end], statuses[end:]
        if betas and self.q4 and self.q4[-1].seq_id > betas[0].seq_id:
            moved = []
            while self.q4 and self.q4[-1].seq_id > betas[0].seq_id:
                moved.append(self.q4.pop())
            self.q3.extendleft(moved)
            self._ahead_bytes += sum([status.size for status in moved])
        in_memory = [status.size for status in statuses if status.message is not None]
        self.ram_count += len(in_memory)
        self._ram_bytes += sum(in_memory)
        self._ahead_bytes += sum([status.size for status in betas if status.message is not None])
        if self._exact is not None:
            self._exact.add(statuses)
        merge_into(self.q4, alphas)
        merge_into(self.q3, betas)
        if self._exact is not None:
            self._drop_stale(self._exact)

    def _add_pending(self, statuses: list[MsgStatus]) -> None:
        self.memory.count_ack_in(len(statuses))
        pending = self.ram_pending
        size = 0
        for status in statuses:
            pending[status.seq_id] = status
            size += status.size
        self._pending_bytes += size

    def _take_pending(self, seq_ids: Iterable[int]) -> list[MsgStatus]:
        settled = []
        pop = self.ram_pending.pop
        size = 0
        for seq_id in seq_ids:
            status = pop(seq_id, None) or self.disk_pending.pop(seq_id, None)
            if status is not None:
                settled.append(status)
                size += status.size
        self._pending_bytes -= size
        if self._returns:
            self._forget_returns(settled)
        if self._is_reading_positions:
            self._settled_meanwhile.update([status.seq_id for status in settled])
        return settled

    def _forget_returns(self, statuses: Iterable[MsgStatus]) -> None:
        for status in statuses:
            self._returns.pop(status.seq_id, None)

    def _learn_returns(self, positions: Iterable[Position]) -> None:
        returns = self._returns
        for position in positions:
            count = position.delivery_count
            # What was counted since may not be on disk yet.
            if count and count > returns.get(position.seq_id, 0):
                returns[position.seq_id] = count

    def _remove(self, statuses: Iterable[MsgStatus]) -> None:
        """Take messages off the disk, those that are there."""
        persistent: list[tuple[int, int, int]] = []
        transient: list[tuple[int, int, int]] = []
        for status in statuses:
            if status.is_on_disk:
                row = (status.seq_id, status.size, status.body_id)
                (persistent if status.is_persistent else transient).append(row)
        if persistent and self._index is not None:
            self._index.remove(persistent)
        if transient and self._transient is not None:
            self._transient.remove(transient)

    def _to_delta(self, statuses: list[MsgStatus]) -> None:
        """What is ready but in none of the queues yet goes to disk alone."""
        self._write_transients(statuses)
        for status in statuses:
            status.message = None
        self._add_to_delta(statuses)

    def _add_to_delta(self, statuses: Iterable[MsgStatus]) -> None:
        for status in statuses:
            self.delta.add(status)
        if self._exact is not None:
            self._exact.add_to_delta(statuses)

    def _write(
        self, index: QueueIndex, statuses: list[MsgStatus], committed: Callable[[], None] | None
    ) -> None:
        """Hand a run, positions ascending, with one expiry, to an index.

        Where nobody waits for all of it at once, large messages go in parts: one commit is not to
        take more than it can write quickly.
        """
        messages = [status.message for status in statuses if status.message is not None]
        cost = len(statuses)
        embed_below = index.embed_below
        # What is smaller than this is neither kept apart nor costs more than its row.
        small = min(embed_below, 1 << CREDIT_BITS)
        for status, message in zip(statuses, messages, strict=True):
            size = status.size + len(message.header)
            if size >= small:
                cost += size >> CREDIT_BITS
                if size >= embed_below:
                    status.body_id = index.reserve(message)
        if cost > 2 * COMMIT_ROWS and committed is None and len(statuses) > 1:
            middle = len(statuses) // 2
            self._write(index, statuses[:middle], None)
            self._write(index, statuses[middle:], None)
            return
        seq_ids = [status.seq_id for status in statuses]
        index.write(seq_ids, messages, statuses[0].expires_at_ms, committed, cost)
        self._spend(cost)

    def _reserve_body(self, index: QueueIndex, status: MsgStatus) -> None:
        message = status.message
        assert message is not None
        if status.size + len(message.header) >= index.embed_below:
            status.body_id = index.reserve(message)

    def _write_transients(self, statuses: Iterable[MsgStatus]) -> None:
        """What is only in memory so far goes to the transient file."""
        transient = [status for status in statuses if not status.is_on_disk]
        if not transient:
            return
        if self._transient is None:
            self._transient = self._make_transient_index()
            self._transient.is_exact = self._exact is not None
        transient.sort(key=attrgetter("seq_id"))
        for _, group in groupby(transient, key=attrgetter("expires_at_ms")):
            run = list(group)
            for at in range(0, len(run), COMMIT_ROWS):
                self._write(self._transient, run[at : at + COMMIT_ROWS], None)
        for status in transient:
            status.is_on_disk = True

    def check_invariants(self) -> None:
        """For tests, after every operation [106, 116]."""
        delta = self.delta
        later = self._requeue_later
        queues = (self.q4, self.q3, self.q2, self.q1)
        ready = [status for queue in queues for status in queue]
        assert not self.q1 or self.q3 or delta.count, "q1 without q3"
        assert not self.q2 or delta.count, "q2 without delta"
        assert self._len == len(ready) + delta.count + len(later), "length"
        size = sum(status.size for status in (*ready, *later)) + delta.bytes
        assert self._ready_bytes == size, "bytes"
        in_order = [status.seq_id for status in (*self.q4, *self.q3)]
        if delta.count:
            assert delta.count <= delta.end - delta.start, "delta"
            assert 0 <= delta.transient <= delta.count, "transient in delta"
            assert not in_order or in_order[-1] < delta.start, "q3 before delta"
            in_order.append(delta.end - 1)
        else:
            assert not delta.bytes, "bytes in an empty delta"
            assert not delta.transient, "transient ones in an empty delta"
            assert not later, "nothing to wait for"
        in_order += [status.seq_id for status in (*self.q2, *self.q1)]
        assert in_order == sorted(set(in_order)), "order"
        for status in (*ready, *later, *self.ram_pending.values(), *self.disk_pending.values()):
            assert status.message is not None or status.is_on_disk, "nowhere"
            assert not status.is_persistent or status.is_on_disk, "not on disk"
        assert all(status.message is not None for status in (*self.q4, *self.q1)), "alphas"
        assert all(status.message is None for status in self.q2), "betas"
        in_memory = [status.size for status in ready if status.message is not None]
        assert self.ram_count == len(in_memory), "ram count"
        assert self._ram_bytes == sum(in_memory), "ram bytes"
        ahead = sum(status.size for status in self.q3 if status.message is not None)
        assert self._ahead_bytes == ahead, "read ahead"
        assert all(status.message is not None for status in self.ram_pending.values())
        assert all(status.message is None for status in self.disk_pending.values())
        pending = (*self.ram_pending.values(), *self.disk_pending.values())
        assert self._pending_bytes == sum(status.size for status in pending), "pending bytes"
        if self.is_lazy:
            assert not any((self.q1, self.q2, self.q4)), "lazy"


def status_at(position: Position, is_persistent: bool) -> MsgStatus:
    return MsgStatus(
        position.seq_id,
        None,
        position.size,
        position.expires_at_ms,
        is_persistent,
        True,
        position.body_id or 0,
    )
