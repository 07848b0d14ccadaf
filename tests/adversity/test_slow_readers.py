"""Clients that do not read what they are sent: what they cost, and whom.

A socket has two buffers in the kernel, some megabytes together, before the broker notices. From
there on the broker's own share is bounded (connection/writer.py), and that is what counts here.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pamqp import commands

from leveret.broker.config import Settings
from leveret.broker.connection.writer import HIGH_MARK, STUCK_MARK, SocketWriter
from leveret.broker.server import Broker
from leveret.protocol.codec import make, method_frame
from tests.adversity.census import resident_bytes, take_census, wait_same, wait_until
from tests.adversity.steps import (
    confirmed,
    consume,
    fill_socket,
    make_queue,
    queue_statistics,
    reader_of,
    select_confirms,
)
from tests.support.broker_process import running_broker
from tests.support.raw_client import DEADLINE_S, RawClient, publish

MIB = 1 << 20
# What a queue may have under way to one channel: 200 messages, or 200 times 16 KiB.
WINDOW_BYTES = 200 << 14
# The kernel's buffers for one connection on this machine are smaller than this.
KERNEL_BYTES = 8 * MIB


def is_stuck(writer: SocketWriter) -> bool:
    return writer.is_stuck


def are_paused(broker: Broker, clients: list[RawClient]) -> bool:
    return all(reader_of(broker, client).writer.is_paused for client in clients)


async def settle(client: RawClient, queue: str) -> None:
    """Until the broker has nothing more to do: the queue looks the same, five times over."""
    passive = make(commands.Queue.Declare, queue=queue, passive=True)
    last: int | None = None
    count: int | None = None
    same = 0
    while same < 5:
        for _ in range(20):
            count = (await client.call(1, passive, commands.Queue.DeclareOk)).message_count
        same = same + 1 if count == last else 0
        last = count


class Collector:
    """A consumer as it should be: reads, and acknowledges."""

    def __init__(self, client: RawClient) -> None:
        self._client = client
        self.bodies: list[bytes] = []
        self.redelivered = 0

    async def run(self, until: int) -> None:
        """Read on until there are so many; only the first bytes of each body are kept."""
        while len(self.bodies) < until:
            got = await self._client.receive()
            method = got.method
            assert isinstance(method, commands.Basic.Deliver)
            self.bodies.append(got.body[:8])
            self.redelivered += bool(method.redelivered)
            await self._client.tell(1, make(commands.Basic.Ack, delivery_tag=method.delivery_tag))


def all_held_by(broker: Broker, client: RawClient, queue: str) -> bool:
    """Whether nothing waits in the queue, and all that is unacked was sent to this client."""
    statistics = queue_statistics(broker, queue)
    held = channel_statistics(broker, client)["messages_unacknowledged"]
    return statistics["messages_ready"] == 0 and statistics["messages_unacknowledged"] == held


def channel_statistics(broker: Broker, client: RawClient) -> dict[str, Any]:
    channels: Any = reader_of(broker, client).statistics()["channels"]
    return channels[1]


@pytest.mark.parametrize(
    ("size", "count"),
    [
        pytest.param(100, 80_000, id="100B"),
        pytest.param(16 << 10, 1_600, id="16KiB", marks=pytest.mark.slow),
        pytest.param(MIB, 40, id="1MiB", marks=pytest.mark.slow),
    ],
)
async def test_consumer_that_never_reads(broker: Broker, size: int, count: int) -> None:
    """It gets its share and no more; a second consumer of the same queue gets the rest at once."""
    async with (
        await RawClient.open(broker.port) as publisher,
        await RawClient.open(broker.port) as reading,
    ):
        await make_queue(publisher, "q")
        await select_confirms(publisher)
        before = take_census(broker)
        slow = await RawClient.open(broker.port, receive_buffer=4096)
        await consume(slow, "q")
        await consume(reading, "q", tag="good")
        good = Collector(reading)
        collecting = asyncio.create_task(good.run(count))
        batch = max(1, MIB // size)
        for start in range(0, count, batch):
            stop = min(count, start + batch)
            await publisher.send(
                b"".join(publish(1, "q", n.to_bytes(8) * (size // 8)) for n in range(start, stop))
            )
            await confirmed(publisher, stop)
            assert reader_of(broker, slow).writer.backlog <= HIGH_MARK + WINDOW_BYTES + MIB
        await wait_until(partial(all_held_by, broker, slow, "q"), "the good one has the rest")
        held = channel_statistics(broker, slow)["messages_unacknowledged"]
        assert 0 < held * size <= KERNEL_BYTES + HIGH_MARK + WINDOW_BYTES + 2 * size
        assert good.redelivered == 0

        slow.reset()
        await collecting
        assert good.redelivered == held
        assert len(set(good.bodies)) == count
        await wait_until(lambda: queue_statistics(broker, "q")["messages"] == 0, "all are acked")
        await reading.call(
            1, make(commands.Basic.Cancel, consumer_tag="good"), commands.Basic.CancelOk
        )
        await wait_same(broker, before)


async def test_others_are_not_held_up(broker: Broker) -> None:
    """With ten consumers that do not read, a message to somebody else takes no longer."""
    async with await RawClient.open(broker.port) as publisher:
        await make_queue(publisher, "slow")
        before = take_census(broker)
        slow = [await RawClient.open(broker.port, receive_buffer=4096) for _ in range(10)]
        for client in slow:
            await consume(client, "slow", no_ack=True)
        await fill_socket(publisher, "slow", partial(are_paused, broker, slow), 100_000)
        loop = asyncio.get_running_loop()
        async with await RawClient.open(broker.port) as other:
            await make_queue(other, "fast", exclusive=True)
            await consume(other, "fast", no_ack=True)
            took = []
            for _ in range(100):
                await publisher.send(publish(1, "slow", bytes(10_000)))
                start = loop.time()
                await other.send(publish(1, "fast", b"hop"))
                assert (await other.receive()).body == b"hop"
                took.append(loop.time() - start)
            # A few milliseconds; a stall would be seconds.
            assert sorted(took)[95] < 0.25
        for client in slow:
            client.reset()
        await wait_until(
            lambda: queue_statistics(broker, "slow")["consumers"] == 0, "they are forgotten"
        )
        await publisher.call(1, make(commands.Queue.Purge, queue="slow"), commands.Queue.PurgeOk)
        await wait_same(broker, before)


async def test_many_channels_of_a_client_that_never_reads(broker: Broker) -> None:
    """The bound is one of the connection: many channels, or queues, are not many bounds."""
    size, channels = 256 << 10, 12
    async with await RawClient.open(broker.port) as publisher:
        for number in range(channels):
            await make_queue(publisher, f"q{number}")
        before = take_census(broker)
        for number in range(channels):
            await publisher.send(publish(1, f"q{number}", bytes(size)) * 12)
        slow = await RawClient.open(broker.port, channels=channels, receive_buffer=4096)
        writer = reader_of(broker, slow).writer
        for number in range(channels):
            # Half of them on channels of their own, half on one.
            channel = max(1, number - channels // 2)
            consume = make(commands.Basic.Consume, queue=f"q{number}", nowait=True)
            await slow.tell(channel, consume)
        await wait_until(partial(is_stuck, writer), "stuck")
        for number in range(channels):
            await settle(publisher, f"q{number}")
        assert writer.backlog <= STUCK_MARK + WINDOW_BYTES + MIB
        # Once it reads, everything comes.
        for _ in range(channels * 12):
            assert len((await slow.receive()).body) == size
        slow.reset()
        del writer
        for number in range(channels):
            name = f"q{number}"
            await wait_until(lambda: queue_statistics(broker, name)["consumers"] == 0, name)  # noqa: B023
            await publisher.call(1, make(commands.Queue.Purge, queue=name), commands.Queue.PurgeOk)
        await wait_same(broker, before)


@pytest.mark.parametrize("requeue", [False, True])
async def test_gets_without_reading(broker: Broker, requeue: bool) -> None:
    """A few bytes ask for a megabyte: answers must not pile up, however many were asked for."""
    count = 40
    async with await RawClient.open(broker.port) as other:
        await make_queue(other, "q")
        before = take_census(broker)
        await other.send(publish(1, "q", bytes(MIB)) * (1 if requeue else count))
        await make_queue(other, "q")
        client = await RawClient.open(broker.port, receive_buffer=4096)
        questions = b""
        for tag in range(1, count + 1):
            questions += method_frame(1, make(commands.Basic.Get, queue="q", no_ack=not requeue))
            if requeue:
                reject = make(commands.Basic.Reject, delivery_tag=tag, requeue=True)
                questions += method_frame(1, reject)
        writer = reader_of(broker, client).writer
        await client.send(questions)
        await wait_until(partial(is_stuck, writer), "stuck")
        await settle(other, "q")
        assert writer.backlog <= STUCK_MARK + 2 * MIB
        for tag in range(1, count + 1):
            got = await client.receive()
            assert isinstance(got.method, commands.Basic.GetOk)
            assert (got.method.delivery_tag, len(got.body)) == (tag, MIB)
        await client.say_goodbye()
        del writer
        await other.call(1, make(commands.Queue.Purge, queue="q"), commands.Queue.PurgeOk)
        await wait_same(broker, before)


@pytest.mark.parametrize("how", ["reset", "channel-close", "connection-close"])
async def test_stuck_client_ends(broker: Broker, how: str) -> None:
    """Nobody may wait for ever for a socket that nobody reads."""
    async with await RawClient.open(broker.port) as other:
        await make_queue(other, "q")
        before = take_census(broker)
        await other.send(publish(1, "q", bytes(MIB)) * 20)
        await make_queue(other, "q")
        client = await RawClient.open(broker.port, receive_buffer=4096)
        await make_queue(client, "own", exclusive=True)
        writer = reader_of(broker, client).writer
        last = {
            "reset": b"",
            "channel-close": method_frame(1, make(commands.Channel.Close)),
            "connection-close": method_frame(0, make(commands.Connection.Close)),
        }
        get = method_frame(1, make(commands.Basic.Get, queue="q"))
        await client.send(get * 20 + last[how])
        await wait_until(partial(is_stuck, writer), "stuck")
        await settle(other, "q")
        del writer
        client.reset()
        await wait_until(lambda: queue_statistics(broker, "q")["messages_ready"] == 20, "all back")
        await other.call(1, make(commands.Queue.Purge, queue="q"), commands.Queue.PurgeOk)
        await wait_same(broker, before)


async def test_stop_with_stuck_clients(settings: Settings) -> None:
    """A broker can be stopped whatever its clients do."""
    broker = Broker(settings)
    await broker.start()
    async with await RawClient.open(broker.port) as other:
        await make_queue(other, "q")
        await other.send(publish(1, "q", bytes(MIB)) * 20)
        await make_queue(other, "q")
        client = await RawClient.open(broker.port, receive_buffer=4096)
        writer = reader_of(broker, client).writer
        await client.send(method_frame(1, make(commands.Basic.Get, queue="q")) * 20)
        await wait_until(partial(is_stuck, writer), "stuck")
        async with asyncio.timeout(DEADLINE_S):
            await broker.stop()
        client.close()


async def test_publisher_that_never_reads_returns(broker: Broker) -> None:
    """The broker stops reading in turn; once the client reads, everything comes."""
    async with await RawClient.open(broker.port) as other:
        await make_queue(other, "q")
        before = take_census(broker)
        client = await RawClient.open(broker.port, receive_buffer=4096)
        writer = reader_of(broker, client).writer
        one = publish(1, "nowhere", bytes(16 << 10), mandatory=True)
        sent = refused = 0
        rest = b""
        while refused < 20:
            data = rest or one
            taken = client.send_some(data)
            refused = 0 if taken else refused + 1
            sent += taken
            rest = data[taken:] if taken else data
            assert sent < 6 * KERNEL_BYTES, "it is read for ever"
            # Let the broker take it.
            await make_queue(other, "q")
        assert writer.is_stuck
        assert writer.backlog <= STUCK_MARK + WINDOW_BYTES + MIB
        whole = sent // len(one)
        for _ in range(whole):
            got = await client.receive()
            assert isinstance(got.method, commands.Basic.Return)
        await client.send(rest)
        client.close()
        del writer
        await wait_same(broker, before)


async def test_publisher_that_never_reads_confirms(broker: Broker) -> None:
    count = 30_000
    async with await RawClient.open(broker.port) as other:
        await make_queue(other, "q")
        before = take_census(broker)
        client = await RawClient.open(broker.port, receive_buffer=4096)
        await select_confirms(client)
        for _ in range(count // 100):
            await client.send(publish(1, "q", b"tiny") * 100)
        await wait_until(lambda: queue_statistics(broker, "q")["messages"] == count, "all there")
        await confirmed(client, count)
        await client.say_goodbye()
        await other.call(1, make(commands.Queue.Purge, queue="q"), commands.Queue.PurgeOk)
        await wait_same(broker, before)


@pytest.mark.parametrize(
    ("size", "count"), [(100, 60_000), (16 << 10, 1_500), (MIB, 24)], ids=["100B", "16KiB", "1MiB"]
)
async def test_memory_of_a_consumer_that_never_reads(tmp_path: Path, size: int, count: int) -> None:
    """Beside what its messages cost anyway, which are in the queue before it comes."""
    with running_broker(tmp_path) as process:
        async with await RawClient.open(process.port) as other:
            await make_queue(other, "q")
            await select_confirms(other)
            batch = max(1, MIB // size)
            for start in range(0, count, batch):
                stop = min(count, start + batch)
                await other.send(publish(1, "q", bytes(size)) * (stop - start))
                await confirmed(other, stop)
            before = resident_bytes(process.pid)
            async with await RawClient.open(process.port, receive_buffer=4096) as slow:
                await consume(slow, "q")
                await settle(other, "q")
                assert resident_bytes(process.pid) - before < 12 * MIB
