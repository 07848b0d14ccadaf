"""Clients that come and go, open and close, declare and delete for ever: nothing must add up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
from pamqp import commands
from pamqp.base import Frame

from leveret.broker.server import Broker
from leveret.protocol.codec import make, method_frame
from tests.adversity.census import resident_bytes, take_census, wait_same, wait_until
from tests.adversity.steps import connections_are
from tests.support.broker_process import running_broker
from tests.support.raw_client import RawClient, publish

MIB = 1 << 20
# Allowed between the first half and the second.
GROWTH = 5 * MIB


async def reopen_channels(client: RawClient, port: int, rounds: int, first: int) -> None:
    """Channels of one connection, opened, used and closed in bursts."""
    burst = 100
    for at in range(first, first + rounds, burst):
        numbers = [2 + (at + place) % 2000 for place in range(burst)]
        await client.send(
            b"".join(
                method_frame(number, make(commands.Channel.Open))
                + publish(number, "nowhere", b"x")
                + method_frame(number, make(commands.Channel.Close))
                for number in numbers
            )
        )
        # The answers of different channels may come in any order.
        answers = [(await client.receive()).method for _ in range(2 * burst)]
        assert sum(isinstance(answer, commands.Channel.OpenOk) for answer in answers) == burst
        assert sum(isinstance(answer, commands.Channel.CloseOk) for answer in answers) == burst


async def fail_channels(client: RawClient, port: int, rounds: int, first: int) -> None:
    """Channels that the broker closes, with something in their hands each."""
    declare = make(commands.Queue.Declare, queue="held", exclusive=True)
    await client.call(1, declare, commands.Queue.DeclareOk)
    await client.send(publish(1, "held", b"x"))
    for _ in range(rounds):
        await client.open_channel(2)
        await client.tell(2, make(commands.Basic.Get, queue="held"))
        assert (await client.receive()).body == b"x"
        await client.tell(2, make(commands.Queue.Purge, queue="missing"))
        await client.expect(commands.Channel.Close)
        await client.tell(2, make(commands.Channel.CloseOk))
    await client.call(1, make(commands.Queue.Delete, queue="held"), commands.Queue.DeleteOk)


async def reconnect(_: RawClient, port: int, rounds: int, first: int) -> None:
    """Fifty connections at a time, each with a queue, a consumer and a message of its own."""

    async def once(number: int) -> None:
        async with await RawClient.open(port, channels=2, heartbeat=60) as client:
            name = f"own-{number}"
            declare = make(commands.Queue.Declare, queue=name, exclusive=True)
            await client.call(1, declare, commands.Queue.DeclareOk)
            consume = make(commands.Basic.Consume, queue=name)
            await client.call(1, consume, commands.Basic.ConsumeOk)
            await client.send(publish(2, name, b"mine"))
            assert (await client.receive()).body == b"mine"
            if number % 3 == 0:
                await client.say_goodbye()
            elif number % 3 == 1:
                client.reset()

    for at in range(first, first + rounds, 50):
        await asyncio.gather(*(once(number) for number in range(at, min(at + 50, first + rounds))))


async def declare_and_delete(client: RawClient, port: int, rounds: int, first: int) -> None:
    """Each time another name: an exchange, a queue, bindings, a consumer, messages; and away."""
    for number in range(first, first + rounds):
        exchange, queue = f"exchange-{number}", f"queue-{number}"
        await client.send(
            b"".join(
                method_frame(1, method)
                for method in (
                    make(
                        commands.Exchange.Declare,
                        exchange=exchange,
                        exchange_type=("direct", "topic", "fanout", "headers")[number % 4],
                    ),
                    make(commands.Queue.Declare, queue=queue, auto_delete=number % 2 == 1),
                    make(
                        commands.Queue.Bind,
                        queue=queue,
                        exchange=exchange,
                        routing_key=f"key.{number}.#",
                    ),
                    make(
                        commands.Exchange.Bind,
                        destination=exchange,
                        source="amq.topic",
                        routing_key=f"*.{number}",
                    ),
                    make(commands.Basic.Consume, queue=queue, consumer_tag="c", no_ack=True),
                )
            )
            + publish(1, f"key.{number}.#", bytes(1000), exchange=exchange)
            + publish(1, queue, bytes(1000))
            + publish(1, f"nobody.{number}", bytes(1000), exchange="amq.topic")
            + b"".join(
                method_frame(1, method)
                for method in (
                    make(commands.Queue.Unbind, queue=queue, exchange=exchange),
                    make(commands.Exchange.Delete, exchange=exchange),
                    make(commands.Basic.Cancel, consumer_tag="c"),
                    make(commands.Queue.Delete, queue=queue),
                )
            )
        )
        while not await is_deleted(client):
            pass


async def is_deleted(client: RawClient) -> bool:
    """Take the next answer: whether it is the last one of a round."""
    method: Frame = (await client.receive()).method
    assert not isinstance(method, commands.Channel.Close | commands.Connection.Close), dict(method)
    return isinstance(method, commands.Queue.DeleteOk)


async def use_many_keys(client: RawClient, port: int, rounds: int, first: int) -> None:
    """Publishes that never repeat a routing key, to an exchange with bindings."""
    declare = make(commands.Queue.Declare, queue="few", exclusive=True)
    await client.call(1, declare, commands.Queue.DeclareOk)
    bind = make(commands.Queue.Bind, queue="few", exchange="amq.topic", routing_key="few.*")
    await client.call(1, bind, commands.Queue.BindOk)
    for at in range(first, first + rounds, 100):
        await client.send(
            b"".join(
                publish(1, f"key.{number}.{'x' * 200}", b"", exchange="amq.topic")
                for number in range(at, at + 100)
            )
        )
        await client.call(1, declare, commands.Queue.DeclareOk)
    await client.call(1, make(commands.Queue.Delete, queue="few"), commands.Queue.DeleteOk)


async def test_queues_that_others_delete(broker: Broker) -> None:
    """A channel forgets queues it has asked, consumed from or published to when they are gone."""
    async with await RawClient.open(broker.port) as other, await RawClient.open(broker.port) as us:
        before = take_census(broker)
        for number in range(100):
            queue = f"queue-{number}"
            declare = make(commands.Queue.Declare, queue=queue)
            await other.call(1, declare, commands.Queue.DeclareOk)
            passive = make(commands.Queue.Declare, queue=queue, passive=True)
            await us.call(1, passive, commands.Queue.DeclareOk)
            if number % 5 == 0:
                await us.call(1, make(commands.Basic.Get, queue=queue), commands.Basic.GetEmpty)
            elif number % 5 == 1:
                consume = make(commands.Basic.Consume, queue=queue, consumer_tag="c")
                await us.call(1, consume, commands.Basic.ConsumeOk)
                cancel = make(commands.Basic.Cancel, consumer_tag="c")
                await us.call(1, cancel, commands.Basic.CancelOk)
            elif number % 5 == 2:
                await us.call(1, make(commands.Queue.Purge, queue=queue), commands.Queue.PurgeOk)
            elif number % 5 == 3:
                await us.send(publish(1, queue, b"x"))
                await us.call(1, passive, commands.Queue.DeclareOk)
            client = us if number % 2 else other
            await client.call(1, make(commands.Queue.Delete, queue=queue), commands.Queue.DeleteOk)
        await wait_same(broker, before)


Churn = Callable[[RawClient, int, int, int], Awaitable[None]]
FAST: list[tuple[Churn, int]] = [
    (reopen_channels, 10_000),
    (fail_channels, 1_000),
    (reconnect, 500),
    (declare_and_delete, 1_000),
    (use_many_keys, 10_000),
]
# What is in reference cycles waits for the collector, which comes rarely: connections that are gone
# may add up to some 70 MiB before it does. The first half must be long enough to get there.
SLOW: list[tuple[Churn, int]] = [
    (reopen_channels, 120_000),
    (fail_channels, 20_000),
    (reconnect, 26_000),
    (declare_and_delete, 20_000),
    (use_many_keys, 200_000),
]


@pytest.mark.parametrize(
    ("churn", "rounds"), [pytest.param(*case, id=case[0].__name__) for case in FAST]
)
async def test_nothing_is_left(broker: Broker, churn: Churn, rounds: int) -> None:
    """Neither in the broker nor in the connection that has done it."""
    async with await RawClient.open(broker.port) as client:
        # Once beforehand: some things are made when they are first needed.
        await churn(client, broker.port, 100, 0)
        await wait_until(partial(connections_are, broker, 1), "the first are gone")
        before = take_census(broker)
        await churn(client, broker.port, rounds, 100)
        await wait_same(broker, before)


async def test_channels_of_many_connections(broker: Broker) -> None:
    """10,000 opened and closed, 100 on each of 100 connections, 10 connections at a time."""

    async def once() -> None:
        async with await RawClient.open(broker.port) as client:
            await reopen_channels(client, broker.port, 100, 0)

    before = take_census(broker)
    for _ in range(10):
        await asyncio.gather(*(once() for _ in range(10)))
    await wait_same(broker, before)


@pytest.mark.parametrize(
    ("churn", "rounds"),
    [pytest.param(*case, id=case[0].__name__) for case in FAST]
    + [
        pytest.param(
            *case, id=f"{case[0].__name__}-long", marks=[pytest.mark.slow, pytest.mark.timeout(300)]
        )
        for case in SLOW
    ],
)
async def test_memory_does_not_grow(tmp_path: Path, churn: Churn, rounds: int) -> None:
    half = rounds // 2
    with running_broker(tmp_path) as process:
        async with await RawClient.open(process.port) as client:
            await churn(client, process.port, half, 0)
            first = resident_bytes(process.pid)
            await churn(client, process.port, half, half)
            grown = resident_bytes(process.pid) - first
    print(f"{churn.__name__}: {first / MIB:.1f} MiB after the first half, {grown / MIB:+.1f} MiB")
    assert grown < GROWTH
