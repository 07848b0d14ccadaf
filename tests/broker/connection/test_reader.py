"""An open connection: channels that come, fail and go, and ends that somebody must agree to."""

from __future__ import annotations

import asyncio

import pytest
from pamqp import commands

from leveret.broker.clock import VirtualClock
from leveret.broker.connection.reader import CLOSE_TIMEOUT_S
from leveret.broker.server import Broker
from leveret.protocol.codec import make, method_frame
from leveret.protocol.framing import HEARTBEAT_FRAME
from tests.broker.connection.silence import expect_silent_close, is_still_open
from tests.support.raw_client import Hangup, RawClient, publish
from tests.support.waiting import wait_until

OPEN = make(commands.Channel.Open)
CLOSE = make(commands.Channel.Close, reply_code=200)
CLOSE_OK = make(commands.Channel.CloseOk)
GET_MISSING = make(commands.Basic.Get, queue="missing")
END = make(commands.Connection.Close, reply_code=200)


async def names(client: RawClient, count: int) -> list[str]:
    return [(await client.receive()).method.name for _ in range(count)]


# --- channels ----------------------------------------------------------------------------------


async def test_a_number_is_free_once_its_channel_is_closed(timeless: Broker) -> None:
    async with await RawClient.open(timeless.port) as client:
        for _ in range(3):
            await client.call(1, CLOSE, commands.Channel.CloseOk)
            await client.open_channel(1)
        await client.say_goodbye()


async def test_a_number_is_not_free_before_close_ok(timeless: Broker) -> None:
    async with await RawClient.open(timeless.port) as client:
        await client.send(method_frame(1, CLOSE) + method_frame(1, OPEN))
        assert await names(client, 2) == ["Channel.CloseOk", "Connection.Close"]


async def test_a_channel_that_failed_is_deaf_until_the_client_agrees(timeless: Broker) -> None:
    async with await RawClient.open(timeless.port) as client:
        closed = await client.call(1, GET_MISSING, commands.Channel.Close)
        assert closed.reply_code == 404
        await client.send(method_frame(1, GET_MISSING) + publish(1, "q", b"ignored"))
        await client.send(method_frame(1, CLOSE_OK) + method_frame(1, OPEN))
        await client.expect(commands.Channel.OpenOk)
        await client.say_goodbye()


async def test_a_close_of_a_channel_that_failed_is_answered(timeless: Broker) -> None:
    """The client has not seen ours yet when it sends its own."""
    async with await RawClient.open(timeless.port) as client:
        await client.call(1, GET_MISSING, commands.Channel.Close)
        await client.call(1, CLOSE, commands.Channel.CloseOk)
        await client.send(method_frame(1, CLOSE_OK) + method_frame(1, OPEN))
        await client.expect(commands.Channel.OpenOk)
        await client.say_goodbye()


async def test_a_close_right_behind_an_error_is_answered(timeless: Broker) -> None:
    """In one piece: the reader does not know of the error when it reads the close."""
    async with await RawClient.open(timeless.port) as client:
        await client.send(method_frame(1, GET_MISSING) + method_frame(1, CLOSE))
        assert await names(client, 2) == ["Channel.Close", "Channel.CloseOk"]
        await client.send(method_frame(1, CLOSE_OK) + method_frame(1, OPEN))
        await client.expect(commands.Channel.OpenOk)
        await client.say_goodbye()


async def test_a_number_is_not_free_while_both_close(timeless: Broker) -> None:
    """And nothing is left behind."""
    async with await RawClient.open(timeless.port) as client:
        await client.send(
            method_frame(1, GET_MISSING) + method_frame(1, CLOSE) + method_frame(1, OPEN)
        )
        assert sorted(await names(client, 3)) == [
            "Channel.Close",
            "Channel.CloseOk",
            "Connection.Close",
        ]
    await wait_until(lambda: not timeless.listeners[0].readers)


@pytest.mark.parametrize(
    ("method", "text"),
    [
        pytest.param(OPEN, "CHANNEL_ERROR - second 'channel.open' seen", id="opened-twice"),
        pytest.param(GET_MISSING, "CHANNEL_ERROR - expected 'channel.open'", id="never-opened"),
    ],
)
async def test_channels_out_of_step_end_the_connection(
    timeless: Broker, method: commands.Channel.Open, text: str
) -> None:
    async with await RawClient.open(timeless.port) as client:
        number = 1 if method is OPEN else 2
        closed = await client.call(number, method, commands.Connection.Close)
        assert (closed.reply_code, closed.reply_text) == (504, text)


