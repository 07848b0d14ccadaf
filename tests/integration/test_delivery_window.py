"""The delivery window: a consumer that does not read costs little memory and nobody's time.

A queue has at most a window of deliveries under way to one channel, and the window is opened
again only while the channel's socket takes what it is given. The consumers here are bare sockets
that read when the test says so.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from pamqp import commands

from leveret.broker.config import Settings
from leveret.broker.connection.reader import Reader
from leveret.broker.connection.writer import HIGH_MARK
from leveret.broker.queues.commands import Deliver
from leveret.broker.server import Broker
from leveret.protocol.codec import make
from tests.support.held_queues import channels, readers
from tests.support.raw_client import RawClient, publish
from tests.support.waiting import wait_until, wait_until_quiet

pytestmark = pytest.mark.timeout(60)

# How long nothing must change for the broker to be taken as done.
QUIET_S = 0.1
SMALL_BUFFER = 16 << 10
CREDIT_BYTES = 16 << 10
MIB = 1 << 20


async def wait_quiet(observe: Callable[[], object]) -> None:
    await wait_until_quiet(observe, QUIET_S)


def queue_statistics(broker: Broker, queue: str) -> dict[str, Any]:
    queues = broker.vhosts["/"].statistics()["queues"]
    assert isinstance(queues, dict)
    return dict(queues[queue])


async def fill(broker: Broker, queue: str, count: int, size: int) -> None:
    """Declare a queue and put numbered messages into it."""
    async with await RawClient.open(broker.port) as client:
        declaration = make(commands.Queue.Declare, queue=queue, arguments={})
        await client.call(1, declaration, commands.Queue.DeclareOk)
        for number in range(count):
            await client.send(publish(1, queue, struct.pack(">I", number).ljust(size, b".")))
        await wait_until(lambda: queue_statistics(broker, queue)["publish"] == count)
        await client.say_goodbye()


async def consume(
    client: RawClient, queue: str, *, channel: int = 1, no_ack: bool = False, prefetch: int = 0
) -> None:
    qos = make(commands.Basic.Qos, prefetch_count=prefetch)
    await client.call(channel, qos, commands.Basic.QosOk)
    # No answer is asked for: what comes next would be deliveries.
    await client.tell(
        channel,
        make(commands.Basic.Consume, queue=queue, no_ack=no_ack, nowait=True, arguments={}),
    )


async def read_numbers(client: RawClient, count: int) -> list[int]:
    bodies = [(await client.receive()).body for _ in range(count)]
    return [struct.unpack(">I", body[:4])[0] for body in bodies]


def bytes_for(reader: Reader) -> int:
    """What the broker holds for this connection's consumers beside the queues themselves."""
    waiting = [item for channel in reader._channels.values() for item in channel.mailbox.urgent]
    return reader.writer.backlog + sum(
        len(message.body)
        for item in waiting
        if isinstance(item, Deliver)
        for message in item.messages
    )


@pytest.mark.parametrize("no_ack", [True, False], ids=["no-ack", "ack"])
@pytest.mark.parametrize(
    ("count", "size"),
    [
        pytest.param(30_000, 100, id="100B"),
        pytest.param(3_000, 10_000, id="10kB"),
        pytest.param(200, 150_000, id="150kB"),
        pytest.param(24, MIB, id="1MiB"),
    ],
)
async def test_a_consumer_that_does_not_read_costs_little(
    broker: Broker, count: int, size: int, no_ack: bool
) -> None:
    """And misses nothing, once it reads."""
    await fill(broker, "q", count, size)
    async with await RawClient.open(broker.port, receive_buffer=SMALL_BUFFER) as slow:
        await consume(slow, "q", no_ack=no_ack)
        [reader] = readers(broker)
        await wait_quiet(lambda: (reader.writer.bytes_sent, reader.writer.backlog))

        assert reader.writer.is_paused
        window = broker.settings.delivery_window * CREDIT_BYTES
        assert bytes_for(reader) <= HIGH_MARK + window + size
        # The queue has kept the rest.
        assert queue_statistics(broker, "q")["messages_ready"] > 0

        assert await read_numbers(slow, count) == list(range(count))
        assert queue_statistics(broker, "q")["messages_ready"] == 0
        assert not reader.writer.is_paused


