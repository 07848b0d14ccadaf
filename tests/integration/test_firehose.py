"""amq.rabbitmq.trace: copies of publishes and deliveries, as RabbitMQ's firehose makes them.

The broker runs in the test's own loop; headers, types and order were compared with RabbitMQ 3.10.8.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel, AbstractConnection
from pamqp import commands

from leveret.broker.cli.main import main
from leveret.broker.config import Settings
from leveret.broker.node import NODE_NAME
from leveret.broker.server import Broker
from leveret.broker.vhost import TRACE_EXCHANGE
from leveret.broker.vhosts import VhostError
from leveret.protocol.codec import Properties, make, read_properties, write_properties
from leveret.protocol.field_table import Field, Table, table_from_python
from tests.support.raw_client import RawClient, publish
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(60)


class Copy(NamedTuple):
    key: str
    headers: Table
    body: bytes


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    # Little credit, so that copies are felt.
    settings = Settings(port=0, data=tmp_path, credit_flow_initial=40, credit_flow_more_after=20)
    async with Broker(settings) as broker:
        yield broker


@pytest.fixture
async def client(broker: Broker) -> AsyncIterator[RawClient]:
    async with await RawClient.open(broker.port) as client:
        for queue in ("traced", "q"):
            declare = make(commands.Queue.Declare, queue=queue, arguments={})
            await client.call(1, declare, commands.Queue.DeclareOk)
        bind = make(commands.Queue.Bind, queue="traced", exchange=TRACE_EXCHANGE, routing_key="#")
        await client.call(1, bind, commands.Queue.BindOk)
        yield client


@pytest.fixture
async def connection(broker: Broker) -> AsyncIterator[AbstractConnection]:
    async with await aio_pika.connect(broker.url) as connection:
        yield connection


async def get_copy(client: RawClient, queue: str = "traced") -> Copy | None:
    await client.tell(1, make(commands.Basic.Get, queue=queue, no_ack=True))
    received = await client.receive()
    if isinstance(received.method, commands.Basic.GetEmpty):
        return None
    assert isinstance(received.method, commands.Basic.GetOk)
    assert received.method.exchange == TRACE_EXCHANGE
    properties = read_properties(received.header)
    assert properties == Properties(headers=properties.headers)
    assert properties.headers is not None
    return Copy(received.method.routing_key or "", properties.headers, received.body)


async def test_copies_are_rabbitmqs(broker: Broker, client: RawClient) -> None:
    broker.trace_on("/")
    async with await RawClient.open(broker.port) as publisher:
        headers = table_from_python({"CC": ["also"]})
        properties = Properties(
            content_type="text/plain", headers=headers, delivery_mode=2, timestamp=2**33
        )
        await publisher.send(publish(1, "q", b"body", header=write_properties(properties)))
        get = make(commands.Basic.Get, queue="q", no_ack=True)
        await publisher.call(1, get, commands.Basic.GetOk)
        ends = f"127.0.0.1:{publisher.port} -> 127.0.0.1:{broker.port}"
    published = await get_copy(client)
    assert published is not None
    assert (published.key, published.body) == ("publish.", b"body")
    keys = [Field("S", "q"), Field("S", "also")]
    of_message = [
        ("exchange_name", Field("S", "")),
        ("routing_keys", Field("A", keys)),
        (
            "properties",
            Field(
                "F",
                {
                    "timestamp": Field("l", 2**33),
                    "delivery_mode": Field("I", 2),
                    "headers": Field("F", headers),
                    "content_type": Field("S", "text/plain"),
                },
            ),
        ),
        ("node", Field("S", NODE_NAME)),
    ]
    of_channel = [
        ("vhost", Field("S", "/")),
        ("connection", Field("S", ends)),
        ("channel", Field("I", 1)),
        ("user", Field("S", "guest")),
    ]
    routed = ("routed_queues", Field("A", [Field("S", "q")]))
    assert list(published.headers.items()) == [*of_message, *of_channel, routed]
    delivered = await get_copy(client)
    assert delivered is not None
    assert (delivered.key, delivered.body) == ("deliver.q", b"body")
    redelivered = ("redelivered", Field("I", 0))
    assert list(delivered.headers.items()) == [*of_message, redelivered, *of_channel]


async def test_it_is_off_until_it_is_on_and_again_afterwards(
    broker: Broker, client: RawClient
) -> None:
    async def counted(body: bytes) -> None:
        await client.send(publish(1, "q", body))
        purge = make(commands.Queue.Purge, queue="q")
        await client.call(1, purge, commands.Queue.PurgeOk)

    await counted(b"before")
    assert await get_copy(client) is None
    broker.trace_on("/")
    broker.trace_on("/")
    await counted(b"while")
    copy = await get_copy(client)
    assert copy is not None
    assert copy.body == b"while"
    broker.trace_off("/")
    await counted(b"after")
    assert await get_copy(client) is None
    with pytest.raises(VhostError, match="there is no vhost 'nowhere'"):
        broker.trace_on("nowhere")


async def test_consuming_the_copies_makes_no_more_of_them(
    broker: Broker, connection: AbstractConnection
) -> None:
    """Whoever consumes them is traced itself."""
    channel = await connection.channel()
    traced = await channel.declare_queue(exclusive=True)
    await traced.bind(TRACE_EXCHANGE, "#")
    queue = await channel.declare_queue("work", exclusive=True)
    seen: list[str] = []

    async def note(message: aio_pika.abc.AbstractIncomingMessage) -> None:
        seen.append(message.routing_key or "")

    await traced.consume(note, no_ack=True)
    broker.trace_on("/")
    await work(channel, 100)
    async with queue.iterator(no_ack=True) as messages:
        for _ in range(100):
            await anext(messages)
    await wait_until(lambda: len(seen) >= 200)
    # One more of each comes behind everything that should not be there.
    await work(channel, 1)
    assert await queue.get(no_ack=True) is not None
    await wait_until(lambda: len(seen) >= 202)
    assert sorted(seen) == ["deliver.work"] * 101 + ["publish."] * 101


async def work(channel: AbstractChannel, count: int) -> None:
    await asyncio.gather(
        *(
            channel.default_exchange.publish(aio_pika.Message(b"%d" % number), "work")
            for number in range(count)
        )
    )


async def test_names_that_leave_no_room_in_the_key(broker: Broker, client: RawClient) -> None:
    name = "x" * 255
    declare = make(commands.Queue.Declare, queue=name, arguments={})
    await client.call(1, declare, commands.Queue.DeclareOk)
    broker.trace_on("/")
    await client.send(publish(1, name, b"long"))
    await client.tell(1, make(commands.Basic.Get, queue=name, no_ack=True))
    assert (await client.receive()).body == b"long"
    assert await get_copy(client) is not None
    copy = await get_copy(client)
    assert copy is not None
    assert copy.key == f"deliver.{name}"[:255]


async def test_the_command_line(
    broker: Broker, client: RawClient, capsys: pytest.CaptureFixture[str]
) -> None:
    data = str(broker.settings.data)

    async def leveret(*arguments: str) -> int:
        return await asyncio.to_thread(main, ["trace", *arguments, "--data", data])

    assert await leveret("on") == 0
    assert broker.vhosts["/"].tracer is not None
    assert await leveret("off", "-p", "/") == 0
    assert broker.vhosts["/"].tracer is None
    assert await leveret("on", "-p", "nowhere") == 1
    printed = capsys.readouterr()
    assert "tracing is on for vhost '/'" in printed.out
    assert "there is no vhost 'nowhere'" in printed.err
