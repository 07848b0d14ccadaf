"""Everything of one virtual host on disk: one file for what lasts, one for what is paged out.

Upstream: ``broker/live_vhost.py``. Composes ``database.py``, ``definitions.py``,
``message_store.py`` and, for each queue, a ``variable_queue.py`` on a ``queue_index.py``.

The second file holds transient messages that had to leave memory; it need not survive anything,
is written without fsync and deleted at start [138].
"""

from __future__ import annotations

import hashlib
import logging
import sqlite3
from collections.abc import Awaitable, Callable
from functools import partial
from heapq import heappop, heappush
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from leveret.storage.commit import SEQ_BITS
from leveret.storage.database import PATIENCE_S, Database
from leveret.storage.definitions import Definitions, DefinitionStore
from leveret.storage.folder_sync import sync_folder
from leveret.storage.message_store import MessageStore
from leveret.storage.migrations import SCHEMA_VERSION, UnknownVersion, check_version, migrate
from leveret.storage.operations import Barrier, RangeDrop, Statement
from leveret.storage.priority_queue import PriorityQueue
from leveret.storage.queue_index import Counters, QueueIndex
from leveret.storage.variable_queue import VariableQueue

log = logging.getLogger(__name__)

# How the name of a file ends that holds what was paged out, and need not survive anything.
TRANSIENT_SUFFIX = ".transient.db"
_NAME_MAX = 100
# What the first version had already.
_READ_AT_START = ("exchange", "queue", "binding", "counter")


class StoreError(Exception):
    """A file that cannot be used; the text tells a person why, and what to do."""


class StoreSettings(NamedTuple):
    # full, normal or off: what a commit waits for.
    synchronous: str
    # Messages smaller than this stand in the queue index.
    embed_below: int
    # How long a stop waits for a disk on which commits only fail.
    patience_s: float = PATIENCE_S


def file_stem(vhost: str) -> str:
    """A file name that shows the virtual host's; the file itself knows it exactly."""
    # A virtual host "a.transient" must not get the name of the second file of "a".
    stem = quote(vhost, safe="", errors="surrogateescape").replace(".transient", "%2Etransient")
    if len(stem) <= _NAME_MAX:
        return stem
    raw = vhost.encode("utf-8", "surrogateescape")
    return stem[:_NAME_MAX] + "-" + hashlib.sha256(raw).hexdigest()[:16]


