"""Credit flow from queue to socket: a publisher that outruns a queue is slowed, never buffered.

The broker runs in the test's own loop, so that its mailboxes can be counted; the publisher is a
bare socket that is filled until it takes no more.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
from pamqp import commands

from leveret.broker.config import Settings
from leveret.broker.queues.commands import DeleteNow, Delivery
from leveret.broker.server import Broker
from leveret.protocol.codec import make
from tests.support.flood import STEP_S, Flood
from tests.support.held_queues import (
    HeldQueues,
    channels,
    cost_under_way,
    queue_mailbox,
    readers,
    uncut_bytes,
)
from tests.support.raw_client import RawClient, publish
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(60)

DEADLINE_S = 20.0
# What is read from a socket in one turn of the loop: libuv reads up to 32 times 256 KiB.
UNCUT_BYTES = 8 << 20


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldQueues]:
    held = HeldQueues(monkeypatch)
    yield held
    held.release()


@pytest.fixture
async def publisher(held: HeldQueues, broker: Broker) -> AsyncIterator[RawClient]:
    async with await RawClient.open(broker.port) as client:
        yield client
        held.release()


async def declare(client: RawClient, queue: str, *, exclusive: bool = False) -> None:
    declaration = make(commands.Queue.Declare, queue=queue, exclusive=exclusive, arguments={})
    await client.call(1, declaration, commands.Queue.DeclareOk)


async def consume_numbers(port: int, queue: str, count: int) -> list[int]:
    """The numbers of that many messages, in the order in which they are delivered."""
    async with await RawClient.open(port) as client:
        consume = make(commands.Basic.Consume, queue=queue, no_ack=True, arguments={})
        await client.call(1, consume, commands.Basic.ConsumeOk)
        bodies = [(await client.receive()).body for _ in range(count)]
        await client.say_goodbye()
    return [struct.unpack(">Q", body[:8])[0] for body in bodies]


def published(broker: Broker, queue: str) -> int:
    statistics = broker.vhosts["/"].statistics()["queues"]
    assert isinstance(statistics, dict)
    count = statistics[queue]["publish"]
    assert isinstance(count, int)
    return count


async def wait_until_queue_has(broker: Broker, queue: str, count: int) -> None:
    await wait_until(lambda: published(broker, queue) >= count)


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(100, id="100B"),
        pytest.param(5_000, id="5kB"),
        pytest.param(100_000, id="100kB"),
        pytest.param(1 << 20, id="1MiB"),
    ],
)
async def test_a_queue_that_does_not_take_blocks_the_publishers_socket(
    held: HeldQueues, broker: Broker, publisher: RawClient, size: int
) -> None:
    """All that waits between socket and queue is within the credit of both links."""
    await declare(publisher, "held")
    held.hold(broker, "held")
    flood = Flood(publisher, "held", size=size)
    await flood.until_blocked()

    [reader] = readers(broker)
    assert reader.statistics()["state"] == "flow"
    one_message = 1 + size // 16384
    # The last message may exceed the credit that is left.
    assert cost_under_way(broker) <= 2 * broker.settings.credit_flow_initial + one_message - 1
    assert uncut_bytes(broker) <= UNCUT_BYTES + size

    held.release()
    await flood.send_more(10)
    assert await consume_numbers(broker.port, "held", flood.sent) == list(range(flood.sent))


@pytest.mark.parametrize(("initial", "more_after"), [(1, 1), (10, 5), (50, 50)])
async def test_the_credit_that_was_configured(
    held: HeldQueues, settings: Settings, initial: int, more_after: int
) -> None:
    settings = replace(settings, credit_flow_initial=initial, credit_flow_more_after=more_after)
    async with Broker(settings) as broker, await RawClient.open(broker.port) as publisher:
        await declare(publisher, "held")
        held.hold(broker, "held")
        flood = Flood(publisher, "held", size=1000)
        await flood.until_blocked()
        assert 0 < cost_under_way(broker) <= 2 * initial
        held.release()
        await flood.send_more(10)
        assert await consume_numbers(broker.port, "held", flood.sent) == list(range(flood.sent))


async def test_queues_need_not_slow_their_publishers(settings: Settings, held: HeldQueues) -> None:
    """[34]: without flow control a queue that does not take is buffered for, as asked."""
    settings = replace(settings, classic_queue_flow_control="off")
    async with Broker(settings) as broker, await RawClient.open(broker.port) as publisher:
        await declare(publisher, "q")
        held.hold(broker, "q")
        count = 5 * settings.credit_flow_initial
        await publisher.send(b"".join(publish(1, "q", b"x") for _ in range(count)))
        mailbox = queue_mailbox(broker, "q")

        def waiting() -> int:
            taken = [item for item in mailbox.ordinary if isinstance(item, Delivery)]
            return sum(len(delivery.messages) for delivery in taken)

        await wait_until(lambda: waiting() == count)
        held.release()


async def test_channels_share_the_fate_of_their_socket(held: HeldQueues, broker: Broker) -> None:
    """Each channel has links of its own; one that is blocked stops the reader of them all."""
    async with await RawClient.open(broker.port, channels=3) as publisher:
        await declare(publisher, "held")
        held.hold(broker, "held")
        flood = Flood(publisher, "held", size=1000, channels=(1, 2, 3))
        await flood.until_blocked()
        assert cost_under_way(broker) <= 3 * 2 * broker.settings.credit_flow_initial
        held.release()
        await flood.send_more(10)
        numbers = await consume_numbers(broker.port, "held", flood.sent)
    # Order holds within a channel, not between channels.
    for channel in range(3):
        mine = [number for number in numbers if number % 3 == channel]
        assert mine == list(range(channel, flood.sent, 3))


async def test_a_message_for_several_queues_is_limited_by_the_slowest(
    held: HeldQueues, broker: Broker, publisher: RawClient
) -> None:
    for name in ("fast", "slow", "fast, too"):
        await declare(publisher, name)
        bind = make(commands.Queue.Bind, queue=name, exchange="amq.fanout", arguments={})
        await publisher.call(1, bind, commands.Queue.BindOk)
    held.hold(broker, "slow")
    flood = Flood(publisher, "", exchange="amq.fanout", size=2000)
    await flood.until_blocked()

    [channel] = channels(broker)
    assert channel.flow.blockers == {queue_mailbox(broker, "slow")}
    initial = broker.settings.credit_flow_initial
    assert cost_under_way(broker) <= 2 * initial
    # What the slow one has not taken, the fast ones have: they wait with it, not for it.
    assert not queue_mailbox(broker, "fast").ordinary
    assert initial <= published(broker, "fast") <= 2 * initial

    held.release()
    await flood.send_more(10)
    for name in ("fast", "slow", "fast, too"):
        numbers = await consume_numbers(broker.port, name, flood.sent)
        assert numbers == list(range(flood.sent))


async def test_another_connections_publisher_is_not_slowed(
    held: HeldQueues, broker: Broker, publisher: RawClient
) -> None:
    await declare(publisher, "held")
    held.hold(broker, "held")
    await Flood(publisher, "held", size=2000).until_blocked()

    async with await RawClient.open(broker.port) as other:
        await declare(other, "free")
        flood = Flood(other, "free", size=2000)
        # Many times the credit of its links.
        count = 10 * broker.settings.credit_flow_initial
        await flood.send_more(count)
        await wait_until_queue_has(broker, "free", count)
        assert await consume_numbers(broker.port, "free", count) == list(range(count))
        # Nor is it slowed while it asks the broker for other things.
        await declare(other, "one more")
    states = [reader.statistics()["state"] for reader in readers(broker)]
    assert "flow" in states


async def test_a_queue_that_is_gone_blocks_nobody(
    held: HeldQueues, broker: Broker, publisher: RawClient
) -> None:
    """Deleted before it took anything: the publisher goes on, to where there is no queue."""
    owner = await RawClient.open(broker.port)
    await declare(owner, "held", exclusive=True)
    await declare(publisher, "next")
    held.hold(broker, "held")
    flood = Flood(publisher, "held", size=2000)
    await flood.until_blocked()
    assert any(channel.flow.is_blocked for channel in channels(broker))

    # Its owner goes, and the queue with it: that is in the urgent lane, before all messages.
    mailbox = queue_mailbox(broker, "held")
    [counters] = [
        actor.counters
        for queue, actor in broker.vhosts["/"]._supervisor.actors.items()
        if queue.mailbox is mailbox
    ]
    owner.close()
    await wait_until(lambda: any(isinstance(item, DeleteNow) for item in mailbox.urgent))
    held.release()
    await flood.finish_message()
    await Flood(publisher, "next", size=10).send_more(1)
    await wait_until_queue_has(broker, "next", 1)
    [channel] = channels(broker)
    assert not channel.flow.is_blocked
    assert channel.counters.publish == flood.sent + 1
    assert counters.publish == 0


async def test_a_queue_that_crashes_blocks_nobody(
    held: HeldQueues, broker: Broker, publisher: RawClient, caplog: pytest.LogCaptureFixture
) -> None:
    await declare(publisher, "held")
    held.hold(broker, "held")
    flood = Flood(publisher, "held", size=2000)
    await flood.until_blocked()
    # Something no queue can handle.
    queue_mailbox(broker, "held").put_urgent(object())
    held.release()
    await flood.send_more(1)
    # The queue is back under its name, and takes what came after the crash.
    await wait_until(lambda: channels(broker)[0].counters.publish == flood.sent)
    assert not channels(broker)[0].flow.is_blocked
    assert "crashed; it is restarted" in caplog.text


async def test_a_blocked_publisher_that_hangs_up_is_forgotten(
    held: HeldQueues, broker: Broker
) -> None:
    publisher = await RawClient.open(broker.port)
    await declare(publisher, "held")
    held.hold(broker, "held")
    flood = Flood(publisher, "held", size=2000)
    await flood.until_blocked()
    publisher.close()
    held.release()
    await wait_until(lambda: not readers(broker))
    assert published(broker, "held") <= flood.sent


async def test_a_broker_with_a_blocked_publisher_can_be_stopped(
    held: HeldQueues, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is released: the queue does not take to the end."""
    monkeypatch.setattr("leveret.broker.server.CLOSE_CONNECTIONS_S", STEP_S)
    monkeypatch.setattr("leveret.broker.queues.supervisor.STOP_S", STEP_S)
    broker = Broker(settings)
    await broker.start()
    async with await RawClient.open(broker.port) as publisher:
        await declare(publisher, "held")
        held.hold(broker, "held")
        await Flood(publisher, "held", size=2000).until_blocked()
        [reader] = readers(broker)
        async with asyncio.timeout(DEADLINE_S):
            await broker.stop()
    assert not readers(broker)
    assert reader.mailbox.is_closed
