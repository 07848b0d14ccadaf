"""TTLs, limits, return counts and dead letters in the middle of which the broker stops or dies.

Stops are those of a broker in the test's loop, with files and a clock that the test moves, also
while the broker is down. Deaths are kill -9 of a broker process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel, AbstractQueue, DeliveryMode
from aio_pika.exceptions import DeliveryError

from leveret.broker.clock import VirtualClock
from leveret.broker.config import Settings
from leveret.broker.server import Broker
from tests.support.broker_process import BrokerProcess
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(60)

TTL_MS = 60_000
DEAD: dict[str, Any] = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}


class Lives:
    """One data folder, several brokers one after the other, and the time that passes."""

    def __init__(self, folder: Path) -> None:
        self._settings = Settings(port=0, data=folder / "data")
        self._now = 1_700_000_000.0

    @asynccontextmanager
    async def live(self) -> AsyncIterator[Life]:
        clock = VirtualClock(self._now)
        async with Broker(self._settings, clock) as broker:
            async with await aio_pika.connect(broker.url) as connection:
                yield Life(broker, clock, await connection.channel())
                self._now = clock.now()

    def pass_time(self, milliseconds: int) -> None:
        """While no broker runs."""
        self._now += milliseconds / 1000


class Life:
    def __init__(self, broker: Broker, clock: VirtualClock, channel: AbstractChannel) -> None:
        self.broker = broker
        self.clock = clock
        self.channel = channel

    async def declare(self, name: str, **arguments: Any) -> AbstractQueue:
        given = {name.replace("_", "-"): value for name, value in arguments.items()}
        return await self.channel.declare_queue(name, durable=True, arguments=given)

    async def publish(
        self, queue: str, *bodies: bytes, ttl_ms: int | None = None, persistent: bool = True
    ) -> None:
        for body in bodies:
            mode = DeliveryMode.PERSISTENT if persistent else DeliveryMode.NOT_PERSISTENT
            expiration = None if ttl_ms is None else ttl_ms / 1000
            message = aio_pika.Message(body, delivery_mode=mode, expiration=expiration)
            await self.channel.default_exchange.publish(message, queue)

    def count(self, name: str, counter: str = "messages_ready") -> Any:
        [vhost] = self.broker.vhosts.values()
        statistics: Any = vhost.statistics()
        return statistics["queues"][name][counter]

    def pass_time(self, milliseconds: int) -> None:
        self.clock.advance(milliseconds / 1000)

    async def bodies(self, name: str) -> list[bytes]:
        queue = await self.channel.get_queue(name)
        found = []
        while (message := await queue.get(no_ack=True, fail=False)) is not None:
            found.append(message.body)
        return found


@pytest.fixture
def lives(tmp_path: Path) -> Lives:
    return Lives(tmp_path)


# --- TTL ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["default", "lazy"])
@pytest.mark.parametrize("is_exact", [False, True])
async def test_a_message_expires_at_its_time_in_the_next_life(
    lives: Lives, mode: str, is_exact: bool
) -> None:
    arguments = {"x_message_ttl": TTL_MS, "x_message_ttl_exact": is_exact, "x_queue_mode": mode}
    async with lives.live() as life:
        await life.declare("dead")
        await life.declare("q", **arguments, **_names(DEAD))
        await life.publish("q", b"a")
        life.pass_time(TTL_MS // 2)
        await life.publish("q", b"b")
    lives.pass_time(TTL_MS // 4)
    async with lives.live() as life:
        life.pass_time(TTL_MS // 4 - 1)
        assert life.count("q") == 2
        life.pass_time(1)
        await wait_until(lambda: life.count("dead") == 1)
        assert life.count("q") == 1
        life.pass_time(TTL_MS)
        await wait_until(lambda: life.count("dead") == 2)
        assert await life.bodies("dead") == [b"a", b"b"]


@pytest.mark.parametrize("is_exact", [False, True])
async def test_what_expired_while_the_broker_was_down_is_never_delivered(
    lives: Lives, is_exact: bool
) -> None:
    async with lives.live() as life:
        await life.declare("dead")
        await life.declare("q", x_message_ttl_exact=is_exact, **_names(DEAD))
        await life.publish("q", b"brief", ttl_ms=1_000)
        await life.publish("q", b"long", ttl_ms=TTL_MS)
        await life.publish("q", b"brief, too", ttl_ms=500)
        await life.publish("q", b"for ever")
    lives.pass_time(2_000)
    async with lives.live() as life:
        expected = [b"brief, too", b"brief"] if is_exact else [b"brief"]
        await wait_until(lambda: life.count("dead") == len(expected))
        assert await life.bodies("dead") == expected
        assert await life.bodies("q") == [b"long", b"for ever"]
        await wait_until(lambda: life.count("q", "messages") == 0)
        assert await life.bodies("dead") == ([] if is_exact else [b"brief, too"])


async def test_a_requeued_message_keeps_its_time_over_a_restart(lives: Lives) -> None:
    async with lives.live() as life:
        queue = await life.declare("q", x_message_ttl=TTL_MS)
        await life.publish("q", b"a")
        life.pass_time(TTL_MS // 2)
        message = await queue.get()
        # It is unacked when the broker stops.
        assert message is not None
    async with lives.live() as life:
        life.pass_time(TTL_MS // 2 - 1)
        assert life.count("q") == 1
        life.pass_time(1)
        await wait_until(lambda: life.count("q") == 0)


async def test_a_queue_that_becomes_exact_after_a_restart_finds_what_is_on_disk(
    lives: Lives,
) -> None:
    """Those rows were written without the mark by which an exact queue finds them."""
    async with lives.live() as life:
        await life.declare("dead")
        await life.declare("q", **_names(DEAD))
        await life.publish("q", b"for ever")
        for number in range(50):
            await life.publish("q", b"%d" % number, ttl_ms=1_000 * (50 - number))
    async with lives.live() as life:
        await life.broker.policies.set("/", "exact", "^q$", {"message-ttl-exact": True})
        life.pass_time(10_000)
        await wait_until(lambda: life.count("dead") == 10)
        assert [int(body) for body in await life.bodies("dead")] == list(range(49, 39, -1))
        life.pass_time(40_000)
        await wait_until(lambda: life.count("dead") == 40)
        assert life.count("q") == 1


async def test_a_queue_that_nobody_used_goes_after_the_restart(lives: Lives) -> None:
    """Its time begins anew: nobody could have used it while the broker was down."""
    async with lives.live() as life:
        await life.declare("q", x_expires=TTL_MS)
    lives.pass_time(10 * TTL_MS)
    async with lives.live() as life:
        life.pass_time(TTL_MS - 1)
        assert "q" in life.broker.vhosts["/"].topology.queues
        life.pass_time(1)
        await wait_until(lambda: "q" not in life.broker.vhosts["/"].topology.queues)


# --- limits ------------------------------------------------------------------------------------


async def test_limits_hold_after_a_restart(lives: Lives) -> None:
    async with lives.live() as life:
        await life.declare("dead")
        await life.declare("short", x_max_length=2, **_names(DEAD))
        await life.declare("strict", x_max_length_bytes=4, x_overflow="reject-publish")
        await life.publish("short", b"1", b"2")
        await life.publish("strict", b"123")
    async with lives.live() as life:
        await life.publish("short", b"3")
        await wait_until(lambda: life.count("dead") == 1)
        with pytest.raises(DeliveryError):
            await life.publish("strict", b"45")
        await life.publish("strict", b"4")
        assert await life.bodies("short") == [b"2", b"3"]
        assert await life.bodies("strict") == [b"123", b"4"]


async def test_a_limit_by_policy_holds_after_a_restart(lives: Lives) -> None:
    async with lives.live() as life:
        await life.declare("q")
        await life.publish("q", b"1", b"2", b"3")
        await life.broker.policies.set("/", "short", "^q$", {"max-length": 2})
        await wait_until(lambda: life.count("q") == 2)
    async with lives.live() as life:
        await life.publish("q", b"4")
        assert await life.bodies("q") == [b"3", b"4"]


# --- returns -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["default", "lazy"])
async def test_returns_are_counted_over_restarts(lives: Lives, mode: str) -> None:
    """After N returns a message is dead, in whichever life they came."""
    limit = 4
    async with lives.live() as life:
        await life.declare("dead")
        await life.declare("q", x_queue_mode=mode, **_names(DEAD))
        await life.broker.policies.set("/", "poison", "^q$", {"delivery-limit": limit})
        await life.publish("q", b"poison")
        await _return_one(life, "q", 2)
    async with lives.live() as life:
        await _return_one(life, "q", 1)
    async with lives.live() as life:
        await _return_one(life, "q", limit - 3)
        assert (life.count("q"), life.count("dead")) == (1, 0)
        await _return_one(life, "q", 1)
        await wait_until(lambda: life.count("dead") == 1)
        assert life.count("q", "messages") == 0
        assert life.count("q", "dead_letter") == {"delivery_limit": 1}


async def test_a_quorum_queue_tells_its_count_after_a_restart(lives: Lives) -> None:
    async with lives.live() as life:
        await life.declare("q", x_queue_type="quorum")
        await life.publish("q", b"a")
        await _return_one(life, "q", 3)
    async with lives.live() as life:
        queue = await life.channel.get_queue("q")
        message = await queue.get(no_ack=True)
        assert message is not None
        assert message.headers["x-delivery-count"] == 3


def _returned(life: Life, name: str) -> int:
    dead: int = sum(life.count(name, "dead_letter").values())
    requeued: int = life.count(name, "requeue")
    return requeued + dead


async def _return_one(life: Life, name: str, times: int) -> None:
    queue = await life.channel.get_queue(name)
    for _ in range(times):
        message = await queue.get()
        assert message is not None
        before = _returned(life, name)
        await message.nack(requeue=True)
        await wait_until(lambda: _returned(life, name) > before)  # noqa: B023


# --- kill -9 -----------------------------------------------------------------------------------


@pytest.fixture
async def processes(tmp_path: Path) -> AsyncIterator[list[BrokerProcess]]:
    """Brokers on one folder; the last is killed at the end, if it runs."""
    started: list[BrokerProcess] = []
    yield started
    if started and started[-1].is_running:
        await asyncio.to_thread(started[-1].kill)


async def start(processes: list[BrokerProcess], folder: Path) -> BrokerProcess:
    if processes and processes[-1].is_running:
        await asyncio.to_thread(processes[-1].kill)
    processes.append(await asyncio.to_thread(BrokerProcess, folder / "data", folder / "log"))
    return processes[-1]


async def test_what_was_to_expire_expires_after_a_kill(
    tmp_path: Path, processes: list[BrokerProcess]
) -> None:
    """Exact: all of it is on disk, where the index of due times finds it."""
    broker = await start(processes, tmp_path)
    async with await aio_pika.connect(broker.url) as connection:
        channel = await connection.channel()
        await channel.declare_queue("dead", durable=True)
        arguments = {**DEAD, "x-message-ttl-exact": True}
        await channel.declare_queue("q", durable=True, arguments=arguments)
        # Together, so that they come within some milliseconds.
        sent = [
            channel.default_exchange.publish(
                aio_pika.Message(
                    b"%d" % number,
                    delivery_mode=DeliveryMode.PERSISTENT,
                    expiration=0.2 + 0.05 * (20 - number),
                ),
                "q",
            )
            for number in range(20)
        ]
        await asyncio.gather(*sent)
        keep = aio_pika.Message(b"kept", delivery_mode=DeliveryMode.PERSISTENT)
        await channel.default_exchange.publish(keep, "q")
        broker = await start(processes, tmp_path)
    async with await aio_pika.connect(broker.url) as connection:
        channel = await connection.channel()
        dead = await channel.get_queue("dead")
        found: list[int] = []
        async with asyncio.timeout(20), dead.iterator(no_ack=True) as messages:
            async for message in messages:
                found.append(int(message.body))
                if len(found) == 20:
                    break
        assert found == list(range(19, -1, -1))
        queue = await channel.get_queue("q")
        left = await queue.get(no_ack=True)
        assert left is not None
        assert left.body == b"kept"


async def test_a_poison_message_dies_although_the_broker_did_before(
    tmp_path: Path, processes: list[BrokerProcess]
) -> None:
    """The count is written when a message returns: a later confirm
    shows that it is on disk, if that later message is unacked."""
    for attempt in range(3):
        broker = await start(processes, tmp_path)
        async with await aio_pika.connect(broker.url) as connection:
            channel = await connection.channel()
            dead = await channel.declare_queue("dead", durable=True)
            arguments = {**DEAD, "x-queue-type": "quorum", "x-delivery-limit": 2}
            queue = await channel.declare_queue("q", durable=True, arguments=arguments)
            poison = aio_pika.Message(b"poison", delivery_mode=DeliveryMode.PERSISTENT)
            if not attempt:
                await channel.default_exchange.publish(poison, "q")
            message = await queue.get()
            assert message is not None
            assert message.headers["x-delivery-count"] == attempt
            await message.nack(requeue=True)
            # Behind the nack in the channel, and on disk behind what that has put.
            await channel.declare_queue("after", durable=True)
            await channel.default_exchange.publish(poison, "after")
            await channel.default_exchange.publish(poison, "after")
            if attempt == 2:
                async with asyncio.timeout(20), dead.iterator(no_ack=True) as messages:
                    async for buried in messages:
                        assert buried.body == b"poison"
                        break


def _names(arguments: dict[str, str]) -> dict[str, str]:
    return {name.replace("-", "_"): value for name, value in arguments.items()}