async def test_other_consumers_of_the_queue_are_served(broker: Broker) -> None:
    count = 2_000
    await fill(broker, "q", count, 10_000)
    async with (
        await RawClient.open(broker.port, receive_buffer=SMALL_BUFFER) as slow,
        await RawClient.open(broker.port) as quick,
    ):
        await consume(slow, "q", no_ack=True)
        await wait_quiet(lambda: [reader.writer.bytes_sent for reader in readers(broker)])
        delivered = queue_statistics(broker, "q")["deliver_no_ack"]
        assert 0 < delivered < count
        await consume(quick, "q", no_ack=True)
        # All that the one who does not read was not given, in order.
        assert await read_numbers(quick, count - delivered) == list(range(delivered, count))
        assert await read_numbers(slow, delivered) == list(range(delivered))


async def test_publishers_and_other_queues_do_not_notice(broker: Broker) -> None:
    await fill(broker, "q", 2_000, 10_000)
    async with await RawClient.open(broker.port, receive_buffer=SMALL_BUFFER) as slow:
        await consume(slow, "q", no_ack=True)
        await wait_quiet(lambda: [reader.writer.bytes_sent for reader in readers(broker)])
        # A publisher to the very queue, far beyond its credit.
        async with await RawClient.open(broker.port) as publisher:
            more = 5 * broker.settings.credit_flow_initial
            for _ in range(more):
                await publisher.send(publish(1, "q", b"more"))
            await wait_until(lambda: queue_statistics(broker, "q")["publish"] == 2_000 + more)
            assert not any(channel.flow.is_blocked for channel in channels(broker))
        await fill(broker, "another", 100, 100)
        async with await RawClient.open(broker.port) as consumer:
            await consume(consumer, "another", no_ack=True)
            assert await read_numbers(consumer, 100) == list(range(100))


async def test_its_other_methods_are_still_answered(broker: Broker) -> None:
    """Deliveries stop at the high mark; answers still fit in behind them."""
    await fill(broker, "q", 2_000, 10_000)
    async with await RawClient.open(broker.port, receive_buffer=SMALL_BUFFER, channels=2) as slow:
        await consume(slow, "q", no_ack=True)
        [reader] = readers(broker)
        await wait_quiet(lambda: reader.writer.bytes_sent)
        assert reader.writer.is_paused
        await slow.tell(2, make(commands.Queue.Declare, queue="mine", arguments={}))
        await wait_until(lambda: "mine" in broker.vhosts["/"].topology.queues)


async def test_the_window_that_was_configured(settings: Settings) -> None:
    """In messages, and for large ones in units of 16 KiB."""
    async with Broker(replace(settings, delivery_window=5)) as broker:
        await fill(broker, "q", 300, 20_000)
        async with await RawClient.open(broker.port, receive_buffer=SMALL_BUFFER) as slow:
            await consume(slow, "q", no_ack=True)
            [reader] = readers(broker)
            await wait_quiet(lambda: reader.writer.bytes_sent)
            # What fits into 5 units, on top of what the socket was willing to take.
            assert bytes_for(reader) <= HIGH_MARK + 5 * CREDIT_BYTES + 20_000
            assert await read_numbers(slow, 300) == list(range(300))


async def test_each_channel_of_a_queue_has_a_window(broker: Broker) -> None:
    """Several consumers on one socket that is not read cost a window each, not more."""
    count, size, many = 3_000, 10_000, 4
    await fill(broker, "q", count, size)
    async with await RawClient.open(
        broker.port, receive_buffer=SMALL_BUFFER, channels=many
    ) as slow:
        for channel in range(1, many + 1):
            await slow.tell(
                channel,
                make(commands.Basic.Consume, queue="q", no_ack=True, nowait=True, arguments={}),
            )
        [reader] = readers(broker)
        await wait_quiet(lambda: reader.writer.bytes_sent)
        window = broker.settings.delivery_window * CREDIT_BYTES
        assert bytes_for(reader) <= HIGH_MARK + many * (window + size)
        assert sorted(await read_numbers(slow, count)) == list(range(count))


async def test_what_was_under_way_returns_when_the_consumer_hangs_up(broker: Broker) -> None:
    count = 1_000
    await fill(broker, "q", count, 10_000)
    slow = await RawClient.open(broker.port, receive_buffer=SMALL_BUFFER)
    await consume(slow, "q")
    await wait_quiet(lambda: [reader.writer.bytes_sent for reader in readers(broker)])
    assert queue_statistics(broker, "q")["messages_unacknowledged"] > 0
    slow.close()
    await wait_until(lambda: not readers(broker))
    await wait_until(lambda: queue_statistics(broker, "q")["messages_ready"] == count)
    async with await RawClient.open(broker.port) as quick:
        await consume(quick, "q", no_ack=True)
        assert await read_numbers(quick, count) == list(range(count))
