"""A backlog that comes and goes: what it takes of the disk, and what it leaves there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel, AbstractQueue

from leveret.broker.clock import VirtualClock
from leveret.broker.config import Settings
from leveret.broker.server import Broker
from leveret.storage import free_space

pytestmark = pytest.mark.timeout(60)

MIB = 1 << 20
BODY = bytes(40_000)
# Eight megabytes.
BACKLOG = 200
DEADLINE_S = 30.0


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few megabytes are many."""
    monkeypatch.setattr(free_space, "LOOK_BYTES", 2 * MIB)
    monkeypatch.setattr(free_space, "RESERVE_BYTES", 1 * MIB)


@pytest.fixture
async def broker(settings: Settings, clock: VirtualClock) -> AsyncIterator[Broker]:
    async with Broker(settings, clock) as running:
        yield running


async def publish(channel: AbstractChannel, queue: AbstractQueue, count: int) -> None:
    message = aio_pika.Message(BODY, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
    exchange = channel.default_exchange
    await asyncio.gather(*[exchange.publish(message, queue.name) for _ in range(count)])


async def drain(queue: AbstractQueue, count: int) -> None:
    async with queue.iterator(timeout=DEADLINE_S) as messages:
        for _ in range(count):
            await (await anext(messages)).ack()


def file_bytes(settings: Settings) -> int:
    files: list[Path] = list((settings.data / "vhosts").glob("*.db"))
    return sum(path.stat().st_size for path in files)


async def test_the_room_of_a_backlog_comes_back_to_the_disk(
    broker: Broker, settings: Settings, clock: VirtualClock
) -> None:
    address = f"amqp://guest:guest@127.0.0.1:{broker.port}/?heartbeat=0"
    async with await aio_pika.connect(address) as client:
        channel = await client.channel()
        await channel.set_qos(prefetch_count=50)
        queue = await channel.declare_queue("backlog", durable=True)
        sizes = []
        # The same room again and again, and no more of it.
        for _ in range(4):
            await publish(channel, queue, BACKLOG)
            await drain(queue, BACKLOG)
            sizes.append(file_bytes(settings))
        assert max(sizes) <= 12 * MIB
        await publish(channel, queue, 10)
        async with asyncio.timeout(DEADLINE_S):
            while file_bytes(settings) > 3 * MIB:
                clock.advance(0.05)
                await asyncio.sleep(0.001)
        left = [await queue.get(no_ack=True) for _ in range(10)]
        assert [message.body for message in left] == [BODY] * 10