class VhostStore:
    def __init__(
        self,
        folder: Path,
        vhost: str,
        settings: StoreSettings,
        *,
        now: Callable[[], float],
        sleep: Callable[[float], Awaitable[object]],
        on_trouble: Callable[[Exception | None], None],
        on_damage: Callable[[Path, Exception], None] = lambda path, error: None,
    ) -> None:
        """``on_damage`` is called with a file that is damaged or gone: no more comes of it, and
        who waits for it waits until the store is abandoned."""
        self._vhost = vhost
        self._settings = settings
        self._on_trouble = on_trouble
        # Which of the two files cannot be written.
        self._troubled: set[str] = set()
        self._now = now
        stem = file_stem(vhost)
        schema = files("leveret.storage").joinpath("schema.sql").read_text()
        schema += (
            f"INSERT INTO meta VALUES ('schema_version', {SCHEMA_VERSION}),"
            f" ('vhost', CAST(X'{vhost.encode('utf-8', 'surrogateescape').hex()}' AS BLOB)),"
            " ('clean', 1)"
        )
        self.database = Database(
            folder / f"{stem}.db",
            schema=schema,
            synchronous=settings.synchronous.upper(),
            on_trouble=partial(self._trouble, "persistent"),
            on_damage=lambda error: on_damage(self.database.path, error),
            sleep=sleep,
        )
        self._transient = Database(
            folder / f"{stem}{TRANSIENT_SUFFIX}",
            schema=schema,
            synchronous="OFF",
            on_trouble=partial(self._trouble, "transient"),
            on_damage=lambda error: on_damage(self._transient.path, error),
            sleep=sleep,
        )
        self.definitions = DefinitionStore(self.database)
        self._bodies = MessageStore(settings.embed_below)
        self._transient_bodies = MessageStore(settings.embed_below)
        # Whether the broker was stopped in order the last time.
        self.is_clean = True
        # Queue ids in use, those included whose rows are still being deleted.
        self._ids: set[int] = set()
        # Ids below the next new one that may be given again, as a heap.
        self._free: list[int] = []
        self._next_id = 1
        self._indexes: dict[int, QueueIndex] = {}
        # Of durable queues with priorities: under which ids they are, by priority, but for 0.
        self._sub_ids: dict[int, dict[int, int]] = {}
        # What sub-queues have on disk, until they are made.
        self._sub_counters: dict[int, Counters] = {}
        # Ids under which a queue's paged-out messages are in the transient file.
        self._transient_ids: dict[int, list[int]] = {}

    async def open(self) -> Definitions:
        """Open the files, delete what was paged out, read what was declared.

        Raises StoreError for a file that is newer than we are, damaged, or not ours.
        """
        for suffix in ("", "-wal", "-shm"):
            Path(f"{self._transient.path}{suffix}").unlink(missing_ok=True)  # noqa: ASYNC240
        _make_folder(self.database.path.parent)
        try:
            async with self.database.opening(_look):
                definitions = await self._load()
        except UnknownVersion as error:
            raise StoreError(f"{self.database.path} {error}.") from error
        except sqlite3.Error as error:
            raise StoreError(
                f"{self.database.path} cannot be read: {error}. Nothing in it was changed. Restore"
                " a backup, or move it aside (leveret check --move-aside) to start without what it"
                " holds."
            ) from error
        self._ids |= definitions.queue_ids
        for sub in definitions.sub_queues:
            self._sub_ids.setdefault(sub.queue_id, {})[sub.priority] = sub.id
            self._sub_counters[sub.id] = sub.counters
        self._next_id = max(self._ids, default=0) + 1
        self._free = [each for each in range(1, self._next_id) if each not in self._ids]
        return definitions

    async def _load(self) -> Definitions:
        call = self.database.call_writer
        found = await call(_read_meta)
        await self._bring_up_to_date(check_version(found.get("schema_version")))
        self.is_clean = bool(found.get("clean"))
        next_body = await call(_next_body_id)
        self._bodies = MessageStore(self._settings.embed_below, next_body)
        definitions = await self.definitions.load()
        counted = await call(_counted_queues)
        # The first thing that is written: of a damaged file all is as it was found.
        await call(_mark_clean, 0)
        await call(_drop_stray_sub_queues)
        # Rows of queues that were deleted just before the end; bit by bit, in the background.
        for queue_id in counted:
            if queue_id not in definitions.queue_ids:
                self._ids.add(queue_id)
                self._drop_rows(queue_id)
        return definitions

    async def _bring_up_to_date(self, version: int) -> None:
        path = self.database.path
        if version == SCHEMA_VERSION:
            return
        try:
            await self.database.call_writer(migrate, version)
        except sqlite3.Error as error:
            raise StoreError(
                f"{path} cannot be brought from schema version {version} to {SCHEMA_VERSION}:"
                f" {error}. Nothing in it was changed: the version that wrote it can still use it."
            ) from error
        log.info("%s: brought from schema version %d to %d", path, version, SCHEMA_VERSION)

    # --- queues ----------------------------------------------------------------------------------

    def take_queue_id(self) -> int:
        """The lowest id no queue has, and whose rows are gone."""
        if self._free:
            queue_id = heappop(self._free)
        else:
            queue_id, self._next_id = self._next_id, self._next_id + 1
        self._ids.add(queue_id)
        return queue_id

    def _free_id(self, queue_id: int) -> None:
        self._ids.discard(queue_id)
        heappush(self._free, queue_id)

    def make_queue(
        self,
        queue_id: int,
        counters: Counters,
        wake: Callable[[], None],
        spend: Callable[[int], None],
        granted: Callable[[int], None],
        *,
        is_durable: bool,
        is_clean: bool,
        is_lazy: bool,
    ) -> VariableQueue:
        """``counters``: what is on disk of it; for a queue that is started anew after a crash,
        the index it had knows better."""
        index: QueueIndex | None = None
        if is_durable:
            index = self._indexes.get(queue_id)
            if index is None:
                index = QueueIndex(self.database, self._bodies, queue_id, counters)
                self._indexes[queue_id] = index
            index.granted = granted

        def transient_index() -> QueueIndex:
            # An id of its own: what a predecessor that crashed has paged out is in the way.
            own_id = self.take_queue_id()
            self._transient_ids.setdefault(queue_id, []).append(own_id)
            made = QueueIndex(self._transient, self._transient_bodies, own_id, Counters())
            made.granted = granted
            return made

        return VariableQueue(
            wake,
            index,
            transient_index,
            self._now,
            spend=spend,
            is_clean=is_clean,
            is_lazy=is_lazy,
        )

    def make_priority_queue(
        self,
        max_priority: int,
        queue_id: int,
        counters: Counters,
        wake: Callable[[], None],
        spend: Callable[[int], None],
        granted: Callable[[int], None],
        *,
        is_durable: bool,
        is_clean: bool,
        is_lazy: bool,
    ) -> PriorityQueue:
        """As ``make_queue``; each priority that is used, but for 0, gets an id of its own."""
        sub_ids = self._sub_ids.setdefault(queue_id, {}) if is_durable else {}

        def make(priority: int) -> VariableQueue:
            own_id, own_counters = queue_id, counters
            if priority and is_durable:
                if priority not in sub_ids:
                    sub_ids[priority] = self.take_queue_id()
                    # In the file before any of its messages: operations keep their order.
                    self.definitions.save_sub_queue(sub_ids[priority], queue_id, priority)
                own_id = sub_ids[priority]
                own_counters = self._sub_counters.pop(own_id, Counters())
            return self.make_queue(
                own_id,
                own_counters,
                wake,
                spend,
                granted,
                is_durable=is_durable,
                is_clean=is_clean,
                is_lazy=is_lazy,
            )

        return PriorityQueue(max_priority, make, (0, *sub_ids) if is_durable else ())

    async def wait_settled(self, queue_id: int) -> None:
        """Return when all is on disk that a queue, which has crashed, had handed over.

        Only then is it known what the queue that is made in its place finds.
        """
        await self.database.wait_committed()
        # A large range goes in several commits: look again after each.
        while any(self._indexes[each].is_dropping for each in self._index_ids(queue_id)):
            await self.database.wait_committed()

    def _index_ids(self, queue_id: int) -> list[int]:
        """Under which ids a durable queue has rows, as far as they are used."""
        ids = (queue_id, *self._sub_ids.get(queue_id, {}).values())
        return [each for each in ids if each in self._indexes]

    def forget_queue(self, queue_id: int, *, is_durable: bool) -> None:
        """The queue is deleted: its row goes with the next commit, its messages after it."""
        sub_ids = self._sub_ids.pop(queue_id, {}).values()
        for each in (queue_id, *sub_ids):
            self._indexes.pop(each, None)
            self._sub_counters.pop(each, None)
            for own_id in self._transient_ids.pop(each, ()):
                self._drop_transient(own_id)
        if not is_durable:
            self._free_id(queue_id)
            return
        self.definitions.delete_queue(queue_id)
        if sub_ids:
            self.definitions.delete_sub_queues(queue_id)
        for each in (queue_id, *sub_ids):
            self._drop_rows(each)

    def _drop_rows(self, queue_id: int) -> None:
        first, last = queue_id << SEQ_BITS, ((queue_id + 1) << SEQ_BITS) - 1

        def gone() -> None:
            self.database.put(
                Statement(
                    "DELETE FROM counter WHERE queue_id = ?",
                    (queue_id,),
                    lambda: self._free_id(queue_id),
                )
            )

        self.database.put(RangeDrop(self.database, first, last, after=gone))

    def _drop_transient(self, own_id: int) -> None:
        first, last = own_id << SEQ_BITS, ((own_id + 1) << SEQ_BITS) - 1
        self._transient.put(
            RangeDrop(self._transient, first, last, after=lambda: self._free_id(own_id))
        )

    # --- the whole -------------------------------------------------------------------------------

    def call_when_saved(self, call: Callable[[], object]) -> None:
        """Call back once everything that was put until now is on disk."""
        self.database.put(Barrier(call))

    @property
    def has_unsaved(self) -> bool:
        return self.database.is_busy

    async def close(self) -> None:
        """Commit what is left and note that the end was in order."""
        await self.database.close(
            lambda connection: _mark_clean(connection, 1), patience_s=self._settings.patience_s
        )
        await self._transient.abandon()

    async def abandon(self) -> None:
        """Close without writing anything more."""
        await self.database.abandon()
        await self._transient.abandon()
        if self._troubled:
            # Who is not written to is short of nothing.
            self._troubled.clear()
            self._on_trouble(None)

    def delete_files(self) -> None:
        """Delete all there is on disk; the store must not be open."""
        folder = self.database.path.parent
        for path in (self.database.path, self._transient.path):
            for part in ("", "-wal", "-shm"):
                Path(f"{path}{part}").unlink(missing_ok=True)
        if folder.exists():
            sync_folder(folder)

    def _trouble(self, file: str, error: Exception | None) -> None:
        """One of two that works again is not both."""
        if error is not None:
            self._troubled.add(file)
            self._on_trouble(error)
            return
        self._troubled.discard(file)
        if not self._troubled:
            self._on_trouble(None)

    def statistics(self) -> dict[str, object]:
        indexes = self._indexes.values()
        return {
            "persistent": self.database.numbers,
            "transient": self._transient.numbers,
            "pending_operations": self.database.pending_operations,
            # Of durable queues: rows whose commit has not ended, and what they hold.
            "uncommitted_rows": sum([index.uncommitted_rows for index in indexes]),
            "uncommitted_bytes": self.database.committing_bytes
            + sum([index.unwritten_bytes for index in indexes]),
        }


