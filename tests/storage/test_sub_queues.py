"""Where the messages of each priority are on disk, and how they are found again."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from leveret.storage.backing_queue import LOADING
from leveret.storage.check import check_folder
from leveret.storage.definitions import Definitions
from leveret.storage.priority_queue import PriorityQueue
from leveret.storage.queue_index import Counters
from leveret.storage.vhost_store import VhostStore
from tests.storage.data_folder import FILE
from tests.storage.store import opened_store
from tests.storage.test_priority_queue import message
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(20)


class Woken:
    """A priority queue and the patience to drain it."""

    def __init__(
        self, store: VhostStore, queue_id: int, counters: Counters, *, is_durable: bool = True
    ) -> None:
        self._woken = asyncio.Event()
        self.queue: PriorityQueue = store.make_priority_queue(
            9,
            queue_id,
            counters,
            self._woken.set,
            lambda cost: None,
            lambda cost: None,
            is_durable=is_durable,
            is_clean=True,
            is_lazy=True,
        )

    def publish(self, **priorities: int) -> None:
        self.queue.publish([message(body, each) for body, each in priorities.items()], None)

    async def drained(self) -> str:
        bodies = []
        while len(self.queue):
            entries = self.queue.fetch(100, ack_required=False)
            if entries is LOADING:
                await self._woken.wait()
                self._woken.clear()
            else:
                assert isinstance(entries, list)
                bodies += [entry.message.body.decode() for entry in entries]
        return "".join(bodies)


def new_queue(store: VhostStore, name: str = "jobs") -> Woken:
    queue_id = store.take_queue_id()
    store.definitions.save_queue(queue_id, name, b"\0\0\0\0", auto_delete=False)
    return Woken(store, queue_id, Counters())


def found_again(store: VhostStore, definitions: Definitions) -> Woken:
    [stored] = definitions.queues
    return Woken(store, stored.id, stored.counters)


def change(data: Path, sql: str) -> None:
    with closing(sqlite3.connect(data / FILE)) as connection:
        connection.executescript(sql)


async def test_each_priority_is_found_again(tmp_path: Path) -> None:
    async with opened_store(tmp_path / "vhosts") as (store, _):
        jobs = new_queue(store)
        jobs.publish(a=1, b=9, c=0, d=1)
        jobs.queue.terminate()
    assert check_folder(tmp_path).problems == []
    async with opened_store(tmp_path / "vhosts") as (store, definitions):
        assert sorted(sub.priority for sub in definitions.sub_queues) == [1, 9]
        jobs = found_again(store, definitions)
        assert len(jobs.queue) == 4
        jobs.publish(e=9, f=5)
        # A new one does not get an id that is in use.
        other = new_queue(store, "other")
        other.publish(x=1)
        assert await jobs.drained() == "befadc"
        assert await other.drained() == "x"


async def test_one_that_starts_again_after_a_crash_finds_all(tmp_path: Path) -> None:
    async with opened_store(tmp_path / "vhosts") as (store, _):
        queue_id = store.take_queue_id()
        store.definitions.save_queue(queue_id, "jobs", b"\0\0\0\0", auto_delete=False)
        Woken(store, queue_id, Counters()).publish(a=1, b=9, c=0)
        again = Woken(store, queue_id, Counters())
        assert len(again.queue) == 3
        again.publish(d=9)
        assert await again.drained() == "bdac"


async def test_deleting_frees_all_ids(tmp_path: Path) -> None:
    async with opened_store(tmp_path / "vhosts") as (store, _):
        first = store.take_queue_id()
        store.definitions.save_queue(first, "jobs", b"\0\0\0\0", auto_delete=False)
        jobs = Woken(store, first, Counters())
        jobs.publish(a=1, b=9)
        jobs.queue.delete_and_terminate()
        store.forget_queue(first, is_durable=True)
        freed: set[int] = set()

        def is_free() -> bool:
            freed.add(store.take_queue_id())
            return {first, first + 1, first + 2} <= freed

        await wait_until(is_free)


async def test_one_that_is_not_durable_leaves_nothing(tmp_path: Path) -> None:
    async with opened_store(tmp_path / "vhosts") as (store, _):
        queue_id = store.take_queue_id()
        jobs = Woken(store, queue_id, Counters(), is_durable=False)
        jobs.publish(a=1, b=9, c=0)
        assert await jobs.drained() == "bac"
        jobs.queue.delete_and_terminate()
        store.forget_queue(queue_id, is_durable=False)
    async with opened_store(tmp_path / "vhosts") as (store, definitions):
        assert definitions.sub_queues == []


async def test_what_has_lost_its_queue_is_deleted(tmp_path: Path) -> None:
    """The broker was killed between two commits of a deletion; the id may be given again."""
    async with opened_store(tmp_path / "vhosts") as (store, _):
        jobs = new_queue(store)
        jobs.publish(a=1, b=9, c=0)
        jobs.queue.terminate()
    change(tmp_path, "DELETE FROM queue")
    report = check_folder(tmp_path)
    assert report.problems == []
    assert sum(remark.number for remark in report.remarks) == 3
    async with opened_store(tmp_path / "vhosts") as (store, definitions):
        assert definitions.sub_queues == []
    async with opened_store(tmp_path / "vhosts") as (store, _):
        jobs = new_queue(store)
        assert len(jobs.queue) == 0
        jobs.publish(d=1)
        assert await jobs.drained() == "d"
        jobs.queue.terminate()
    async with opened_store(tmp_path / "vhosts") as (store, definitions):
        assert [sub.priority for sub in definitions.sub_queues] == [1]


async def test_a_check_names_the_priority(tmp_path: Path) -> None:
    async with opened_store(tmp_path / "vhosts") as (store, _):
        jobs = new_queue(store)
        jobs.publish(a=1, b=9)
        jobs.queue.terminate()
    change(tmp_path, "DELETE FROM message WHERE body = x'62'")
    [problem] = check_folder(tmp_path).problems
    assert str(problem) == (
        f"{FILE}, queue 'jobs (priority 9)': counters that are wrong: 1 messages, there are 0;"
        " 1 bytes, there are 0"
    )


async def test_a_file_without_the_table_is_damaged(tmp_path: Path) -> None:
    async with opened_store(tmp_path / "vhosts"):
        pass
    change(tmp_path, "DROP TABLE sub_queue")
    [problem] = check_folder(tmp_path).problems
    assert "it lacks sub_queue" in str(problem)
