"""aio-pika: exchanges, publisher confirms, returned messages and transactions."""

import asyncio

import pytest
from aio_pika import DeliveryMode, ExchangeType, Message
from aio_pika.abc import (
    AbstractChannel,
    AbstractConnection,
    AbstractExchange,
    AbstractIncomingMessage,
    AbstractQueue,
    HeadersType,
)
from aio_pika.exceptions import (
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    DeliveryError,
    PublishError,
)
from aiormq.abc import DeliveredMessage
from pamqp.commands import Basic

pytestmark = pytest.mark.timeout(20)

DEADLINE_S = 10


async def drain(queue: AbstractQueue) -> list[bytes]:
    """Take what is ready, in order."""
    bodies = []
    while (message := await queue.get(no_ack=True, fail=False)) is not None:
        bodies.append(message.body)
    return bodies


async def bind_new_queue(
    channel: AbstractChannel,
    exchange: AbstractExchange,
    routing_key: str = "",
    arguments: dict[str, str] | None = None,
) -> AbstractQueue:
    queue = await channel.declare_queue(exclusive=True)
    await queue.bind(exchange, routing_key, arguments=dict(arguments or {}))
    return queue


async def test_direct_exchange_routes_by_key_until_unbound(
    channel: AbstractChannel, name: str
) -> None:
    exchange = await channel.declare_exchange(name, ExchangeType.DIRECT)
    red = await bind_new_queue(channel, exchange, "red")
    blue = await bind_new_queue(channel, exchange, "blue")

    await exchange.publish(Message(b"before"), "red")
    await red.unbind(exchange, "red")
    returned = await exchange.publish(Message(b"after"), "red")

    assert isinstance(getattr(returned, "delivery", None), Basic.Return)
    assert (await drain(red), await drain(blue)) == ([b"before"], [])
    await exchange.delete()


async def test_fanout_exchange_copies_to_every_queue(channel: AbstractChannel, name: str) -> None:
    exchange = await channel.declare_exchange(name, ExchangeType.FANOUT, auto_delete=True)
    queues = [await bind_new_queue(channel, exchange, key) for key in ("", "a", "b")]

    await exchange.publish(Message(b"news"), "ignored")

    assert [await drain(queue) for queue in queues] == [[b"news"]] * 3


async def test_topic_exchange_matches_patterns(channel: AbstractChannel, name: str) -> None:
    exchange = await channel.declare_exchange(name, ExchangeType.TOPIC, auto_delete=True)
    patterns = ("stock.*.nyse", "stock.#", "#", "*.usd")
    queues = {pattern: await bind_new_queue(channel, exchange, pattern) for pattern in patterns}

    for key in ("stock.usd.nyse", "stock", "rate.usd"):
        await exchange.publish(Message(key.encode()), key)

    assert {pattern: await drain(queue) for pattern, queue in queues.items()} == {
        "stock.*.nyse": [b"stock.usd.nyse"],
        "stock.#": [b"stock.usd.nyse", b"stock"],
        "#": [b"stock.usd.nyse", b"stock", b"rate.usd"],
        "*.usd": [b"rate.usd"],
    }


async def test_headers_exchange_matches_all_or_any(channel: AbstractChannel, name: str) -> None:
    exchange = await channel.declare_exchange(name, ExchangeType.HEADERS, auto_delete=True)
    wanted = {"format": "pdf", "kind": "report"}
    every = await bind_new_queue(channel, exchange, "", {"x-match": "all", **wanted})
    some = await bind_new_queue(channel, exchange, "", {"x-match": "any", **wanted})

    sent: dict[bytes, HeadersType] = {
        b"both": {"format": "pdf", "kind": "report", "extra": 1},
        b"one": {"format": "pdf", "kind": "letter"},
        b"none": {"format": "zip"},
    }
    for body, headers in sent.items():
        await exchange.publish(Message(body, headers=headers), "")

    assert (await drain(every), await drain(some)) == ([b"both"], [b"both", b"one"])