def _make_folder(folder: Path) -> None:
    if not folder.exists():
        folder.mkdir(parents=True)
        # Or a power cut could take it, with files in it that were synced.
        sync_folder(folder.parent)


# --- in a thread of the file's -----------------------------------------------------------------


def _look(connection: sqlite3.Connection) -> None:
    """Raises UnknownVersion or sqlite3.Error for a file that cannot be used."""
    if check_version(_read_meta(connection).get("schema_version")) < SCHEMA_VERSION:
        # It will be changed before it is read: it must be readable now.
        for table in _READ_AT_START:
            connection.execute(f"SELECT * FROM {table}").fetchall()
        _next_body_id(connection)


def _read_meta(connection: sqlite3.Connection) -> dict[str, object]:
    return dict(connection.execute("SELECT name, value FROM meta").fetchall())


def _mark_clean(connection: sqlite3.Connection, value: int) -> None:
    connection.execute("UPDATE meta SET value = ? WHERE name = 'clean'", (value,))


def _next_body_id(connection: sqlite3.Connection) -> int:
    (highest,) = connection.execute("SELECT max(id) FROM body").fetchone()
    return (highest or 0) + 1


def _drop_stray_sub_queues(connection: sqlite3.Connection) -> None:
    """Their queue was deleted just before the end; its id may be given to another."""
    connection.execute("DELETE FROM sub_queue WHERE queue_id NOT IN (SELECT id FROM queue)")


def _counted_queues(connection: sqlite3.Connection) -> list[int]:
    return [row[0] for row in connection.execute("SELECT queue_id FROM counter")]
