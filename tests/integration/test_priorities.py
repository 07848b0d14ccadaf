"""Queues with priorities in a running broker: over restarts and crashes, until they are gone."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any, cast

import aio_pika
import pytest
from aio_pika import DeliveryMode, Message
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage, AbstractQueue

from leveret.broker.config import Settings
from leveret.broker.server import Broker
from leveret.storage.check import check_folder
from leveret.storage.memory_queue import MemoryQueue
from tests.storage.data_folder import FILE
from tests.support.broker_process import BrokerProcess
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(60)

# Body and priority, as published; then the bodies in the order in which they are to come.
MIXED = [("a", 1), ("b", 9), ("c", None), ("d", 5), ("e", 9), ("f", 200), ("g", 1), ("h", 0)]
IN_ORDER = "befdagch"


@asynccontextmanager
async def channel_to(url: str) -> AsyncIterator[AbstractChannel]:
    async with await aio_pika.connect(url) as connection, connection.channel() as channel:
        yield channel


async def declare(channel: AbstractChannel, **arguments: str) -> AbstractQueue:
    return await channel.declare_queue(
        "jobs", durable=True, arguments={"x-max-priority": 9, **arguments}
    )


async def publish(channel: AbstractChannel, body: str, priority: int | None) -> None:
    message = Message(body.encode(), priority=priority, delivery_mode=DeliveryMode.PERSISTENT)
    await channel.default_exchange.publish(message, "jobs")


def ready(broker: Broker, queue: str) -> int:
    [vhost] = cast(list[Any], broker.statistics()["vhosts"])
    return cast(int, vhost["queues"][queue]["messages_ready"])


async def collect(queue: AbstractQueue, got: list[AbstractIncomingMessage]) -> str:
    """Consume into ``got``; returns the consumer's tag."""

    async def on_message(message: AbstractIncomingMessage) -> None:
        got.append(message)

    return await queue.consume(on_message)


async def drained(queue: AbstractQueue) -> str:
    bodies = []
    while (message := await queue.get(no_ack=True, fail=False)) is not None:
        bodies.append(message.body.decode())
    return "".join(bodies)


def rows(data: Path, sql: str) -> list[tuple[int, ...]]:
    with closing(sqlite3.connect(data / FILE)) as connection:
        return connection.execute(sql).fetchall()


def is_empty(data: Path, table: str) -> bool:
    return not rows(data, f"SELECT 1 FROM {table}")


async def test_a_stop_keeps_priorities_and_what_was_delivered(tmp_path: Path) -> None:
    settings = Settings(port=0, data=tmp_path)
    async with Broker(settings) as broker, channel_to(broker.url) as channel:
        queue = await declare(channel)
        for body, priority in MIXED:
            await publish(channel, body, priority)
        held = [await queue.get() for _ in range(4)]
        await held[0].ack()
    assert check_folder(tmp_path).problems == []
    async with Broker(settings) as broker, channel_to(broker.url) as channel:
        queue = await declare(channel)
        assert queue.declaration_result.message_count == len(MIXED) - 1
        # One that comes now is behind its equals.
        await publish(channel, "z", 9)
        seen = []
        while (message := await queue.get(no_ack=True, fail=False)) is not None:
            seen.append((message.body.decode(), message.redelivered))
    assert seen == [
        ("e", True),
        ("f", True),
        ("z", False),
        ("d", True),
        ("a", False),
        ("g", False),
        ("c", False),
        ("h", False),
    ]


async def test_what_was_confirmed_survives_a_crash(tmp_path: Path) -> None:
    data, log = tmp_path / "data", tmp_path / "log"
    broker = BrokerProcess(data, log)
    async with channel_to(broker.url) as channel:
        queue = await declare(channel)
        for body, priority in MIXED:
            await publish(channel, body, priority)
        broker.kill()
    assert check_folder(data).problems == []
    broker = BrokerProcess(data, log)
    async with channel_to(broker.url) as channel:
        queue = await declare(channel)
        assert await drained(queue) == IN_ORDER
    broker.assert_stopped_cleanly()


