"""From the protocol header to an open connection, and all the ways it comes to nothing [15-18]."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from pamqp import commands

from leveret.broker.clock import VirtualClock
from leveret.broker.connection.handshake import CAPABILITIES
from leveret.broker.server import Broker
from leveret.protocol.codec import make, method_frame
from leveret.protocol.field_table import Field, Table, encode_table, table_from_python
from leveret.protocol.framing import HEARTBEAT_FRAME
from tests.broker.connection.silence import expect_silent_close
from tests.support.raw_client import PROTOCOL_HEADER, Hangup, RawClient, handshake
from tests.support.waiting import wait_until

SILENCE_S = 3.0
HANDSHAKE_S = 10.0

START_OK, TUNE_OK, OPEN = (
    commands.Connection.StartOk,
    commands.Connection.TuneOk,
    commands.Connection.Open,
)


def start_ok(
    response: str = "\x00guest\x00guest",
    mechanism: str = "PLAIN",
    properties: Table | None = None,
) -> commands.Connection.StartOk:
    return make(
        START_OK,
        client_properties=properties or {},
        mechanism=mechanism,
        response=response,
        locale="en_US",
    )


async def begin(broker: Broker) -> RawClient:
    """The header was sent, and connection.start has come."""
    client = await RawClient.connect(broker.port)
    await client.send(PROTOCOL_HEADER)
    await client.expect(commands.Connection.Start)
    return client


async def log_in(broker: Broker) -> RawClient:
    client = await begin(broker)
    await client.call(0, start_ok(), commands.Connection.Tune)
    return client


# --- headers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "version"),
    [
        pytest.param(b"AMQP\x00\x00\x09\x01", (0, 9), id="0-9-1"),
        pytest.param(b"AMQP\x01\x01\x00\x09", (0, 9), id="0-9"),
        pytest.param(b"AMQP\x01\x01\x08\x00", (8, 0), id="0-8"),
        pytest.param(b"AMQP\x01\x01\x09\x01", (8, 0), id="0-8-as-its-text-says"),
    ],
)
async def test_headers_that_are_understood(
    timeless: Broker, header: bytes, version: tuple[int, int]
) -> None:
    async with await RawClient.connect(timeless.port) as client:
        await client.send(header)
        start = await client.expect(commands.Connection.Start)
        assert (start.version_major, start.version_minor) == version
        assert start.mechanisms == "AMQPLAIN PLAIN"
        properties = cast(Table, start.server_properties)
        assert properties["product"] == Field("S", "RabbitMQ")
        capabilities = properties.get("capabilities")
        if version == (0, 9):
            assert capabilities is not None
            assert capabilities.value == {name: Field("t", True) for name in CAPABILITIES}
        else:
            assert capabilities is None


@pytest.mark.parametrize(
    "header", [b"AMQP\x00\x01\x00\x00", b"AMQP\x03\x01\x00\x00", b"GET / HT", b"\x00" * 8]
)
async def test_other_headers_are_answered_with_ours(timeless: Broker, header: bytes) -> None:
    """At once: no time need pass."""
    async with await RawClient.connect(timeless.port) as client:
        await client.send(header)
        async with asyncio.timeout(5):
            assert await client._take(8) == PROTOCOL_HEADER
        with pytest.raises(Hangup):
            await client._take(1)


async def test_a_header_may_come_in_pieces(timeless: Broker) -> None:
    async with await RawClient.connect(timeless.port) as client:
        for place in range(8):
            await client.send(PROTOCOL_HEADER[place : place + 1])
        await client.expect(commands.Connection.Start)


async def test_everything_at_once(timeless: Broker) -> None:
    """A client that does not wait for answers, and goes on with its first channel."""
    async with await RawClient.connect(timeless.port) as client:
        await client.send(b"".join(handshake()) + method_frame(1, make(commands.Channel.Open)))
        for answer in ("Start", "Tune", "OpenOk"):
            assert (await client.receive()).method.name == f"Connection.{answer}"
        await client.expect(commands.Channel.OpenOk)


async def test_heartbeats_may_come_between(timeless: Broker) -> None:
    async with await begin(timeless) as client:
        await client.send(HEARTBEAT_FRAME)
        await client.tell(0, start_ok())
        await client.expect(commands.Connection.Tune)


# --- logging in --------------------------------------------------------------------------------


async def test_amqplain(timeless: Broker) -> None:
    table = table_from_python({"LOGIN": "guest", "PASSWORD": "guest"})
    response = encode_table(table)[4:].decode("latin-1")
    async with await begin(timeless) as client:
        await client.call(0, start_ok(response, "AMQPLAIN"), commands.Connection.Tune)


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(start_ok("\x00guest\x00wrong"), id="wrong-password"),
        pytest.param(start_ok("guest"), id="malformed-response"),
        pytest.param(start_ok(mechanism="KERBEROS"), id="unknown-mechanism"),
        pytest.param(make(TUNE_OK), id="out-of-place"),
    ],
)
async def test_a_login_that_fails_is_met_with_silence(
    timeless: Broker, clock: VirtualClock, method: commands.Connection.StartOk
) -> None:
    """[16] The reason is in the log; the client hears nothing, and waits."""
    async with await begin(timeless) as client:
        await client.tell(0, method)
        await expect_silent_close(timeless, client, clock, SILENCE_S)


async def test_a_client_that_asked_for_it_is_told(timeless: Broker, clock: VirtualClock) -> None:
    capabilities = {"capabilities": {"authentication_failure_close": True}}
    async with await begin(timeless) as client:
        await client.tell(
            0, start_ok("\x00guest\x00wrong", properties=table_from_python(capabilities))
        )
        closed = await client.expect(commands.Connection.Close)
        assert closed.reply_code == 403
        assert closed.reply_text == (
            "ACCESS_REFUSED - Login was refused using authentication mechanism PLAIN."
            " For details see the broker logfile."
        )
        await client.tell(0, make(commands.Connection.CloseOk))
        with pytest.raises(Hangup):
            await client.receive()


# --- tune and open -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frame_max", "channel_max"),
    [
        pytest.param(131073, 2047, id="larger-frames"),
        pytest.param(0, 2047, id="frames-without-a-limit"),
        pytest.param(4095, 2047, id="frames-too-small"),
        pytest.param(131072, 2048, id="more-channels"),
        pytest.param(131072, 0, id="channels-without-a-limit"),
    ],
)
async def test_limits_may_only_be_lowered(
    timeless: Broker, clock: VirtualClock, frame_max: int, channel_max: int
) -> None:
    """[17]"""
    async with await log_in(timeless) as client:
        await client.tell(0, make(TUNE_OK, frame_max=frame_max, channel_max=channel_max))
        await expect_silent_close(timeless, client, clock, SILENCE_S)


async def test_what_was_tuned_holds(timeless: Broker) -> None:
    async with await log_in(timeless) as client:
        await client.tell(0, make(TUNE_OK, frame_max=4096, channel_max=1))
        await client.call(0, make(OPEN, virtual_host="/"), commands.Connection.OpenOk)
        await client.open_channel(1)
        await client.tell(2, make(commands.Channel.Open))
        closed = await client.expect(commands.Connection.Close)
        assert closed.reply_code == 530
        assert closed.reply_text == (
            "NOT_ALLOWED - number of channels opened (1) has reached the negotiated channel_max (1)"
        )


async def test_a_virtual_host_that_does_not_exist(timeless: Broker) -> None:
    async with await log_in(timeless) as client:
        await client.tell(0, make(TUNE_OK, frame_max=131072, channel_max=2047))
        await client.tell(0, make(OPEN, virtual_host="elsewhere"))
        closed = await client.expect(commands.Connection.Close)
        assert closed.reply_text == "NOT_ALLOWED - vhost elsewhere not found"
        assert (closed.class_id, closed.method_id) == (10, 40)


async def test_something_else_than_open(timeless: Broker) -> None:
    """From tune-ok on, mistakes are answered."""
    async with await log_in(timeless) as client:
        await client.tell(0, make(TUNE_OK, frame_max=131072, channel_max=2047))
        closed = await client.call(0, make(START_OK), commands.Connection.Close)
        assert closed.reply_code == 504
        assert (closed.class_id, closed.method_id) == (10, 11)


async def test_a_malformed_frame_before_tune_is_met_with_silence(
    timeless: Broker, clock: VirtualClock
) -> None:
    async with await begin(timeless) as client:
        await client.send(b"\x01\x00\x00\x00\x00\x00\x04\x00\x0a\x00\x0b\x00")
        await expect_silent_close(timeless, client, clock, SILENCE_S)


# --- time --------------------------------------------------------------------------------------


async def test_a_client_has_ten_seconds(timeless: Broker, clock: VirtualClock) -> None:
    """[16]"""
    async with await log_in(timeless) as client:
        await expect_silent_close(timeless, client, clock, HANDSHAKE_S)


async def test_an_open_connection_has_all_the_time(timeless: Broker, clock: VirtualClock) -> None:
    async with await RawClient.open(timeless.port) as client:
        assert clock.statistics()["timers"] == 0
        clock.advance(100_000)
        await client.open_channel(2)
        await client.say_goodbye()
    await wait_until(lambda: not timeless.listeners[0].readers)
