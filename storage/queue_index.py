"""Where the messages of one queue are on disk: position, size, expiry, small bodies (hop 8).

Upstream: ``variable_queue.py``. Downstream: ``database.py``, ``message_store.py``.

Rows of all queues are in one table with one integer as key, ``queue id << 40 | position``:
appends, range reads and range deletes go by rowid. A message that is removed before its row was
taken into a commit is never written [134]; one that is being written is deleted by a later commit.
Who published it need not wait for either: a run of which nothing is left is confirmed at once.

The queue's row in ``counter`` says what the committed rows add up to; it is written in each
commit the queue takes part in, so that a start need not look at the messages.
"""

from __future__ import annotations

import sqlite3
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from leveret.protocol.twin import Message
from leveret.storage.commit import SEQ_BITS, Batch
from leveret.storage.database import COMMIT_ROWS, Database
from leveret.storage.message_rows import (
    EXACT,
    PERSISTENT,
    SEQ_MASK,
    Position,
    make_position,
    select_chosen,
    select_due,
    select_messages,
    select_positions,
    short_strings,
)
from leveret.storage.message_store import MessageStore
from leveret.storage.operations import DROP_ROWS, RangeDrop, Statement

# Counters.expiring: all rows with an expiry are in that index.
MARKED = 2
# What a row costs beyond body and header: counted against the cap of a commit.
ROW_OVERHEAD = 100
# A row costs one credit, and one more for each 2 KiB of header and body. So 4,000 credits are two
# full commits, be it in rows or in bytes.
CREDIT_BITS = 11


class Counters:
    """What a queue's committed rows add up to."""

    __slots__ = ("bytes", "delivered", "expiring", "messages", "next_seq")

    def __init__(
        self,
        next_seq: int = 0,
        messages: int = 0,
        size: int = 0,
        delivered: int = -1,
        expiring: int = 0,
    ) -> None:
        self.next_seq = next_seq
        self.messages = messages
        self.bytes = size
        self.delivered = delivered
        # 1 once a message with an expiry was written, 2 if all that have one are marked so that
        # an exact queue finds them; 0 again when no message is left.
        self.expiring = expiring


class _Write:
    """A run on its way to the table; rows that were taken back meanwhile are left out."""

    __slots__ = ("_cost", "_expires_at_ms", "_index", "committed", "left", "seq_ids")

    def __init__(
        self,
        index: QueueIndex,
        seq_ids: Sequence[int],
        expires_at_ms: int | None,
        committed: Callable[[], None] | None,
        cost: int,
    ) -> None:
        self._index = index
        self.seq_ids = seq_ids
        self._expires_at_ms = expires_at_ms
        self.committed = committed
        self._cost = cost
        # How many of it must be on disk before somebody is told.
        self.left = len(seq_ids)

    def gather(self, batch: Batch) -> None:
        self._index._gather_rows(self.seq_ids, self._expires_at_ms, batch)
        batch.after.append(self._on_disk)

    def _on_disk(self) -> None:
        index = self._index
        index.uncommitted_rows -= len(self.seq_ids)
        index._settled(self, self._cost)
        self.left = 0
        if self.committed is not None:
            index._tell_committed()


class _Remove:
    __slots__ = ("_index", "_removed")

    def __init__(self, index: QueueIndex, removed: list[tuple[int, int, int]]) -> None:
        self._index = index
        self._removed = removed

    def gather(self, batch: Batch) -> None:
        self._index._gather_removed(self._removed, batch)
        batch.after.append(self._on_disk)

    def _on_disk(self) -> None:
        self._index._settled(self, 0)


class _Count:
    __slots__ = ("_index",)

    def __init__(self, index: QueueIndex) -> None:
        self._index = index

    def gather(self, batch: Batch) -> None:
        self._index._gather_counters(batch)