async def test_what_came_before_a_bad_frame_is_done(timeless: Broker) -> None:
    async with await RawClient.open(timeless.port) as client:
        declare = method_frame(1, make(commands.Queue.Declare, queue="q"))
        await client.send(declare + b"\x01\x00\x01\x00\x00\x00\x01\x00\x00")
        await client.expect(commands.Queue.DeclareOk)
        closed = await client.expect(commands.Connection.Close)
        assert closed.reply_code == 501
    assert "q" in timeless.vhosts["/"].topology.queues


async def test_what_came_before_the_end_of_the_stream_is_done(timeless: Broker) -> None:
    async with await RawClient.open(timeless.port) as client:
        await client.call(1, make(commands.Queue.Declare, queue="q"), commands.Queue.DeclareOk)
        await client.send(publish(1, "q", b"last words") + publish(1, "q", b"not finished")[:-9])
    await wait_until(lambda: not timeless.listeners[0].readers)
    async with await RawClient.open(timeless.port) as client:
        get = make(commands.Basic.Get, queue="q", no_ack=True)
        await client.tell(1, get)
        received = await client.receive()
        assert received.body == b"last words"
        await client.call(1, get, commands.Basic.GetEmpty)
        await client.say_goodbye()


# --- ends that are agreed upon -----------------------------------------------------------------


async def test_a_client_that_does_not_hang_up_after_its_close(
    timeless: Broker, clock: VirtualClock
) -> None:
    async with await RawClient.open(timeless.port, heartbeat=60) as client:
        await client.call(0, END, commands.Connection.CloseOk)
        await expect_silent_close(timeless, client, clock, CLOSE_TIMEOUT_S)


async def test_a_client_that_does_not_answer_our_close(
    timeless: Broker, clock: VirtualClock
) -> None:
    async with await RawClient.open(timeless.port, heartbeat=60) as client:
        await client.call(1, OPEN, commands.Connection.Close)
        # Whatever else it says does not count.
        await client.send(publish(1, "q", b"x") + method_frame(1, CLOSE_OK) + HEARTBEAT_FRAME)
        await expect_silent_close(timeless, client, clock, CLOSE_TIMEOUT_S)


async def test_an_answer_ends_it_at_once(timeless: Broker, clock: VirtualClock) -> None:
    async with await RawClient.open(timeless.port) as client:
        await client.call(1, OPEN, commands.Connection.Close)
        answer = method_frame(0, make(commands.Connection.CloseOk))
        await client.send(publish(1, "q", b"on its way") + answer[:5])
        assert await is_still_open(timeless, client)
        await client.send(answer[5:])
        with pytest.raises(Hangup):
            await client.receive()
    assert clock.statistics()["timers"] == 0


async def test_both_close(timeless: Broker) -> None:
    """Each is owed an answer."""
    async with await RawClient.open(timeless.port) as client:
        await client.call(1, OPEN, commands.Connection.Close)
        await client.call(0, END, commands.Connection.CloseOk)
        await client.tell(0, make(commands.Connection.CloseOk))
        with pytest.raises(Hangup):
            await client.receive()


async def test_a_shutdown_says_so(timeless: Broker) -> None:
    async with await RawClient.open(timeless.port) as client:
        timeless.listeners[0].stop_accepting()
        closing = asyncio.create_task(timeless.listeners[0].close_connections(20))
        closed = await client.expect(commands.Connection.Close)
        assert closed.reply_code == 320
        assert closed.reply_text == (
            "CONNECTION_FORCED - broker forced connection closure with reason 'shutdown'"
        )
        await client.tell(0, make(commands.Connection.CloseOk))
        await closing


# --- heartbeats --------------------------------------------------------------------------------


async def test_a_silent_client_is_dropped(timeless: Broker, clock: VirtualClock) -> None:
    """[19] Without a word: there is nobody to hear it."""
    async with await RawClient.open(timeless.port, heartbeat=10) as client:
        # The handshake itself is a sign of life in the first interval.
        clock.advance(29)
        assert await is_still_open(timeless, client)
        clock.advance(1)
        with pytest.raises(Hangup):
            await client.receive()
        assert client.heartbeats >= 4
    await wait_until(lambda: not timeless.listeners[0].readers)


async def test_a_client_that_says_something_is_not(timeless: Broker, clock: VirtualClock) -> None:
    async with await RawClient.open(timeless.port, heartbeat=10) as client:
        (reader,) = timeless.listeners[0].readers
        for _ in range(5):
            before = reader.bytes_received
            await client.send(HEARTBEAT_FRAME)
            await wait_until(lambda seen=before: reader.bytes_received > seen)  # type: ignore[misc]
            clock.advance(19)
            assert await is_still_open(timeless, client)
        await client.say_goodbye()