async def test_exchange_bound_to_exchange(channel: AbstractChannel, name: str) -> None:
    source = await channel.declare_exchange(f"{name}.source", ExchangeType.TOPIC, auto_delete=True)
    target = await channel.declare_exchange(f"{name}.target", ExchangeType.FANOUT, auto_delete=True)
    queue = await bind_new_queue(channel, target)
    await target.bind(source, "orders.#")

    await source.publish(Message(b"through both"), "orders.new")

    message = await queue.get(no_ack=True)
    assert (message.body, message.exchange) == (b"through both", source.name)


async def test_alternate_exchange_takes_what_matches_nothing(
    channel: AbstractChannel, name: str
) -> None:
    spare = await channel.declare_exchange(f"{name}.spare", ExchangeType.FANOUT, auto_delete=True)
    exchange = await channel.declare_exchange(
        name, ExchangeType.DIRECT, auto_delete=True, arguments={"alternate-exchange": spare.name}
    )
    known = await bind_new_queue(channel, exchange, "known")
    unknown = await bind_new_queue(channel, spare)

    for key in ("known", "stranger"):
        confirmation = await exchange.publish(Message(key.encode()), key)
        assert isinstance(confirmation, Basic.Ack)

    assert (await drain(known), await drain(unknown)) == ([b"known"], [b"stranger"])


@pytest.mark.parametrize("mode", list(DeliveryMode), ids=lambda mode: mode.name.lower())
async def test_publish_is_confirmed(
    channel: AbstractChannel, name: str, mode: DeliveryMode
) -> None:
    # Not exclusive: an exclusive queue is never durable, whatever its declaration says.
    queue = await channel.declare_queue(name, durable=True)
    try:
        confirmation = await channel.default_exchange.publish(
            Message(b"safe", delivery_mode=mode), queue.name
        )

        assert isinstance(confirmation, Basic.Ack)
        assert (await queue.get(no_ack=True)).delivery_mode == mode
    finally:
        await queue.delete(if_empty=False)


async def test_every_concurrent_publish_is_confirmed_and_ordered(
    channel: AbstractChannel, name: str
) -> None:
    queue = await channel.declare_queue(name, exclusive=True)
    bodies = [b"%d" % number for number in range(500)]

    async with asyncio.timeout(DEADLINE_S):
        confirmations = await asyncio.gather(
            *(channel.default_exchange.publish(Message(body), queue.name) for body in bodies)
        )

    assert all(isinstance(confirmation, Basic.Ack) for confirmation in confirmations)
    received: list[bytes] = []
    async with asyncio.timeout(DEADLINE_S), queue.iterator(no_ack=True) as messages:
        async for message in messages:
            received.append(message.body)
            if len(received) == len(bodies):
                break
    assert received == bodies


async def test_full_queue_that_rejects_publishes_nacks(channel: AbstractChannel, name: str) -> None:
    queue = await channel.declare_queue(
        name, exclusive=True, arguments={"x-max-length": 1, "x-overflow": "reject-publish"}
    )
    await channel.default_exchange.publish(Message(b"fits"), queue.name)

    with pytest.raises(DeliveryError) as refused:
        await channel.default_exchange.publish(Message(b"too much"), queue.name)

    assert isinstance(refused.value.frame, Basic.Nack)
    assert await drain(queue) == [b"fits"]


async def test_unroutable_mandatory_message_is_returned_whole(
    channel: AbstractChannel, name: str
) -> None:
    returned: asyncio.Future[AbstractIncomingMessage] = asyncio.get_running_loop().create_future()
    channel.return_callbacks.add(lambda _, message: returned.set_result(message))
    sent = Message(b"x" * 200_000, headers={"attempt": 1}, correlation_id="c-1")

    result = await channel.default_exchange.publish(sent, name)

    assert isinstance(result, DeliveredMessage)
    assert isinstance(result.delivery, Basic.Return)
    assert (result.delivery.reply_code, result.delivery.reply_text) == (312, "NO_ROUTE")
    message = await asyncio.wait_for(returned, DEADLINE_S)
    assert (message.body, message.headers, message.correlation_id, message.routing_key) == (
        sent.body,
        {"attempt": 1},
        "c-1",
        name,
    )


