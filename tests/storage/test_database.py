"""One writer, group commit, readers; here with real threads."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import aiosqlite
import pytest

from leveret.storage import commit as commit_module
from leveret.storage import database as module
from leveret.storage import operations as operations_module
from leveret.storage.connections import PAGE_SIZE, run_in_thread
from leveret.storage.database import Database
from leveret.storage.message_store import MessageStore
from leveret.storage.operations import RangeDrop, Statement
from leveret.storage.queue_index import Counters, QueueIndex
from tests.storage.bench import message
from tests.storage.stage import SCHEMA, check_counters
from tests.support.commit_gate import Gate, commit_gate
from tests.support.waiting import wait_until


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = Database(tmp_path / "vhost.db", schema=SCHEMA, synchronous="OFF")
    yield opened
    await opened.abandon()


@pytest.fixture
def gate() -> Iterator[Gate]:
    with commit_gate() as gate:
        yield gate


def index_of(
    database: Database, queue_id: int = 1, *, store: MessageStore | None = None
) -> QueueIndex:
    if store is None:
        store = MessageStore(4096)
    return QueueIndex(database, store, queue_id, Counters())


def write(
    index: QueueIndex, *seq_ids: int, size: int = 10, then: Callable[[], None] | None = None
) -> None:
    messages = [message("x" * size, persistent=True) for _ in seq_ids]
    index.write(seq_ids, messages, None, then)


async def rows(database: Database, sql: str) -> list[Any]:
    return await database.read(lambda connection: connection.execute(sql).fetchall())


async def count(database: Database) -> int:
    [(found,)] = await rows(database, "SELECT count(*) FROM message")
    return int(found)


async def check_files(database: Database) -> None:
    await database.read(
        lambda connection: check_counters(lambda sql: connection.execute(sql).fetchall())
    )


# --- aiosqlite -----------------------------------------------------------------------------------


async def test_aiosqlite_runs_a_function_in_its_thread(tmp_path: Path) -> None:
    """Its ``_execute`` and ``_conn`` are private: this fails with a version that lacks them."""
    connection = await aiosqlite.connect(tmp_path / "some.db", isolation_level=None)
    try:
        here = threading.get_ident()
        there, raw, answer = await run_in_thread(
            connection, lambda c, *a: (threading.get_ident(), c, a), 1, 2
        )
        assert there != here
        assert isinstance(raw, sqlite3.Connection)
        assert answer == (1, 2)
        with pytest.raises(ZeroDivisionError):
            await run_in_thread(connection, lambda c: 1 // 0)
    finally:
        await connection.close()


# --- opening -------------------------------------------------------------------------------------


async def test_the_schema_is_applied_once(tmp_path: Path) -> None:
    for _ in range(2):
        database = Database(tmp_path / "vhost.db", schema=SCHEMA, synchronous="FULL")
        await database.open()
        write(index_of(database, 7), *([0] if not await count(database) else [1]))
        await database.close()
    connection = sqlite3.connect(tmp_path / "vhost.db")
    assert connection.execute("SELECT count(*) FROM message").fetchone() == (2,)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA auto_vacuum").fetchone() == (2,)
    assert connection.execute("PRAGMA page_size").fetchone() == (PAGE_SIZE,)
    connection.close()


async def test_a_confirm_means_fsynced(tmp_path: Path) -> None:
    database = Database(tmp_path / "vhost.db", schema=SCHEMA, synchronous="FULL")
    setting = await database.call_writer(lambda c: c.execute("PRAGMA synchronous").fetchone())
    assert setting == (2,)
    await database.close()


async def test_two_that_open_at_once_share_a_connection(database: Database) -> None:
    """Or one of them, and its thread, would never be closed."""
    write(index_of(database), 0)
    await asyncio.gather(database.open(), count(database), count(database), database.open())


async def test_a_file_that_was_closed_is_not_opened_again_by_a_straggler(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    await database.open()
    await database.close()
    write(index_of(database), 0)
    assert not database.is_busy
    assert "too late" in caplog.text


# --- group commit --------------------------------------------------------------------------------


async def test_what_comes_during_a_commit_is_the_next_one(database: Database, gate: Gate) -> None:
    gate.shut()
    index = index_of(database)
    write(index, 0)
    await wait_until(lambda: gate.commits)
    for seq_id in range(1, 51):
        write(index, seq_id)
    assert len(gate.commits) == 1, "one at a time"
    gate.open()
    await database.wait_committed()
    assert [batch.rows for batch in gate.commits] == [1, 50]
    assert await count(database) == 51


async def test_commits_are_capped_and_in_order(
    database: Database, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COMMIT_ROWS", 10)
    index = index_of(database)
    done: list[int] = []
    gate.shut()
    for run in range(10):
        write(index, *range(run * 4, run * 4 + 4), then=partial(done.append, run))
    gate.open()
    await database.wait_committed()
    # The one that passes the mark is still part of it.
    assert [batch.rows for batch in gate.commits] == [12, 12, 12, 4]
    assert done == list(range(10))


async def test_commits_are_capped_by_bytes(
    database: Database, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COMMIT_BYTES", 10_000)
    index = index_of(database)
    for seq_id in range(8):
        write(index, seq_id, size=3_000)
    await database.wait_committed()
    assert [batch.rows for batch in gate.commits] == [4, 4]


async def test_nothing_is_confirmed_before_its_commit(database: Database, gate: Gate) -> None:
    gate.shut()
    done: list[str] = []
    write(index_of(database), 0, then=lambda: done.append("yes"))
    await wait_until(lambda: gate.commits)
    for _ in range(20):
        await asyncio.sleep(0)
    assert done == []
    gate.open()
    await database.wait_committed()
    assert done == ["yes"]


async def test_flying_writes_are_confirmed_and_never_written(
    database: Database, gate: Gate
) -> None:
    gate.shut()
    index = index_of(database)
    done: list[int] = []
    write(index, 0)
    await wait_until(lambda: gate.commits)
    write(index, 1, 2, 3, then=lambda: done.append(1))
    index.remove([(1, 10, 0), (3, 10, 0)])
    write(index, 4, 5, then=lambda: done.append(2))
    index.remove([(4, 10, 0), (5, 10, 0)])
    gate.open()
    await database.wait_committed()
    assert done == [1, 2]
    assert [batch.rows for batch in gate.commits] == [1, 1]
    assert [key & 0xFF for (key,) in await rows(database, "SELECT key FROM message")] == [0, 2]
    await check_files(database)


async def test_a_message_acked_during_its_commit_is_deleted_by_the_next(
    database: Database, gate: Gate
) -> None:
    gate.shut()
    index = index_of(database)
    write(index, 0)
    await wait_until(lambda: gate.commits)
    index.remove([(0, 10, 0)])
    gate.open()
    await database.wait_committed()
    assert await count(database) == 0
    await check_files(database)


async def test_who_waits_is_told_of_what_is_released_during_its_commit(
    database: Database, gate: Gate
) -> None:
    gate.shut()
    index = index_of(database)
    done: list[int] = []
    write(index, 0, then=lambda: done.append(0))
    await wait_until(lambda: gate.commits)
    write(index, 1, 2, then=lambda: done.append(1))
    write(index, 3, then=lambda: done.append(2))
    index.release([3, 0, 1])
    assert done == [0]
    index.release([2])
    assert done == [0, 1, 2]
    gate.open()
    await database.wait_committed()
    assert done == [0, 1, 2]


async def test_who_waits_for_a_commit_does_not_wait_for_the_checkpoint_after_it(
    database: Database, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leveret.storage.database.CHECKPOINT_BYTES", 1)
    index = index_of(database)
    checkpoints: list[float] = []
    write(index, 0, then=lambda: checkpoints.append(database.numbers["checkpoints"]))
    await wait_until(lambda: checkpoints)
    assert checkpoints == [0]
    await wait_until(lambda: database.numbers["checkpoints"] == 1)


async def test_credit_comes_back_when_all_is_committed_or_taken_back(
    database: Database, gate: Gate
) -> None:
    index = index_of(database)
    granted: list[int] = []
    index.granted = granted.append
    gate.shut()
    index.write([0, 1, 2], [message("x", persistent=True)] * 3, None, None, 7)
    index.remove([(1, 10, 0)])
    await wait_until(lambda: gate.commits)
    assert (granted, index.uncommitted_rows) == ([], 3)
    gate.open()
    await database.wait_committed()
    assert (granted, index.uncommitted_rows) == ([7], 0)


async def forever(seconds: float) -> None:
    await asyncio.Event().wait()


async def test_statements_come_after_what_was_put_before_them(database: Database) -> None:
    """The counter of a queue that is deleted must not be written again by the same commit."""
    write(index_of(database, 5), 0)
    database.put(Statement("DELETE FROM counter WHERE queue_id = ?", (5,)))
    await database.wait_committed()
    assert await rows(database, "SELECT * FROM counter") == []


async def test_an_error_in_one_answer_leaves_the_others(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    index = index_of(database)
    done: list[int] = []
    write(index, 0, then=lambda: done.append(1 // 0))
    write(index, 1, then=lambda: done.append(2))
    await database.wait_committed()
    assert done == [2]
    assert "ZeroDivisionError" in caplog.text


# --- trouble -------------------------------------------------------------------------------------


async def test_a_full_disk_is_waited_out(tmp_path: Path, gate: Gate) -> None:
    told: list[Exception | None] = []
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    database = Database(
        tmp_path / "vhost.db",
        schema=SCHEMA,
        synchronous="OFF",
        on_trouble=told.append,
        sleep=sleep,
    )
    await database.open()
    full = sqlite3.OperationalError("database or disk is full")
    gate.failures += [full, full]
    index = index_of(database)
    done: list[int] = []
    write(index, 0, then=lambda: done.append(len(waits)))
    await database.wait_committed()
    assert told == [full, full, None]
    assert waits == [module.RETRY_S] * 2
    assert done == [2], "confirmed once, after the last try"
    assert await count(database) == 1
    assert database.numbers["failures"] == 2
    await check_files(database)
    await database.close()


async def test_half_a_commit_is_rolled_back(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full in the middle of a transaction, and has room again for the next try."""
    await database.open()
    index = index_of(database)
    write(index, 0, 1, 2)
    await database.wait_committed()
    delete, tries = commit_module.delete_rows, []

    def fails_once(*arguments: Any) -> None:
        tries.append(1)
        delete(*arguments)
        if len(tries) == 1:
            raise sqlite3.OperationalError("disk I/O error")

    async def no_sleep(seconds: float) -> None:
        assert await count(database) == 3

    monkeypatch.setattr(commit_module, "delete_rows", fails_once)
    database._sleep = no_sleep
    write(index, 3, 4)
    index.remove([(0, 10, 0)])
    await database.wait_committed()
    assert len(tries) == 2
    assert await count(database) == 4
    await check_files(database)


