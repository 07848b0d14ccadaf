"""Peers that fall silent: nobody says goodbye, nothing is closed, time passes."""

from __future__ import annotations

from functools import partial

import pytest
from pamqp import commands

from leveret.broker.clock import VirtualClock
from leveret.broker.connection.reader import Reader
from leveret.broker.connection.writer import SocketWriter
from leveret.broker.server import Broker
from leveret.protocol.codec import make, method_frame
from leveret.protocol.framing import HEARTBEAT_FRAME
from tests.adversity.census import take_census, wait_same, wait_until
from tests.adversity.steps import (
    confirmed,
    connections_are,
    consume,
    drain,
    fill_socket,
    make_queue,
    reader_of,
    ready_is,
    select_confirms,
)
from tests.support.raw_client import Hangup, RawClient, handshake, publish

HANDSHAKE_S = 10
CLOSE_S = 30


def silent_after() -> list[object]:
    """Beginnings of a handshake, each with what the broker has answered to it."""
    parts = handshake(heartbeat=60)
    start, tune = commands.Connection.Start, commands.Connection.Tune
    return [
        pytest.param([], [], id="nothing"),
        pytest.param([parts[0][:5]], [], id="half-a-header"),
        pytest.param(parts[:1], [start], id="header"),
        pytest.param([parts[0], parts[1][:30]], [start], id="half-a-start-ok"),
        pytest.param(parts[:2], [start, tune], id="start-ok"),
        pytest.param([*parts[:2], parts[2][:20]], [start, tune], id="tune-ok"),
    ]


@pytest.mark.parametrize(("said", "answers"), silent_after())
async def test_handshake_that_is_never_finished(
    timeless_broker: Broker, clock: VirtualClock, said: list[bytes], answers: list[type]
) -> None:
    before = take_census(timeless_broker)
    async with await RawClient.connect(timeless_broker.port) as client:
        for place, part in enumerate(said):
            await client.send(part)
            if place < len(answers):
                await client.expect(answers[place])
        await wait_until(lambda: clock.statistics()["timers"] == 1, "accepted")
        clock.advance(HANDSHAKE_S - 0.1)
        assert await is_held(client)
        clock.advance(0.1)
        with pytest.raises(Hangup):
            await client.receive()
    await wait_same(timeless_broker, before)


def has_received(reader: Reader, size: int) -> bool:
    return reader.bytes_received == size


def has_backlog(writer: SocketWriter) -> bool:
    return writer.backlog > 0


def is_paused(writer: SocketWriter) -> bool:
    return writer.is_paused


def is_stuck(writer: SocketWriter) -> bool:
    return writer.is_stuck


async def is_held(client: RawClient) -> bool:
    """Whether the broker keeps this connection, as far as can be seen after a moment."""
    try:
        await client.receive(deadline_s=0.05)
    except TimeoutError:
        return True
    except Hangup:
        return False
    raise AssertionError("the broker has said something")


async def test_half_open_peer(timeless_broker: Broker, clock: VirtualClock) -> None:
    """Two to three intervals of silence: what it held goes back, what was its own is gone."""
    broker = timeless_broker
    async with await RawClient.open(broker.port) as other:
        await make_queue(other, "q")
        await select_confirms(other)
        before = take_census(broker)
        async with await RawClient.open(broker.port, heartbeat=10) as silent:
            await make_queue(silent, "own", exclusive=True)
            await consume(silent, "q")
            await other.send(publish(1, "q", b"one") + publish(1, "q", b"two"))
            await confirmed(other, 2)
            assert ready_is(broker, "q", 0)

            clock.advance(20)
            await make_queue(other, "q")
            assert connections_are(broker, 2)
            clock.advance(10)
            await wait_until(partial(connections_are, broker, 1), "the dead are forgotten")
            await wait_until(partial(ready_is, broker, "q", 2), "its messages are back")
            assert "own" not in broker.vhosts["/"].topology.queues
            left = await drain(other, "q")
            assert [got.body for got in left] == [b"one", b"two"]
            assert all(getattr(got.method, "redelivered", False) for got in left)
            await silent.expect_hangup()
            assert silent.heartbeats >= 4
        await wait_same(broker, before)


async def test_heartbeats_keep_a_connection(timeless_broker: Broker, clock: VirtualClock) -> None:
    broker = timeless_broker
    async with await RawClient.open(broker.port, heartbeat=10) as client:
        reader = reader_of(broker, client)
        opening = reader.bytes_received
        for count in range(1, 11):
            await client.send(HEARTBEAT_FRAME)
            expected = opening + 8 * count
            await wait_until(partial(has_received, reader, expected), "the heartbeat came")
            clock.advance(10)
        await make_queue(client, "q")
        assert client.heartbeats >= 9


