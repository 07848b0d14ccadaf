"""Thousands that expire, or are too many, at one moment: all go, others get their turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import pytest

from leveret.broker.clock import VirtualClock
from leveret.broker.queues import commands as c
from leveret.broker.queues.actor_rules import DROP_MESSAGES
from leveret.broker.queues.dead_lettering import BACKLOG
from tests.broker.queues.bench import Port
from tests.broker.queues.town import Town, consume, delivered, letter

MANY = 4 * DROP_MESSAGES
RUN = 500
# Rules are kept at three places of a turn.
PER_TURN = 3 * (DROP_MESSAGES + RUN)


@pytest.fixture
async def town(clock: VirtualClock) -> AsyncIterator[Town]:
    async with Town(clock) as town:
        yield town


async def fill(town: Town) -> None:
    for _ in range(MANY // RUN):
        await town.publish("q", *[letter(b"a")] * RUN)


async def most_in_a_turn(town: Town, counter: str) -> int:
    """Come to rest; how far the counter went at once."""
    most, last = 0, cast(int, town.count("q", counter))
    while last < MANY:
        await asyncio.sleep(0)
        now = cast(int, town.count("q", counter))
        most, last = max(most, now - last), now
    await town.rest()
    return most


@pytest.mark.parametrize("is_exact", [False, True], ids=["head", "exact"])
@pytest.mark.parametrize("exchange", [None, "nowhere"])
async def test_all_that_expire_go_turn_by_turn(
    town: Town, exchange: str | None, is_exact: bool
) -> None:
    town.add("q", message_ttl_ms=100, message_ttl_exact=is_exact, dead_letter_exchange=exchange)
    await fill(town)
    town.clock.advance(0.1)
    assert await most_in_a_turn(town, "expire") <= PER_TURN
    assert town.count("q") == 0


@pytest.mark.parametrize("exchange", [None, "nowhere"])
async def test_a_limit_that_comes_later(town: Town, exchange: str | None) -> None:
    town.add("q", dead_letter_exchange=exchange)
    await fill(town)
    town.change_policy("q", {"max-length": 0})
    most = await most_in_a_turn(town, "drop")
    assert most <= PER_TURN
    assert town.count("q") == 0


async def test_a_consumer_does_not_pull_them_all_out_of_the_queue(town: Town) -> None:
    """What waits to be dead-lettered is in memory: there must not be more of it than that."""
    queue = town.add(
        "q", message_ttl_ms=100, dead_letter_exchange="", dead_letter_routing_key="dead"
    )
    town.add("dead")
    await fill(town)
    town.is_holding = True
    town.clock.advance(0.1)
    port = Port("consumer")
    consume(queue, port)
    await town.rest()
    assert cast(int, town.count("q")) >= MANY - 2 * BACKLOG
    await town.publish("q", letter(b"alive"))
    town.is_holding = False
    await town.commit_held()
    assert [message.body for message, _ in delivered(port)] == [b"alive"]
    assert town.count("dead") == MANY


async def test_nor_does_a_get(town: Town) -> None:
    """It is answered when those before the one it gets are on their way."""
    queue = town.add("q", dead_letter_exchange="", dead_letter_routing_key="dead")
    town.add("dead")
    # The first lives: what expires behind it is noticed by the get that takes it.
    await town.publish("q", letter(b"first"))
    for _ in range(MANY // RUN):
        await town.publish("q", *[letter(b"a", expiration="100")] * RUN)
    await town.publish("q", letter(b"last"))
    town.is_holding = True
    town.clock.advance(0.1)
    port = Port("getter")
    for _ in range(2):
        queue.mailbox.put(c.Get(port.mailbox, True))
    await town.rest()
    assert cast(int, town.count("q")) >= MANY - 2 * BACKLOG
    assert [item.message.body for item in port.take() if isinstance(item, c.GetOk)] == [b"first"]
    town.is_holding = False
    await town.commit_held()
    await town.rest()
    assert [item.message.body for item in port.take() if isinstance(item, c.GetOk)] == [b"last"]
    assert town.count("dead") == MANY
