"""How often a message was delivered before, as the event log tells it."""

from __future__ import annotations

from typing import Any

import aio_pika
import pytest
from aio_pika import DeliveryMode, Message
from aio_pika.abc import AbstractIncomingMessage, AbstractQueue

from leveret.broker.config import Settings
from leveret.broker.event_log import returns
from leveret.broker.event_log.returns import Returns
from tests.broker.event_log.telling import Telling
from tests.support.waiting import wait_until

HERE, THERE = ("/", "q"), ("other", "q")


def test_those_that_came_back_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(returns, "RETURNS_MAX", 3)
    known = Returns()
    for msg in (1, 2, 1, 3, 1, 4, 5):
        known.came_back(msg, HERE)
    assert len(known) == 3
    assert known.deliveries(1, HERE) == 3
    assert known.by_queue == {HERE: {1, 4, 5}}
    # All that is known of one that is not: it came back.
    assert known.deliveries(2, HERE) == 1


def test_queues_are_kept_apart() -> None:
    known = Returns()
    for place in (HERE, THERE):
        known.came_back(1, place)
    known.came_back(2, HERE)
    known.done((1, 2, 3), THERE)
    assert known.by_queue == {HERE: {1, 2}}
    known.forget(HERE, but=(2, 9))
    assert known.by_queue == {HERE: {2}}
    known.forget(HERE)
    known.forget(HERE)
    assert (len(known), known.by_queue) == (0, {})


def test_the_queue_may_know_better() -> None:
    known = Returns()
    known.learn(1, HERE, 4)
    assert known.came_back(1, HERE) == 5
    known.learn(1, HERE, 2)
    assert known.deliveries(1, HERE) == 5


async def take(queue: AbstractQueue, **options: Any) -> AbstractIncomingMessage:
    taken = await queue.get(**options)
    assert taken is not None
    return taken


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"x-queue-type": "quorum"}, id="quorum"),
        pytest.param({}, id="delivery-limit"),
    ],
)
async def test_counts_of_queues_that_count_outlive_a_restart(
    settings: Settings, arguments: dict[str, Any]
) -> None:
    for boot in range(2):
        async with Telling(settings) as told, await aio_pika.connect(told.url) as connection:
            await told.broker.policies.set("/", "limit", "^q$", {"delivery-limit": 9})
            channel = await connection.channel()
            queue = await channel.declare_queue("q", durable=True, arguments=arguments)
            if not boot:
                message = Message(b"abc", delivery_mode=DeliveryMode.PERSISTENT)
                await channel.default_exchange.publish(message, "q")
            for _ in range(3):
                await (await take(queue)).nack()
        given = [event.delivery_count for event in told.of("get")]
        back = [event.delivery_count for event in told.of("requeue")]
        assert (given, back) == (([3, 4, 5], [4, 5, 6]) if boot else ([0, 1, 2], [1, 2, 3]))


async def test_a_dead_letter_has_the_count_of_its_queue(settings: Settings) -> None:
    arguments: dict[str, Any] = {
        "x-queue-type": "quorum",
        "x-delivery-limit": 3,
        "x-dead-letter-exchange": "missing",
    }
    for boot in range(2):
        async with Telling(settings) as told, await aio_pika.connect(told.url) as connection:
            channel = await connection.channel()
            queue = await channel.declare_queue("q", durable=True, arguments=arguments)
            if not boot:
                message = Message(b"abc", delivery_mode=DeliveryMode.PERSISTENT)
                await channel.default_exchange.publish(message, "q")
            for _ in range(2):
                await (await take(queue)).nack()
    assert told.only("dead_letter").delivery_count == 4


async def gone_by_get(told: Telling, queue: AbstractQueue) -> None:
    for _ in range(3):
        await take(queue, no_ack=True)


async def gone_by_delivery(told: Telling, queue: AbstractQueue) -> None:
    seen: list[AbstractIncomingMessage] = []

    async def see(message: AbstractIncomingMessage) -> None:
        seen.append(message)

    await queue.consume(see, no_ack=True)
    await wait_until(lambda: len(seen) == 3)


async def gone_by_purge(told: Telling, queue: AbstractQueue) -> None:
    await queue.purge()


async def gone_by_deletion(told: Telling, queue: AbstractQueue) -> None:
    await queue.delete(if_unused=False, if_empty=False)


async def gone_on_disk(told: Telling, queue: AbstractQueue) -> None:
    def in_memory() -> Any:
        queues: Any = told.broker.vhosts["/"].statistics()["queues"]
        return queues["q"]["backing_queue"]["messages_ready_ram"]

    await told.broker.policies.set("/", "lazy", "^q$", {"queue-mode": "lazy"})
    await wait_until(lambda: not in_memory())
    await queue.delete(if_unused=False, if_empty=False)


@pytest.mark.parametrize(
    "goes", [gone_by_get, gone_by_delivery, gone_by_purge, gone_by_deletion, gone_on_disk]
)
async def test_what_is_gone_is_forgotten(settings: Settings, goes: Any) -> None:
    async with Telling(settings) as told, await aio_pika.connect(told.url) as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue("q")
        for body in (b"1", b"22", b"333"):
            await channel.default_exchange.publish(Message(body), "q")
        for taken in [await take(queue) for _ in range(3)]:
            await taken.nack()
        assert told.broker.message_log is not None
        known = told.broker.message_log.returns
        await wait_until(lambda: len(known) == 3)
        await goes(told, queue)
        assert len(known) == 0


async def test_a_purge_leaves_what_consumers_have(settings: Settings) -> None:
    async with Telling(settings) as told, await aio_pika.connect(told.url) as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue("q")
        for body in (b"1", b"22"):
            await channel.default_exchange.publish(Message(body), "q")
        for taken in [await take(queue) for _ in range(2)]:
            await taken.nack()
        held = await take(queue)
        await queue.purge()
        await held.nack()
        await take(queue, no_ack=True)
    assert [event.delivery_count for event in told.of("requeue")] == [1, 1, 2]
    assert told.of("get")[-1].delivery_count == 2
