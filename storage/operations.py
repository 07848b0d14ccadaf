"""What is put into a database's log beside the writes of queues: statements, ranges, barriers.

Upstream: ``definitions.py`` and ``vhost_store.py``; queues drop ranges when they are purged.
Downstream: ``commit.py``.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from leveret.storage.commit import SEQ_BITS, Batch, change_references, delete_rows

if TYPE_CHECKING:
    from leveret.storage.database import Database

# Of a range that is dropped, one commit deletes so many rows.
DROP_ROWS = 2_000


class Statement:
    """A single statement, for definitions."""

    __slots__ = ("_after", "_parameters", "_sql")

    def __init__(
        self, sql: str, parameters: tuple[Any, ...], after: Callable[[], None] | None = None
    ) -> None:
        self._sql = sql
        self._parameters = parameters
        self._after = after

    def gather(self, batch: Batch) -> None:
        batch.statements.append((self._sql, self._parameters))
        batch.rows += 1
        if self._after is not None:
            batch.after.append(self._after)


class RangeDrop:
    """Deletes the messages of a range of keys, and their references to bodies, bit by bit.

    One commit takes a bounded part; as long as there is more, the rest is put again. ``keep`` are
    keys that stay. ``removed`` is told after each part how many messages and bytes went,
    ``after`` when all are gone.
    """

    __slots__ = (
        "_after",
        "_bytes",
        "_count",
        "_database",
        "_first",
        "_is_done",
        "_keep",
        "_last",
        "_next",
        "_removed",
    )

    def __init__(
        self,
        database: Database,
        first: int,
        last: int,
        *,
        keep: Collection[int] = (),
        removed: Callable[[int, int], None] | None = None,
        after: Callable[[], None] | None = None,
    ) -> None:
        self._database = database
        self._first = first
        self._last = last
        self._keep = keep
        self._removed = removed
        self._after = after
        # What the last part took; written in the writer's thread, read after its commit.
        self._count = 0
        self._bytes = 0
        self._next = first
        self._is_done = False

    @property
    def freed_bytes(self) -> int:
        """Of the last part."""
        return self._bytes

    def gather(self, batch: Batch) -> None:
        batch.drops.append(self)
        batch.rows += DROP_ROWS
        batch.after.append(self._go_on)

    def run(self, connection: sqlite3.Connection) -> None:
        rows = connection.execute(
            "SELECT key, size, body_id FROM message WHERE key BETWEEN ? AND ? ORDER BY key LIMIT ?",
            (self._first, self._last, DROP_ROWS),
        ).fetchall()
        self._is_done = len(rows) < DROP_ROWS
        self._next = rows[-1][0] + 1 if rows else self._first
        if self._keep:
            rows = [row for row in rows if row[0] not in self._keep]
        self._count = len(rows)
        self._bytes = sum([row[1] for row in rows])
        if not rows:
            return
        if self._keep:
            delete_rows(connection, "message", [row[0] for row in rows])
        else:
            connection.execute(
                "DELETE FROM message WHERE key BETWEEN ? AND ?", (self._first, rows[-1][0])
            )
        connection.execute(
            "UPDATE counter SET messages = messages - ?, bytes = bytes - ? WHERE queue_id = ?",
            (self._count, self._bytes, self._first >> SEQ_BITS),
        )
        changes: dict[int, int] = {}
        for _, _, body_id in rows:
            if body_id is not None:
                changes[body_id] = changes.get(body_id, 0) - 1
        change_references(connection, changes)

    def _go_on(self) -> None:
        # Only now: a commit that failed was tried again with the same part.
        self._first = self._next
        if self._removed is not None:
            self._removed(self._count, self._bytes)
        if not self._is_done:
            self._database.put(self)
        elif self._after is not None:
            self._after()


class Barrier:
    """Written nothing, known to be reached: everything put before it is on disk."""

    __slots__ = ("_reached",)

    def __init__(self, reached: Callable[[], object]) -> None:
        self._reached = reached

    def gather(self, batch: Batch) -> None:
        batch.after.append(self._reached)