@pytest.mark.parametrize("how_full", ["some-unsent", "paused", "stuck"])
async def test_half_open_peer_with_a_full_socket(
    timeless_broker: Broker, clock: VirtualClock, how_full: str
) -> None:
    """Its kernel still answers, so the socket would never be written out, nor fail."""
    broker = timeless_broker
    async with await RawClient.open(broker.port) as other:
        await make_queue(other, "q")
        before = take_census(broker)
        async with await RawClient.open(broker.port, heartbeat=10, receive_buffer=4096) as silent:
            writer = reader_of(broker, silent).writer
            is_full = {"some-unsent": has_backlog, "paused": is_paused, "stuck": is_stuck}
            if how_full == "stuck":
                await other.send(publish(1, "q", bytes(1 << 20)) * 16)
                await make_queue(other, "q")
                await silent.send(method_frame(1, make(commands.Basic.Get, queue="q")) * 16)
                await wait_until(partial(is_stuck, writer), "stuck")
            else:
                await consume(silent, "q", no_ack=True)
                await fill_socket(other, "q", partial(is_full[how_full], writer))
            # Two intervals without progress, the first may have seen some.
            for _ in range(3):
                clock.advance(10)
                await make_queue(other, "q")
            await wait_until(partial(connections_are, broker, 1), "the dead are forgotten")
            await other.call(1, make(commands.Queue.Purge, queue="q"), commands.Queue.PurgeOk)
            # The other end of the socket is still open here: ours must be gone all the same.
            before["sockets"] += 1
            del writer
            await wait_same(broker, before)


async def test_close_that_is_never_answered(timeless_broker: Broker, clock: VirtualClock) -> None:
    broker = timeless_broker
    before = take_census(broker)
    async with await RawClient.open(broker.port, heartbeat=10) as client:
        await make_queue(client, "own", exclusive=True)
        await client.tell(1, make(commands.Basic.Qos, prefetch_size=1))
        assert (await client.expect(commands.Connection.Close)).reply_code == 540
        # At once, whatever the client says to it.
        assert "own" not in broker.vhosts["/"].topology.queues
        # Heartbeats and more do not prolong it.
        await client.send(HEARTBEAT_FRAME * 10)
        await client.send(publish(1, "own", b"x"))
        clock.advance(CLOSE_S - 0.1)
        assert await is_held(client)
        clock.advance(0.1)
        await client.expect_hangup()
    await wait_same(broker, before)


async def test_close_that_is_never_read(timeless_broker: Broker, clock: VirtualClock) -> None:
    """What cannot be written out must not keep the socket for ever."""
    broker = timeless_broker
    async with await RawClient.open(broker.port) as other:
        await make_queue(other, "q")
        before = take_census(broker)
        async with await RawClient.open(broker.port, receive_buffer=4096) as client:
            await consume(client, "q", no_ack=True)
            writer = reader_of(broker, client).writer
            await fill_socket(other, "q", partial(has_backlog, writer))
            del writer
            await client.tell(1, make(commands.Basic.Qos, prefetch_size=1))
            await wait_until(lambda: clock.statistics()["timers"] == 1, "it is closed")
            clock.advance(CLOSE_S)
            await wait_until(partial(connections_are, broker, 1), "it is given up")
            clock.advance(CLOSE_S)
            before["sockets"] += 1
            await wait_same(broker, before)


async def test_goodbye_without_hanging_up(timeless_broker: Broker, clock: VirtualClock) -> None:
    broker = timeless_broker
    before = take_census(broker)
    async with await RawClient.open(broker.port) as client:
        await client.call(0, make(commands.Connection.Close), commands.Connection.CloseOk)
        clock.advance(CLOSE_S - 0.1)
        assert await is_held(client)
        clock.advance(0.1)
        await client.expect_hangup()
    await wait_same(broker, before)


async def test_channel_close_that_is_never_answered(broker: Broker) -> None:
    """The channel is gone for us; what is said on it means nothing, the others go on."""
    async with await RawClient.open(broker.port) as client:
        await make_queue(client, "q")
        before = take_census(broker)
        await client.open_channel(2)
        await client.tell(2, make(commands.Queue.Purge, queue="missing"))
        assert (await client.expect(commands.Channel.Close)).reply_code == 404
        half = publish(2, "q", b"never" * 100)
        for _ in range(100):
            await client.send(half + half[:-50])
            await client.send(half[-50:])
            await client.tell(2, make(commands.Queue.Declare, queue="never"))
        await make_queue(client, "q")
        await wait_same(broker, before)
