"""A whole broker whose queues must read before they answer: whatever clients do comes out right.

Its backing queues play queues whose messages are on disk: at random they answer that the head has
to be read first. Nothing that a client sees may depend on that.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage, AbstractQueue

from leveret.broker.config import Settings
from leveret.broker.server import Broker
from leveret.storage.backing_queue import BackingQueue
from leveret.storage.memory_queue import MemoryQueue
from tests.support.waiting import wait_until

SEEDS = (1, 2, 3)
COUNT = 60


@pytest.fixture(params=SEEDS)
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
async def slow_broker(settings: Settings, seed: int) -> AsyncIterator[Broker]:
    source = random.Random(seed)

    def make_backing(wake: Callable[[], None]) -> BackingQueue:
        return MemoryQueue(wake, random.Random(source.random()))

    async with Broker(settings, make_backing=make_backing) as broker:
        yield broker


@pytest.fixture
async def channel(slow_broker: Broker) -> AsyncIterator[AbstractChannel]:
    async with await aio_pika.connect(slow_broker.url) as connection:
        yield await connection.channel()


@pytest.fixture
async def queue(channel: AbstractChannel) -> AbstractQueue:
    return await channel.declare_queue("q")


async def publish(channel: AbstractChannel, *bodies: str) -> None:
    """All at once; returns when they are confirmed."""
    await asyncio.gather(
        *(
            channel.default_exchange.publish(aio_pika.Message(body.encode()), routing_key="q")
            for body in bodies
        )
    )


async def fill(channel: AbstractChannel, count: int = COUNT) -> list[str]:
    bodies = [str(number) for number in range(count)]
    await publish(channel, *bodies)
    return bodies


async def get(queue: AbstractQueue, *, no_ack: bool = False) -> AbstractIncomingMessage | None:
    return await queue.get(fail=False, no_ack=no_ack, timeout=10)


async def drain(queue: AbstractQueue) -> list[tuple[str, bool]]:
    """What is left, by gets: bodies and whether they were delivered before."""
    left = []
    while (message := await get(queue, no_ack=True)) is not None:
        left.append((message.body.decode(), bool(message.redelivered)))
    return left


class Inbox:
    """What a consumer was given, in order."""

    def __init__(self) -> None:
        self.messages: list[AbstractIncomingMessage] = []

    async def __call__(self, message: AbstractIncomingMessage) -> None:
        self.messages.append(message)

    @property
    def bodies(self) -> list[str]:
        return [message.body.decode() for message in self.messages]


@pytest.mark.parametrize("no_ack", [False, True], ids=["acked", "no-ack"])
@pytest.mark.parametrize("prefetch", [0, 1, 7])
async def test_consuming_a_backlog(
    channel: AbstractChannel, queue: AbstractQueue, no_ack: bool, prefetch: int
) -> None:
    bodies = await fill(channel)
    seen: list[str] = []

    async def take(message: AbstractIncomingMessage) -> None:
        seen.append(message.body.decode())
        assert not message.redelivered
        if not no_ack:
            await message.ack()

    await channel.set_qos(prefetch)
    await queue.consume(take, no_ack=no_ack)
    await wait_until(lambda: len(seen) >= COUNT)
    assert seen == bodies


async def test_consuming_while_others_publish(
    slow_broker: Broker, channel: AbstractChannel, queue: AbstractQueue
) -> None:
    bodies = await fill(channel)
    inbox = Inbox()
    await queue.consume(inbox, no_ack=True)
    for number in range(COUNT, 2 * COUNT):
        await publish(channel, str(number))
        bodies.append(str(number))
    await wait_until(lambda: len(inbox.messages) >= len(bodies))
    assert inbox.bodies == bodies


async def test_getting(channel: AbstractChannel, queue: AbstractQueue) -> None:
    bodies = await fill(channel)
    for left, body in zip(range(COUNT - 1, -1, -1), bodies, strict=True):
        message = await get(queue)
        assert message is not None
        assert (message.body.decode(), message.message_count) == (body, left)
        await message.ack()
    assert await get(queue) is None


async def test_several_who_get(
    slow_broker: Broker, channel: AbstractChannel, queue: AbstractQueue
) -> None:
    """Each message once, and nobody waits for ever."""
    bodies = await fill(channel)
    got: list[str] = []

    async def get_all() -> None:
        async with await aio_pika.connect(slow_broker.url) as connection:
            mine = await (await connection.channel()).get_queue("q", ensure=False)
            while (message := await get(mine, no_ack=True)) is not None:
                got.append(message.body.decode())

    await asyncio.gather(*(get_all() for _ in range(4)))
    assert sorted(got, key=int) == bodies


async def test_requeueing(channel: AbstractChannel, queue: AbstractQueue) -> None:
    """Every third goes back to its place, marked."""
    bodies = await fill(channel)
    taken = [await get(queue) for _ in range(COUNT // 2)]
    for number, message in enumerate(taken):
        assert message is not None
        await (message.nack(requeue=True) if number % 3 == 0 else message.ack())
    expected = [(body, True) for body in bodies[: COUNT // 2 : 3]]
    expected += [(body, False) for body in bodies[COUNT // 2 :]]
    assert await drain(queue) == expected


async def test_a_consumer_that_dies(
    slow_broker: Broker, channel: AbstractChannel, queue: AbstractQueue
) -> None:
    bodies = await fill(channel)
    inbox = Inbox()
    async with await aio_pika.connect(slow_broker.url) as connection:
        other = await connection.channel()
        await other.set_qos(10)
        mine = await other.get_queue("q", ensure=False)
        await mine.consume(inbox)
        await wait_until(lambda: len(inbox.messages) >= 10)
    assert inbox.bodies == bodies[:10]
    assert await drain(queue) == [(body, place < 10) for place, body in enumerate(bodies)]


async def test_cancelling_in_the_middle(channel: AbstractChannel, queue: AbstractQueue) -> None:
    bodies = await fill(channel)
    inbox = Inbox()
    await channel.set_qos(5)
    tag = await queue.consume(inbox)
    await queue.cancel(tag)
    got = len(inbox.messages)
    for message in inbox.messages:
        await message.ack()
    assert inbox.bodies == bodies[:got]
    assert [body for body, _ in await drain(queue)] == bodies[got:]


async def test_purging(channel: AbstractChannel, queue: AbstractQueue) -> None:
    """What was delivered stays, and can go back."""
    bodies = await fill(channel)
    held = await get(queue)
    assert held is not None
    purged = await queue.purge()
    assert purged.message_count == COUNT - 1
    assert await get(queue) is None
    await held.nack(requeue=True)
    await publish(channel, "new")
    assert await drain(queue) == [(bodies[0], True), ("new", False)]


async def test_purging_under_a_consumer(channel: AbstractChannel, queue: AbstractQueue) -> None:
    """It may be waiting for what is purged; what comes afterwards reaches it."""
    bodies = await fill(channel)
    inbox = Inbox()
    await channel.set_qos(1)
    await queue.consume(inbox)
    purged = await queue.purge()
    await publish(channel, "new")
    survivors = COUNT - (purged.message_count or 0)
    seen = 0
    while seen <= survivors:
        await wait_until(lambda due=seen: len(inbox.messages) > due)  # type: ignore[misc]
        await inbox.messages[seen].ack()
        seen += 1
    assert inbox.bodies == [*bodies[:survivors], "new"]


async def test_deleting(channel: AbstractChannel, queue: AbstractQueue) -> None:
    await fill(channel)
    asked = asyncio.gather(*(get(queue, no_ack=True) for _ in range(3)))
    await asked
    deleted = await channel.queue_delete("q")
    assert deleted.message_count == COUNT - 3
    again = await channel.declare_queue("q")
    assert await get(again) is None
    await publish(channel, "new")
    assert await drain(again) == [("new", False)]


async def test_deleting_while_others_wait_for_an_answer(
    slow_broker: Broker, channel: AbstractChannel, queue: AbstractQueue
) -> None:
    """They get a message, or learn that the queue is gone: an answer in any case."""
    await fill(channel, 10)

    async def get_until_it_is_gone() -> None:
        async with await aio_pika.connect(slow_broker.url) as connection:
            mine = await (await connection.channel()).get_queue("q", ensure=False)
            gone = False
            while not gone:
                try:
                    await get(mine)
                except aio_pika.exceptions.ChannelNotFoundEntity:
                    gone = True

    getting = [asyncio.create_task(get_until_it_is_gone()) for _ in range(3)]
    await wait_until(lambda: len(slow_broker.listeners[0].readers) == 4)
    await channel.queue_delete("q")
    await asyncio.gather(*getting)


async def test_everything_at_once(
    slow_broker: Broker, channel: AbstractChannel, queue: AbstractQueue, seed: int
) -> None:
    """Workers that ack, requeue, or break off, while messages come: each is worked off once."""
    source = random.Random(seed)
    done: Counter[str] = Counter()

    async def work() -> None:
        """For a while: some workers leave with messages that they have not acked."""
        left = asyncio.Event()
        patience = source.randrange(5, 40)

        async def take(message: AbstractIncomingMessage) -> None:
            nonlocal patience
            if patience == 0:
                left.set()
                return
            patience -= 1
            if source.random() < 0.3:
                await message.nack(requeue=True)
            else:
                done[message.body.decode()] += 1
                await message.ack()

        async with await aio_pika.connect(slow_broker.url) as connection:
            other = await connection.channel()
            await other.set_qos(source.randrange(1, 6))
            await (await other.get_queue("q", ensure=False)).consume(take)
            await left.wait()

    workers = {asyncio.create_task(work()) for _ in range(3)}
    published = 0
    async with asyncio.timeout(60):
        while len(done) < 5 * COUNT:
            if published < 5 * COUNT:
                await publish(channel, *map(str, range(published, published + COUNT // 4)))
                published += COUNT // 4
            else:
                await asyncio.wait(workers, return_when=asyncio.FIRST_COMPLETED, timeout=0.05)
            workers = {task for task in workers if not task.done()}
            while len(workers) < 3:
                workers.add(asyncio.create_task(work()))
    for task in workers:
        task.cancel()
    await asyncio.wait(workers)
    assert done == Counter(map(str, range(5 * COUNT)))
