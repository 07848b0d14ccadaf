"""Is a data folder sound? Index against store, counters against rows, SQLite's own check.

Upstream: ``leveret check``, ``leveret restore``, the tests of durability. Works on the files of a
broker that is stopped or was killed, and changes nothing in them.

A *problem* is something the broker never writes: a bug, or a disk that lost or changed something.
A *remark* is what a broker that was killed may leave behind; its next start puts it right.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from leveret.storage.broker_store import (
    BROKER_FILE,
    BROKER_SCHEMA_VERSION,
    BrokerState,
    read_broker_state,
)
from leveret.storage.commit import SEQ_BITS
from leveret.storage.connections import open_read_only
from leveret.storage.data_folder import database_files, vhost_files
from leveret.storage.migrations import UnknownVersion, check_version
from leveret.storage.vhost_store import file_stem

_SEQ_MASK = (1 << SEQ_BITS) - 1
_TABLES = frozenset({"meta", "exchange", "queue", "binding", "counter", "message", "body"})
# Since version 2.
_LATER_TABLES = frozenset({"parameter", "sub_queue"})
_BROKER_TABLES = frozenset({"meta", "vhost", "user", "parameter"})
# Of SQLite's own findings so many are told: one bad page can make thousands.
_INTEGRITY_MAX = 20
# Where a problem is found at many places, so many are named.
_EXAMPLES = 5


class Finding(NamedTuple):
    """``number``: at how many places it was found."""

    file: str
    queue: str | None
    number: int
    text: str

    def __str__(self) -> str:
        where = f"{self.file}, queue '{self.queue}'" if self.queue is not None else self.file
        return f"{where}: {self.text}"


class FileReport(NamedTuple):
    file: str
    vhost: str
    size_bytes: int
    queues: int
    messages: int
    message_bytes: int
    bodies: int
    is_clean: bool


class BrokerReport(NamedTuple):
    """Of ``broker.db``."""

    file: str
    size_bytes: int
    vhosts: int
    users: int


class Report(NamedTuple):
    files: list[FileReport]
    problems: list[Finding]
    remarks: list[Finding]
    # Of broker.db; none where there is no such file.
    broker: list[BrokerReport]
    # Files that cannot be used as they are: what SQLite cannot read or finds wrong.
    damaged: list[str]

    @property
    def is_sound(self) -> bool:
        return not self.problems


def check_folder(data: Path, tell: Callable[[str], object] = lambda file: None) -> Report:
    """Check every file; ``tell`` hears which one is next. The folder must not be in use."""
    report = Report([], [], [], [], [])
    files = database_files(data)
    if not files:
        report.problems.append(Finding(str(data), None, 0, "there are no files of a broker in it"))
    for path in files:
        name = path.relative_to(data).as_posix()
        tell(name)
        if name == BROKER_FILE:
            _BrokerFileCheck(path, name, report).run()
        else:
            _FileCheck(path, name, report).run()
    return report


class _FileCheck:
    def __init__(self, path: Path, name: str, report: Report) -> None:
        self._path = path
        self._name = name
        self._report = report

    def run(self) -> None:
        try:
            with closing(open_read_only(self._path, is_in_use=False)) as connection:
                if self._check_structure(connection):
                    self._check_content(connection)
        except sqlite3.Error as error:
            self._damaged(f"cannot be read: {error}")

    def _damaged(self, text: str) -> None:
        self._problem(text)
        if self._name not in self._report.damaged:
            self._report.damaged.append(self._name)

    def _problem(self, text: str, *, queue: str | None = None, number: int = 1) -> None:
        self._report.problems.append(Finding(self._name, queue, number, text))

    def _remark(self, text: str, *, queue: str | None = None, number: int = 1) -> None:
        self._report.remarks.append(Finding(self._name, queue, number, text))

    # --- the file ---------------------------------------------------------------------------------

    def _check_structure(self, connection: sqlite3.Connection) -> bool:
        """Whether it is worth while to look at the rows."""
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
        if missing := sorted(_TABLES - tables):
            self._damaged(f"is not a file of this broker: it lacks {', '.join(missing)}")
            return False
        meta = dict(connection.execute("SELECT name, value FROM meta"))
        try:
            # One of an older version is as good: the next start brings it up to date.
            version = check_version(meta.get("schema_version"))
        except UnknownVersion as error:
            self._problem(str(error))
            return False
        if version >= 2 and (missing := sorted(_LATER_TABLES - tables)):
            self._damaged(f"is not a file of this broker: it lacks {', '.join(missing)}")
            return False
        return self._is_intact(connection)

    def _is_intact(self, connection: sqlite3.Connection) -> bool:
        wrong = [
            text
            for (text,) in connection.execute(f"PRAGMA integrity_check({_INTEGRITY_MAX})")
            if text != "ok"
        ]
        for text in wrong:
            self._damaged(f"SQLite: {text}")
        return not wrong

    # --- the rows ---------------------------------------------------------------------------------

    def _check_content(self, connection: sqlite3.Connection) -> None:
        queues = {row[0]: _text(row[1]) for row in connection.execute("SELECT id, name FROM queue")}
        number = len(queues)
        queues |= _sub_queues(connection)
        messages, size = self._check_counters(connection, queues)
        self._check_orphans(connection, queues)
        self._check_bodies(connection, queues)
        self._check_bindings(connection)
        meta = dict(connection.execute("SELECT name, value FROM meta"))
        (bodies,) = connection.execute("SELECT count(*) FROM body").fetchone()
        self._report.files.append(
            FileReport(
                self._name,
                _text(meta.get("vhost", b"")),
                self._path.stat().st_size,
                number,
                messages,
                size,
                bodies,
                bool(meta.get("clean")),
            )
        )

    def _check_counters(
        self, connection: sqlite3.Connection, queues: dict[int, str]
    ) -> tuple[int, int]:
        """What the rows of each queue add up to; returns what those of all do."""
        counters = {
            row[0]: row[1:]
            for row in connection.execute("SELECT queue_id, messages, bytes, next_seq FROM counter")
        }
        total = total_size = 0
        for queue_id, name in queues.items():
            count, size, last = connection.execute(
                "SELECT count(*), total(size), max(key) FROM message WHERE key BETWEEN ? AND ?",
                _keys(queue_id),
            ).fetchone()
            total += count
            total_size += int(size)
            said, said_size, next_seq = counters.get(queue_id, (0, 0, 0))
            wrong = []
            if said != count:
                wrong.append(f"{said} messages, there are {count}")
            if said_size != size:
                wrong.append(f"{said_size} bytes, there are {int(size)}")
            if last is not None and next_seq <= last & _SEQ_MASK:
                wrong.append(f"next position {next_seq}, there is one at {last & _SEQ_MASK}")
            if wrong:
                self._problem(f"counters that are wrong: {'; '.join(wrong)}", queue=name)
        return total, total_size

    def _check_orphans(self, connection: sqlite3.Connection, queues: dict[int, str]) -> None:
        """Messages of queues that are gone: where a counter is left, a start deletes them."""
        counted = {row[0] for row in connection.execute("SELECT queue_id FROM counter")}
        for first, last in _gaps(sorted(queues)):
            # Queues of the gap one by one, each found by the first of its rows.
            while True:
                row = connection.execute(
                    "SELECT key FROM message WHERE key BETWEEN ? AND ? ORDER BY key LIMIT 1",
                    (first, last),
                ).fetchone()
                if row is None:
                    break
                queue_id = row[0] >> SEQ_BITS
                (number,) = connection.execute(
                    "SELECT count(*) FROM message WHERE key BETWEEN ? AND ?", _keys(queue_id)
                ).fetchone()
                text = f"{number} messages of no queue (id {queue_id})"
                if queue_id in counted:
                    self._remark(f"{text}: it was deleted, the next start goes on", number=number)
                else:
                    self._problem(text, number=number)
                first = _keys(queue_id)[1] + 1
                if first > last:
                    break

    def _check_bodies(self, connection: sqlite3.Connection, queues: dict[int, str]) -> None:
        rows = connection.execute(
            """WITH named AS MATERIALIZED (
                SELECT body_id, count(*) AS number FROM message
                WHERE body_id IS NOT NULL GROUP BY body_id)
            SELECT b.id, b.refs, coalesce(n.number, 0)
            FROM body b LEFT JOIN named n ON n.body_id = b.id
            WHERE b.refs != coalesce(n.number, 0)"""
        ).fetchall()
        if rows:
            shown = ", ".join(f"{id_} ({refs}, named {n} times)" for id_, refs, n in rows[:5])
            self._problem(
                f"{len(rows)} bodies whose references were miscounted: {_such_as(shown, rows)}",
                number=len(rows),
            )
        lost = connection.execute(
            """SELECT key FROM message m WHERE body IS NULL
            AND NOT EXISTS (SELECT 1 FROM body b WHERE b.id = m.body_id) ORDER BY key"""
        )
        self._by_queue("messages without their body", lost, queues)
        # length() of a blob looks at the head of its row only.
        cut = connection.execute(
            """SELECT m.key FROM message m LEFT JOIN body b ON b.id = m.body_id
            WHERE m.size != length(coalesce(m.body, b.body)) ORDER BY m.key"""
        )
        self._by_queue("messages whose body has another size than noted", cut, queues)

    def _by_queue(self, what: str, keys: Iterator[tuple[int]], queues: dict[int, str]) -> None:
        found: dict[int, list[int]] = {}
        numbers: dict[int, int] = {}
        for (key,) in keys:
            queue_id = key >> SEQ_BITS
            numbers[queue_id] = numbers.get(queue_id, 0) + 1
            examples = found.setdefault(queue_id, [])
            if len(examples) < _EXAMPLES:
                examples.append(key & _SEQ_MASK)
        for queue_id, number in numbers.items():
            positions = ", ".join(map(str, found[queue_id]))
            self._problem(
                f"{number} {what}, at {positions}{', ...' if number > _EXAMPLES else ''}",
                queue=queues.get(queue_id, f"(id {queue_id})"),
                number=number,
            )

    def _check_bindings(self, connection: sqlite3.Connection) -> None:
        """A start leaves out what leads nowhere; exchanges that are always there have no row."""
        for kind, table in (("queue", "queue"), ("exchange", "exchange")):
            rows = connection.execute(
                f"SELECT source, destination FROM binding WHERE kind = ?"
                f" AND destination NOT IN (SELECT name FROM {table})",
                (kind,),
            )
            for source, destination in rows:
                if kind == "queue" or not _text(destination).startswith("amq."):
                    self._remark(
                        f"a binding from '{_text(source)}' to the {kind} '{_text(destination)}',"
                        " which is not there"
                    )


class _BrokerFileCheck(_FileCheck):
    """``broker.db``: can it be read, and does what it names exist?"""

    def _check_structure(self, connection: sqlite3.Connection) -> bool:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
        if missing := sorted(_BROKER_TABLES - tables):
            self._damaged(f"is not a file of this broker: it lacks {', '.join(missing)}")
            return False
        meta = dict(connection.execute("SELECT name, value FROM meta"))
        version = meta.get("schema_version")
        if version != BROKER_SCHEMA_VERSION:
            self._problem(
                f"has schema version {version}, this Leveret knows version {BROKER_SCHEMA_VERSION}"
            )
            return False
        return self._is_intact(connection)

    def _check_content(self, connection: sqlite3.Connection) -> None:
        try:
            state = read_broker_state(connection)
        except (ValueError, TypeError) as error:
            self._damaged(f"cannot be understood: {error}")
            return
        self._compare_with_files(state)
        self._report.broker.append(
            BrokerReport(self._name, self._path.stat().st_size, len(state.vhosts), len(state.users))
        )

    def _compare_with_files(self, state: BrokerState) -> None:
        files = {path.stem: path.name for path in vhost_files(self._path.parent)}
        for name in state.vhosts:
            if files.pop(file_stem(name), None) is None:
                self._remark(f"the file of vhost '{_text(name)}' is not there: it will be empty")
        for name in state.vhosts_to_delete:
            if files.pop(file_stem(name), None) is not None:
                self._remark(f"vhost '{_text(name)}' was deleted, the next start goes on")
        for file in files.values():
            self._remark(f"vhosts/{file} is of no vhost: nobody uses it")


def _sub_queues(connection: sqlite3.Connection) -> dict[int, str]:
    """Those of a queue that is gone are gone with it: the next start deletes them."""
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'sub_queue'").fetchone():
        return {}
    rows = connection.execute(
        "SELECT s.id, q.name, s.priority FROM sub_queue s JOIN queue q ON q.id = s.queue_id"
    )
    return {row[0]: f"{_text(row[1])} (priority {row[2]})" for row in rows}


def _keys(queue_id: int) -> tuple[int, int]:
    """First and last key a message of the queue can have."""
    return queue_id << SEQ_BITS, ((queue_id + 1) << SEQ_BITS) - 1


def _gaps(queue_ids: list[int]) -> Iterator[tuple[int, int]]:
    """Ranges of keys that belong to no queue."""
    first = -(1 << 63)
    for queue_id in queue_ids:
        low, high = _keys(queue_id)
        if first < low:
            yield first, low - 1
        first = high + 1
    yield first, (1 << 63) - 1


def _such_as(shown: str, rows: list[tuple[int, int, int]]) -> str:
    return f"{shown}, ..." if len(rows) > _EXAMPLES else shown


def _text(value: object) -> str:
    """Names may be bytes that are not UTF-8; they are shown to people here."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return str(value)
