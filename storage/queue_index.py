"""Where the messages of one queue are on disk: position, size, expiry, small bodies (hop 8).

Upstream: ``variable_queue.py``. Downstream: ``database.py``, ``message_store.py``.

Rows of all queues are in one table with one integer as key, ``queue id << 40 | position``:
appends, range reads and range deletes go by rowid. A message that is removed before its row was
taken into a commit is never written [134]; one that is being written is deleted by a later commit.

The queue's row in ``counter`` says what the committed rows add up to; it is written in each
commit the queue takes part in, so that a start need not look at the messages.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from leveret.protocol.twin import Message
from leveret.storage.database import SEQ_BITS, Batch, Database, RangeDrop
from leveret.storage.message_store import MessageStore

_SEQ_MASK = (1 << SEQ_BITS) - 1
_PERSISTENT = 256
# What a row costs beyond body and header: counted against the cap of a commit.
ROW_OVERHEAD = 100


class Position(NamedTuple):
    """A message that is known to be there and was not read."""

    seq_id: int
    size: int
    is_persistent: bool
    expires_at_ms: int | None
    body_id: int | None


class Counters:
    """What a queue's committed rows add up to."""

    __slots__ = ("bytes", "delivered", "messages", "next_seq")

    def __init__(
        self, next_seq: int = 0, messages: int = 0, size: int = 0, delivered: int = -1
    ) -> None:
        self.next_seq = next_seq
        self.messages = messages
        self.bytes = size
        self.delivered = delivered


class _Write:
    """A run on its way to the table; rows that were taken back meanwhile are left out."""

    __slots__ = ("_committed", "_index", "_seq_ids")

    def __init__(
        self, index: QueueIndex, seq_ids: Sequence[int], committed: Callable[[], None] | None
    ) -> None:
        self._index = index
        self._seq_ids = seq_ids
        self._committed = committed

    def gather(self, batch: Batch) -> None:
        self._index._gather_rows(self._seq_ids, batch)
        batch.after.append(self._on_disk)

    def _on_disk(self) -> None:
        self._index.granted(len(self._seq_ids))
        if self._committed is not None:
            self._committed()


class _Remove:
    __slots__ = ("_index", "_removed")

    def __init__(self, index: QueueIndex, removed: list[tuple[int, int, int]]) -> None:
        self._index = index
        self._removed = removed

    def gather(self, batch: Batch) -> None:
        self._index._gather_removed(self._removed, batch)


