"""Databases without threads, and a variable queue on them that tests can step through.

With ``inline_threads`` what would run in a thread runs in the event loop, one turn later: the
same test takes the same course each time, and a search for a failing example can be repeated.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from leveret.storage import database as database_module
from leveret.storage.database import Database
from leveret.storage.message_store import MessageStore
from leveret.storage.operations import Barrier
from leveret.storage.queue_index import Counters, QueueIndex
from leveret.storage.variable_queue import VariableQueue

T = TypeVar("T")

SCHEMA = files("leveret.storage").joinpath("schema.sql").read_text()
# Small, so that a few bytes make a body that is kept apart.
EMBED_BELOW = 12
SEGMENT_SIZE = 5
QUEUE_ID = 3
TURNS_MAX = 50_000


class InlineConnection:
    """Stands for an aiosqlite connection."""

    def __init__(self, raw: sqlite3.Connection) -> None:
        self.raw = raw

    async def close(self) -> None:
        self.raw.close()


async def _connect(path: Path, prepare: Callable[..., None], *arguments: Any) -> InlineConnection:
    raw = sqlite3.connect(path, isolation_level=None)
    prepare(raw, *arguments)
    return InlineConnection(raw)


async def _run(connection: InlineConnection, function: Callable[..., T], *arguments: Any) -> T:
    await asyncio.sleep(0)
    return function(connection.raw, *arguments)


@contextmanager
def inline_threads() -> Iterator[None]:
    with (
        mock.patch.object(database_module, "connect", _connect),
        mock.patch.object(database_module, "run_in_thread", _run),
    ):
        yield


class Stage:
    """A folder with the two files of a virtual host, an event loop, and one queue in it."""

    def __init__(
        self,
        wake: Callable[[], None],
        *,
        is_durable: bool = True,
        is_lazy: bool = False,
        segment_size: int = SEGMENT_SIZE,
    ) -> None:
        self._wake = wake
        self._is_durable = is_durable
        self._segment_size = segment_size
        self.is_lazy = is_lazy
        # A test has taken rows away behind the queue's back.
        self.is_damaged = False
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp(prefix="leveret-"))
        self._patches = inline_threads()
        self._patches.__enter__()
        self.start(is_clean=True)

    def start(self, *, is_clean: bool) -> None:
        """Make the queue of what is in the files."""
        for old in self.folder.glob("transient*"):
            old.unlink()
        self.database = Database(self.folder / "vhost.db", schema=SCHEMA, synchronous="OFF")
        self.transient = Database(self.folder / "transient.db", schema=SCHEMA, synchronous="OFF")
        self.run(self.database.open())
        [(highest,)] = self.rows("SELECT max(id) FROM body")
        self.store = MessageStore(EMBED_BELOW, (highest or 0) + 1)
        self.transient_store = MessageStore(EMBED_BELOW)
        self.queue = self.make(is_clean=is_clean)

    def make(self, *, is_clean: bool) -> VariableQueue:
        return self.make_variable(QUEUE_ID, is_clean=is_clean)

    def make_variable(self, queue_id: int, *, is_clean: bool) -> VariableQueue:
        found = self.rows(f"SELECT * FROM counter WHERE queue_id = {queue_id}")
        counters = Counters(*found[0][1:]) if found else Counters()
        index = QueueIndex(self.database, self.store, queue_id, counters)
        return VariableQueue(
            self._wake,
            index if self._is_durable else None,
            lambda: QueueIndex(self.transient, self.transient_store, queue_id, Counters()),
            lambda: 0.0,
            is_clean=is_clean,
            is_lazy=self.is_lazy,
            segment_size=self._segment_size,
        )

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(coroutine)

    def call(self, function: Callable[[], T]) -> T:
        """Call something of the queue as from the loop, while nothing else of it moves.

        What must always hold is looked at afterwards.
        """
        asyncio._set_running_loop(self.loop)
        try:
            result = function()
        finally:
            asyncio._set_running_loop(None)
        self.queue.check_invariants()
        return result

    def turn(self) -> None:
        """Let reads and commits go one turn further."""
        self.loop.call_soon(self.loop.stop)
        self.loop.run_forever()
        self.queue.check_invariants()
        assert self.is_damaged or not self.queue.lost

    @property
    def is_busy(self) -> bool:
        return self.database.is_busy or self.transient.is_busy or self.queue._read is not None

    def settle(self) -> None:
        """Let reads and commits come to their end, those that nobody waits for as well."""
        for database in (self.database, self.transient):
            if database.pending_operations:
                self.call(partial(database.put, Barrier(lambda: None)))
        turns = 0
        while self.is_busy:
            self.turn()
            turns += 1
            assert turns < TURNS_MAX, "it never ends"

    def stop(self) -> None:
        """As a broker that is stopped in order."""
        self.call(self.queue.terminate)
        self.run(self.database.close())
        self.run(self.transient.abandon())

    def crash(self) -> None:
        """What is not committed is lost."""
        self.queue._is_terminated = True
        if self.queue._read is not None:
            self.queue._read.cancel()
        self.run(self.database.abandon())
        self.run(self.transient.abandon())

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """What is committed, as another process would see it."""
        connection = sqlite3.connect(self.folder / "vhost.db")
        try:
            return connection.execute(sql).fetchall()
        finally:
            connection.close()

    def check_files(self) -> None:
        """Counters and references add up, at any committed moment."""
        check_counters(self.rows)

    def close(self) -> None:
        self.crash()
        self.loop.close()
        self._patches.__exit__(None, None, None)
        shutil.rmtree(self.folder)


def check_counters(rows: Callable[[str], list[tuple[Any, ...]]]) -> None:
    """The counter rows, and the references of bodies, equal what is in the table message."""
    counted = rows("SELECT queue_id, messages, bytes FROM counter WHERE messages ORDER BY 1")
    there = rows("SELECT key >> 40, count(*), sum(size) FROM message GROUP BY 1 ORDER BY 1")
    assert counted == there
    [(too_late,)] = rows(
        "SELECT count(*) FROM message m JOIN counter c ON c.queue_id = m.key >> 40"
        " WHERE m.key & 0xffffffffff >= c.next_seq"
    )
    assert not too_late, "a position that will be given again"
    refs = rows("SELECT id, refs FROM body ORDER BY 1")
    named = rows(
        "SELECT body_id, count(*) FROM message WHERE body_id NOT NULL GROUP BY 1 ORDER BY 1"
    )
    assert refs == named


class Driven:
    """A variable queue for the shared suite: each call is made in the stage's event loop.

    With ``paging`` it is under constant and random memory pressure.
    """

    def __init__(self, stage: Stage, paging: random.Random | None) -> None:
        self.stage = stage
        self._paging = paging

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.stage.queue, name)
        if not callable(attribute):
            return attribute

        def call(*arguments: Any, **options: Any) -> Any:
            result = self.stage.call(lambda: attribute(*arguments, **options))
            if self._paging is not None and not self.stage.queue._is_terminated:
                self.stage.call(self._page)
            return result

        return call

    def __len__(self) -> int:
        return len(self.stage.queue)

    def _page(self) -> None:
        assert self._paging is not None
        queue, some = self.stage.queue, self._paging.randrange
        queue.push_q1(some(4))
        queue.push_q4(some(4))
        queue.push_betas_to_deltas(some(6))
        queue._limit_ram_acks(some(3))