class _Mark:
    """Marks the rows of a queue that has become exact, a bounded part in each commit."""

    __slots__ = ("_first", "_index", "_next")

    def __init__(self, index: QueueIndex) -> None:
        self._index = index
        self._first: int | None = index._base
        self._next: int | None = None

    def gather(self, batch: Batch) -> None:
        batch.calls.append(self._run)
        batch.rows += DROP_ROWS
        batch.after.append(self._go_on)

    def _run(self, connection: sqlite3.Connection) -> None:
        last = self._index._base + SEQ_MASK
        keys = connection.execute(
            "SELECT key FROM message WHERE key BETWEEN ? AND ? ORDER BY key LIMIT ?",
            (self._first, last, DROP_ROWS),
        ).fetchall()
        self._next = keys[-1][0] + 1 if len(keys) == DROP_ROWS else None
        if keys:
            connection.execute(
                "UPDATE message SET flags = flags | 512"
                " WHERE key BETWEEN ? AND ? AND expires_at IS NOT NULL",
                (self._first, keys[-1][0]),
            )

    def _go_on(self) -> None:
        self._first = self._next
        if self._first is None:
            # Unless rows without a mark were written, or marking began anew, meanwhile.
            if self._index._marking is self:
                self._index.counters.expiring = MARKED
            self._index._settled(self, 0)
        else:
            self._index._database.put(self)