class QueueIndex:
    def __init__(
        self, database: Database, store: MessageStore, queue_id: int, counters: Counters
    ) -> None:
        self._database = database
        self._store = store
        self._base = queue_id << SEQ_BITS
        self._queue_id = queue_id
        self.counters = counters
        # Told how many rows that were handed over are done with: credit for more.
        self.granted: Callable[[int], None] = lambda rows: None
        # Handed over and not yet part of a commit: position -> message, expiry.
        self._unwritten: dict[int, tuple[Message, int | None]] = {}

    # --- writing ---------------------------------------------------------------------------------

    def write(
        self,
        seq_ids: Sequence[int],
        messages: Iterable[Message],
        expires_at_ms: int | None,
        committed: Callable[[], None] | None,
    ) -> None:
        """Write a run; ``committed`` is called when what was not taken back of it is on disk."""
        unwritten, store = self._unwritten, self._store
        for seq_id, message in zip(seq_ids, messages, strict=True):
            unwritten[seq_id] = (message, expires_at_ms)
            if store.is_separate(message):
                store.reserve(message)
        self._database.put(_Write(self, seq_ids, committed))

    def remove(self, removed: Iterable[tuple[int, int, int]]) -> None:
        """Remove messages given as (position, size, id of a separate body or 0)."""
        pop = self._unwritten.pop
        written = [row for row in removed if pop(row[0], None) is None]
        if written:
            self._database.put(_Remove(self, written))

    def remove_range(self, first: int, last: int) -> None:
        """Remove whatever is there from ``first`` to ``last``."""
        for seq_id in [seq_id for seq_id in self._unwritten if first <= seq_id <= last]:
            del self._unwritten[seq_id]
        self._database.put(
            RangeDrop(
                self._database, self._base + first, self._base + last, removed=self._range_removed
            )
        )

    def _range_removed(self, messages: int, size: int) -> None:
        self.counters.messages -= messages
        self.counters.bytes -= size

    def delivered(self, seq_id: int) -> None:
        """Remember how far deliveries went; written with the next commit of this queue."""
        if seq_id > self.counters.delivered:
            self.counters.delivered = seq_id

    def save_counters(self) -> None:
        self._database.put(_Count(self))

    def _gather_rows(self, seq_ids: Sequence[int], batch: Batch) -> None:
        pop = self._unwritten.pop
        rows = batch.messages
        base, store = self._base, self._store
        counters = self.counters
        for seq_id in seq_ids:
            found = pop(seq_id, None)
            if found is None:
                continue
            message, expires_at_ms = found
            body = message.body
            size = len(body)
            header = message.header
            body_id = None
            embedded: bytes | None = body
            if store.is_separate(message):
                store.add_reference(message, batch)
                body_id, embedded = message.body_id, None
            else:
                batch.bytes += size
            rows.append(
                (
                    base + seq_id,
                    size,
                    message.needs | _PERSISTENT if message.persistent else message.needs,
                    expires_at_ms,
                    message.envelope,
                    _short_strings(message.extra_keys) if message.extra_keys else None,
                    header,
                    body_id,
                    embedded,
                )
            )
            batch.rows += 1
            batch.bytes += len(header) + ROW_OVERHEAD
            counters.messages += 1
            counters.bytes += size
            if seq_id >= counters.next_seq:
                counters.next_seq = seq_id + 1
        self._gather_counters(batch)

    def _gather_removed(self, removed: list[tuple[int, int, int]], batch: Batch) -> None:
        counters = self.counters
        base = self._base
        for seq_id, size, body_id in removed:
            batch.deletes.append(base + seq_id)
            counters.messages -= 1
            counters.bytes -= size
            if body_id:
                self._store.drop_reference(body_id, batch)
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
        )

    # --- reading ---------------------------------------------------------------------------------

    async def read_positions(self, first: int, end: int, limit: int) -> list[Position]:
        """Up to ``limit`` positions from ``first``, before ``end``; all that was put is seen."""
        await self._database.wait_committed()
        rows = await self._database.read(
            _select_positions, self._base + first, self._base + end, limit
        )
        return [
            Position(key & _SEQ_MASK, size, bool(flags & _PERSISTENT), expires_at_ms, body_id)
            for key, size, flags, expires_at_ms, body_id in rows
        ]

    async def read_messages(
        self, first: int, last: int, limit: int, max_bytes: int
    ) -> list[tuple[int, Message]]:
        """Messages from ``first`` to ``last``, within both limits but at least one."""
        await self._database.wait_committed()
        return await self._database.read(
            _select_messages, self._base + first, self._base + last, limit, max_bytes
        )


class _Count:
    __slots__ = ("_index",)

    def __init__(self, index: QueueIndex) -> None:
        self._index = index

    def gather(self, batch: Batch) -> None:
        self._index._gather_counters(batch)


# --- in the reader's thread ------------------------------------------------------------------


def _select_positions(
    connection: sqlite3.Connection, first: int, end: int, limit: int
) -> list[Any]:
    return connection.execute(
        "SELECT key, size, flags, expires_at, body_id FROM message"
        " WHERE key >= ? AND key < ? ORDER BY key LIMIT ?",
        (first, end, limit),
    ).fetchall()


def _select_messages(
    connection: sqlite3.Connection, first: int, last: int, limit: int, max_bytes: int
) -> list[tuple[int, Message]]:
    found: list[tuple[int, Message]] = []
    size = 0
    cursor = connection.execute(
        "SELECT m.key, m.size, m.flags, m.envelope, m.extra_keys, m.header, m.body_id,"
        " coalesce(m.body, b.body) FROM message m LEFT JOIN body b ON b.id = m.body_id"
        " WHERE m.key BETWEEN ? AND ? ORDER BY m.key LIMIT ?",
        (first, last, limit),
    )
    for key, length, flags, envelope, extra_keys, header, body_id, body in cursor:
        size += length
        if found and size > max_bytes:
            break
        exchange, routing_key = _names(envelope)
        message = Message(
            envelope, exchange, routing_key, header, body, flags & 255, bool(flags & _PERSISTENT)
        )
        if extra_keys is not None:
            message.extra_keys = _names(extra_keys)
        if body_id is not None:
            message.body_id = body_id
        found.append((key & _SEQ_MASK, message))
    return found


def _short_strings(names: Iterable[str]) -> bytes:
    raw = [name.encode("utf-8", "surrogateescape") for name in names]
    return b"".join(bytes((len(name),)) + name for name in raw)


def _names(data: bytes) -> tuple[str, ...]:
    names = []
    at = 0
    while at < len(data):
        end = at + 1 + data[at]
        names.append(data[at + 1 : end].decode("utf-8", "surrogateescape"))
        at = end
    return tuple(names)
