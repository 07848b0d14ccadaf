"""Bytes that no client should send: an orderly end for that client, and nothing for the others."""

from __future__ import annotations

import asyncio
import random
import struct
from pathlib import Path

import pytest
from pamqp import commands

from leveret.broker.clock import VirtualClock
from leveret.broker.server import Broker
from leveret.protocol.codec import make, method_frame
from leveret.protocol.framing import BODY, HEADER, HEARTBEAT_FRAME, METHOD, frame
from tests.adversity.census import resident_bytes, take_census, wait_same, wait_until
from tests.adversity.steps import confirmed, drain, make_queue, select_confirms
from tests.support.broker_process import running_broker
from tests.support.raw_client import FRAME_MAX, Hangup, RawClient, handshake, publish

MIB = 1 << 20
# What may be the answer to bytes that make no sense.
SYNTAX_ERRORS = {501, 502, 503, 504, 505, 530, 540, 541}


async def ending(client: RawClient) -> commands.Connection.Close | None:
    """How the broker ends the connection: with a close, or (None) without a word.

    What it says before is of no interest. A client that sent half a frame hangs up by itself.
    """
    try:
        while True:
            method = (await client.receive()).method
            if isinstance(method, commands.Connection.Close):
                return method
    except Hangup:
        return None


@pytest.mark.parametrize("seed", range(4))
async def test_garbage_after_the_handshake(broker: Broker, seed: int) -> None:
    chance = random.Random(seed)
    async with await RawClient.open(broker.port) as other:
        before = take_census(broker)
        for _ in range(25):
            async with await RawClient.open(broker.port) as client:
                # Past 7 bytes there is a frame type, which is unknown unless it is one of four.
                await client.send(b"\x00" + chance.randbytes(chance.randrange(20, 5000)))
                close = await ending(client)
                assert close is not None
                assert close.reply_code == 501
        await make_queue(other, "still-here", exclusive=True)
        delete = make(commands.Queue.Delete, queue="still-here")
        await other.call(1, delete, commands.Queue.DeleteOk)
        await wait_same(broker, before)


@pytest.mark.parametrize("seed", range(4))
async def test_garbage_instead_of_a_handshake(broker: Broker, seed: int) -> None:
    chance = random.Random(seed)
    before = take_census(broker)
    for _ in range(50):
        async with await RawClient.connect(broker.port) as client:
            await client.send(chance.randbytes(8))
            # Whatever it was, this is what we speak.
            assert await client._take(8) == b"AMQP\x00\x00\x09\x01"
            with pytest.raises(Hangup):
                await client._take(1)
    await wait_same(broker, before)


@pytest.mark.parametrize("seed", range(6))
async def test_damaged_conversations(broker: Broker, seed: int) -> None:
    """Valid frames with a few bytes changed: the damage stays with who did it."""
    chance = random.Random(seed)
    conversation = b"".join(
        [
            method_frame(1, make(commands.Channel.Open)),
            method_frame(1, make(commands.Confirm.Select)),
            method_frame(1, make(commands.Exchange.Declare, exchange="x", exchange_type="topic")),
            method_frame(1, make(commands.Queue.Declare, queue="q", exclusive=True)),
            method_frame(1, make(commands.Queue.Bind, queue="q", exchange="x", routing_key="#")),
            publish(1, "some.key", b"body", exchange="x"),
            publish(1, "q", bytes(300)),
            method_frame(1, make(commands.Basic.Qos, prefetch_count=10)),
            method_frame(1, make(commands.Basic.Consume, queue="q", consumer_tag="c")),
            method_frame(1, make(commands.Basic.Ack, delivery_tag=1)),
            method_frame(1, make(commands.Basic.Cancel, consumer_tag="c")),
            method_frame(1, make(commands.Basic.Get, queue="q")),
            method_frame(1, make(commands.Channel.Close)),
        ]
    )
    async with await RawClient.open(broker.port) as other:
        before = take_census(broker)
        for _ in range(60):
            damaged = bytearray(conversation)
            for _ in range(chance.randrange(1, 4)):
                damaged[chance.randrange(len(damaged))] = chance.randrange(256)
            async with await RawClient.open(broker.port, channels=0) as client:
                await client.send(bytes(damaged))
                # Either it is ended, or it was harmless and answers this.
                await client.tell(0, make(commands.Connection.Close))
                try:
                    while not isinstance(
                        method := (await client.receive(deadline_s=0.5)).method,
                        commands.Connection.Close | commands.Connection.CloseOk,
                    ):
                        pass
                    if isinstance(method, commands.Connection.Close):
                        assert method.reply_code in SYNTAX_ERRORS
                except (Hangup, TimeoutError):
                    pass  # the damage may have made one long frame of the rest
        for name in list(broker.vhosts["/"].topology.queues):
            delete = make(commands.Queue.Delete, queue=name)
            await other.call(1, delete, commands.Queue.DeleteOk)
        for name, exchange in list(broker.vhosts["/"].topology.exchanges.items()):
            if name and not name.startswith("amq."):
                assert exchange is not None
                delete_it = make(commands.Exchange.Delete, exchange=name)
                await other.call(1, delete_it, commands.Exchange.DeleteOk)
        await wait_same(broker, before)


