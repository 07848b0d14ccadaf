"""What was declared in one virtual host, on disk: durable exchanges, queues, bindings; parameters.

Upstream: ``broker/live_vhost.py``, which tells of every change and reads all of it at start.
Downstream: ``database.py``: definitions and messages share a file, so that they change together.

Knows names and encoded argument tables, not the broker's objects.
"""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, NamedTuple

from leveret.storage.operations import Statement
from leveret.storage.queue_index import Counters

if TYPE_CHECKING:
    from leveret.storage.database import Database


class StoredExchange(NamedTuple):
    name: str
    type: str
    auto_delete: bool
    internal: bool
    arguments: bytes


class StoredQueue(NamedTuple):
    id: int
    name: str
    auto_delete: bool
    arguments: bytes
    declared_by: str
    counters: Counters


class StoredSubQueue(NamedTuple):
    """Where the messages of one priority are, of a queue that has priorities."""

    id: int
    queue_id: int
    priority: int
    counters: Counters


class StoredBinding(NamedTuple):
    source: str
    kind: str
    destination: str
    key: str
    arguments: bytes


class StoredParameter(NamedTuple):
    """Something set at run time. ``component`` says whose: 'policy', 'operator_policy',
    'vhost-limits'; ``value`` is JSON."""

    component: str
    name: str
    value: str


class Definitions(NamedTuple):
    exchanges: list[StoredExchange]
    queues: list[StoredQueue]
    bindings: list[StoredBinding]
    parameters: list[StoredParameter]
    sub_queues: list[StoredSubQueue]

    @property
    def queue_ids(self) -> set[int]:
        """All under which there may be messages."""
        return {queue.id for queue in self.queues} | {sub.id for sub in self.sub_queues}


class DefinitionStore:
    def __init__(self, database: Database) -> None:
        self._database = database
        # What is on disk, or on its way there: only that need ever be deleted.
        self._exchanges: set[str] = set()
        self._bindings: set[StoredBinding] = set()

    async def load(self) -> Definitions:
        found = await self._database.call_writer(_load)
        self._exchanges = {exchange.name for exchange in found.exchanges}
        self._bindings = set(found.bindings)
        return found

    def save_exchange(self, exchange: StoredExchange) -> None:
        self._exchanges.add(exchange.name)
        self._put("INSERT OR REPLACE INTO exchange VALUES (?, ?, ?, ?, ?)", exchange)

    def delete_exchange(self, name: str) -> None:
        if name in self._exchanges:
            self._exchanges.remove(name)
            self._put("DELETE FROM exchange WHERE name = ?", (_sql(name),))

    def save_queue(
        self,
        queue_id: int,
        name: str,
        arguments: bytes,
        declared_by: str = "",
        *,
        auto_delete: bool,
    ) -> None:
        self._put(
            "INSERT INTO queue VALUES (?, ?, ?, ?, ?)",
            (queue_id, name, auto_delete, arguments, declared_by),
        )

    def delete_queue(self, queue_id: int) -> None:
        self._put("DELETE FROM queue WHERE id = ?", (queue_id,))

    def save_sub_queue(self, sub_id: int, queue_id: int, priority: int) -> None:
        self._put("INSERT OR REPLACE INTO sub_queue VALUES (?, ?, ?)", (sub_id, queue_id, priority))

    def delete_sub_queues(self, queue_id: int) -> None:
        """To be called after ``delete_queue``: a start deletes what has lost its queue."""
        self._put("DELETE FROM sub_queue WHERE queue_id = ?", (queue_id,))

    def save_binding(self, binding: StoredBinding) -> None:
        if binding not in self._bindings:
            self._bindings.add(binding)
            self._put("INSERT OR IGNORE INTO binding VALUES (?, ?, ?, ?, ?)", binding)

    def delete_binding(self, binding: StoredBinding) -> None:
        if binding in self._bindings:
            self._bindings.remove(binding)
            self._put(
                "DELETE FROM binding WHERE source = ? AND kind = ? AND destination = ?"
                " AND key = ? AND arguments = ?",
                binding,
            )

    def save_parameter(self, component: str, name: str, value: str) -> None:
        """Set it, in place of what it was."""
        self._put("INSERT OR REPLACE INTO parameter VALUES (?, ?, ?)", (component, name, value))

    def delete_parameter(self, component: str, name: str) -> None:
        self._put("DELETE FROM parameter WHERE component = ? AND name = ?", (component, name))

    def _put(self, sql: str, parameters: tuple[object, ...]) -> None:
        self._database.put(Statement(sql, tuple(map(_sql, parameters))))


def _sql(value: object) -> object:
    """Names may hold bytes that are not UTF-8, which SQLite's text cannot: those go as blobs."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return value.encode("utf-8", "surrogateescape")
    return value


def _name(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("utf-8", "surrogateescape")


def _load(connection: sqlite3.Connection) -> Definitions:
    exchanges = [
        StoredExchange(_name(name), kind, bool(auto_delete), bool(internal), arguments)
        for name, kind, auto_delete, internal, arguments in connection.execute(
            "SELECT name, type, auto_delete, internal, arguments FROM exchange"
        )
    ]
    queues = [
        StoredQueue(
            queue_id,
            _name(name),
            bool(auto_delete),
            arguments,
            _name(declared_by),
            Counters(*counters) if counters[0] is not None else Counters(),
        )
        for queue_id, name, auto_delete, arguments, declared_by, *counters in connection.execute(
            "SELECT q.id, q.name, q.auto_delete, q.arguments, q.declared_by,"
            " c.next_seq, c.messages, c.bytes, c.delivered, c.expiring"
            " FROM queue q LEFT JOIN counter c ON c.queue_id = q.id ORDER BY q.id"
        )
    ]
    bindings = [
        StoredBinding(_name(source), kind, _name(destination), _name(key), arguments)
        for source, kind, destination, key, arguments in connection.execute(
            "SELECT source, kind, destination, key, arguments FROM binding"
        )
    ]
    parameters = [
        StoredParameter(_name(component), _name(name), _name(value))
        for component, name, value in connection.execute(
            "SELECT component, name, value FROM parameter ORDER BY component, name"
        )
    ]
    sub_queues = [
        StoredSubQueue(
            sub_id,
            queue_id,
            priority,
            Counters(*counters) if counters[0] is not None else Counters(),
        )
        for sub_id, queue_id, priority, *counters in connection.execute(
            "SELECT s.id, s.queue_id, s.priority, c.next_seq, c.messages, c.bytes, c.delivered,"
            " c.expiring FROM sub_queue s JOIN queue q ON q.id = s.queue_id"
            " LEFT JOIN counter c ON c.queue_id = s.id ORDER BY s.id"
        )
    ]
    return Definitions(exchanges, queues, bindings, parameters, sub_queues)