class QueueIndex:
    def __init__(
        self, database: Database, store: MessageStore, queue_id: int, counters: Counters
    ) -> None:
        self._database = database
        self._store = store
        self._base = queue_id << SEQ_BITS
        self._queue_id = queue_id
        self.counters = counters
        # Rows with an expiry are written so that ``read_due`` finds them.
        self.is_exact = False
        # What marks those that were written before.
        self._marking: _Mark | None = None
        # Told what was spent on writes that are done with: credit for more.
        self.granted: Callable[[int], None] = lambda cost: None
        # Rows handed over whose commit has not ended, those included that were taken back.
        self.uncommitted_rows = 0
        # Handed over and not yet part of a commit.
        self._unwritten: dict[int, Message] = {}
        # Operations that are not on disk yet, with the first and last position they touch: a
        # read waits for those that touch what it is after, and for no others.
        self._under_way: dict[object, tuple[int, int]] = {}
        # Of these, the writes that somebody waits for; their positions ascend.
        self._awaited: deque[_Write] = deque()
        # Messages and bytes whose removal is not part of a commit yet.
        self._unremoved = 0
        self._unremoved_bytes = 0

    # --- writing ---------------------------------------------------------------------------------

    def write(
        self,
        seq_ids: Sequence[int],
        messages: Iterable[Message],
        expires_at_ms: int | None,
        committed: Callable[[], None] | None,
        cost: int = 0,
    ) -> None:
        """Write a run, positions ascending.

        ``committed`` is called when all of it is on disk or was released; what it ``cost`` is
        granted when no commit has to do with it any more.
        """
        self._unwritten.update(zip(seq_ids, messages, strict=True))
        if seq_ids[-1] >= self.counters.next_seq:
            self.counters.next_seq = seq_ids[-1] + 1
        self.uncommitted_rows += len(seq_ids)
        write = _Write(self, seq_ids, expires_at_ms, committed, cost)
        self._under_way[write] = (seq_ids[0], seq_ids[-1])
        if committed is not None:
            self._awaited.append(write)
        self._database.put(write)

    @property
    def embed_below(self) -> int:
        """From this size on, body and header together, a body is kept apart [107]."""
        return self._store.embed_below

    @property
    def unwritten_bytes(self) -> int:
        """Of what no commit has taken yet."""
        waiting = self._unwritten.values()
        return sum([len(message.header) + len(message.body) for message in waiting])

    def reserve(self, message: Message) -> int:
        """The id under which a large body will be written."""
        self._store.reserve(message)
        return message.body_id

    def remove(self, removed: Iterable[tuple[int, int, int]]) -> None:
        """Remove messages given as (position, size, id of a separate body or 0)."""
        pop = self._unwritten.pop
        written = [row for row in removed if pop(row[0], None) is None]
        if not written:
            return
        self._unremoved += len(written)
        self._unremoved_bytes += sum([row[1] for row in written])
        for at in range(0, len(written), COMMIT_ROWS):
            part = written[at : at + COMMIT_ROWS]
            remove = _Remove(self, part)
            self._under_way[remove] = (min(part)[0], max(part)[0])
            # Nobody waits for it: should it be lost, the message comes back marked as redelivered.
            self._database.put_lazily(remove)

    def release(self, seq_ids: Collection[int]) -> None:
        """These are about to be removed: nobody need wait any more for their commit.

        Each was written, and is given once. A run of which all were given counts as committed.
        """
        if not self._awaited or not seq_ids:
            return
        seq_ids = sorted(seq_ids)
        for write in self._awaited:
            if write.seq_ids[0] > seq_ids[-1]:
                break
            # Whatever was written of this queue between a write's first and last is the write's;
            # transient messages may stand there, too, and do not count.
            begin = bisect_left(seq_ids, write.seq_ids[0])
            write.left -= bisect_right(seq_ids, write.seq_ids[-1], begin) - begin
        self._tell_committed()

    def _tell_committed(self) -> None:
        """In the order in which they were written: what is confirmed in order is told in one."""
        awaited = self._awaited
        while awaited and not awaited[0].left:
            committed = awaited.popleft().committed
            assert committed is not None
            committed()

    def gather_unit(
        self,
        runs: Sequence[tuple[Sequence[int], Sequence[Message], int | None]],
        removed: Collection[tuple[int, int, int]],
        batch: Batch,
    ) -> None:
        """Write and remove within a commit that begins now; runs as (positions, messages, expiry).

        What is removed was written by an earlier commit, or by this one: all that was put before
        has been gathered before. No read need wait for it: what it writes is not ready before it
        has ended, and what it removes is pending until then.
        """
        for seq_ids, messages, expires_at_ms in runs:
            self._unwritten.update(zip(seq_ids, messages, strict=True))
            if seq_ids[-1] >= self.counters.next_seq:
                self.counters.next_seq = seq_ids[-1] + 1
            self._gather_rows(seq_ids, expires_at_ms, batch)
        if removed:
            self._unremoved += len(removed)
            self._unremoved_bytes += sum([row[1] for row in removed])
            self._gather_removed(removed, batch)

    def remove_range(self, first: int, last: int, keep: Collection[int] = ()) -> None:
        """Remove whatever is there from ``first`` to ``last``, but not ``keep``."""
        for seq_id in [seq_id for seq_id in self._unwritten if first <= seq_id <= last]:
            if seq_id not in keep:
                del self._unwritten[seq_id]
        drop = RangeDrop(
            self._database,
            self._base + first,
            self._base + last,
            keep={self._base + seq_id for seq_id in keep},
            removed=self._range_removed,
            after=lambda: self._settled(drop, 0),
        )
        self._under_way[drop] = (first, last)
        self._database.put(drop)

    def forget_unwritten(self) -> None:
        """The queue is gone: what no commit has taken yet need not be written."""
        self._unwritten.clear()

    def _range_removed(self, messages: int, size: int) -> None:
        self.counters.messages -= messages
        self.counters.bytes -= size

    def _settled(self, operation: object, cost: int) -> None:
        del self._under_way[operation]
        if cost:
            self.granted(cost)

    def delivered(self, seq_id: int) -> None:
        """Remember how far deliveries went; written with the next commit of this queue."""
        if seq_id > self.counters.delivered:
            self.counters.delivered = seq_id

    def save_delivery_counts(self, counts: Iterable[tuple[int, int]]) -> None:
        """Remember how often messages, given as (position, count), came back."""
        for seq_id, count in counts:
            # After all that was put before: the row is there, unless it was never to be written.
            self._database.put_lazily(
                Statement(
                    "UPDATE message SET delivery_count = ? WHERE key = ?",
                    (count, self._base + seq_id),
                )
            )

    def save_counters(self) -> None:
        self._database.put(_Count(self))

    @property
    def is_dropping(self) -> bool:
        """A range is being removed, in several commits: nobody knows yet how much that is."""
        return any(isinstance(operation, RangeDrop) for operation in self._under_way)

    def totals(self) -> Counters:
        """What the counters will be when all that was put is on disk; unless ``is_dropping``."""
        counters = self.counters
        return Counters(
            counters.next_seq,
            counters.messages + len(self._unwritten) - self._unremoved,
            counters.bytes
            + sum([len(message.body) for message in self._unwritten.values()])
            - self._unremoved_bytes,
            counters.delivered,
            counters.expiring,
        )

    def _gather_rows(self, seq_ids: Sequence[int], expires_at_ms: int | None, batch: Batch) -> None:
        pop = self._unwritten.pop
        base, store = self._base, self._store
        embed_below = store.embed_below
        marks = EXACT if self.is_exact and expires_at_ms is not None else 0
        count = size = written = 0
        for seq_id in seq_ids:
            message = pop(seq_id, None)
            if message is None:
                continue
            body: bytes | None = message.body
            header = message.header
            length = len(message.body)
            count += 1
            size += length
            written += len(header)
            body_id = None
            if length + len(header) >= embed_below:
                store.reserve(message)
                store.add_reference(message, batch)
                body_id, body = message.body_id, None
            else:
                written += length
            if message.log_id:
                batch.logged += (message.log_id, message.stamp_us or None)
                parameters = batch.logged
            else:
                parameters = batch.messages
            parameters += (
                base + seq_id,
                length,
                message.needs | marks | PERSISTENT if message.persistent else message.needs | marks,
                expires_at_ms,
                message.envelope,
                short_strings(message.extra_keys) if message.extra_keys else None,
                header,
                body_id,
                body,
            )
        if not count:
            return
        batch.rows += count
        batch.bytes += written + count * ROW_OVERHEAD
        self.counters.messages += count
        self.counters.bytes += size
        if expires_at_ms is not None and not (marks and self.counters.expiring == MARKED):
            self.counters.expiring = MARKED if marks and not self.counters.expiring else 1
            if not marks:
                self._marking = None
        self._gather_counters(batch)

    def _gather_removed(self, removed: Collection[tuple[int, int, int]], batch: Batch) -> None:
        base = self._base
        batch.deletes += [base + row[0] for row in removed]
        size = sum([row[1] for row in removed])
        self.counters.messages -= len(removed)
        self.counters.bytes -= size
        if not self.counters.messages:
            self.counters.expiring = 0
        self._unremoved -= len(removed)
        self._unremoved_bytes -= size
        for _, length, body_id in removed:
            if body_id:
                size -= length
                batch.freed_apart_bytes += length
                self._store.drop_reference(body_id, batch)
        batch.freed_bytes += size
        batch.rows += len(removed)
        self._gather_counters(batch)

    def _gather_counters(self, batch: Batch) -> None:
        counters = self.counters
        batch.counters[self._queue_id] = (
            self._queue_id,
            counters.next_seq,
            counters.messages,
            counters.bytes,
            counters.delivered,
            counters.expiring,
        )

    # --- reading ---------------------------------------------------------------------------------

    async def read_positions(self, first: int, end: int, limit: int) -> list[Position]:
        """Up to ``limit`` positions from ``first``, before ``end``; all that was put is seen."""
        await self._wait_on_disk(first, end - 1)
        rows = await self._database.read_patiently(
            select_positions, self._base + first, self._base + end, limit
        )
        return [make_position(row) for row in rows]

    async def read_due(
        self, first: int, end: int, now_ms: int, limit: int
    ) -> tuple[list[Position], int | None]:
        """Of an exact queue: what is due from ``first``, before ``end``, in order of due time; and
        when the next is."""
        await self._wait_on_disk(first, end - 1)
        rows = await self._database.read_patiently(
            select_due, self._base + first, self._base + end, limit + 1
        )
        found = [make_position(row) for row in rows]
        due = [each for each in found[:limit] if (each.expires_at_ms or 0) <= now_ms]
        return due, found[len(due)].expires_at_ms if len(due) < len(found) else None

    def mark_exact(self) -> None:
        """Rows that were written before the queue was exact are to be found, too."""
        self.is_exact = True
        if self.counters.expiring == MARKED:
            return
        mark = self._marking = _Mark(self)
        self._under_way[mark] = (0, SEQ_MASK)
        self._database.put(mark)

    async def read_messages(
        self, first: int, last: int, limit: int, max_bytes: int
    ) -> list[tuple[int, Message]]:
        """Messages from ``first`` to ``last``, within both limits but at least one."""
        await self._wait_on_disk(first, last)
        return await self._database.read_patiently(
            select_messages, self._base + first, self._base + last, limit, max_bytes
        )

    async def read_chosen(self, seq_ids: Sequence[int]) -> list[tuple[int, Message]]:
        """The messages at these positions, which ascend and are not many; those there are."""
        await self._wait_on_disk(seq_ids[0], seq_ids[-1])
        return await self._database.read_patiently(
            select_chosen, [self._base + seq_id for seq_id in seq_ids]
        )

    async def _wait_on_disk(self, first: int, last: int) -> None:
        """Return when all that was put and touches this range is on disk."""
        # A large range is dropped in several commits: look again after each.
        while any(low <= last and first <= high for low, high in self._under_way.values()):
            await self._database.wait_committed()
