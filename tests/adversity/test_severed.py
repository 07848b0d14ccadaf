"""Connections that end in the middle of things: at every byte, by end of stream and by reset."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from pamqp import commands

from leveret.broker.server import Broker
from leveret.protocol.codec import make, method_frame
from tests.adversity.census import take_census, wait_same, wait_until
from tests.adversity.steps import (
    ask,
    confirmed,
    connections_are,
    drain,
    make_queue,
    ready_is,
    select_confirms,
)
from tests.support.raw_client import PERSISTENT, RawClient, handshake, publish

Cut = Callable[[RawClient], None]
CUTS = [pytest.param(RawClient.close, id="eof"), pytest.param(RawClient.reset, id="reset")]
HANDSHAKE_ANSWERS = (
    commands.Connection.Start,
    commands.Connection.Tune,
    commands.Connection.OpenOk,
)


async def test_census_sees_what_is_there(broker: Broker) -> None:
    """Otherwise the rest of these tests would say nothing."""
    before = take_census(broker)
    async with await RawClient.open(broker.port, heartbeat=60) as client:
        await make_queue(client, "q")
        await select_confirms(client)
        await client.send(publish(1, "q", b"one") + publish(1, "q", b"two"))
        await confirmed(client, 2)
        await client.call(1, make(commands.Basic.Consume, queue="q"), commands.Basic.ConsumeOk)
        more = take_census(broker) - before
    assert more["tasks"] == 3  # reader, channel, queue
    assert more["sockets"] == 2  # both ends
    assert more["timers"] == 3  # two of the heartbeat, one for deliveries that are not acked
    for name in ("Reader", "Channel", "SocketWriter", "TCPTransport", "QueueActor", "Consumer"):
        assert more[name] == 1, name
    with pytest.raises(AssertionError, match="'queues': '0 -> 1'"):
        await wait_same(broker, before, deadline_s=0.2)


@pytest.mark.parametrize("cut", CUTS)
async def test_handshake(broker: Broker, cut: Cut) -> None:
    parts = handshake(heartbeat=60)
    before = take_census(broker)
    for number, part in enumerate(parts):
        for size in range(len(part) + (number == len(parts) - 1)):
            client = await RawClient.connect(broker.port)
            for earlier, answer in zip(parts[:number], HANDSHAKE_ANSWERS, strict=False):
                await client.send(earlier)
                await client.expect(answer)
            await client.send(part[:size])
            cut(client)
    await wait_same(broker, before)


@pytest.mark.parametrize("cut", CUTS)
async def test_handshake_sent_without_waiting(broker: Broker, cut: Cut) -> None:
    """Everything up to an open channel in one go, and gone before it is answered."""
    everything = b"".join(handshake()) + method_frame(1, make(commands.Channel.Open))
    before = take_census(broker)
    for size in range(0, len(everything) + 1):
        client = await RawClient.connect(broker.port)
        await client.send(everything[:size])
        cut(client)
    await wait_same(broker, before)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("frames", ["hot", "cold"])
async def test_publish(broker: Broker, cut: Cut, frames: str) -> None:
    """A publish that is not all there never happened; one that is there, did."""
    whole = publish(1, "q", b"0123456789", header=PERSISTENT)
    if frames == "cold":
        # A body in two frames on a channel of its own, with a heartbeat between.
        whole = publish(1, "q", b"01234", header=PERSISTENT)
        body_size_at = whole.index(b"\x00\x00\x00\x00\x00\x00\x00\x05")
        whole = (
            whole[:body_size_at]
            + (10).to_bytes(8)
            + whole[body_size_at + 8 :]
            + b"\x08\x00\x00\x00\x00\x00\x00\xce"
            + b"\x03\x00\x01\x00\x00\x00\x0556789\xce"
        )
    async with await RawClient.open(broker.port) as other:
        await make_queue(other, "q", durable=True)
        before = take_census(broker)
        for size in range(len(whole)):
            client = await RawClient.open(broker.port)
            await select_confirms(client)
            await client.send(whole[:size])
            cut(client)
        await wait_same(broker, before)
        await other.call(1, make(commands.Basic.Get, queue="q"), commands.Basic.GetEmpty)

        client = await RawClient.open(broker.port)
        await select_confirms(client)
        await client.send(whole)
        await client.expect(commands.Basic.Ack)
        cut(client)
        got = await ask(other, make(commands.Basic.Get, queue="q", no_ack=True))
        assert got.body == b"0123456789"
        await wait_same(broker, before)


async def test_whole_publish_before_the_end_of_the_stream_counts(broker: Broker) -> None:
    """Although nobody waits for the confirm any more."""
    async with await RawClient.open(broker.port) as other:
        await make_queue(other, "q")
        before = take_census(broker)
        client = await RawClient.open(broker.port)
        await client.send(publish(1, "q", b"kept") * 1000)
        client.close()
        await wait_until(partial(ready_is, broker, "q", 1000), "1000 messages")
        await other.call(1, make(commands.Queue.Purge, queue="q"), commands.Queue.PurgeOk)
        await wait_same(broker, before)


@pytest.mark.parametrize("cut", CUTS)
async def test_consume_and_ack(broker: Broker, cut: Cut) -> None:
    """Consume, two deliveries, an ack of each: what was not acked is there for the next one."""
    consume = method_frame(1, make(commands.Basic.Consume, queue="q", consumer_tag="c"))
    acks = [method_frame(1, make(commands.Basic.Ack, delivery_tag=tag)) for tag in (1, 2)]
    async with await RawClient.open(broker.port) as other:
        await make_queue(other, "q")
        await select_confirms(other)
        before = take_census(broker)
        for size in range(1, len(consume) + 1):
            client = await RawClient.open(broker.port)
            await client.send(consume[:size])
            cut(client)
        for size in range(len(acks[0]) * 2 + 1):
            await other.send(publish(1, "q", b"first") + publish(1, "q", b"second"))
            await confirmed(other, 2 * size + 2)
            client = await RawClient.open(broker.port)
            await client.call(1, make(commands.Basic.Consume, queue="q"), commands.Basic.ConsumeOk)
            for body in (b"first", b"second"):
                assert (await client.receive()).body == body
            await client.send((acks[0] + acks[1])[:size])
            cut(client)
            await wait_until(partial(connections_are, broker, 1), "the client is forgotten")
            left = await drain(other, "q")
            # A reset may throw away what was sent before it.
            acked = size // len(acks[0])
            possible = [2 - acked] if cut is RawClient.close else range(2 - acked, 3)
            assert len(left) in possible
            assert [got.body for got in left] == [b"first", b"second"][2 - len(left) :]
            assert all(getattr(got.method, "redelivered", None) for got in left)
        await wait_same(broker, before)


@pytest.mark.parametrize("cut", CUTS)
async def test_transaction(broker: Broker, cut: Cut) -> None:
    """Without commit there was nothing."""
    select = method_frame(1, make(commands.Tx.Select))
    commit = method_frame(1, make(commands.Tx.Commit))
    whole = select + publish(1, "q", b"x") * 3 + commit
    async with await RawClient.open(broker.port) as other:
        await make_queue(other, "q")
        before = take_census(broker)
        for size in range(len(whole) - len(commit), len(whole)):
            client = await RawClient.open(broker.port)
            await client.send(whole[:size])
            cut(client)
        await wait_same(broker, before)
        assert ready_is(broker, "q", 0)
