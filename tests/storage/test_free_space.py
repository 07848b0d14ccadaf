"""How large a file becomes under steady load, and after a backlog."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from leveret.broker.clock import VirtualClock
from leveret.storage import free_space as module
from leveret.storage.connections import PAGE_SIZE
from leveret.storage.database import Database
from leveret.storage.message_store import MessageStore
from leveret.storage.queue_index import Counters, QueueIndex
from tests.storage.bench import message
from tests.storage.stage import SCHEMA

pytestmark = pytest.mark.timeout(60)

MIB = 1 << 20
# What the file of a few messages has beside them: pointer maps, roots of tables, half-empty pages.
SLACK_BYTES = 2 * MIB
EMBED_BELOW = 4096
# Of virtual time.
STEP_S = 0.05


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few megabytes are many."""
    monkeypatch.setattr(module, "LOOK_BYTES", 2 * MIB)
    monkeypatch.setattr(module, "RESERVE_BYTES", 1 * MIB)


@pytest.fixture
async def database(tmp_path: Path, clock: VirtualClock) -> AsyncIterator[Database]:
    opened = Database(tmp_path / "vhost.db", schema=SCHEMA, synchronous="OFF", sleep=clock.sleep)
    await opened.open()
    yield opened
    await opened.abandon()


class Backlog:
    """Messages of one queue, in order: put at one end, removed at the other."""

    def __init__(self, database: Database, queue_id: int, size: int) -> None:
        self._database = database
        self._index = QueueIndex(database, MessageStore(EMBED_BELOW), queue_id, Counters())
        self._size = size
        self._first = self._next = 0
        self._body_ids: dict[int, int] = {}

    async def grow(self, size_bytes: int) -> None:
        """With a run for each commit."""
        for _ in range(max(1, size_bytes // MIB)):
            run = range(self._next, self._next + MIB // self._size)
            messages = [message("x" * self._size, persistent=True) for _ in run]
            if self._size >= EMBED_BELOW:
                for seq_id, large in zip(run, messages, strict=True):
                    self._body_ids[seq_id] = self._index.reserve(large)
            self._index.write(run, messages, None, None)
            self._next = run.stop
            await self._database.wait_committed()

    async def shrink(self, size_bytes: int) -> None:
        for _ in range(size_bytes // MIB):
            run = range(self._first, min(self._next, self._first + MIB // self._size))
            self._index.remove(
                [(seq_id, self._size, self._body_ids.pop(seq_id, 0)) for seq_id in run]
            )
            self._first = run.stop
            await self._database.wait_committed()


def file_bytes(database: Database) -> int:
    return database.path.stat().st_size


async def pass_time(database: Database, clock: VirtualClock, seconds: float) -> None:
    """In steps, each with what is due in it: as if real time passed."""
    for _ in range(round(seconds / STEP_S)):
        clock.advance(STEP_S)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        # Behind what has just been asked of the writer's thread.
        await database.upkeep(lambda connection: None)


async def settle(database: Database, clock: VirtualClock) -> None:
    """Let time pass until nothing more is given back."""
    while database._free_space._task is not None:
        await pass_time(database, clock, STEP_S)


@pytest.mark.parametrize("size", [pytest.param(1_000, id="1kB"), pytest.param(50_000, id="50kB")])
async def test_a_file_under_steady_load_stops_growing(
    database: Database, clock: VirtualClock, size: int
) -> None:
    """A backlog of 8 MiB that is replaced twenty times over."""
    backlog = Backlog(database, 1, size)
    await backlog.grow(8 * MIB)
    sizes = []
    for _ in range(20):
        for _ in range(8):
            await backlog.grow(MIB)
            await backlog.shrink(MIB)
        await pass_time(database, clock, 2.0)
        await database.checkpoint()
        sizes.append(file_bytes(database))
    assert max(sizes) <= 12 * MIB
    assert max(sizes[10:]) <= max(sizes[:10])
    assert database.numbers["returned_bytes"] == 0, "it would only grow again"


@pytest.mark.parametrize("size", [pytest.param(1_000, id="1kB"), pytest.param(50_000, id="50kB")])
async def test_the_room_of_a_backlog_is_given_back(
    database: Database, clock: VirtualClock, size: int
) -> None:
    backlog = Backlog(database, 1, size)
    await backlog.grow(16 * MIB)
    await database.checkpoint()
    assert file_bytes(database) >= 15 * MIB
    await backlog.shrink(16 * MIB)
    await settle(database, clock)
    assert file_bytes(database) <= module.RESERVE_BYTES + SLACK_BYTES
    assert database.numbers["returned_bytes"] >= 14 * MIB
    assert database.numbers["free_bytes"] <= module.RESERVE_BYTES


async def test_what_stands_behind_free_pages_is_moved_and_stays_whole(
    database: Database, clock: VirtualClock
) -> None:
    """Two backlogs in turn all over the file, small and large bodies; one of them goes."""
    goes, stays = Backlog(database, 1, 1_000), Backlog(database, 2, 50_000)
    for _ in range(8):
        await goes.grow(MIB)
        await stays.grow(MIB)
    before = await database.read(_content)
    await goes.shrink(8 * MIB)
    await settle(database, clock)
    reserve = max(module.RESERVE_BYTES, 8 * MIB // module.RESERVE_SHARE)
    assert file_bytes(database) <= 8 * MIB + reserve + SLACK_BYTES
    assert await database.read(_content) == before
    assert await database.read(lambda c: c.execute("PRAGMA integrity_check").fetchone()) == ("ok",)


def _content(connection: sqlite3.Connection) -> list[tuple[int, bytes]]:
    return connection.execute(
        "SELECT m.key, b.body FROM message m JOIN body b ON b.id = m.body_id ORDER BY m.key"
    ).fetchall()


async def test_what_is_needed_again_soon_is_kept(database: Database, clock: VirtualClock) -> None:
    """A backlog that comes and goes every few seconds: its pages are free only in between."""
    backlog = Backlog(database, 1, 1_000)
    for _ in range(6):
        await backlog.grow(8 * MIB)
        await pass_time(database, clock, module.LOOK_S / 4)
        await backlog.shrink(8 * MIB)
        await pass_time(database, clock, module.LOOK_S / 4)
    assert database.numbers["returned_bytes"] == 0


async def test_commits_have_their_turn_between_steps(
    database: Database, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_STEP_PAGES", 4)
    monkeypatch.setattr(module, "STEP_PAGES", 4)
    backlog, other = Backlog(database, 1, 1_000), Backlog(database, 2, 1_000)
    await backlog.grow(16 * MIB)
    await backlog.shrink(16 * MIB)
    numbers = database.numbers
    while not numbers["returned_bytes"]:
        await pass_time(database, clock, STEP_S)
    begun = numbers["returned_bytes"]
    for _ in range(10):
        returned = numbers["returned_bytes"]
        await pass_time(database, clock, STEP_S)
        assert numbers["returned_bytes"] - returned <= 4 * PAGE_SIZE, "one step"
        returned = numbers["returned_bytes"]
        await other.grow(MIB)
        assert numbers["returned_bytes"] == returned, "a pause"
    assert numbers["returned_bytes"] > begun


async def test_a_backup_is_not_disturbed(database: Database, clock: VirtualClock) -> None:
    """A WAL that cannot start anew must not grow for nothing."""
    backlog = Backlog(database, 1, 1_000)
    await backlog.grow(8 * MIB)
    await backlog.shrink(8 * MIB)
    database.snapshots += 1
    await pass_time(database, clock, 2 * module.LOOK_S)
    assert database.numbers["returned_bytes"] == 0
    database.snapshots -= 1
    await settle(database, clock)
    assert database.numbers["returned_bytes"] > 0


async def test_room_that_a_former_broker_left_is_given_back(
    database: Database, clock: VirtualClock
) -> None:
    backlog = Backlog(database, 1, 1_000)
    await backlog.grow(8 * MIB)
    await backlog.shrink(8 * MIB)
    await database.close()
    assert file_bytes(database) >= 8 * MIB
    await database.open()
    await settle(database, clock)
    assert file_bytes(database) <= module.RESERVE_BYTES + SLACK_BYTES


async def test_a_little_is_not_worth_a_look(database: Database) -> None:
    backlog = Backlog(database, 1, 1_000)
    await backlog.grow(MIB)
    await backlog.shrink(MIB)
    assert database._free_space._task is None
