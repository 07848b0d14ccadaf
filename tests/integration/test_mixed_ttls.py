"""10,000 messages with TTLs of their own expire into a dead-letter queue, and in which order.

With exact expiry that is the order of due time, without it the order in the queue: nothing passes
the head.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from pamqp import commands

from leveret.broker.clock import VirtualClock
from leveret.broker.config import Settings
from leveret.broker.server import Broker
from leveret.protocol.codec import Properties, make, write_properties
from leveret.protocol.field_table import Field, Table
from tests.durability.link import Link
from tests.support.raw_client import publish
from tests.support.waiting import wait_until

MESSAGES = 10_000
LONGEST_MS = 60_000
DEAD_LETTERS: Table = {
    "x-dead-letter-exchange": Field("S", ""),
    "x-dead-letter-routing-key": Field("S", "dead"),
}


def ready(broker: Broker, queue: str) -> int:
    actors = broker.vhosts["/"]._supervisor.actors
    [actor] = [actor for record, actor in actors.items() if record.name.name == queue]
    count = actor.statistics()["messages_ready"]
    assert isinstance(count, int)
    return count


async def declare(link: Link, name: str, arguments: Table) -> None:
    declaration = make(commands.Queue.Declare, queue=name, durable=True, arguments=arguments)
    await link.call(declaration, commands.Queue.DeclareOk)


async def publish_mixed(link: Link, ttls: list[int], *, persistent: bool) -> None:
    """Bodies are numbers; returns when the broker has come past all of it."""
    mode = 2 if persistent else 1
    for first in range(0, len(ttls), 500):
        frames = []
        for number, ttl in enumerate(ttls[first : first + 500], first):
            header = write_properties(Properties(delivery_mode=mode, expiration=str(ttl)))
            frames.append(publish(1, "q", b"%d" % number, header=header))
        link.write(b"".join(frames))
        await link.round_trip()


async def take(link: Link, queue: str, count: int) -> list[int]:
    found: list[int] = []
    is_all = asyncio.Event()

    def on_delivery(tag: int, redelivered: bool, message_id: str, body: bytes) -> None:
        found.append(int(body))
        if len(found) == count:
            is_all.set()

    link.on_delivery = on_delivery
    link.takes_dead_letters = True
    consume = make(commands.Basic.Consume, queue=queue, no_ack=True)
    await link.call(consume, commands.Basic.ConsumeOk)
    async with asyncio.timeout(20):
        await is_all.wait()
    return found


@pytest.mark.parametrize("is_lazy", [False, True], ids=["default", "lazy"])
@pytest.mark.parametrize("persistent", [True, False], ids=["persistent", "transient"])
@pytest.mark.parametrize("is_exact", [True, False], ids=["exact", "head"])
async def test_in_which_order_they_expire(
    tmp_path: Path, clock: VirtualClock, is_exact: bool, persistent: bool, is_lazy: bool
) -> None:
    ttls = random.Random(7).choices(range(1, LONGEST_MS), k=MESSAGES)
    arguments = {**DEAD_LETTERS, "x-message-ttl-exact": Field("t", is_exact)}
    if is_lazy:
        arguments["x-queue-mode"] = Field("S", "lazy")
    async with Broker(Settings(port=0, data=tmp_path / "data"), clock) as broker:
        link = await Link.open(broker.port)
        await declare(link, "dead", {})
        await declare(link, "q", arguments)
        await publish_mixed(link, ttls, persistent=persistent)
        await wait_until(lambda: ready(broker, "q") == MESSAGES)

        clock.advance(LONGEST_MS / 4 / 1000)
        due = [number for number, ttl in enumerate(ttls) if ttl <= LONGEST_MS // 4]
        if not is_exact:
            # One that lives longer holds up all behind it.
            due = due[: next(at for at, ttl in enumerate(ttls) if ttl > LONGEST_MS // 4)]
        await wait_until(lambda: ready(broker, "dead") == len(due))
        assert ready(broker, "q") == MESSAGES - len(due)

        clock.advance(LONGEST_MS / 1000)
        await wait_until(lambda: ready(broker, "dead") == MESSAGES)
        found = await take(link, "dead", MESSAGES)
        in_order = list(range(MESSAGES))
        if is_exact:
            in_order.sort(key=ttls.__getitem__)
            assert [ttls[number] for number in found] == [ttls[number] for number in in_order]
        else:
            assert found == in_order
        assert sorted(found) == list(range(MESSAGES))
        await link.close()
