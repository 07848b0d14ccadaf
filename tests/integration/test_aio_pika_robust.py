"""aio-pika: connections that are refused, fail, are cut and come back."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aio_pika
import pytest
from aio_pika import ExchangeType, Message
from aio_pika.abc import (
    AbstractChannel,
    AbstractConnection,
    AbstractIncomingMessage,
    AbstractRobustConnection,
)
from aio_pika.exceptions import (
    AMQPConnectionError,
    AMQPError,
    ChannelClosed,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    ConnectionClosed,
    ProbableAuthenticationError,
)
from aio_pika.tools import CallbackCollection
from aiormq.exceptions import ChannelAccessRefused, ChannelLockedResource
from yarl import URL

pytestmark = pytest.mark.timeout(20)

DEADLINE_S = 10


class CuttableProxy:
    """A way to the broker that a test can cut, as a failing network would: without goodbye."""

    def __init__(self, broker: URL) -> None:
        self._broker = broker
        # Both ends of every connection that is passed on; emptied by cut().
        self._ends: set[asyncio.StreamWriter] = set()
        # One per accepted connection, so that close() can wait for all of them.
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        """Listen; return the URL under which the broker is reached through here."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        return str(self._broker.with_host("127.0.0.1").with_port(port))

    def cut(self) -> None:
        assert self._ends, "nothing is connected"
        for end in self._ends:
            end.transport.abort()
        self._ends.clear()

    async def close(self) -> None:
        self._server.close()
        for end in self._ends:
            end.transport.abort()
        await asyncio.gather(*self._tasks)
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        onward_reader, onward = await asyncio.open_connection(self._broker.host, self._broker.port)
        ends = {writer, onward}
        self._ends |= ends
        await asyncio.gather(self._pass_on(reader, onward), self._pass_on(onward_reader, writer))
        self._ends -= ends

    @staticmethod
    async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@pytest.fixture
async def proxy(amqp_url: str) -> AsyncIterator[CuttableProxy]:
    proxy = CuttableProxy(URL(amqp_url))
    yield proxy
    await proxy.close()


@pytest.fixture
async def robust(proxy: CuttableProxy) -> AsyncIterator[AbstractRobustConnection]:
    """A robust connection through the proxy."""
    url = await proxy.start()
    connection = await aio_pika.connect_robust(url, reconnect_interval=0.05)
    yield connection
    await connection.close()


def called(callbacks: CallbackCollection[Any, Any]) -> asyncio.Event:
    """An event that is set once the client calls ``callbacks``."""
    event = asyncio.Event()

    async def note(*_: object) -> None:
        event.set()

    callbacks.add(note)
    return event


async def test_robust_connection_restores_topology_and_consumer(
    proxy: CuttableProxy, robust: AbstractRobustConnection, channel: AbstractChannel, name: str
) -> None:
    """The queue is exclusive: it died with the old socket and must be declared and bound anew."""
    back = called(robust.reconnect_callbacks)
    arrived: asyncio.Queue[AbstractIncomingMessage] = asyncio.Queue()
    own = await robust.channel()
    exchange = await own.declare_exchange(name, ExchangeType.TOPIC, auto_delete=True)
    queue = await own.declare_queue(f"{name}.queue", exclusive=True)
    await queue.bind(exchange, "orders.*")
    await queue.consume(arrived.put)

    async with asyncio.timeout(DEADLINE_S):
        proxy.cut()
        await back.wait()
        outside = await channel.get_exchange(name)
        await outside.publish(Message(b"after the cut"), "orders.new")
        message = await arrived.get()

    assert message.body == b"after the cut"
    await message.ack()


async def test_robust_consumer_gets_its_unacked_message_again(
    proxy: CuttableProxy, robust: AbstractRobustConnection, channel: AbstractChannel, name: str
) -> None:
    arrived: asyncio.Queue[AbstractIncomingMessage] = asyncio.Queue()
    own = await robust.channel()
    queue = await own.declare_queue(name)
    await queue.consume(arrived.put)
    await channel.default_exchange.publish(Message(b"job"), name)

    async with asyncio.timeout(DEADLINE_S):
        first = await arrived.get()
        proxy.cut()
        again = await arrived.get()
        await again.ack()
        # Answered after the ack, on its channel.
        deleted = await own.queue_delete(name)

    assert (first.redelivered, again.redelivered, again.body) == (False, True, b"job")
    assert deleted.message_count == 0


async def test_robust_connection_publishes_again_after_a_cut(
    proxy: CuttableProxy, robust: AbstractRobustConnection, channel: AbstractChannel, name: str
) -> None:
    back = called(robust.reconnect_callbacks)
    queue = await channel.declare_queue(name, exclusive=True)
    own = await robust.channel()
    await own.default_exchange.publish(Message(b"before"), name)

    async with asyncio.timeout(DEADLINE_S):
        proxy.cut()
        await back.wait()
        await own.ready()
        await own.default_exchange.publish(Message(b"after"), name)

    assert [(await queue.get(no_ack=True)).body for _ in range(2)] == [b"before", b"after"]


async def test_robust_channel_reopens_after_a_channel_error(
    robust: AbstractRobustConnection, name: str
) -> None:
    own = await robust.channel()
    back = called(own.reopen_callbacks)
    queue = await own.declare_queue(name, exclusive=True)
    with pytest.raises(ChannelNotFoundEntity):
        await own.get_queue(f"{name}.missing")

    async with asyncio.timeout(DEADLINE_S):
        await back.wait()
        await own.default_exchange.publish(Message(b"still here"), name)
        assert (await queue.get(no_ack=True)).body == b"still here"


