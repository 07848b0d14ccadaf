"""aio-pika's robust connections while the broker process is stopped, or killed, and started again.

The topology is durable and declared once, by somebody else: the robust client only ever asks for it
passively, so that it cannot make up for anything that a restart has lost. What was confirmed must
come to the consumer, once or marked as a redelivery.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aio_pika
import pytest
from aio_pika import DeliveryMode, ExchangeType, Message
from aio_pika.abc import (
    AbstractIncomingMessage,
    AbstractRobustChannel,
    AbstractRobustConnection,
)

from tests.support.broker_process import BrokerProcess

pytestmark = pytest.mark.timeout(60)

DEADLINE_S = 20
CONFIRMED = 20
PREFETCH = 5

Arrived = asyncio.Queue[AbstractIncomingMessage]


class Server:
    """One data folder and one port, several processes one after the other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = self._start()

    def _start(self, *flags: str) -> BrokerProcess:
        return BrokerProcess(self._folder / "data", self._folder / "broker.log", *flags)

    @property
    def url(self) -> str:
        return self._process.url

    async def end(self, how: str) -> None:
        # In a thread: the client must be able to answer the broker's goodbye.
        if how == "stopped":
            await asyncio.to_thread(self._process.assert_stopped_cleanly)
        else:
            await asyncio.to_thread(self._process.kill)

    async def start_again(self) -> None:
        port = str(self._process.port)
        self._process = await asyncio.to_thread(self._start, "--port", port)

    def close(self) -> None:
        if self._process.is_running:
            self._process.kill()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.close()


class Client:
    """A robust connection with a consumer and a publisher that waits for confirms."""

    def __init__(self, connection: AbstractRobustConnection) -> None:
        self._connection = connection
        self.arrived: Arrived = asyncio.Queue()
        self.back = asyncio.Event()

    async def set_up(self) -> None:
        async def note(*_: object) -> None:
            self.back.set()

        self._connection.reconnect_callbacks.add(note)
        self._publishing = await self._channel()
        self._orders = await self._publishing.get_exchange("orders")
        consuming = await self._channel()
        await consuming.set_qos(prefetch_count=PREFETCH)
        queue = await consuming.get_queue("jobs")
        await queue.consume(self.arrived.put)

    async def _channel(self) -> AbstractRobustChannel:
        channel = await self._connection.channel()
        assert isinstance(channel, AbstractRobustChannel)
        return channel

    async def publish(self, body: str) -> None:
        """Returns when it is confirmed."""
        message = Message(body.encode(), delivery_mode=DeliveryMode.PERSISTENT)
        await self._orders.publish(message, "orders.new")

    async def wait_ready(self) -> None:
        await self.back.wait()
        await self._publishing.ready()


async def declare(url: str) -> None:
    async with await aio_pika.connect(url) as connection:
        channel = await connection.channel()
        await channel.declare_exchange("orders", ExchangeType.TOPIC, durable=True)
        queue = await channel.declare_queue("jobs", durable=True)
        await queue.bind("orders", "orders.*")


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Client]:
    await declare(url)
    async with await aio_pika.connect_robust(url, reconnect_interval=0.05) as connection:
        client = Client(connection)
        await client.set_up()
        yield client


@pytest.mark.parametrize("how", ["stopped", "killed"])
async def test_robust_client_lives_through_a_restart(server: Server, how: str) -> None:
    sent = [f"before {number}" for number in range(CONFIRMED)]
    async with asyncio.timeout(DEADLINE_S), connected(server.url) as client:
        for body in sent:
            await client.publish(body)
        # The consumer holds as many as it may have: some were delivered, the others never.
        held = [await client.arrived.get() for _ in range(PREFETCH)]
        assert [message.body.decode() for message in held] == sent[:PREFETCH]

        await server.end(how)
        await server.start_again()
        await client.wait_ready()
        await client.publish("after")

        again: list[AbstractIncomingMessage] = []
        for _ in range(CONFIRMED + 1):
            message = await client.arrived.get()
            await message.ack()
            again.append(message)
        assert [message.body.decode() for message in again] == [*sent, "after"]
        # After a kill nobody knows what was delivered: any may have been. What comes later is new.
        redelivered = PREFETCH if how == "stopped" else CONFIRMED
        assert [message.redelivered for message in again] == [
            place < redelivered for place in range(CONFIRMED + 1)
        ]
        assert client.arrived.empty(), "nothing comes twice"
    await server.end("stopped")


@pytest.mark.parametrize("how", ["stopped", "killed"])
async def test_what_was_acked_does_not_come_again(server: Server, how: str) -> None:
    async with asyncio.timeout(DEADLINE_S), connected(server.url) as client:
        await client.publish("done")
        await client.publish("open")
        await (await client.arrived.get()).ack()
        await client.arrived.get()
        # Acks are not answered; a later confirm of the same queue comes behind their commit.
        await client.publish("last")
        await client.arrived.get()

        await server.end(how)
        await server.start_again()
        await client.wait_ready()
        again = [await client.arrived.get() for _ in range(2)]
        assert [(message.body, message.redelivered) for message in again] == [
            (b"open", True),
            (b"last", True),
        ]
        for message in again:
            await message.ack()
    await server.end("stopped")
