"""One transaction: gathered in the event loop, executed in the writer's thread (hop 9).

Upstream: ``operations.py``, ``queue_index.py`` and ``unit.py`` add to a ``Batch`` when its commit
begins; ``database.py`` runs ``commit`` in its writer's thread. Python's sqlite3 gives up the GIL at
every step and must win it back from the event loop, so statements are few and large.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from leveret.storage.operations import RangeDrop

# A message's key is queue id << SEQ_BITS | position.
SEQ_BITS = 40
_ROWS_PER_STATEMENT = (100, 10, 1)
# A batch holds its rows as one flat list of parameters; delivery_count begins with its default.
_INTO_MESSAGE = (
    "INSERT INTO message"
    " (key, size, flags, expires_at, envelope, extra_keys, header, body_id, body)"
)
_MESSAGE_COLUMNS = 9
# The same for messages that are told in the event log: two numbers more, in front.
_INTO_LOGGED = _INTO_MESSAGE.replace("(", "(log_id, stamp_us, ", 1)
_LOGGED_COLUMNS = _MESSAGE_COLUMNS + 2


class Batch:
    """One transaction, gathered in the event loop, executed in the writer's thread."""

    __slots__ = (
        "after",
        "bodies",
        "body_refs",
        "bytes",
        "calls",
        "counters",
        "deletes",
        "drops",
        "freed_apart_bytes",
        "freed_bytes",
        "logged",
        "messages",
        "rows",
        "statements",
    )

    def __init__(self) -> None:
        # Run after all others, one by one: definitions. One that deletes a queue's counter must
        # come after the counter that an earlier operation of this batch wrote.
        self.statements: list[tuple[str, tuple[Any, ...]]] = []
        # Rows for the tables message and body; the former column by column, the latter as
        # id -> [references, body].
        self.messages: list[Any] = []
        # Rows for the table message with their numbers in the event log.
        self.logged: list[Any] = []
        self.bodies: dict[int, list[Any]] = {}
        # References that go, after those of bodies came.
        self.body_refs: dict[int, int] = {}
        # Keys of messages to delete.
        self.deletes: list[int] = []
        # For what is neither of these: called with the connection.
        self.calls: list[Callable[[sqlite3.Connection], None]] = []
        # Large ranges of messages to delete, a bounded part at a time.
        self.drops: list[RangeDrop] = []
        # Queue id -> its row in counter, as of this commit.
        self.counters: dict[int, tuple[int, int, int, int, int, int]] = {}
        # Called in the event loop once the transaction is on disk.
        self.after: list[Callable[[], object]] = []
        self.rows = 0
        self.bytes = 0
        # Of rows that go: the pages they stood on are written, too.
        self.freed_bytes = 0
        # Of the bodies these rows name, whether they go with them or not.
        self.freed_apart_bytes = 0

    @property
    def is_empty(self) -> bool:
        """Nothing to write; there may still be somebody to tell."""
        return not (
            self.statements
            or self.messages
            or self.logged
            or self.deletes
            or self.drops
            or self.calls
            or self.body_refs
            or self.counters
        )


class Operation(Protocol):
    """Something to be written. ``gather`` is called when its commit begins, not before:
    what was taken back by then is never written."""

    def gather(self, batch: Batch) -> None: ...


def commit(connection: sqlite3.Connection, batch: Batch) -> float:
    """The whole batch or nothing; returns the CPU time it took of this thread."""
    begun = time.thread_time()
    execute = connection.execute
    execute("BEGIN IMMEDIATE")
    try:
        if batch.bodies:
            rows = [(body_id, refs, body) for body_id, (refs, body) in batch.bodies.items()]
            _insert(connection, "INSERT INTO body", 3, _flat(rows), _ONE_MORE_REFERENCE)
        if batch.messages:
            _insert(connection, _INTO_MESSAGE, _MESSAGE_COLUMNS, batch.messages)
        if batch.logged:
            _insert(connection, _INTO_LOGGED, _LOGGED_COLUMNS, batch.logged)
        if batch.deletes:
            delete_rows(connection, "message", batch.deletes)
        if batch.body_refs:
            change_references(connection, batch.body_refs)
        if batch.counters:
            rows_of_counters = _flat(batch.counters.values())
            _insert(connection, "INSERT OR REPLACE INTO counter", 6, rows_of_counters)
        for drop in batch.drops:
            drop.run(connection)
        for call in batch.calls:
            call(connection)
        for sql, parameters in batch.statements:
            execute(sql, parameters)
        execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.rollback()
        raise
    return time.thread_time() - begun


_ONE_MORE_REFERENCE = " ON CONFLICT (id) DO UPDATE SET refs = refs + excluded.refs"


def _flat(rows: Iterable[tuple[Any, ...]]) -> list[Any]:
    return [value for row in rows for value in row]


def _insert(
    connection: sqlite3.Connection, into: str, columns: int, flat: list[Any], conflict: str = ""
) -> None:
    """Many rows a statement: each step costs a fight for the GIL."""
    at, end = 0, len(flat)
    for rows in _ROWS_PER_STATEMENT:
        size = rows * columns
        if end - at >= size:
            sql = _insert_sql(into, columns, rows, conflict)
            while end - at >= size:
                connection.execute(sql, flat[at : at + size])
                at += size


@cache
def _insert_sql(into: str, columns: int, rows: int, conflict: str) -> str:
    places = "(" + ",".join("?" * columns) + ")"
    return f"{into} VALUES {','.join([places] * rows)}{conflict}"


def delete_rows(connection: sqlite3.Connection, table: str, rowids: list[int]) -> None:
    """Runs of neighbours by range, the rest by number."""
    rowids.sort()
    single: list[int] = []
    at, count = 0, len(rowids)
    while at < count:
        end = at + 1
        while end < count and rowids[end] == rowids[end - 1] + 1:
            end += 1
        if end - at > 2:
            connection.execute(
                f"DELETE FROM {table} WHERE rowid BETWEEN ? AND ?", (rowids[at], rowids[end - 1])
            )
        else:
            single += rowids[at:end]
        at = end
    at = 0
    for size in _ROWS_PER_STATEMENT:
        sql = f"DELETE FROM {table} WHERE rowid IN ({','.join('?' * size)})"
        while len(single) - at >= size:
            connection.execute(sql, single[at : at + size])
            at += size


def change_references(connection: sqlite3.Connection, changes: dict[int, int]) -> None:
    gone = []
    for body_id, change in changes.items():
        connection.execute("UPDATE body SET refs = refs + ? WHERE id = ?", (change, body_id))
        if change < 0:
            gone.append(body_id)
    for at in range(0, len(gone), 100):
        some = gone[at : at + 100]
        connection.execute(
            f"DELETE FROM body WHERE id IN ({','.join('?' * len(some))}) AND refs <= 0", some
        )