async def test_a_consumer_gets_the_highest_first_and_what_it_returns_is_in_its_place(
    tmp_path: Path,
) -> None:
    async with Broker(Settings(port=0, data=tmp_path)) as broker, channel_to(broker.url) as channel:
        queue = await declare(channel)
        for body, priority in MIXED:
            await publish(channel, body, priority)
        async with channel_to(broker.url) as other:
            await other.set_qos(prefetch_count=5)
            got: list[AbstractIncomingMessage] = []
            consumed = await other.get_queue("jobs")
            await collect(consumed, got)
            await wait_until(lambda: len(got) == 5)
            assert "".join(message.body.decode() for message in got) == IN_ORDER[:5]
            await got[1].ack()
            await wait_until(lambda: len(got) == 6)
            await publish(channel, "z", 7)
        # What it had not acked is back.
        await wait_until(lambda: ready(broker, "jobs") == 8)
        assert await drained(queue) == "bfzdagch"


async def test_a_run_that_goes_straight_to_consumers_is_settled_message_by_message(
    tmp_path: Path,
) -> None:
    async with Broker(Settings(port=0, data=tmp_path)) as broker, channel_to(broker.url) as channel:
        queue = await declare(channel)
        got: list[AbstractIncomingMessage] = []
        tag = await collect(queue, got)
        for body, priority in MIXED:
            await publish(channel, body, priority)
        await wait_until(lambda: len(got) == len(MIXED))
        for message in got:
            if message.body in (b"a", b"e", b"h"):
                await message.ack()
        await queue.cancel(tag)
        for message in got:
            if message.body not in (b"a", b"e", b"h"):
                await message.nack()
        assert await drained(queue) == "bfdgc"


async def test_a_transaction_over_priorities_is_kept(tmp_path: Path) -> None:
    settings = Settings(port=0, data=tmp_path)
    async with Broker(settings) as broker, await aio_pika.connect(broker.url) as connection:
        async with connection.channel(publisher_confirms=False) as channel:
            await declare(channel)
            async with channel.transaction():
                for body, priority in MIXED:
                    await publish(channel, body, priority)
    async with Broker(settings) as broker, channel_to(broker.url) as channel:
        assert await drained(await declare(channel)) == IN_ORDER


async def test_what_is_on_disk_alone_comes_in_order(tmp_path: Path) -> None:
    async with Broker(Settings(port=0, data=tmp_path)) as broker, channel_to(broker.url) as channel:
        queue = await declare(channel, **{"x-queue-mode": "lazy"})
        for number in range(300):
            await publish(channel, f"{number:03}", number % 3)
        text = await drained(queue)
    bodies = [int(text[at : at + 3]) for at in range(0, len(text), 3)]
    assert bodies == sorted(range(300), key=lambda number: (-(number % 3), number))


async def test_a_dead_letter_keeps_its_priority(tmp_path: Path) -> None:
    async with Broker(Settings(port=0, data=tmp_path)) as broker, channel_to(broker.url) as channel:
        dead = await channel.declare_queue("dead", arguments={"x-max-priority": 9})
        queue = await declare(
            channel, **{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
        )
        for body, priority in MIXED:
            await publish(channel, body, priority)
        for _ in MIXED:
            message = await queue.get()
            await message.reject()
        await wait_until(lambda: ready(broker, "dead") == len(MIXED))
        assert await drained(dead) == IN_ORDER


async def test_a_deleted_queue_leaves_nothing(tmp_path: Path) -> None:
    async with Broker(Settings(port=0, data=tmp_path)) as broker, channel_to(broker.url) as channel:
        queue = await declare(channel)
        for body, priority in MIXED:
            await publish(channel, body, priority)
        assert len(rows(tmp_path, "SELECT priority FROM sub_queue")) == 3
        await queue.delete(if_empty=False)
        for table in ("message", "counter", "sub_queue"):
            await wait_until(partial(is_empty, tmp_path, table))
        queue = await declare(channel)
        await publish(channel, "new", 5)
        assert await drained(queue) == "new"


async def test_where_nothing_is_kept_there_are_priorities_too(tmp_path: Path) -> None:
    async with (
        Broker(Settings(port=0, data=tmp_path), make_backing=MemoryQueue) as broker,
        channel_to(broker.url) as channel,
    ):
        queue = await declare(channel)
        for body, priority in MIXED:
            await publish(channel, body, priority)
        assert await drained(queue) == IN_ORDER


async def test_a_maximum_of_zero_is_no_priority(tmp_path: Path) -> None:
    async with Broker(Settings(port=0, data=tmp_path)) as broker, channel_to(broker.url) as channel:
        queue = await channel.declare_queue("jobs", arguments={"x-max-priority": 0})
        for body, priority in MIXED:
            await publish(channel, body, priority)
        assert await drained(queue) == "abcdefgh"
