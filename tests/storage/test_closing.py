"""Closing a file on a disk that is full, slow, or has just enough room."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from leveret.broker.clock import VirtualClock
from leveret.storage import database as module
from leveret.storage.database import Database
from leveret.storage.message_store import MessageStore
from leveret.storage.queue_index import Counters, QueueIndex
from tests.storage.bench import message
from tests.storage.stage import SCHEMA
from tests.support.slow_writer import SlowWriter, slow_writer
from tests.support.waiting import wait_until

PATIENCE_S = 3.0

pytestmark = pytest.mark.timeout(20)


@pytest.fixture
def writer() -> Iterator[SlowWriter]:
    with slow_writer() as slow:
        yield slow


@pytest.fixture
def database(tmp_path: Path, clock: VirtualClock) -> Database:
    return Database(tmp_path / "vhost.db", schema=SCHEMA, synchronous="OFF", sleep=clock.sleep)


def write(index: QueueIndex, seq_id: int, confirmed: list[int] | None = None) -> None:
    then = None if confirmed is None else lambda: confirmed.append(seq_id)
    index.write([seq_id], [message("x" * 1000, persistent=True)], None, then)


def index_of(database: Database) -> QueueIndex:
    return QueueIndex(database, MessageStore(4096), 1, Counters())


def stored(database: Database) -> list[int]:
    with closing(sqlite3.connect(database.path)) as connection:
        return [row[0] for row in connection.execute("SELECT key & 255 FROM message")]


async def fail_once_more(database: Database, clock: VirtualClock) -> None:
    failures = database.numbers["failures"]
    clock.advance(module.RETRY_S)
    await wait_until(lambda: database.numbers["failures"] > failures)


async def one_commit(database: Database, writer: SlowWriter) -> None:
    commits = database.numbers["commits"]
    writer.permit_one()
    await wait_until(lambda: database.numbers["commits"] > commits)


async def test_a_disk_that_stays_full_is_not_waited_for_for_ever(
    database: Database, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """SQLite's own idea of a full disk: a file that may not grow."""
    threads = threading.active_count()
    index = index_of(database)
    confirmed: list[int] = []
    write(index, 0, confirmed)
    await database.wait_committed()
    await database.call_writer(lambda c: c.execute("PRAGMA max_page_count=1").fetchone())
    for seq_id in range(1, 50):
        write(index, seq_id, confirmed)
    noted: list[object] = []
    end = asyncio.ensure_future(database.close(noted.append, patience_s=PATIENCE_S))
    await wait_until(lambda: database.numbers["failures"])
    for _ in range(5):
        await fail_once_more(database, clock)
        assert not end.done()
    clock.advance(module.RETRY_S)
    await end
    assert (confirmed, noted) == ([0], [])
    assert stored(database) == [0]
    assert "nothing could be written for 3 s" in caplog.text
    assert "Nothing of that was confirmed" in caplog.text
    assert threading.active_count() == threads


async def test_a_disk_that_has_room_again_in_time_gets_everything(
    database: Database, clock: VirtualClock
) -> None:
    index = index_of(database)
    await database.call_writer(lambda c: c.execute("PRAGMA max_page_count=1").fetchone())
    for seq_id in range(50):
        write(index, seq_id)
    noted: list[object] = []
    end = asyncio.ensure_future(database.close(noted.append, patience_s=PATIENCE_S))
    await wait_until(lambda: database.numbers["failures"])
    await fail_once_more(database, clock)
    await database.call_writer(lambda c: c.execute("PRAGMA max_page_count=10000").fetchone())
    clock.advance(module.RETRY_S)
    await end
    assert noted
    assert stored(database) == list(range(50))


async def test_a_slow_disk_is_waited_for(
    database: Database, clock: VirtualClock, writer: SlowWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long all of it takes: what counts is that commits succeed."""
    monkeypatch.setattr(module, "COMMIT_ROWS", 1)
    await database.open()
    index = index_of(database)
    for seq_id in range(5):
        write(index, seq_id)
    writer.hold()
    noted: list[object] = []
    end = asyncio.ensure_future(database.close(noted.append, patience_s=PATIENCE_S))
    for _ in range(5):
        assert not end.done()
        clock.advance(0.6 * PATIENCE_S)
        await one_commit(database, writer)
    await end
    assert noted
    assert stored(database) == [0, 1, 2, 3, 4]


async def test_a_last_note_that_cannot_be_written_keeps_no_file_open(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    await database.open()
    await database.close(lambda connection: connection.execute("INSERT INTO nowhere VALUES (1)"))
    assert "could not be noted: no such table: nowhere" in caplog.text
    assert not database.is_open
