"""The files of one virtual host: queue ids, and what a queue that starts again finds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from leveret.storage import operations
from leveret.storage.backing_queue import LOADING
from leveret.storage.queue_index import Counters
from leveret.storage.variable_queue import VariableQueue
from leveret.storage.vhost_store import StoreSettings, VhostStore
from tests.storage.bench import message


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[VhostStore]:
    opened = VhostStore(
        tmp_path,
        "/",
        StoreSettings("off", 4096),
        now=time.monotonic,
        sleep=asyncio.sleep,
        on_trouble=lambda error: None,
    )
    await opened.open()
    yield opened
    await opened.close()


def make_queue(store: VhostStore, queue_id: int, woken: asyncio.Event) -> VariableQueue:
    return store.make_queue(
        queue_id,
        Counters(),
        woken.set,
        lambda cost: None,
        lambda cost: None,
        is_durable=False,
        is_clean=False,
        is_lazy=True,
    )


async def drained(queue: VariableQueue, woken: asyncio.Event) -> list[bytes]:
    bodies: list[bytes] = []
    while len(queue):
        entries = queue.fetch(100, ack_required=False)
        if entries is LOADING:
            await woken.wait()
            woken.clear()
        else:
            assert isinstance(entries, list)
            bodies += [entry.message.body for entry in entries]
    return bodies


async def test_a_queue_that_crashed_while_it_was_purged_starts_again_empty(
    store: VhostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is purged goes in many commits: until the last, its counters are too high."""
    monkeypatch.setattr(operations, "DROP_ROWS", 10)

    def make() -> VariableQueue:
        return store.make_queue(
            1,
            Counters(),
            lambda: None,
            lambda cost: None,
            lambda cost: None,
            is_durable=True,
            is_clean=False,
            is_lazy=True,
        )

    crashed = make()
    crashed.publish([message("old", persistent=True) for _ in range(100)], None)
    await store.database.wait_committed()
    assert crashed.purge() == 100
    await store.wait_settled(1)
    again = make()
    assert len(again) == 0
    again.publish([message("new", persistent=True)], None)
    assert len(again) == 1


async def test_ids_are_given_again_lowest_first(store: VhostStore) -> None:
    ids = [store.take_queue_id() for _ in range(4)]
    store.forget_queue(ids[2], is_durable=False)
    store.forget_queue(ids[0], is_durable=False)
    assert [store.take_queue_id() for _ in range(3)] == [ids[0], ids[2], ids[3] + 1]


async def test_a_queue_that_crashed_with_paged_out_messages_starts_again(
    store: VhostStore,
) -> None:
    """Positions begin anew with the queue: rows of its former life must not be in the way."""
    queue_id = store.take_queue_id()
    woken = asyncio.Event()
    crashed = make_queue(store, queue_id, woken)
    crashed.publish([message("old") for _ in range(3)], None)
    again = make_queue(store, queue_id, woken)
    again.publish([message(f"new {number}") for number in range(3)], None)
    assert await drained(again, woken) == [b"new 0", b"new 1", b"new 2"]
