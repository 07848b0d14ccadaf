"""Store credit: publishers that outrun the disk are stopped at their sockets.

Commits are held, one by one, in the writer's own thread; everything else is as in earnest.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from pamqp import commands

from leveret.broker.server import Broker
from leveret.protocol.codec import make
from tests.support.flood import Flood
from tests.support.held_queues import readers
from tests.support.raw_client import PERSISTENT, RawClient, publish
from tests.support.slow_writer import SlowWriter, slow_writer
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(60)

PUBLISHERS = 4
# The run that uses up the credit may exceed it: so many messages at most, and bytes.
RUN_ROWS = 500
RUN_BYTES = 1 << 20
# What four thousand credits stand for, in bytes.
CREDIT_BYTES = 8 << 20
COMMITS_MAX = 10
TURNS = 20


def store_statistics(broker: Broker) -> dict[str, Any]:
    found = broker.vhosts["/"].statistics()["store"]
    assert isinstance(found, dict)
    return found


def commits(broker: Broker) -> int:
    return int(store_statistics(broker)["persistent"]["commits"])


async def step(broker: Broker, writer: SlowWriter) -> None:
    """Let one commit pass, and the broker hear of it."""
    done = commits(broker)
    writer.permit_one()
    await wait_until(lambda: commits(broker) > done)
    # From the store to the queue, the channel, the socket: a few turns of the loop.
    for _ in range(TURNS):
        await asyncio.sleep(0)


@pytest.fixture
def writer() -> Iterator[SlowWriter]:
    with slow_writer() as slow:
        yield slow


@pytest.fixture
async def clients(broker: Broker, writer: SlowWriter) -> AsyncIterator[list[RawClient]]:
    """Four that publish without confirms, and one that does with."""
    async with AsyncExitStack() as stack:
        opened = [
            await stack.enter_async_context(await RawClient.open(broker.port))
            for _ in range(PUBLISHERS + 1)
        ]
        await opened[-1].call(1, make(commands.Confirm.Select), commands.Confirm.SelectOk)
        yield opened
        writer.release()


async def declare(client: RawClient, queue: str) -> None:
    declaration = make(commands.Queue.Declare, queue=queue, durable=True, arguments={})
    await client.call(1, declaration, commands.Queue.DeclareOk)


class Uncommitted:
    """What the broker holds that is not on disk; the most of it that was seen."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.rows = 0
        self.bytes = 0

    def look(self) -> None:
        store = store_statistics(self._broker)
        self.rows = max(self.rows, store["uncommitted_rows"])
        self.bytes = max(self.bytes, store["uncommitted_bytes"])


@pytest.mark.parametrize(
    ("size", "queues"),
    [
        pytest.param(1_000, 1, id="rows-of-one-queue"),
        pytest.param(1_000, 5, id="rows-of-five-queues"),
        pytest.param(100_000, 5, id="bytes-of-five-queues"),
    ],
)
async def test_a_slow_disk_stops_publishers_and_holds_up_nobodys_confirms(
    broker: Broker, writer: SlowWriter, clients: list[RawClient], size: int, queues: int
) -> None:
    names = [f"q{at % queues}" for at in range(PUBLISHERS + 1)]
    for name, client in zip(names, clients, strict=True):
        await declare(client, name)
    floods = [
        Flood(client, name, size=size, header=PERSISTENT)
        for name, client in zip(names, clients[:PUBLISHERS], strict=False)
    ]
    *_, confirming = clients
    writer.hold()
    await asyncio.gather(*[flood.until_blocked() for flood in floods])

    def are_stopped() -> bool:
        states = [reader.statistics()["state"] for reader in readers(broker)]
        return states.count("flow") == PUBLISHERS

    assert are_stopped()
    most = Uncommitted(broker)
    most.look()
    await confirming.send(publish(1, names[-1], b"safe", header=PERSISTENT))
    answer = asyncio.ensure_future(confirming.expect(commands.Basic.Ack))
    begun = commits(broker)
    while not answer.done():
        await step(broker, writer)
        # The others fill whatever room there is, until they are stopped again.
        await wait_until(lambda: [flood.press() for flood in floods] and are_stopped())
        most.look()
    assert answer.result().delivery_tag == 1
    assert commits(broker) - begun <= COMMITS_MAX

    flooded = min(queues, PUBLISHERS)
    assert most.rows <= flooded * (broker.settings.store_credit + RUN_ROWS)
    assert most.bytes <= flooded * (CREDIT_BYTES + RUN_BYTES)

    # All that was taken from the sockets is written in the end.
    writer.release()
    for flood in floods:
        await flood.finish_message()
    sent = sum(flood.sent for flood in floods) + 1
    await wait_until(lambda: store_statistics(broker)["persistent"]["rows"] >= sent)
    await wait_until(lambda: store_statistics(broker)["uncommitted_rows"] == 0)
