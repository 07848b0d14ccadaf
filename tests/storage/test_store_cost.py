"""What rows cost in store credit: spent when they are handed over, granted once written."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from leveret.storage.queue_index import Counters
from tests.storage.bench import message
from tests.storage.store import opened_store
from tests.support.waiting import wait_until

# With two bytes of properties each.
COSTS = [(0, 1), (2045, 1), (2046, 2), (4000, 2), (4094, 3), (100_000, 49)]


@pytest.mark.parametrize("is_durable", [True, False], ids=["persistent", "paged-out"])
async def test_bytes_cost_and_what_was_spent_comes_back(tmp_path: Path, is_durable: bool) -> None:
    spent: list[int] = []
    granted: list[int] = []
    async with opened_store(tmp_path) as (store, _):
        queue = store.make_queue(
            store.take_queue_id(),
            Counters(),
            asyncio.Event().set,
            spent.append,
            granted.append,
            is_durable=is_durable,
            is_clean=True,
            is_lazy=not is_durable,
        )
        for size, _ in COSTS:
            queue.publish([message("x" * size, persistent=True)], None)
        queue.publish([message("x" * size, persistent=True) for size, _ in COSTS], None)
        costs = [cost for _, cost in COSTS]
        assert spent == [*costs, sum(costs)]
        await wait_until(lambda: granted == spent)