@pytest.mark.parametrize("kind", [METHOD, HEADER, BODY, 8])
@pytest.mark.parametrize("size", [FRAME_MAX + 1, 1 << 24, 0xFFFFFFFF])
async def test_frame_that_is_too_large(broker: Broker, kind: int, size: int) -> None:
    """Refused when its size is seen, not when it has come."""
    async with await RawClient.open(broker.port) as client:
        await client.send(struct.pack(">BHI", kind, 1, size) + b"x")
        close = await client.expect(commands.Connection.Close)
        assert (close.reply_code, close.class_id, close.method_id) == (501, 0, 0)
        assert close.reply_text == (
            f"FRAME_ERROR - type {kind}, all octets = <<>>: "
            f"{{frame_too_large,{size},{FRAME_MAX - 8}}}"
        )


@pytest.mark.parametrize("size", [4097, 0xFFFFFFFF])
async def test_frame_that_is_too_large_in_the_handshake(
    timeless_broker: Broker, clock: VirtualClock, size: int
) -> None:
    """Nobody has to log in to send it, so it must cost nothing."""
    before = take_census(timeless_broker)
    async with await RawClient.connect(timeless_broker.port) as client:
        await client.send(handshake()[0])
        await client.expect(commands.Connection.Start)
        await client.send(struct.pack(">BHI", 1, 0, size) + bytes(1000))
        ended = asyncio.create_task(ending(client))

        def is_over() -> bool:
            # Before the connection is open, the answer is silence, then the end.
            clock.advance(0.5)
            return ended.done()

        await wait_until(is_over, "it is ended")
        close = await ended
        assert close is None or close.reply_code == 501
    await wait_same(timeless_broker, before)


def content_header(channel: int, body_size: int) -> bytes:
    payload = struct.pack(">HHQH", 60, 0, body_size, 0)
    return frame(HEADER, channel, payload)


def publish_method(channel: int, key: str) -> bytes:
    return method_frame(channel, make(commands.Basic.Publish, routing_key=key))


async def test_body_of_an_exabyte(tmp_path: Path) -> None:
    """What is announced is not reserved, and what comes of it is not kept."""
    with running_broker(tmp_path) as process:
        async with (
            await RawClient.open(process.port) as client,
            await RawClient.open(process.port) as other,
        ):
            part = frame(BODY, 1, bytes(FRAME_MAX - 8))
            await client.send(publish_method(1, "q") + content_header(1, 1 << 60) + part)
            await client.send(part * 40)
            await make_queue(other, "q")
            before = resident_bytes(process.pid)
            for _ in range(20):
                await client.send(part * 40)
                await make_queue(other, "q")
            # Of 100 MiB.
            assert resident_bytes(process.pid) - before < 20 * MIB
            # A method where a body is due ends it.
            await client.tell(1, make(commands.Channel.Open))
            assert (await client.expect(commands.Connection.Close)).reply_code == 505


