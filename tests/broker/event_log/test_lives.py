"""Whatever clients do, the log is whole: every line, every number, every life."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import aio_pika
import aiormq.exceptions
import pytest
from aio_pika import DeliveryMode, ExchangeType, Message
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractIncomingMessage

from leveret.broker.config import Settings
from tests.broker.event_log.lives import Lives
from tests.broker.event_log.telling import Telling
from tests.support.waiting import wait_until, wait_until_quiet


def dying(name: str, **arguments: Any) -> dict[str, dict[str, Any]]:
    """A queue, and one for its dead: copies of a message that meet could not be told apart."""
    dead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": f"dead.{name}"}
    return {name: {**arguments, **dead}, f"dead.{name}": {"x-max-length": 50}}


QUEUES: dict[str, dict[str, Any]] = {
    "plain": {},
    "urgent": {"x-max-priority": 5},
    "doomed": {},
    **dying("short", **{"x-max-length": 5}),
    "shorter": {"x-max-length": 3},
    "strict": {"x-max-length": 4, "x-overflow": "reject-publish"},
    **dying("stricter", **{"x-max-length": 4, "x-overflow": "reject-publish-dlx"}),
    **dying("brief", **{"x-message-ttl": 1}),
    "briefer": {"x-message-ttl": 0},
    "lost": {"x-max-length": 2, "x-dead-letter-exchange": "missing"},
    **dying("patient", **{"x-queue-type": "quorum", "x-delivery-limit": 2}),
    "impatient": {"x-queue-type": "quorum", "x-delivery-limit": 1},
}


async def declare(channel: AbstractChannel) -> None:
    everywhere = await channel.declare_exchange("everywhere", ExchangeType.TOPIC)
    for name, arguments in QUEUES.items():
        queue = await channel.declare_queue(name, durable=True, arguments=arguments)
        if not name.startswith("dead."):
            await queue.bind(everywhere, f"some.{name[0]}")
            await queue.bind(everywhere, "all")


class Client:
    """Does this and that, by chance; what it is told not to do twice, it may do twice."""

    def __init__(self, connection: AbstractConnection, random: Random, steps: int) -> None:
        self._connection = connection
        self._random = random
        self.left = steps
        self._channel: AbstractChannel | None = None
        self._kept: list[AbstractIncomingMessage] = []

    async def work(self) -> None:
        moves: list[tuple[Callable[[], Awaitable[object]], int]] = [
            (self._publish, 10),
            (self._take, 10),
            (self._answer, 8),
            (self._consume, 2),
            (self._purge, 1),
            (self._reopen, 1),
            (self._delete, 1),
        ]
        await self._reopen()
        while self.left > 0:
            self.left -= 1
            move = self._random.choices(*zip(*moves, strict=True))[0]
            try:
                await move()
            except aiormq.exceptions.ChannelClosed:
                await self._reopen()
            except (aiormq.exceptions.DeliveryError, aio_pika.exceptions.ChannelInvalidStateError):
                pass

    async def _reopen(self) -> None:
        if self._channel is not None and not self._channel.is_closed:
            await self._channel.close()
        self._kept = []
        confirms = self._random.random() < 0.7
        self._channel = await self._connection.channel(publisher_confirms=confirms)
        await self._channel.set_qos(self._random.choice((1, 3, 20)))

    @property
    def channel(self) -> AbstractChannel:
        assert self._channel is not None
        return self._channel

    def _queue(self) -> str:
        return self._random.choice(list(QUEUES))

    async def _publish(self) -> None:
        random = self._random
        name = random.choice(("", "", "everywhere"))
        exchange = await self.channel.get_exchange(name, ensure=False)
        key = self._queue() if not name else random.choice(("all", "some.s", "some.b", "none"))
        if random.random() < 0.1:
            key = "nowhere"
        message = Message(
            random.randbytes(random.choice((0, 5, 5_000))),
            delivery_mode=random.choice(list(DeliveryMode)),
            expiration=random.choice((None, None, 0.001)),
            priority=random.choice((None, 1, 5)),
        )
        is_mandatory = random.random() < 0.3
        sends = [
            exchange.publish(message, key, mandatory=is_mandatory)
            for _ in range(random.choice((1, 5, 30)))
        ]
        await asyncio.gather(*sends, return_exceptions=True)

    async def _take(self) -> None:
        queue = await self.channel.get_queue(self._queue(), ensure=False)
        no_ack = self._random.random() < 0.3
        taken = await queue.get(fail=False, no_ack=no_ack)
        if taken is not None and not no_ack:
            self._kept.append(taken)

    async def _answer(self) -> None:
        if not self._kept:
            return
        random = self._random
        message = self._kept.pop(random.randrange(len(self._kept)))
        multiple, requeue = random.random() < 0.2, random.random() < 0.5
        if multiple:
            last = message.delivery_tag or 0
            self._kept = [each for each in self._kept if (each.delivery_tag or 0) > last]
        how = random.randrange(3)
        if how == 0:
            await message.ack(multiple)
        elif how == 1:
            await message.nack(multiple, requeue)
        else:
            await message.reject(requeue)

    async def _consume(self) -> None:
        random = self._random
        queue = await self.channel.get_queue(self._queue(), ensure=False)

        async def take(message: AbstractIncomingMessage) -> None:
            if random.random() < 0.3:
                self._kept.append(message)
            elif random.random() < 0.8:
                await message.ack()
            else:
                await message.nack(requeue=random.random() < 0.5)

        async def see(message: AbstractIncomingMessage) -> None:
            """No answer is expected."""

        no_ack = random.random() < 0.3
        tag = await queue.consume(see if no_ack else take, no_ack=no_ack)
        await self._publish()
        if random.random() < 0.7:
            await queue.cancel(tag)

    async def _purge(self) -> None:
        await (await self.channel.get_queue(self._queue(), ensure=False)).purge()

    async def _delete(self) -> None:
        """While others use it, maybe; and again."""
        await self.channel.queue_delete("doomed")
        queue = await self.channel.declare_queue("doomed", durable=True)
        await queue.bind("everywhere", "all")


async def busy(settings: Settings, seed: int, clients: int, steps: int) -> None:
    ready: dict[str, int] = {}
    random = Random(seed)
    async with Telling(settings) as told:
        async with await aio_pika.connect(told.url) as connection:
            await declare(await connection.channel())

        async def one(random: Random) -> None:
            left = steps
            while left:
                async with await aio_pika.connect(told.url) as connection:
                    client = Client(connection, random, left)
                    try:
                        await client.work()
                    except (RuntimeError, ConnectionError, aiormq.exceptions.AMQPError):
                        # It answered on a channel that it had closed, which ends a connection.
                        continue
                    finally:
                        left = client.left

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(one(Random(random.random())))

        def state() -> dict[str, tuple[Any, ...]]:
            queues: Any = told.broker.vhosts["/"].statistics()["queues"]
            return {
                name: (each["messages_ready"], each["messages_unacknowledged"], each["dead_letter"])
                for name, each in queues.items()
            }

        await wait_until(lambda: not any(unacked for _, unacked, _ in state().values()))
        await wait_until(lambda: not state()["brief"][0])
        await wait_until_quiet(state, 0.2)
        ready = {name: count for name, (count, _, _) in state().items()}
    lives = Lives(counting=("patient", "impatient"))
    lives.check(told.events)
    assert {name: lives.ready(name) for name in ready} == ready
    assert len(lives.born) > clients * steps / 4


@pytest.mark.parametrize("seed", range(3))
async def test_any_workload_leaves_a_whole_log(settings: Settings, seed: int) -> None:
    await busy(settings, seed, clients=3, steps=60)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 110))
async def test_a_long_workload_leaves_a_whole_log(settings: Settings, seed: int) -> None:
    await busy(settings, seed, clients=6, steps=300)