async def test_return_can_be_raised(connection: AbstractConnection, name: str) -> None:
    async with connection.channel(on_return_raises=True) as strict:
        with pytest.raises(PublishError):
            await strict.default_exchange.publish(Message(b"lost"), name)


async def test_unroutable_message_that_is_not_mandatory_is_confirmed(
    channel: AbstractChannel, name: str
) -> None:
    confirmation = await channel.default_exchange.publish(Message(b"lost"), name, mandatory=False)

    assert isinstance(confirmation, Basic.Ack)


async def test_publish_to_a_missing_exchange_closes_the_channel(
    connection: AbstractConnection, channel: AbstractChannel, name: str
) -> None:
    missing = await channel.get_exchange(name, ensure=False)

    with pytest.raises(ChannelNotFoundEntity, match=f"no exchange '{name}' in vhost '/'"):
        await missing.publish(Message(b"lost"), "key")

    assert channel.is_closed
    async with connection.channel() as another:
        await another.declare_queue(exclusive=True)


async def test_committed_messages_appear_at_commit(
    connection: AbstractConnection, channel: AbstractChannel, name: str
) -> None:
    queue = await channel.declare_queue(name, exclusive=True)
    async with connection.channel(publisher_confirms=False) as transactional:
        async with transactional.transaction():
            for body in (b"one", b"two"):
                await transactional.default_exchange.publish(Message(body), queue.name)
            # A round trip on the same channel: the publishes have been handled, and are held.
            await transactional.set_qos(prefetch_count=1)
            assert await drain(queue) == []

        assert await drain(queue) == [b"one", b"two"]


async def test_rolled_back_messages_never_appear(
    connection: AbstractConnection, channel: AbstractChannel, name: str
) -> None:
    queue = await channel.declare_queue(name, exclusive=True)
    async with connection.channel(publisher_confirms=False) as transactional:
        transaction = transactional.transaction()
        await transaction.select()
        await transactional.default_exchange.publish(Message(b"undone"), queue.name)
        await transaction.rollback()
        await transactional.default_exchange.publish(Message(b"kept"), queue.name)
        await transaction.commit()

    assert await drain(queue) == [b"kept"]


async def test_exception_inside_a_transaction_rolls_it_back(
    connection: AbstractConnection, channel: AbstractChannel, name: str
) -> None:
    queue = await channel.declare_queue(name, exclusive=True)

    async def fail_halfway(transactional: AbstractChannel) -> None:
        async with transactional.transaction():
            await transactional.default_exchange.publish(Message(b"undone"), queue.name)
            raise LookupError("half done")

    async with connection.channel(publisher_confirms=False) as transactional:
        with pytest.raises(LookupError):
            await fail_halfway(transactional)
        # Nothing is left over for a later commit to publish.
        async with transactional.transaction():
            pass

    assert await drain(queue) == []


@pytest.mark.parametrize(
    ("commit", "left"),
    [
        pytest.param(True, [], id="commit"),
        pytest.param(False, [b"job"], id="rollback"),
    ],
)
async def test_acks_are_part_of_the_transaction(
    connection: AbstractConnection,
    channel: AbstractChannel,
    name: str,
    commit: bool,
    left: list[bytes],
) -> None:
    queue = await channel.declare_queue(name, exclusive=True)
    await channel.default_exchange.publish(Message(b"job"), queue.name)
    async with connection.channel(publisher_confirms=False) as transactional:
        transaction = transactional.transaction()
        await transaction.select()
        message = await (await transactional.get_queue(name)).get()
        await message.ack()
        await (transaction.commit() if commit else transaction.rollback())

    # The channel is closed: a message whose ack did not count is back.
    assert await drain(queue) == left


async def test_confirms_and_transactions_exclude_each_other(channel: AbstractChannel) -> None:
    confirming = await channel.get_underlay_channel()

    with pytest.raises(ChannelPreconditionFailed):
        await confirming.tx_select()
