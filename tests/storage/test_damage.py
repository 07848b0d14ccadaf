"""A file that is damaged or gone is told from a disk that fails for a while [11]."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from leveret.storage import database as database_module
from leveret.storage.connections import PAGE_SIZE
from leveret.storage.damage import READ_TRIES, FileGone, is_lasting
from leveret.storage.database import Database
from leveret.storage.operations import Statement
from tests.support.waiting import wait_until

SCHEMA = "CREATE TABLE t (a INTEGER PRIMARY KEY, b BLOB)"


class Watched:
    """A database, and what it says."""

    def __init__(self, path: Path) -> None:
        self.troubles: list[Exception | None] = []
        self.damages: list[Exception] = []
        self.database = Database(
            path,
            schema=SCHEMA,
            synchronous="OFF",
            on_trouble=self.troubles.append,
            on_damage=self.damages.append,
            sleep=self._sleep,
        )

    async def _sleep(self, seconds: float) -> None:
        """Retries come at once."""
        await asyncio.sleep(0)

    def insert(self, number: int, done: list[int]) -> None:
        sql = "INSERT INTO t VALUES (?, zeroblob(4000))"
        self.database.put(Statement(sql, (number,), lambda: done.append(number)))

    async def fill(self) -> None:
        """More than SQLite keeps in its cache, all of it in the file itself."""
        done: list[int] = []
        await self.database.call_writer(lambda c: c.execute("PRAGMA cache_size=10"))
        for number in range(1000):
            self.insert(number, done)
        await self.database.wait_committed()
        await self.database.call_writer(
            lambda c: c.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        )


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    made = Watched(tmp_path / "x.db")
    await made.database.open()
    yield made
    await made.database.abandon()


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"\xaa" * path.stat().st_size)


def count(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT sum(length(b)) FROM t").fetchone()[0])


async def test_reading_a_damaged_file_is_told_once_and_never_answers(watched: Watched) -> None:
    await watched.fill()
    overwrite(watched.database.path)
    readers = [asyncio.create_task(watched.database.read_patiently(count)) for _ in range(2)]
    await wait_until(lambda: len(watched.database._promises) == 2)
    [damage] = watched.damages
    assert is_lasting(damage)
    assert watched.troubles == []
    # Whoever gives the file up frees those who wait for it.
    await watched.database.abandon()
    await asyncio.wait(readers)
    assert all(reader.cancelled() for reader in readers)


async def test_damage_met_by_a_commit_ends_all_writing(watched: Watched) -> None:
    await watched.fill()
    overwrite(watched.database.path)
    done: list[int] = []
    watched.database.put(Statement("DELETE FROM t WHERE b IS NOT NULL", ()))
    watched.insert(5000, done)
    await wait_until(lambda: watched.damages)
    watched.insert(5001, done)
    await wait_until(lambda: not watched.database.is_busy)
    assert done == []
    assert len(watched.damages) == 1


async def test_a_damaged_file_is_closed_as_it_is(watched: Watched) -> None:
    """Its WAL is not copied into it: whoever wants to save what it holds may need both."""
    await watched.fill()
    path, done = watched.database.path, list[int]()
    watched.insert(5000, done)
    await watched.database.wait_committed()
    with path.open("r+b") as file:
        # All but the tables of tables.
        file.seek(8 * PAGE_SIZE)
        file.write(b"\xaa" * (path.stat().st_size - 8 * PAGE_SIZE))
    reader = asyncio.create_task(watched.database.read_patiently(count))
    await wait_until(lambda: watched.damages)
    files = (path, Path(f"{path}-wal"))
    before = [each.read_bytes() for each in files]
    await watched.database.abandon()
    await asyncio.wait([reader])
    assert [each.read_bytes() for each in files] == before


async def test_what_goes_to_a_deleted_file_is_not_confirmed(watched: Watched) -> None:
    """SQLite would go on as if nothing had happened."""
    done: list[int] = []
    watched.insert(1, done)
    await watched.database.wait_committed()
    watched.database.path.unlink()
    watched.insert(2, done)
    await wait_until(lambda: watched.damages)
    assert isinstance(watched.damages[0], FileGone)
    assert "deleted or moved away" in str(watched.damages[0])
    assert done == [1]


async def test_what_goes_to_a_file_that_was_replaced_is_not_confirmed(watched: Watched) -> None:
    done: list[int] = []
    watched.insert(1, done)
    await watched.database.wait_committed()
    path = watched.database.path
    path.rename(path.with_name("aside"))
    path.write_bytes(b"")
    watched.insert(2, done)
    await wait_until(lambda: watched.damages)
    assert "another file" in str(watched.damages[0])
    assert done == [1]


async def test_a_disk_that_is_full_is_no_damage(watched: Watched) -> None:
    await watched.database.call_writer(lambda c: c.execute("PRAGMA max_page_count=2").fetchone())
    done: list[int] = []
    for number in range(20):
        watched.insert(number, done)
    await wait_until(lambda: len(watched.troubles) > 5)
    assert watched.damages == []
    await watched.database.call_writer(
        lambda c: c.execute("PRAGMA max_page_count=100000").fetchone()
    )
    await wait_until(lambda: len(done) == 20)
    assert watched.troubles[-1] is None


async def test_a_read_error_that_passes_is_no_damage(watched: Watched) -> None:
    failures = READ_TRIES - 1

    def failing(connection: sqlite3.Connection) -> str:
        nonlocal failures
        if failures:
            failures -= 1
            raise sqlite3.OperationalError("disk I/O error")
        return "read"

    assert await watched.database.read_patiently(failing) == "read"
    assert watched.damages == []


async def test_a_read_error_that_stays_is_damage(watched: Watched) -> None:
    def failing(connection: sqlite3.Connection) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    reader = asyncio.create_task(watched.database.read_patiently(failing))
    await wait_until(lambda: watched.damages)
    reader.cancel()
    await asyncio.wait([reader])


async def test_a_damaged_file_is_closed_without_waiting_for_commits(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(*arguments: object) -> float:
        raise FileGone("gone")

    monkeypatch.setattr(database_module, "commit", damaged)
    done: list[int] = []
    watched.insert(1, done)
    await wait_until(lambda: watched.damages)
    watched.insert(2, done)
    last: list[object] = []
    await watched.database.close(last.append)
    assert done == last == []


async def test_nobody_waits_for_a_file_that_is_closed(watched: Watched) -> None:
    await watched.database.abandon()
    with pytest.raises(asyncio.CancelledError):
        await watched.database.wait_committed()
