"""aio-pika: remote calls, with its RPC pattern and with direct reply-to."""

import asyncio
from collections.abc import AsyncIterator

import aio_pika
import pytest
from aio_pika import Message
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractIncomingMessage
from aio_pika.exceptions import ChannelPreconditionFailed, MessageProcessError
from aio_pika.patterns import RPC
from aiormq.abc import DeliveredMessage
from pamqp.commands import Basic

pytestmark = pytest.mark.timeout(20)

DEADLINE_S = 10
REPLY_TO = "amq.rabbitmq.reply-to"


@pytest.fixture
async def server_channel(amqp_url: str) -> AsyncIterator[AbstractChannel]:
    """The answering side, on a connection of its own."""
    async with await aio_pika.connect(amqp_url) as connection, connection.channel() as channel:
        yield channel


@pytest.fixture
def rpc_type(name: str) -> type[RPC]:
    """RPC with a dead-letter exchange of its own: the usual one is shared and auto-deleted, so
    that another test, ending, could take it away between our declare and our bind."""
    return type("OwnRPC", (RPC,), {"DLX_NAME": f"{name}.dlx"})


async def square(*, x: int) -> int:
    return x * x


async def fail(*, reason: str) -> None:
    raise ValueError(reason)


async def test_remote_call_returns_the_result(
    channel: AbstractChannel, server_channel: AbstractChannel, rpc_type: type[RPC], name: str
) -> None:
    server, client = await rpc_type.create(server_channel), await rpc_type.create(channel)
    await server.register(name, square, auto_delete=True)

    async with asyncio.timeout(DEADLINE_S):
        assert await client.call(name, {"x": 7}) == 49

    await client.close()
    await server.close()


async def test_concurrent_remote_calls_get_their_own_results(
    channel: AbstractChannel, server_channel: AbstractChannel, rpc_type: type[RPC], name: str
) -> None:
    server, client = await rpc_type.create(server_channel), await rpc_type.create(channel)
    await server.register(name, square, auto_delete=True)

    async with asyncio.timeout(DEADLINE_S):
        results = await asyncio.gather(*(client.call(name, {"x": x}) for x in range(50)))

    assert results == [x * x for x in range(50)]
    await client.close()
    await server.close()


async def test_remote_exception_is_raised_at_the_caller(
    channel: AbstractChannel, server_channel: AbstractChannel, rpc_type: type[RPC], name: str
) -> None:
    server, client = await rpc_type.create(server_channel), await rpc_type.create(channel)
    await server.register(name, fail, auto_delete=True)

    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(ValueError, match="no such order"):
            await client.call(name, {"reason": "no such order"})

    await client.close()
    await server.close()


async def test_call_of_an_unknown_method_is_returned(
    channel: AbstractChannel, rpc_type: type[RPC], name: str
) -> None:
    client = await rpc_type.create(channel)

    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(MessageProcessError):
            await client.call(name, {"x": 1})

    await client.close()


async def test_call_nobody_takes_in_time_comes_back_dead_lettered(
    channel: AbstractChannel, rpc_type: type[RPC], name: str
) -> None:
    """The call expires, is dead-lettered to a headers exchange and found by its `From` header."""
    client = await rpc_type.create(channel)
    await channel.declare_queue(
        name, exclusive=True, arguments={"x-dead-letter-exchange": rpc_type.DLX_NAME}
    )

    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(TimeoutError, match="Message timed-out"):
            await client.call(name, {"x": 1}, expiration=0.05)  # type: ignore[arg-type]

    await client.close()


async def test_direct_reply_to_brings_the_answer_back(
    channel: AbstractChannel, server_channel: AbstractChannel, name: str
) -> None:
    requests = await server_channel.declare_queue(name, exclusive=True)
    answers: asyncio.Queue[AbstractIncomingMessage] = asyncio.Queue()
    reply_queue = await channel.get_queue(REPLY_TO, ensure=False)
    await reply_queue.consume(answers.put, no_ack=True)

    await channel.default_exchange.publish(
        Message(b"ping", reply_to=REPLY_TO, correlation_id="c-1"), name
    )
    request = await requests.get(no_ack=True)
    assert request.reply_to is not None
    assert request.reply_to.startswith(f"{REPLY_TO}.")
    await server_channel.default_exchange.publish(
        Message(b"pong", correlation_id=request.correlation_id), request.reply_to
    )

    answer = await asyncio.wait_for(answers.get(), DEADLINE_S)
    assert (answer.body, answer.correlation_id) == (b"pong", "c-1")
    assert (answer.exchange, answer.routing_key) == ("", request.reply_to)


async def test_answer_to_a_requester_that_is_gone_is_returned(
    connection: AbstractConnection, server_channel: AbstractChannel, name: str
) -> None:
    requests = await server_channel.declare_queue(name, exclusive=True)
    async with connection.channel() as requesting:
        reply_queue = await requesting.get_queue(REPLY_TO, ensure=False)
        await reply_queue.consume(asyncio.Queue[AbstractIncomingMessage]().put, no_ack=True)
        await requesting.default_exchange.publish(Message(b"ping", reply_to=REPLY_TO), name)
    request = await requests.get(no_ack=True)
    assert request.reply_to is not None

    result = await server_channel.default_exchange.publish(Message(b"pong"), request.reply_to)

    assert isinstance(result, DeliveredMessage)
    assert isinstance(result.delivery, Basic.Return)


async def test_direct_reply_to_needs_its_consumer_first(
    channel: AbstractChannel, name: str
) -> None:
    await channel.declare_queue(name, exclusive=True)

    with pytest.raises(ChannelPreconditionFailed, match="fast reply consumer does not exist"):
        await channel.default_exchange.publish(Message(b"ping", reply_to=REPLY_TO), name)
