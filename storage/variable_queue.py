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

import logging
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from itertools import chain, islice
from operator import attrgetter

from leveret.protocol.message import Message
from leveret.storage.backing_queue import (
    EMPTY,
    Confirm,
    Entry,
    Loading,
    Nothing,
    Predicate,
    Prepared,
    Run,
)
from leveret.storage.commit import Batch
from leveret.storage.database import COMMIT_ROWS
from leveret.storage.memory_use import INFINITY
from leveret.storage.msg_status import (
    MsgStatus,
)
from leveret.storage.queue_expiry import ExpiringQueue
from leveret.storage.queue_reading import make_entry

log = logging.getLogger(__name__)


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


class VariableQueue(ExpiringQueue):
    # --- publishing -------------------------------------------------------------------------------

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

    def _on_committed(self, confirm: Confirm) -> None:
        if self._is_terminated:
            return
        # The queue takes all there are: it needs to be told of the first only.
        has_been_told = bool(self._confirmed)
        self._confirmed.append(confirm)
        if not has_been_told:
            self._wake()

    # --- fetching ---------------------------------------------------------------------------------

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

    def drop_while(self, predicate: Predicate, seen: list[Message] | None = None) -> int | Loading:
        taken = self._take_while(predicate, self._len, None)
        if not taken and self._len and self._head() is None:
            return self._must_read()
        if seen is not None:
            seen += _messages(taken)
        self._hand_out(taken, ack_required=False)
        return len(taken)

    def drop(self, count: int, seen: list[Message] | None = None) -> int | Loading:
        # What is to go need not be read, unless it is being read already.
        taken = self._take_ready(min(count, self._len), None, on_disk_too=self._read is None)
        if not taken and self._len:
            return self._must_read()
        if taken:
            if seen is not None:
                seen += _messages(taken)
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

    def _hand_out(self, taken: list[MsgStatus], *, ack_required: bool) -> list[Entry]:
        if not taken:
            return []
        delivered = self._delivered
        entries = [
            make_entry(
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

    def _note_delivered(self, seq_id: int) -> None:
        if seq_id > self._delivered:
            self._delivered = seq_id
            if self._index is not None:
                self._index.delivered(seq_id)

    def ready_in_memory(self, limit: int) -> list[Message]:
        # Behind what was read ahead of q3 there may be more, but it is not at the head.
        return _messages(islice(chain(self.q4, self.q3), limit))

    # --- settling ---------------------------------------------------------------------------------

    def ack(self, seq_ids: Collection[int]) -> None:
        settled = self._take_pending(seq_ids)
        if self._index is not None and not self._len and settled:
            # While messages wait, publishers are not let further ahead of consumers: for them
            # there is the commit.
            self._index.release([status.seq_id for status in settled if status.is_persistent])
        self._remove(settled)
        self.memory.count_ack_out(len(settled))

    def _remove_ready(self, taken: list[MsgStatus]) -> None:
        """They leave without ever being pending."""
        if self._returns:
            self._forget_returns(taken)
        self._remove(taken)

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

    def _is_lasting(self, seq_id: int) -> bool:
        status = self.ram_pending.get(seq_id) or self.disk_pending.get(seq_id)
        return status is not None and status.is_persistent

    def delivery_count(self, seq_id: int) -> int:
        return self._returns.get(seq_id, 0)

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

    # --- purge and the end ------------------------------------------------------------------------

    def purge(self) -> int:
        purged = self._len
        queues = [queue for queue in (self.q4, self.q3, self.q2, self.q1) if queue]
        self._remove(self._requeue_later)
        self._requeue_later = []
        if sum([len(queue) for queue in queues]) > COMMIT_ROWS:
            # To name them all would take long: whatever is there goes, in steps of the store's.
            ends = (self.delta.end - 1 if self.delta.count else 0, queues[-1][-1].seq_id)
            starts = [queues[0][0].seq_id, *([self.delta.start] if self.delta.count else [])]
            self._remove_between(min(starts), max(ends))
        else:
            self._remove(status for queue in queues for status in queue)
            if self.delta.count:
                self._remove_between(self.delta.start, self.delta.end - 1)
        for queue in queues:
            queue.clear()
        self.delta.clear()
        if self._returns:
            self._returns = {
                seq_id: count
                for seq_id, count in self._returns.items()
                if seq_id in self.ram_pending or seq_id in self.disk_pending
            }
        self._read_is_void = True
        self._len = self._ready_bytes = self.ram_count = self._ram_bytes = self._ahead_bytes = 0
        return purged

    def _remove_between(self, first: int, last: int) -> None:
        """Take everything of a range off the disk but what is pending there."""
        held = {
            seq_id
            for pending in (self.ram_pending, self.disk_pending)
            for seq_id in pending
            if first <= seq_id <= last
        }
        for index in (self._index, self._transient):
            if index is not None:
                index.remove_range(first, last, held)

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

    # --- what others may see ----------------------------------------------------------------------

    def is_duplicate(self, message: Message) -> bool:
        return False

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
            "mode": "lazy" if self.is_lazy or self._turns_lazy else "default",
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


def _messages(statuses: Iterable[MsgStatus]) -> list[Message]:
    """Of those that are in memory."""
    return [status.message for status in statuses if status.message is not None]