async def test_a_file_that_really_cannot_grow(tmp_path: Path) -> None:
    """SQLite's own idea of a full disk."""
    told: list[Exception | None] = []
    may_grow = asyncio.Event()

    database = Database(
        tmp_path / "vhost.db", schema=SCHEMA, synchronous="OFF", on_trouble=told.append
    )

    async def sleep(seconds: float) -> None:
        await may_grow.wait()
        await database.call_writer(lambda c: c.execute("PRAGMA max_page_count=1000000").fetchone())

    database._sleep = sleep
    await database.call_writer(lambda c: c.execute("PRAGMA max_page_count=30").fetchone())
    index = index_of(database)
    done: list[int] = []
    write(index, *range(200), size=1000, then=lambda: done.append(1))
    await wait_until(lambda: told)
    assert "full" in str(told[0])
    assert not done
    may_grow.set()
    await database.wait_committed()
    assert done
    assert told[-1] is None
    assert await count(database) == 200
    await database.close()


async def test_reading_is_tried_again(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_sleep(seconds: float) -> None: ...

    database._sleep = no_sleep
    failures = [sqlite3.OperationalError("disk I/O error")]

    def query(connection: sqlite3.Connection) -> str:
        if failures:
            raise failures.pop()
        return "read"

    assert await database.read_patiently(query) == "read"
    assert database.numbers["failures"] == 1


async def test_abandoned_work_is_lost(database: Database, gate: Gate, tmp_path: Path) -> None:
    await database.open()
    gate.shut()
    index = index_of(database)
    write(index, 0)
    await wait_until(lambda: gate.commits)
    done: list[int] = []
    write(index, 1, then=lambda: done.append(1))
    abandoning = asyncio.ensure_future(database.abandon())
    gate.open()
    await abandoning
    assert done == []
    connection = sqlite3.connect(database.path)
    assert connection.execute("SELECT key & 255 FROM message").fetchall() in ([], [(0,)])
    connection.close()


# --- large ranges --------------------------------------------------------------------------------


async def test_a_range_is_dropped_in_bounded_steps(
    database: Database, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations_module, "DROP_ROWS", 10)
    index, other = index_of(database, 1), index_of(database, 2)
    write(index, *range(35))
    write(other, *range(35))
    await database.wait_committed()
    del gate.commits[:]
    steps: list[tuple[int, int]] = []
    gone = asyncio.Event()
    database.put(
        RangeDrop(
            database,
            1 << 40,
            (2 << 40) - 1,
            removed=lambda messages, size: steps.append((messages, size)),
            after=gone.set,
        )
    )
    await asyncio.wait_for(gone.wait(), 20)
    assert steps == [(10, 100)] * 3 + [(5, 50)]
    assert len(gate.commits) == 4
    assert await rows(database, "SELECT key >> 40, count(*) FROM message GROUP BY 1") == [(2, 35)]
    await check_files(database)


async def test_others_get_their_turn_while_a_range_is_dropped(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations_module, "DROP_ROWS", 10)
    index, other = index_of(database, 1), index_of(database, 2)
    write(index, *range(100))
    await database.wait_committed()
    left: list[int] = []
    index.remove_range(0, 99)
    write(other, 0, then=lambda: left.append(index.counters.messages))
    await database.wait_committed()
    assert left == [90]
    await wait_until(lambda: not database.is_busy)
    assert await count(database) == 1
    await check_files(database)


async def test_a_range_leaves_what_is_to_be_kept(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations_module, "DROP_ROWS", 3)
    index = index_of(database)
    write(index, *range(20))
    await database.wait_committed()
    write(index, 20, 21)
    index.remove_range(2, 20, {3, 4, 5, 6, 17})
    positions = await index.read_positions(0, 100, 100)
    assert [position.seq_id for position in positions] == [0, 1, 3, 4, 5, 6, 17, 21]
    assert not database.is_busy
    await check_files(database)


async def test_a_step_that_failed_is_taken_again(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations_module, "DROP_ROWS", 4)
    index = index_of(database)
    write(index, *range(10))
    await database.wait_committed()
    run, tries = RangeDrop.run, []

    def fails_once(self: RangeDrop, connection: sqlite3.Connection) -> None:
        tries.append(1)
        run(self, connection)
        if len(tries) == 2:
            raise sqlite3.OperationalError("disk I/O error")

    async def no_sleep(seconds: float) -> None: ...

    database._sleep = no_sleep
    monkeypatch.setattr(RangeDrop, "run", fails_once)
    index.remove_range(0, 9)
    await wait_until(lambda: not database.is_busy)
    assert await count(database) == 0
    assert index.counters.messages == index.counters.bytes == 0


# --- reading -------------------------------------------------------------------------------------


async def test_a_read_sees_what_was_put(database: Database, gate: Gate) -> None:
    gate.shut()
    index = index_of(database)
    write(index, *range(5))
    index.remove([(2, 10, 0)])
    reading = asyncio.ensure_future(index.read_positions(0, 100, 100))
    await wait_until(lambda: gate.commits)
    assert not reading.done()
    gate.open()
    assert [position.seq_id for position in await reading] == [0, 1, 3, 4]


async def test_a_read_waits_only_for_what_it_is_after(database: Database, gate: Gate) -> None:
    index = index_of(database)
    write(index, *range(5))
    await database.wait_committed()
    gate.shut()
    write(index, 5, 6)
    await wait_until(lambda: len(gate.commits) == 2)
    assert len(await index.read_messages(0, 4, 100, 10_000)) == 5
    gate.open()


async def test_messages_come_back_as_they_went(database: Database) -> None:
    index = index_of(database, store=MessageStore(50))
    sent = [message(body, persistent=True) for body in ("", "small", "x" * 100)]
    sent[1].extra_keys = ("cc", "b\udcffc")
    sent[1].needs = 3
    index.write([4, 6, 9], sent, 77, None)
    got = await index.read_messages(0, 100, 100, 10_000)
    assert [seq_id for seq_id, _ in got] == [4, 6, 9]
    fields = ("envelope", "exchange", "routing_key", "header", "body", "needs", "persistent")
    for before, (_, after) in zip(sent, got, strict=True):
        for field in (*fields, "extra_keys", "body_id"):
            assert getattr(after, field) == getattr(before, field), field
    assert {position.expires_at_ms for position in await index.read_positions(0, 9, 9)} == {77}


async def test_reads_are_bounded_but_give_something(database: Database) -> None:
    index = index_of(database)
    write(index, *range(10), size=100)
    assert len(await index.read_messages(0, 9, 4, 10_000)) == 4
    assert len(await index.read_messages(0, 9, 10, 250)) == 2
    assert len(await index.read_messages(0, 9, 10, 1)) == 1
    assert len(await index.read_positions(3, 8, 10)) == 5


# --- files that stay small -----------------------------------------------------------------------


async def test_the_wal_is_bounded_under_steady_load(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHECKPOINT_BYTES", 1 << 20)
    index = index_of(database)
    longest = 0
    for run in range(60):
        first = run * 100
        write(index, *range(first, first + 100), size=3_000)
        await database.wait_committed()
        longest = max(longest, os.stat(f"{database.path}-wal").st_size)
    assert longest < 3 << 20
    assert database.numbers["checkpoints"] > 5


async def test_the_wal_is_bounded_where_commits_write_more_than_one_would_guess(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of each page is deleted: two numbers to us, a whole page to SQLite."""
    monkeypatch.setattr(module, "WAL_LIMIT_BYTES", 2 << 20)
    index = index_of(database)
    write(index, *range(3_000), size=3_000)
    await database.wait_committed()
    await database._checkpoint()
    longest = 0
    for first in range(0, 3_000, 100):
        index.remove([(seq_id, 3_000, 0) for seq_id in range(first, first + 100, 2)])
        await database.wait_committed()
        longest = max(longest, os.stat(f"{database.path}-wal").st_size)
    assert longest < 10 << 20
    await check_files(database)


async def test_readers_do_not_make_the_wal_grow_for_ever(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHECKPOINT_BYTES", 1 << 18)
    monkeypatch.setattr(module, "WAL_LIMIT_BYTES", 1 << 20)
    index = index_of(database)
    wal = f"{database.path}-wal"
    longest = 0
    at_work = True

    async def read_on() -> None:
        while at_work:
            await index._database.read(
                lambda c: c.execute("SELECT sum(size) FROM message").fetchall()
            )

    readers = [asyncio.ensure_future(read_on()) for _ in range(2)]
    for run in range(80):
        write(index, *range(run * 50, run * 50 + 50), size=1_000)
        await database.wait_committed()
        longest = max(longest, os.stat(wal).st_size)
    at_work = False
    await asyncio.gather(*readers)
    assert longest < 3 << 20


async def test_the_space_of_deleted_rows_is_used_again(database: Database) -> None:
    index = index_of(database)
    sizes: list[int] = []
    for run in range(12):
        first = run * 300
        write(index, *range(first, first + 300), size=2_000)
        await database.wait_committed()
        index.remove([(seq_id, 2_000, 0) for seq_id in range(first, first + 300)])
        await database.wait_committed()
        await database._checkpoint()
        sizes.append(database.path.stat().st_size)
    assert await count(database) == 0
    assert sizes[-1] <= sizes[2]


# --- bodies that are shared ----------------------------------------------------------------------


async def bodies(database: Database) -> list[tuple[int, int]]:
    return await rows(database, "SELECT refs, length(body) FROM body ORDER BY id")


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2), (2, 3, 1)])
async def test_a_large_body_is_stored_once_and_goes_with_the_last(
    database: Database, order: tuple[int, ...]
) -> None:
    store = MessageStore(4096)
    indexes = {queue_id: index_of(database, queue_id, store=store) for queue_id in (1, 2, 3)}
    large = message("x" * 5_000, persistent=True)
    indexes[1].write([0], [large], None, None)
    indexes[2].write([0], [large], None, None)
    await database.wait_committed()
    indexes[3].write([0], [large], None, None)
    await database.wait_committed()
    assert await bodies(database) == [(3, 5_000)]
    for left, queue_id in zip((2, 1, 0), order, strict=True):
        indexes[queue_id].remove([(0, 5_000, large.body_id)])
        await database.wait_committed()
        assert await bodies(database) == ([(left, 5_000)] if left else [])
        await check_files(database)


async def test_a_body_added_and_taken_away_in_one_commit(database: Database, gate: Gate) -> None:
    store = MessageStore(4096)
    one, two = index_of(database, 1, store=store), index_of(database, 2, store=store)
    large = message("x" * 5_000, persistent=True)
    one.write([0], [large], None, None)
    await database.wait_committed()
    gate.shut()
    write(one, 1)
    await wait_until(lambda: len(gate.commits) == 2)
    one.remove([(0, 5_000, large.body_id)])
    two.write([0], [large], None, None)
    gate.open()
    await database.wait_committed()
    assert await bodies(database) == [(1, 5_000)]
    assert (await two.read_messages(0, 0, 1, 1))[0][1].body == large.body


async def test_a_queue_deleted_while_others_hold_its_messages(database: Database) -> None:
    """References that went with a range are gone, and a body can be written anew."""
    store = MessageStore(4096)
    one, two = index_of(database, 1, store=store), index_of(database, 2, store=store)
    large = [message("x" * 5_000, persistent=True) for _ in range(3)]
    one.write([0, 1, 2], large, None, None)
    two.write([0, 1], large[:2], None, None)
    await database.wait_committed()
    one.remove_range(0, 2)
    await database.wait_committed()
    assert [refs for refs, _ in await bodies(database)] == [1, 1]
    two.remove([(0, 5_000, large[0].body_id)])
    await database.wait_committed()
    # Dead-lettered, say.
    one.write([3], [large[0]], None, None)
    await database.wait_committed()
    assert (await one.read_messages(3, 3, 1, 1))[0][1].body == large[0].body
    await check_files(database)


async def test_recovered_bodies_keep_their_references(tmp_path: Path) -> None:
    path = tmp_path / "vhost.db"
    database = Database(path, schema=SCHEMA, synchronous="OFF")
    store = MessageStore(4096)
    large = message("x" * 5_000, persistent=True)
    for queue_id in (1, 2):
        index_of(database, queue_id, store=store).write([0], [large], None, None)
    await database.close()

    database = Database(path, schema=SCHEMA, synchronous="OFF")
    [(highest,)] = await rows(database, "SELECT max(id) FROM body")
    store = MessageStore(4096, highest + 1)
    one = QueueIndex(database, store, 1, Counters(1, 1, 5_000))
    two = QueueIndex(database, store, 2, Counters(1, 1, 5_000))
    [(_, recovered)] = await one.read_messages(0, 0, 1, 1)
    # To a third queue, as when it is dead-lettered; then everybody lets go.
    three = index_of(database, 3, store=store)
    three.write([0], [recovered], None, None)
    one.remove([(0, 5_000, recovered.body_id)])
    await database.wait_committed()
    assert await bodies(database) == [(2, 5_000)]
    await check_files(database)
    three.remove([(0, 5_000, recovered.body_id)])
    two.remove([(0, 5_000, recovered.body_id)])
    await database.wait_committed()
    assert await bodies(database) == []
    await database.close()


async def test_two_files_never_mix_their_bodies(database: Database, tmp_path: Path) -> None:
    """A message kept in one file and paged out to another, where others have numbers too."""
    other = Database(tmp_path / "transient.db", schema=SCHEMA, synchronous="OFF")
    paged = index_of(other)
    for at in range(3):
        paged.write([at], [message(f"{at}" * 5_000)], None, None)
    await other.wait_committed()
    # A store that is made later does not begin with numbers that are taken.
    kept = index_of(database)
    for at in range(3, 6):
        shared = message(f"{at}" * 5_000, persistent=True)
        kept.write([at], [shared], None, None)
        await database.wait_committed()
        paged.write([at], [shared], None, None)
    got = await paged.read_messages(0, 9, 10, 1 << 20)
    assert [found.body[:1] for _, found in got] == [b"0", b"1", b"2", b"3", b"4", b"5"]
    await other.close()


# --- what nobody waits for -------------------------------------------------------------------


async def until_gone(database: Database) -> None:
    """Each look is a turn of the reader's thread; the test's time-out ends it."""
    while await count(database):
        pass


async def test_removals_go_along_with_the_next_commit(database: Database) -> None:
    """Nobody waits for a deletion: it costs no fsync of its own."""
    index = index_of(database)
    write(index, *range(20))
    await database.wait_committed()
    commits = database.numbers["commits"]
    for seq_id in range(20):
        index.remove([(seq_id, 0, 0)])
        await asyncio.sleep(0)
    assert (database.numbers["commits"], await count(database)) == (commits, 20)
    write(index, 20)
    await database.wait_committed()
    assert (database.numbers["commits"], await count(database)) == (commits + 1, 1)


async def test_removals_are_written_after_a_moment_if_nothing_else_comes(tmp_path: Path) -> None:
    moment = asyncio.Event()

    async def sleep(seconds: float) -> None:
        await moment.wait()

    database = Database(tmp_path / "vhost.db", schema=SCHEMA, synchronous="OFF", sleep=sleep)
    index = index_of(database)
    write(index, 0)
    await database.wait_committed()
    index.remove([(0, 0, 0)])
    await asyncio.sleep(0)
    assert await count(database) == 1
    moment.set()
    await until_gone(database)
    await database.close()


async def test_many_removals_do_not_wait_for_company(database: Database) -> None:
    index = index_of(database)
    write(index, *range(module.LAZY_OPERATIONS))
    await database.wait_committed()
    for seq_id in range(module.LAZY_OPERATIONS):
        index.remove([(seq_id, 0, 0)])
    await until_gone(database)


async def test_closing_writes_what_nobody_waited_for(tmp_path: Path) -> None:
    database = Database(tmp_path / "vhost.db", schema=SCHEMA, synchronous="OFF")
    index = index_of(database)
    write(index, 0, 1)
    await database.wait_committed()
    index.remove([(0, 0, 0)])
    await database.close()
    await database.open()
    assert await count(database) == 1
    await database.close()