async def test_frames_that_carry_nothing(broker: Broker) -> None:
    """Heartbeats and empty body frames by the thousand, in the middle of a message."""
    async with await RawClient.open(broker.port) as client:
        await make_queue(client, "q", exclusive=True)
        await select_confirms(client)
        before = take_census(broker)
        await client.send(publish_method(1, "q") + content_header(1, 4))
        empty = frame(BODY, 1, b"")
        for _ in range(100):
            await client.send((empty + HEARTBEAT_FRAME) * 500)
        await client.send(frame(BODY, 1, b"done"))
        await confirmed(client, 1)
        assert [got.body for got in await drain(client, "q")] == [b"done"]
        await wait_same(broker, before)


@pytest.mark.parametrize("finish", [False, True])
async def test_half_a_publish_on_every_channel(broker: Broker, finish: bool) -> None:
    count = 2047
    async with await RawClient.open(broker.port) as other:
        await make_queue(other, "q")
        before = take_census(broker)
        async with await RawClient.open(broker.port, channels=0) as client:
            numbers = range(1, count + 1)
            await client.send(
                b"".join(method_frame(number, make(commands.Channel.Open)) for number in numbers)
            )
            for _ in numbers:
                await client.expect(commands.Channel.OpenOk)
            for number in numbers:
                await client.send(publish_method(number, "q") + content_header(number, 2000))
            for number in numbers:
                await client.send(frame(BODY, number, number.to_bytes(2) * 500))
            await make_queue(other, "q")
            assert len(await drain(other, "q")) == 0
            if finish:
                for number in reversed(numbers):
                    await client.send(frame(BODY, number, number.to_bytes(2) * 500))
                await client.say_goodbye()
                bodies = [got.body for got in await drain(other, "q")]
                assert sorted(bodies) == [number.to_bytes(2) * 1000 for number in numbers]
        await wait_same(broker, before)


def nested(depth: int, kind: bytes = b"F") -> bytes:
    """The entries of a table with ``depth`` more in it, or arrays."""
    inner = b""
    for _ in range(depth):
        key = b"\x01k" if kind == b"F" else b""
        inner = key + kind + struct.pack(">I", len(inner)) + inner
    return inner if kind == b"F" else b"\x01k" + inner


@pytest.mark.parametrize("kind", [b"F", b"A"], ids=["tables", "arrays"])
@pytest.mark.parametrize("where", ["arguments", "headers", "start-ok"])
async def test_tables_nested_too_deeply(broker: Broker, where: str, kind: bytes) -> None:
    depth = 400 if where == "start-ok" else 15_000
    inner = nested(depth, kind)
    table = struct.pack(">I", len(inner)) + inner
    before = take_census(broker)
    async with await RawClient.connect(broker.port) as client:
        if where == "start-ok":
            await client.send(handshake()[0])
            await client.expect(commands.Connection.Start)
            await client.send(
                frame(METHOD, 0, b"\x00\x0a\x00\x0b" + table + b"\x05PLAIN\x00\x00\x00\x00\x00")
            )
        else:
            await client.shake_hands()
            await client.open_channel(1)
            if where == "arguments":
                payload = b"\x00\x32\x00\x0a\x00\x00\x01q\x00" + table
                await client.send(frame(METHOD, 1, payload))
            else:
                header = struct.pack(">HHQH", 60, 0, 0, 1 << 13) + table
                await client.send(publish_method(1, "q") + frame(HEADER, 1, header))
        close = await ending(client)
        assert close is None or close.reply_code in SYNTAX_ERRORS
    await wait_same(broker, before)


@pytest.mark.parametrize("kind", [b"F", b"A"], ids=["tables", "arrays"])
async def test_tables_nested_as_deeply_as_allowed(broker: Broker, kind: bytes) -> None:
    inner = nested(100, kind)
    header = struct.pack(">H", 1 << 13) + struct.pack(">I", len(inner)) + inner
    async with await RawClient.open(broker.port) as client:
        await make_queue(client, "q", exclusive=True)
        await client.send(publish(1, "q", b"x", header=header))
        (got,) = await drain(client, "q")
        assert got.header == header


async def test_errors_name_no_source(broker: Broker) -> None:
    """What a client is told are RabbitMQ's words, never ours about our code."""
    async with await RawClient.open(broker.port) as client:
        await client.tell(1, make(commands.Basic.Recover, requeue=False))
        close = await client.expect(commands.Connection.Close)
        assert close.reply_text == "NOT_IMPLEMENTED - requeue=false"