async def test_exclusive_queue_goes_when_its_socket_is_cut(
    amqp_url: str, proxy: CuttableProxy, channel: AbstractChannel, name: str
) -> None:
    """No close, no heartbeat: the end of the stream alone frees the name."""
    owner = await aio_pika.connect(await proxy.start())
    await (await owner.channel()).declare_queue(name, exclusive=True)
    async with await aio_pika.connect(amqp_url) as watching:
        proxy.cut()
        async with asyncio.timeout(DEADLINE_S):
            while await passive_declare_fails_with(watching, name, ChannelLockedResource):
                pass

    await channel.declare_queue(name, exclusive=True)
    await owner.close()


async def passive_declare_fails_with(
    connection: AbstractConnection, name: str, error: type[ChannelClosed]
) -> bool:
    """Whether the queue is there, but refused with ``error``; False once it is gone."""
    probe = await connection.channel()
    with pytest.raises(ChannelClosed) as refused:
        await probe.declare_queue(name, passive=True)
    return isinstance(refused.value, error)


async def test_exclusive_queue_is_locked_for_others_and_goes_with_its_owner(
    amqp_url: str, connection: AbstractConnection, name: str
) -> None:
    async with await aio_pika.connect(amqp_url) as owner:
        await (await owner.channel()).declare_queue(name, exclusive=True)
        assert await passive_declare_fails_with(connection, name, ChannelLockedResource)

    # The owner's close was answered, which happens after its queues are gone.
    assert await passive_declare_fails_with(connection, name, ChannelNotFoundEntity)


async def passive_declare_of_a_missing_queue(channel: AbstractChannel, name: str) -> None:
    await channel.get_queue(name)


async def declare_with_other_arguments(channel: AbstractChannel, name: str) -> None:
    await channel.declare_queue(name, exclusive=True)
    await channel.declare_queue(name, exclusive=True, arguments={"x-max-length": 1})


async def declare_with_other_exclusiveness(channel: AbstractChannel, name: str) -> None:
    await channel.declare_queue(name, exclusive=True)
    await channel.declare_queue(name, exclusive=False)


async def declare_a_reserved_name(channel: AbstractChannel, name: str) -> None:
    await channel.declare_queue(f"amq.{name}")


async def consume_beside_an_exclusive_consumer(channel: AbstractChannel, name: str) -> None:
    queue = await channel.declare_queue(name, exclusive=True)
    nowhere: asyncio.Queue[AbstractIncomingMessage] = asyncio.Queue()
    await queue.consume(nowhere.put, exclusive=True)
    await queue.consume(nowhere.put)


async def bind_to_a_missing_exchange(channel: AbstractChannel, name: str) -> None:
    queue = await channel.declare_queue(name, exclusive=True)
    await queue.bind(f"{name}.missing", "key")


async def ack_a_tag_never_given(channel: AbstractChannel, name: str) -> None:
    underlay = await channel.get_underlay_channel()
    await underlay.basic_ack(1)
    await channel.declare_queue(name, exclusive=True)


@pytest.mark.parametrize(
    ("mistake", "error", "text"),
    [
        (passive_declare_of_a_missing_queue, ChannelNotFoundEntity, "NOT_FOUND - no queue"),
        (bind_to_a_missing_exchange, ChannelNotFoundEntity, "NOT_FOUND - no exchange"),
        (declare_with_other_exclusiveness, ChannelLockedResource, "RESOURCE_LOCKED - cannot"),
        (declare_with_other_arguments, ChannelPreconditionFailed, "inequivalent arg 'x-max-length"),
        (
            ack_a_tag_never_given,
            ChannelPreconditionFailed,
            "PRECONDITION_FAILED - unknown delivery tag 1",
        ),
        (declare_a_reserved_name, ChannelAccessRefused, "contains reserved prefix 'amq.*'"),
        (consume_beside_an_exclusive_consumer, ChannelAccessRefused, "in exclusive use"),
    ],
)
async def test_channel_error_leaves_the_connection_usable(
    connection: AbstractConnection,
    channel: AbstractChannel,
    name: str,
    mistake: Callable[[AbstractChannel, str], Awaitable[None]],
    error: type[AMQPError],
    text: str,
) -> None:
    mistaken = await connection.channel()
    with pytest.raises(error) as raised:
        await mistake(mistaken, name)

    assert text in str(raised.value)
    assert mistaken.is_closed
    # Both a channel that was open beside it and a new one go on.
    await channel.declare_queue(exclusive=True)
    async with connection.channel() as another:
        await another.declare_queue(exclusive=True)


async def test_connection_error_ends_the_connection(amqp_url: str, name: str) -> None:
    """An unknown exchange type is a 503, which no channel survives."""
    connection = await aio_pika.connect(amqp_url)
    channel = await connection.channel()
    with pytest.raises(ConnectionClosed):
        await channel.declare_exchange(name, "no-such-type")

    await asyncio.wait_for(channel.closed(), DEADLINE_S)
    await connection.close()


async def test_wrong_password_is_refused(amqp_url: str) -> None:
    with pytest.raises(ProbableAuthenticationError, match="ACCESS_REFUSED - Login was refused"):
        await aio_pika.connect(URL(amqp_url).with_password("wrong"))


async def test_missing_vhost_is_refused(amqp_url: str, name: str) -> None:
    # aio-pika keeps the broker's text to itself; the pika tests read it.
    with pytest.raises(AMQPError, match=r"Connection\.Close"):
        await aio_pika.connect(URL(amqp_url).with_path(f"/{name}"))


async def test_robust_connection_does_not_hide_a_wrong_password(amqp_url: str) -> None:
    with pytest.raises(AMQPConnectionError):
        await aio_pika.connect_robust(URL(amqp_url).with_password("wrong"))
