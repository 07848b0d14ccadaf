"""The variable queue: memory head, disk tail, pending acks (hop 7) [105-131].

Upstream: the queue actor, through ``backing_queue.py``. Downstream: ``queue_index.py``, one for
what is to outlive the broker, one (made on first use) for transient messages that are paged out.

A message is an *alpha* (message and position in memory), a *beta* (position in memory, message on
disk) or in the *delta* (both on disk; what is left in memory are four integers). They stand in

    front   q4 (alphas)   q3 (betas)   delta   q2 (betas)   q1 (alphas)   rear

Publishes go to q4 while q3 and delta are empty, else to q1. Fetches take from q4, then from q3;
what q3 lacks is read from the delta. Under memory pressure alphas become betas, from the rear
first (q1, then q4's rear), and betas go into the delta (q3's rear, then q2's front). A persistent
message is on disk from the start, wherever it stands: being in memory and being on disk are two
different things. The index row carries the message, so a beta is always what RabbitMQ calls a
gamma.

Reading is asked for ahead of need, in chunks bounded by number and bytes, and never waited for:
``fetch`` answers LOADING, and ``wake`` is called when the read is done. Positions are read two
thousand at a time, messages a chunk at a time. While positions are read the front of the delta
stands still (its rear may grow); publishes, acks, requeues and purges go on, and a purge makes
the read void.

Messages leave in the order of their positions, so whatever is ready and not beyond the furthest
position that ever left has left before: that one number says which are redelivered.

Invariants (``check_invariants``): q1 not empty => q3 or delta not empty; q2 not empty => delta
not empty; positions ascend from front to rear; counts are exact.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import chain, groupby
from operator import attrgetter

from leveret.protocol.message import Message
from leveret.storage.backing_queue import (
    EMPTY,
    LOADING,
    Confirm,
    Entry,
    Loading,
    Nothing,
    Predicate,
    Prepared,
    Run,
)
from leveret.storage.commit import Batch
from leveret.storage.exact_expiry import ExactExpiry
from leveret.storage.memory_use import INFINITY, MemoryUse, permitted_beta_count
from leveret.storage.msg_status import (
    Delta,
    MsgStatus,
    merge_into,
    next_segment_boundary,
    place_of,
)
from leveret.storage.queue_index import CREDIT_BITS, Position, QueueIndex

log = logging.getLogger(__name__)

SEGMENT_SIZE = 16_384
IO_BATCH_SIZE = 4_096
READ_MESSAGES = 256
READ_BYTES = 1 << 20
# Positions that are read at once: a whole segment of them would be a pause for everybody.
READ_POSITIONS = 2_048
# Paging moves so many messages at most before other work gets its turn.
PAGING_STEP = 2_000


# Makes an Entry of a plain tuple without entering Python: the constructor costs twice as much.
_make_entry: Callable[[tuple[int, Message, bool, int | None]], Entry] = partial(
    tuple.__new__, Entry
)


class _Prepared:
    """A unit's part in this queue: positions when the commit begins, ready when it has ended."""

    __slots__ = ("_queue", "_runs", "_settled", "statuses")

    def __init__(self, queue: VariableQueue, runs: Sequence[Run], settled: Collection[int]) -> None:
        self._queue = queue
        self._runs = runs
        self._settled = settled
        self.statuses: list[MsgStatus] = []

    def gather(self, batch: Batch) -> None:
        self.statuses = self._queue._gather_unit(self._runs, self._settled, batch)

    def commit(self) -> None:
        self._queue._finish_unit(self.statuses, self._settled)


class VariableQueue:
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
        self.is_lazy = is_lazy
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

    # --- publishing ------------------------------------------------------------------------------

    def publish(
        self, messages: Sequence[Message], confirm: Confirm | None, expires_at_ms: int | None = None
    ) -> None:
        self._add_ready(self._take_in(messages, confirm, expires_at_ms))

    def _add_ready(self, statuses: list[MsgStatus]) -> None:
        """To the rear; positions are above all that are known."""
        size = sum([status.size for status in statuses])
        self._len += len(statuses)
        self._ready_bytes += size
        if self.is_lazy:
            self._to_delta(statuses)
        else:
            rear = self.q1 if self.q3 or self.delta.count else self.q4
            rear.extend(statuses)
            if self._exact is not None:
                self._exact.add(statuses)
                self._drop_stale(self._exact)
            self.ram_count += len(statuses)
            self._ram_bytes += size
        self._maybe_page(len(statuses))

    def publish_delivered(
        self, messages: Sequence[Message], confirm: Confirm | None, expires_at_ms: int | None = None
    ) -> Sequence[int]:
        statuses = self._take_in(messages, confirm, expires_at_ms)
        self.memory.count_out(len(statuses))
        self._note_delivered(statuses[-1].seq_id)
        self._add_pending(statuses)
        self._maybe_page(len(statuses))
        return range(statuses[0].seq_id, statuses[-1].seq_id + 1)

    def discard(self, messages: Sequence[Message], confirm: Confirm | None) -> None:
        if confirm is not None:
            self._confirmed.append(confirm)

    def drain_confirmed(self) -> list[Confirm]:
        confirmed, self._confirmed = self._confirmed, []
        return confirmed

    def prepare(self, runs: Sequence[Run], settled: Collection[int]) -> Prepared:
        return _Prepared(self, runs, settled)

    def _gather_unit(
        self, runs: Sequence[Run], settled: Collection[int], batch: Batch
    ) -> list[MsgStatus]:
        """The commit of a unit begins: its messages get positions, and rows if they are to last."""
        index = self._index
        statuses: list[MsgStatus] = []
        written: list[tuple[list[int], list[Message], int | None]] = []
        for messages, expires_at_ms in runs:
            fresh = self._new_statuses(messages, expires_at_ms)
            statuses += fresh
            lasting = [status for status in fresh if status.is_persistent]
            if lasting:
                assert index is not None
                for status in lasting:
                    self._reserve_body(index, status)
                written.append(
                    (
                        [status.seq_id for status in lasting],
                        [status.message for status in lasting if status.message is not None],
                        expires_at_ms,
                    )
                )
        if index is not None:
            index.counters.next_seq = self._next_seq
            pending = [
                self.ram_pending.get(each) or self.disk_pending.get(each) for each in settled
            ]
            removed = [
                (status.seq_id, status.size, status.body_id)
                for status in pending
                if status is not None and status.is_persistent
            ]
            index.gather_unit(written, removed, batch)
        return statuses

    def _finish_unit(self, statuses: list[MsgStatus], settled: Collection[int]) -> None:
        if statuses:
            self._add_ready(statuses)
        gone = self._take_pending(settled)
        # Those that last are off the disk already.
        self._remove([status for status in gone if not status.is_persistent])
        self.memory.count_ack_out(len(gone))

    def _new_statuses(
        self, messages: Sequence[Message], expires_at_ms: int | None
    ) -> list[MsgStatus]:
        """With new positions; those that are to last count as being on disk."""
        first = self._next_seq
        self._next_seq = first + len(messages)
        self.memory.count_in(len(messages))
        if expires_at_ms is not None:
            self._may_expire = True
        if self._index is None:
            return [
                MsgStatus(seq_id, message, len(message.body), expires_at_ms, False, False)
                for seq_id, message in enumerate(messages, first)
            ]
        return [
            MsgStatus(
                seq_id,
                message,
                len(message.body),
                expires_at_ms,
                message.persistent,
                message.persistent,
            )
            for seq_id, message in enumerate(messages, first)
        ]

    def _take_in(
        self, messages: Sequence[Message], confirm: Confirm | None, expires_at_ms: int | None
    ) -> list[MsgStatus]:
        """Statuses with new positions; persistent ones are handed to the index at once."""
        statuses = self._new_statuses(messages, expires_at_ms)
        index = self._index
        if index is None:
            if confirm is not None:
                self._confirmed.append(confirm)
            return statuses
        # Positions of transient messages count too, or they would be given anew after a crash.
        index.counters.next_seq = self._next_seq
        written = [status for status in statuses if status.is_persistent]
        if written:
            call = None if confirm is None else partial(self._on_committed, confirm)
            self._write(index, written, call)
        elif confirm is not None:
            self._confirmed.append(confirm)
        return statuses

    def _write(
        self, index: QueueIndex, statuses: list[MsgStatus], committed: Callable[[], None] | None
    ) -> None:
        """Hand a run, positions ascending, with one expiry, to an index."""
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
        seq_ids = [status.seq_id for status in statuses]
        index.write(seq_ids, messages, statuses[0].expires_at_ms, committed, cost)
        self._spend(cost)

    def _reserve_body(self, index: QueueIndex, status: MsgStatus) -> None:
        message = status.message
        assert message is not None
        if status.size + len(message.header) >= index.embed_below:
            status.body_id = index.reserve(message)

    def _on_committed(self, confirm: Confirm) -> None:
        if self._is_terminated:
            return
        # The queue takes all there are: it needs to be told of the first only.
        has_been_told = bool(self._confirmed)
        self._confirmed.append(confirm)
        if not has_been_told:
            self._wake()

    # --- fetching --------------------------------------------------------------------------------

    def fetch(
        self, limit: int, *, ack_required: bool, max_bytes: int | None = None
    ) -> list[Entry] | Nothing:
        if not self._len:
            return EMPTY
        taken = self._take_ready(limit, max_bytes)
        if not taken:
            return self._must_read()
        return self._hand_out(taken, ack_required=ack_required)

    def fetch_while(
        self, predicate: Predicate, limit: int, *, max_bytes: int | None = None
    ) -> list[Entry] | Loading:
        taken = self._take_while(predicate, limit, max_bytes)
        if not taken and self._len and self._head() is None:
            return self._must_read()
        return self._hand_out(taken, ack_required=True)

    def drop_while(self, predicate: Predicate) -> int | Loading:
        taken = self._take_while(predicate, self._len, None)
        if not taken and self._len and self._head() is None:
            return self._must_read()
        self._hand_out(taken, ack_required=False)
        return len(taken)

    def drop(self, count: int) -> int | Loading:
        # What is to go need not be read, unless it is being read already.
        taken = self._take_ready(min(count, self._len), None, on_disk_too=self._read is None)
        if not taken and self._len:
            return self._must_read()
        if taken:
            self._leave(taken)
            self._remove_ready(taken)
        return len(taken)

    def peek(self) -> Entry | Nothing:
        if not self._len:
            return EMPTY
        head = self._head()
        return self._must_read() if head is None else self._entry(head)

    def _entry(self, status: MsgStatus) -> Entry:
        """As ``fetch`` would give it, before it is taken."""
        assert status.message is not None
        return Entry(
            status.seq_id, status.message, status.seq_id <= self._delivered, status.expires_at_ms
        )

    def _head(self) -> MsgStatus | None:
        """The message at the front, if it is in memory."""
        if self.q4:
            return self.q4[0]
        if self.q3 and self.q3[0].message is not None:
            return self.q3[0]
        return None

    def _take_ready(
        self, limit: int, max_bytes: int | None, *, on_disk_too: bool = False
    ) -> list[MsgStatus]:
        """queue_out, for a run: from q4, then q3, as far as messages are in memory."""
        taken: list[MsgStatus] = []
        room = INFINITY if max_bytes is None else max_bytes
        q4 = self.q4
        if len(q4) <= limit and self._ram_bytes <= room:
            taken.extend(q4)
            q4.clear()
            room -= sum([status.size for status in taken])
        while q4 and len(taken) < limit and (q4[0].size <= room or not taken):
            status = q4.popleft()
            room -= status.size
            taken.append(status)
        if q4:
            return self._took(taken)
        q3 = self.q3
        while q3 and len(taken) < limit and (on_disk_too or q3[0].message is not None):
            if q3[0].size > room and taken:
                break
            status = q3.popleft()
            room -= status.size
            if status.message is not None:
                self._ahead_bytes -= status.size
            taken.append(status)
        self._took(taken)
        if not q3 and not self.delta.count:
            # Nothing is left on disk: the rest was published since, and is in q1. It is for the
            # next call: this one has given something, or there was nothing.
            self._q1_to_q4()
        return taken

    def _take_while(
        self, predicate: Predicate, limit: int, max_bytes: int | None
    ) -> list[MsgStatus]:
        taken: list[MsgStatus] = []
        size = 0
        while len(taken) < limit:
            head = self._head()
            if head is None:
                break
            size += head.size
            if taken and max_bytes is not None and size > max_bytes:
                break
            if not predicate(self._entry(head)):
                break
            taken += self._take_ready(1, None)
        return taken

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

    def _hand_out(self, taken: list[MsgStatus], *, ack_required: bool) -> list[Entry]:
        if not taken:
            return []
        delivered = self._delivered
        entries = [
            _make_entry(
                (status.seq_id, status.message, status.seq_id <= delivered, status.expires_at_ms)
            )
            for status in taken
            if status.message is not None
        ]
        self._leave(taken)
        if ack_required:
            self._add_pending(taken)
        else:
            self._remove_ready(taken)
        return entries

    def _leave(self, taken: list[MsgStatus]) -> None:
        self.memory.count_out(len(taken))
        self._note_delivered(taken[-1].seq_id)
        if not self.q4:
            self._read_ahead()

    def _add_pending(self, statuses: list[MsgStatus]) -> None:
        self.memory.count_ack_in(len(statuses))
        pending = self.ram_pending
        size = 0
        for status in statuses:
            pending[status.seq_id] = status
            size += status.size
        self._pending_bytes += size

    def _note_delivered(self, seq_id: int) -> None:
        if seq_id > self._delivered:
            self._delivered = seq_id
            if self._index is not None:
                self._index.delivered(seq_id)

    # --- settling --------------------------------------------------------------------------------

    def ack(self, seq_ids: Collection[int]) -> None:
        settled = self._take_pending(seq_ids)
        self._remove(settled)
        self.memory.count_ack_out(len(settled))

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

    def _remove_ready(self, taken: list[MsgStatus]) -> None:
        """They leave without ever being pending."""
        if self._returns:
            self._forget_returns(taken)
        self._remove(taken)

    def pending(self, seq_ids: Sequence[int]) -> list[Entry] | Loading:
        known: list[Entry] = []
        for place, seq_id in enumerate(seq_ids):
            status = self.ram_pending.get(seq_id)
            if status is not None and status.message is not None:
                known.append(_make_entry((seq_id, status.message, True, status.expires_at_ms)))
            elif seq_id in self.disk_pending:
                if known:
                    break
                if self._pending_read is None:
                    absent = [each for each in seq_ids[place:] if each in self.disk_pending]
                    self._pending_read = asyncio.get_running_loop().create_task(
                        self._read_pending([self.disk_pending[each] for each in absent])
                    )
                return LOADING
        return known

    async def _read_pending(self, absent: list[MsgStatus]) -> None:
        """Back into memory, a chunk of those at the front."""
        is_persistent = absent[0].is_persistent
        index = self._index if is_persistent else self._transient
        assert index is not None
        wanted: dict[int, MsgStatus] = {}
        size = 0
        for status in absent:
            size += status.size
            if len(wanted) == READ_MESSAGES or (wanted and size > READ_BYTES):
                break
            # Those in the other file are for the next time.
            if status.is_persistent is not is_persistent:
                break
            wanted[status.seq_id] = status
        try:
            found = dict(await index.read_chosen(sorted(wanted)))
            for seq_id, status in wanted.items():
                if self.disk_pending.get(seq_id) is not status:
                    continue
                del self.disk_pending[seq_id]
                status.message = found.get(seq_id)
                if status.message is not None:
                    self.ram_pending[seq_id] = status
                else:
                    log.error("a message that was delivered is not on disk (%r)", status)
                    self.lost += 1
                    self._pending_bytes -= status.size
        finally:
            self._pending_read = None
            if not self._is_terminated:
                self._wake()

    def count_returns(self, seq_ids: Sequence[int]) -> list[int]:
        counts = [self._returns.get(seq_id, 0) + 1 for seq_id in seq_ids]
        self._returns.update(zip(seq_ids, counts, strict=True))
        if self._index is not None:
            lasting = [
                (seq_id, count)
                for seq_id, count in zip(seq_ids, counts, strict=True)
                if self._is_lasting(seq_id)
            ]
            self._index.save_delivery_counts(lasting)
        return counts

    def _forget_returns(self, statuses: Iterable[MsgStatus]) -> None:
        for status in statuses:
            self._returns.pop(status.seq_id, None)

    def _is_lasting(self, seq_id: int) -> bool:
        status = self.ram_pending.get(seq_id) or self.disk_pending.get(seq_id)
        return status is not None and status.is_persistent

    def delivery_count(self, seq_id: int) -> int:
        return self._returns.get(seq_id, 0)

    def _learn_returns(self, positions: Iterable[Position]) -> None:
        returns = self._returns
        for position in positions:
            count = position.delivery_count
            # What was counted since may not be on disk yet.
            if count and count > returns.get(position.seq_id, 0):
                returns[position.seq_id] = count

    def requeue(self, seq_ids: Collection[int]) -> None:
        returns = {seq_id: self._returns[seq_id] for seq_id in seq_ids if seq_id in self._returns}
        settled = self._take_pending(seq_ids)
        self._returns.update(returns)
        if not settled:
            return
        settled.sort(key=attrgetter("seq_id"))
        self._len += len(settled)
        self._ready_bytes += sum([status.size for status in settled])
        self._put_back(settled)
        if not self.q4:
            self._read_ahead()

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

    # --- purge and the end -----------------------------------------------------------------------

    def purge(self) -> int:
        purged = self._len
        self._remove(status for queue in (self.q4, self.q3, self.q2, self.q1) for status in queue)
        self._remove(self._requeue_later)
        self._requeue_later = []
        for queue in (self.q4, self.q3, self.q2, self.q1):
            queue.clear()
        if self.delta.count:
            self._remove_delta()
        if self._returns:
            self._returns = {
                seq_id: count
                for seq_id, count in self._returns.items()
                if seq_id in self.ram_pending or seq_id in self.disk_pending
            }
        self._read_is_void = True
        self._len = self._ready_bytes = self.ram_count = self._ram_bytes = self._ahead_bytes = 0
        return purged

    def _remove_delta(self) -> None:
        """Everything of the delta's range but what is pending there."""
        first, end = self.delta.start, self.delta.end
        held = {
            seq_id
            for pending in (self.ram_pending, self.disk_pending)
            for seq_id in pending
            if first <= seq_id < end
        }
        for index in (self._index, self._transient):
            if index is not None:
                index.remove_range(first, end - 1, held)
        self.delta.clear()

    def terminate(self) -> None:
        self._end()
        if self._index is not None:
            self._index.counters.next_seq = self._next_seq
            self._index.save_counters()

    def delete_and_terminate(self) -> None:
        self._end()
        for index in (self._index, self._transient):
            if index is not None:
                index.forget_unwritten()
        for queue in (self.q1, self.q2, self.q3, self.q4):
            queue.clear()
        self.delta.clear()
        self._requeue_later = []
        self.ram_pending = {}
        self.disk_pending = {}
        self._len = self._ready_bytes = self._pending_bytes = 0
        self.ram_count = self._ram_bytes = self._ahead_bytes = 0

    def _end(self) -> None:
        self._is_terminated = True
        self._read_is_void = True
        for read in (self._read, self._pending_read):
            if read is not None:
                # Or it would ask a database that was closed meanwhile.
                read.cancel()

    # --- reading ---------------------------------------------------------------------------------

    def _must_read(self) -> Loading:
        self._owes_wake = True
        if self._read is None:
            self._start_read()
        return LOADING

    def _read_ahead(self) -> None:
        """Ask for the next chunk while the last is being delivered."""
        if self._read is not None or not self._len or self._is_terminated:
            return
        # All of q4 and q1 is in memory, nothing of q2: what remains was read, or requeued.
        ahead = self.ram_count - len(self.q4) - len(self.q1)
        if ahead > READ_MESSAGES // 2 or self._ahead_bytes > READ_BYTES // 2:
            return
        if ahead < len(self.q3) or self.delta.count:
            self._start_read()

    def _start_read(self) -> None:
        self._read = asyncio.get_running_loop().create_task(self._read_some())

    async def _read_some(self) -> None:
        """Read a chunk; go on until there is something to fetch, if there is anything."""
        try:
            while not self._is_terminated:
                self._read_is_void = False
                if len(self.q3) < READ_MESSAGES and self.delta.count:
                    await self._deltas_to_betas()
                if not self._read_is_void:
                    await self._read_messages()
                # A purge made this one void, or all that was read is pending: once more.
                if not self._len or self._head() is not None:
                    break
        finally:
            self._read = None
            if self._owes_wake and not self._is_terminated:
                self._owes_wake = False
                self._wake()

    async def _deltas_to_betas(self) -> None:
        """maybe_deltas_to_betas: the next positions, to the rear of q3 [113].

        A segment of them, or a part of one: what follows is read when it is wanted.
        """
        delta = self.delta
        first, end = delta.start, delta.end
        limit = min(self._segment_size, READ_POSITIONS)
        found: list[MsgStatus] = []
        self._is_reading_positions = True
        self._settled_meanwhile = set()
        try:
            for index in (self._index, self._transient):
                if index is not None:
                    positions = await index.read_positions(first, end, limit)
                    found += [_loaded(position, index is self._index) for position in positions]
                    self._learn_returns(positions)
        finally:
            self._is_reading_positions = False
            later, self._requeue_later = self._requeue_later, []
        self.disk_reads += 1
        if self._read_is_void:
            # Purged; what was requeued since then belongs to the queue as it is now.
            self._put_back(sorted(later, key=attrgetter("seq_id")))
            return
        found.sort(key=attrgetter("seq_id"))
        del found[limit:]
        # Fewer than asked for: that was all up to ``end``, though more may have come behind it.
        delta.start = found[-1].seq_id + 1 if len(found) == limit else end
        in_ram, on_disk, settled = self.ram_pending, self.disk_pending, self._settled_meanwhile
        loaded = [
            status
            for status in found
            if status.seq_id not in in_ram
            and status.seq_id not in on_disk
            and status.seq_id not in settled
        ]
        self.q3.extend(loaded)
        if self._exact is not None:
            self._exact.add(loaded)
        delta.count -= len(loaded)
        delta.bytes -= sum([status.size for status in loaded])
        delta.transient -= sum([not status.is_persistent for status in loaded])
        if delta.count <= 0 or delta.start >= delta.end:
            self._correct_count()
            delta.clear()
            self.q3.extend(self.q2)
            self.q2.clear()
        self._put_back(sorted(later, key=attrgetter("seq_id")))
        if not self.q3 and not delta.count:
            self._q1_to_q4()

    def _correct_count(self) -> None:
        """What the delta was thought to hold is not what was found: believe the disk."""
        missing = self.delta.count
        if missing:
            log.error("%d messages that were counted are not on disk", missing)
            self.lost += abs(missing)
            self._len -= missing
            self._ready_bytes -= self.delta.bytes

    async def _read_messages(self) -> None:
        """Messages for the betas at the front of q3, a chunk of them."""
        wanted: list[MsgStatus] = []
        for status in self.q3:
            if status.message is None:
                wanted.append(status)
                if len(wanted) == READ_MESSAGES:
                    break
        if not wanted:
            return
        head = wanted[0]
        by_seq = {status.seq_id: status for status in wanted}
        first, last = wanted[0].seq_id, wanted[-1].seq_id
        for index, persistent in ((self._index, True), (self._transient, False)):
            if index is None or not any(s.is_persistent is persistent for s in wanted):
                continue
            found = await index.read_messages(first, last, READ_MESSAGES, READ_BYTES)
            self.disk_reads += 1
            if self._read_is_void:
                return
            out, out_bytes, back, back_bytes = self.paged
            for seq_id, message in found:
                waiting = by_seq.get(seq_id)
                if waiting is not None:
                    waiting.message = message
                    self.ram_count += 1
                    self._ram_bytes += waiting.size
                    self._ahead_bytes += waiting.size
                    back += 1
                    back_bytes += waiting.size
            self.paged = (out, out_bytes, back, back_bytes)
        if head.message is None:
            # Never ask for ever for what is not there.
            log.error("a message that was counted is not on disk (position %d)", head.seq_id)
            self.lost += 1
            self.q3.remove(head)
            self._len -= 1
            self._ready_bytes -= head.size

    # --- exact expiry ----------------------------------------------------------------------------

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

    def _statuses(self) -> Iterable[MsgStatus]:
        return chain(self.q4, self.q3, self.q2, self.q1)

    def _drop_stale(self, exact: ExactExpiry) -> None:
        """What was consumed long before it is due must not be remembered until then."""
        if exact.is_stale(self._len - self.delta.count):
            exact.rebuild(self._statuses())

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

    def _mend_order(self) -> None:
        """After messages left from the middle: q2 needs a delta before it, q1 something on disk."""
        if not self.delta.count and self.q2:
            self.q3.extend(self.q2)
            self.q2.clear()
        if not self.q3 and not self.delta.count:
            self._q1_to_q4()

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
                        found += [_loaded(each, index is self._index) for each in positions]
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

    # --- memory ----------------------------------------------------------------------------------

    def set_ram_duration_target(self, duration_s: float) -> None:
        """How long the messages in memory are to last; infinity: no limit [124]."""
        if self.memory.set_target(duration_s):
            self.reduce_memory_use()

    def ram_duration(self) -> float:
        return self.memory.ram_duration(self.ram_count, len(self.ram_pending))

    def _maybe_page(self, count: int) -> None:
        if self.memory.is_due(count):
            self.reduce_memory_use()

    def reduce_memory_use(self) -> bool:
        """Page out, a bounded step; True if more is to be done [117]."""
        target = self.memory.target_ram_count
        if target == INFINITY:
            return False
        excess = max(0, self.ram_count + len(self.ram_pending) - int(target))
        quota = min(excess, PAGING_STEP)
        if self.memory.acks_grow_faster():
            left = self.push_alphas_to_betas(self._limit_ram_acks(quota))
        else:
            left = self._limit_ram_acks(self.push_alphas_to_betas(quota))
        permitted = permitted_beta_count(
            self._len, len(self.q1), len(self.q3), len(self.q4), target, self._segment_size
        )
        surplus = len(self.q2) + len(self.q3) - permitted
        is_short = False
        if surplus >= IO_BATCH_SIZE:
            betas = int(min(surplus, 2 * PAGING_STEP))
            is_short = self.push_betas_to_deltas(betas) == 0 and surplus > betas
        # Where nothing moved, nothing will: what was read ahead stays.
        more = (excess > quota and not left) or is_short
        if more and not self._has_to_page:
            self._has_to_page = True
            self._wake()
        return more

    def resume(self) -> None:
        """Called after a wake: go on paging, a step at a time between other work."""
        if self._has_to_page:
            self._has_to_page = False
            self.reduce_memory_use()

    def _limit_ram_acks(self, quota: int) -> int:
        """Unacked messages leave memory, the latest first [119]."""
        if not quota or not self.ram_pending:
            return quota
        chosen = sorted(self.ram_pending, reverse=True)[:quota]
        statuses = [self.ram_pending.pop(seq_id) for seq_id in chosen]
        self._write_transients(statuses)
        for status in statuses:
            status.message = None
            self.disk_pending[status.seq_id] = status
        return quota - len(statuses)

    def push_alphas_to_betas(self, quota: int) -> int:
        """From q1's front to q2 (q3 if nothing is on disk), then from q4's rear to q3 [114]."""
        left = self.push_q1(quota)
        return self.push_q4(left)

    def push_q1(self, quota: int) -> int:
        count = min(quota, len(self.q1))
        moved = [self.q1.popleft() for _ in range(count)]
        self._page_out(moved)
        (self.q2 if self.delta.count else self.q3).extend(moved)
        return quota - count

    def push_q4(self, quota: int) -> int:
        count = min(quota, len(self.q4))
        moved = [self.q4.pop() for _ in range(count)]
        self._page_out(moved)
        self.q3.extendleft(moved)
        return quota - count

    def push_betas_to_deltas(self, quota: int) -> int:
        """From q3's rear, but not its first segment; then from q2's front [115]."""
        moved: list[MsgStatus] = []
        # The front of the delta and q3 stand still while they are read.
        if self._read is None and self.q3:
            limit = next_segment_boundary(self.q3[0].seq_id, self._segment_size)
            while len(moved) < quota and self.q3[-1].seq_id >= limit:
                moved.append(self.q3.pop())
            self._ahead_bytes -= sum([s.size for s in moved if s.message is not None])
        while len(moved) < quota and self.q2:
            moved.append(self.q2.popleft())
        self._page_out(moved)
        self._add_to_delta(moved)
        return quota - len(moved)

    def set_lazy(self, *, is_lazy: bool) -> None:
        """Lazy: all that is published goes to disk alone, and is read when it is wanted [125].

        What is in memory goes to disk now; back from lazy, it stays there until it is fetched.
        """
        if is_lazy and not self.is_lazy:
            rear = [*self.q2, *self.q1]
            self._page_out(rear)
            self.q2.clear()
            self.q1.clear()
            self._add_to_delta(rear)
            self.push_q4(len(self.q4))
            self.push_betas_to_deltas(len(self.q3))
        self.is_lazy = is_lazy

    def _page_out(self, statuses: list[MsgStatus]) -> None:
        self._write_transients(statuses)
        sizes = []
        for status in statuses:
            if status.message is not None:
                status.message = None
                self.ram_count -= 1
                self._ram_bytes -= status.size
                sizes.append(status.size)
        if sizes:
            out, out_bytes, back, back_bytes = self.paged
            self.paged = (out + len(sizes), out_bytes + sum(sizes), back, back_bytes)

    def _write_transients(self, statuses: Iterable[MsgStatus]) -> None:
        """What is only in memory so far goes to the transient file."""
        transient = [status for status in statuses if not status.is_on_disk]
        if not transient:
            return
        if self._transient is None:
            self._transient = self._make_transient_index()
            self._transient.is_exact = self._exact is not None
        transient.sort(key=attrgetter("seq_id"))
        for _, run in groupby(transient, key=attrgetter("expires_at_ms")):
            self._write(self._transient, list(run), None)
        for status in transient:
            status.is_on_disk = True

    # --- what others may see ---------------------------------------------------------------------

    def is_duplicate(self, message: Message) -> bool:
        return False

    def __len__(self) -> int:
        return self._len

    def is_empty(self) -> bool:
        return not self._len

    def depth(self) -> int:
        return self._len + len(self.ram_pending) + len(self.disk_pending)

    @property
    def may_expire(self) -> bool:
        # Those that are pending may come back.
        if self._may_expire and not self.depth():
            self._may_expire = False
        return self._may_expire

    @property
    def ready_bytes(self) -> int:
        return self._ready_bytes

    def statistics(self) -> dict[str, object]:
        delta = self.delta
        return {
            "mode": "lazy" if self.is_lazy else "default",
            "q1": len(self.q1),
            "q2": len(self.q2),
            "delta": [delta.start, delta.count, delta.transient, delta.end],
            "q3": len(self.q3),
            "q4": len(self.q4),
            "len": self._len,
            "pending_acks": len(self.ram_pending) + len(self.disk_pending),
            "target_ram_count": self.memory.target_ram_count,
            "next_seq_id": self._next_seq,
            "messages_ready_ram": self.ram_count,
            "messages_unacknowledged_ram": len(self.ram_pending),
            "message_bytes_ready": self._ready_bytes,
            "message_bytes_unacknowledged": self._pending_bytes,
            "message_bytes_ram": self._ram_bytes,
            "messages_paged_out": self._len - self.ram_count,
            "disk_reads": self.disk_reads,
            "avg_ingress_rate": self.memory.rates[0],
            "avg_egress_rate": self.memory.rates[1],
            "avg_ack_ingress_rate": self.memory.rates[2],
            "avg_ack_egress_rate": self.memory.rates[3],
        }

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


def _loaded(position: Position, is_persistent: bool) -> MsgStatus:
    return MsgStatus(
        position.seq_id,
        None,
        position.size,
        position.expires_at_ms,
        is_persistent,
        True,
        position.body_id or 0,
    )
