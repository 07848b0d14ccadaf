"""aio-pika: queues, deliveries and acknowledgements."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from aio_pika import DeliveryMode, Message
from aio_pika.abc import (
    AbstractChannel,
    AbstractConnection,
    AbstractIncomingMessage,
    AbstractQueue,
    HeadersType,
)
from aio_pika.exceptions import ChannelNotFoundEntity, QueueEmpty
from pamqp.commands import Basic

pytestmark = pytest.mark.timeout(20)

DEADLINE_S = 10
FRAME_MAX = 131072
# Type, channel, size and end marker.
FRAME_OVERHEAD = 8
PROPERTIES = (
    "app_id content_encoding content_type correlation_id delivery_mode expiration headers"
    " message_id priority reply_to timestamp type user_id"
).split()


async def publish(channel: AbstractChannel, queue: AbstractQueue | str, *bodies: bytes) -> None:
    for body in bodies:
        await channel.default_exchange.publish(Message(body), str(queue))


async def ready_count(channel: AbstractChannel, queue: AbstractQueue) -> int:
    found = await channel.declare_queue(queue.name, passive=True)
    count = found.declaration_result.message_count
    assert count is not None
    return count


async def drain(queue: AbstractQueue) -> list[bytes]:
    """Take what is ready, in order."""
    bodies = []
    while (message := await queue.get(no_ack=True, fail=False)) is not None:
        bodies.append(message.body)
    return bodies


async def collect(
    queue: AbstractQueue, count: int, *, no_ack: bool = False
) -> list[AbstractIncomingMessage]:
    """Consume until ``count`` messages came, then cancel the consumer."""
    messages: list[AbstractIncomingMessage] = []
    async with asyncio.timeout(DEADLINE_S), queue.iterator(no_ack=no_ack) as arriving:
        async for message in arriving:
            messages.append(message)
            if len(messages) == count:
                break
    return messages


async def ignore(_: AbstractIncomingMessage) -> None:
    """A consumer for tests in which it matters only that there is one."""


async def test_consumed_and_acked_messages_are_gone(
    connection: AbstractConnection, channel: AbstractChannel, name: str
) -> None:
    queue = await channel.declare_queue(name, exclusive=True)
    async with connection.channel() as consuming:
        await publish(channel, queue, b"one", b"two", b"three")
        messages = await collect(await consuming.get_queue(name), 3)
        assert [message.body for message in messages] == [b"one", b"two", b"three"]
        assert [message.redelivered for message in messages] == [False] * 3
        for message in messages:
            await message.ack()

    # The consumer's channel is closed: whatever was not acked would be back.
    assert await drain(queue) == []


async def test_closing_a_channel_requeues_its_unacked_messages_in_order(
    connection: AbstractConnection, channel: AbstractChannel, name: str
) -> None:
    queue = await channel.declare_queue(name, exclusive=True)
    await publish(channel, queue, b"one", b"two", b"three")
    async with connection.channel() as consuming:
        taken = await consuming.get_queue(name)
        await taken.get()
        await taken.get()

    again = [await queue.get(no_ack=True) for _ in range(3)]
    assert [(message.body, message.redelivered) for message in again] == [
        (b"one", True),
        (b"two", True),
        (b"three", False),
    ]


async def test_ack_multiple_covers_everything_before_it(
    connection: AbstractConnection, channel: AbstractChannel, name: str
) -> None:
    queue = await channel.declare_queue(name, exclusive=True)
    await publish(channel, queue, b"one", b"two", b"three")
    async with connection.channel() as consuming:
        taken = await consuming.get_queue(name)
        await taken.get()
        second = await taken.get()
        await taken.get()
        await second.ack(multiple=True)

    assert await drain(queue) == [b"three"]


async def test_no_ack_consumer_needs_no_acks(
    connection: AbstractConnection, channel: AbstractChannel, name: str
) -> None:
    queue = await channel.declare_queue(name, exclusive=True)
    await publish(channel, queue, b"one", b"two")
    async with connection.channel() as consuming:
        messages = await collect(await consuming.get_queue(name), 2, no_ack=True)
        assert [message.body for message in messages] == [b"one", b"two"]

    assert await drain(queue) == []


async def test_get_tells_how_many_messages_remain(channel: AbstractChannel, name: str) -> None:
    queue = await channel.declare_queue(name, exclusive=True)
    await publish(channel, queue, b"one", b"two")

    first = await queue.get()
    assert (first.body, first.message_count, first.routing_key) == (b"one", 1, name)
    await first.ack()


async def test_get_from_an_empty_queue(channel: AbstractChannel, name: str) -> None:
    queue = await channel.declare_queue(name, exclusive=True)

    assert await queue.get(fail=False) is None
    with pytest.raises(QueueEmpty):
        await queue.get()


@pytest.mark.parametrize(
    "put_back",
    [
        pytest.param(lambda message: message.nack(requeue=True), id="nack"),
        pytest.param(lambda message: message.reject(requeue=True), id="reject"),
    ],
)
async def test_requeued_message_keeps_its_place(
    channel: AbstractChannel,
    name: str,
    put_back: Callable[[AbstractIncomingMessage], Awaitable[None]],
) -> None:
    queue = await channel.declare_queue(name, exclusive=True)
    await publish(channel, queue, b"first", b"second")

    await put_back(await queue.get())

    again = await queue.get(no_ack=True)
    assert (again.body, again.redelivered) == (b"first", True)


@pytest.mark.parametrize(
    "refuse",
    [
        pytest.param(lambda message: message.nack(requeue=False), id="nack"),
        pytest.param(lambda message: message.reject(requeue=False), id="reject"),
    ],
)
async def test_refused_message_is_dead_lettered(
    channel: AbstractChannel,
    name: str,
    refuse: Callable[[AbstractIncomingMessage], Awaitable[None]],
) -> None:
    morgue = await channel.declare_queue(f"{name}.dead", exclusive=True)
    queue = await channel.declare_queue(
        name,
        exclusive=True,
        arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": morgue.name},
    )
    await publish(channel, queue, b"unwanted")

    await refuse(await queue.get())

    [dead] = await collect(morgue, 1, no_ack=True)
    assert dead.body == b"unwanted"
    assert dead.headers["x-first-death-queue"] == name
    deaths: Any = dead.headers["x-death"]
    assert [(death["queue"], death["reason"], death["count"]) for death in deaths] == [
        (name, "rejected", 1)
    ]


async def test_expired_message_is_dead_lettered(channel: AbstractChannel, name: str) -> None:
    morgue = await channel.declare_queue(f"{name}.dead", exclusive=True)
    queue = await channel.declare_queue(
        name,
        exclusive=True,
        arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": morgue.name},
    )
    await channel.default_exchange.publish(Message(b"late", expiration=0.05), queue.name)

    [dead] = await collect(morgue, 1, no_ack=True)
    assert (dead.body, dead.headers["x-first-death-reason"]) == (b"late", "expired")
    assert dead.expiration is None


async def test_higher_priority_comes_first(channel: AbstractChannel, name: str) -> None:
    queue = await channel.declare_queue(name, exclusive=True, arguments={"x-max-priority": 5})
    for priority in (1, 5, 3):
        message = Message(str(priority).encode(), priority=priority)
        await channel.default_exchange.publish(message, queue.name)

    assert await drain(queue) == [b"5", b"3", b"1"]


async def test_prefetch_bounds_what_a_consumer_holds(
    connection: AbstractConnection, channel: AbstractChannel, name: str
) -> None:
    queue = await channel.declare_queue(name, exclusive=True)
    await publish(channel, queue, *(b"%d" % number for number in range(5)))
    arrived: asyncio.Queue[AbstractIncomingMessage] = asyncio.Queue()
    async with connection.channel() as consuming, asyncio.timeout(DEADLINE_S):
        await consuming.set_qos(prefetch_count=2)
        await (await consuming.get_queue(name)).consume(arrived.put)

        held = [await arrived.get(), await arrived.get()]
        assert await ready_count(channel, queue) == 3

        await held[0].ack()
        third = await arrived.get()
        assert third.body == b"2"
        assert await ready_count(channel, queue) == 2


async def test_prefetch_one_shares_work_between_consumers(
    connection: AbstractConnection, channel: AbstractChannel, name: str
) -> None:
    queue = await channel.declare_queue(name, exclusive=True)
    arrived: asyncio.Queue[AbstractIncomingMessage] = asyncio.Queue()
    async with (
        connection.channel() as left,
        connection.channel() as right,
        asyncio.timeout(DEADLINE_S),
    ):
        for consuming in (left, right):
            await consuming.set_qos(prefetch_count=1)
            await (await consuming.get_queue(name)).consume(arrived.put)
        await publish(channel, queue, b"one", b"two", b"three")

        first, second = await arrived.get(), await arrived.get()
        assert {first.channel.number, second.channel.number} == {left.number, right.number}
        assert await ready_count(channel, queue) == 1


async def test_properties_and_headers_arrive_as_sent(channel: AbstractChannel, name: str) -> None:
    queue = await channel.declare_queue(name, exclusive=True)
    headers: HeadersType = {
        "flag": True,
        "small": 7,
        "large": 2**40,
        "negative": -5,
        "ratio": 0.25,
        "price": Decimal("19.99"),
        "text": "häßlich ✓",
        "raw": bytearray(b"\x00\xff"),
        "when": datetime(2024, 2, 29, 12, 30, tzinfo=UTC),
        "nothing": None,
        "list": [1, "two", [3]],
        "table": {"inner": {"deep": "down"}},
    }
    sent = Message(
        b"body",
        headers=headers,
        content_type="application/json",
        content_encoding="identity",
        delivery_mode=DeliveryMode.PERSISTENT,
        priority=4,
        correlation_id="correlation",
        reply_to="answers",
        expiration=60,
        message_id="id-1",
        timestamp=datetime(2023, 1, 2, 3, 4, 5, tzinfo=UTC),
        type="order",
        user_id="guest",
        app_id="shop",
    )
    await channel.default_exchange.publish(sent, queue.name)

    received = await queue.get(no_ack=True)
    assert received.body == b"body"
    assert {field: getattr(received, field) for field in PROPERTIES} == {
        field: getattr(sent, field) for field in PROPERTIES
    }


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(0, id="empty"),
        pytest.param(FRAME_MAX - FRAME_OVERHEAD, id="one-full-frame"),
        pytest.param(FRAME_MAX - FRAME_OVERHEAD + 1, id="one-byte-more"),
        pytest.param(1024 * 1024, id="one-mebibyte"),
    ],
)
async def test_body_of_any_size(channel: AbstractChannel, name: str, size: int) -> None:
    queue = await channel.declare_queue(name, exclusive=True)
    body = (bytes(range(251)) * (size // 251 + 1))[:size]
    await publish(channel, queue, body)

    [message] = await collect(queue, 1, no_ack=True)
    assert message.body == body


async def test_many_channels_work_side_by_side(connection: AbstractConnection, name: str) -> None:
    async def one(number: int) -> list[bytes]:
        async with connection.channel() as own:
            queue = await own.declare_queue(f"{name}.{number}", exclusive=True)
            await publish(own, queue, *(b"%d.%d" % (number, part) for part in range(5)))
            return [message.body for message in await collect(queue, 5, no_ack=True)]

    received = await asyncio.gather(*(one(number) for number in range(60)))

    assert received == [[b"%d.%d" % (number, part) for part in range(5)] for number in range(60)]


async def test_server_names_a_nameless_queue(channel: AbstractChannel) -> None:
    one = await channel.declare_queue(exclusive=True)
    other = await channel.declare_queue(exclusive=True)

    assert one.name.startswith("amq.gen-")
    assert one.name != other.name


async def test_purge_and_delete_tell_how_many_messages_went(
    channel: AbstractChannel, name: str
) -> None:
    queue = await channel.declare_queue(name)
    await publish(channel, queue, b"one", b"two")
    assert (await queue.purge()).message_count == 2
    await publish(channel, queue, b"three")
    assert (await queue.delete(if_empty=False)).message_count == 1

    with pytest.raises(ChannelNotFoundEntity):
        await channel.declare_queue(name, passive=True)


async def test_cancelled_consumer_gets_no_more(channel: AbstractChannel, name: str) -> None:
    queue = await channel.declare_queue(name, exclusive=True)
    arrived: asyncio.Queue[AbstractIncomingMessage] = asyncio.Queue()
    tag = await queue.consume(arrived.put, no_ack=True)
    await queue.cancel(tag)

    await publish(channel, queue, b"kept")

    assert await drain(queue) == [b"kept"]
    assert arrived.empty()


async def test_deleting_a_queue_cancels_its_consumer(
    connection: AbstractConnection, channel: AbstractChannel, name: str
) -> None:
    queue = await channel.declare_queue(name, exclusive=True)
    cancelled: asyncio.Future[Basic.Cancel] = asyncio.get_running_loop().create_future()
    async with connection.channel() as consuming, asyncio.timeout(DEADLINE_S):
        underlay = await consuming.get_underlay_channel()
        underlay.on_consumer_cancel_callbacks.add(cancelled.set_result)
        taken = await consuming.get_queue(name)
        tag = await taken.consume(ignore)
        await queue.delete(if_unused=False)

        assert (await cancelled).consumer_tag == tag


async def test_auto_delete_queue_goes_with_its_last_consumer(
    channel: AbstractChannel, name: str
) -> None:
    queue = await channel.declare_queue(name, auto_delete=True)
    tags = [await queue.consume(ignore) for _ in range(2)]

    await queue.cancel(tags[0])
    await channel.declare_queue(name, passive=True)
    await queue.cancel(tags[1])

    with pytest.raises(ChannelNotFoundEntity):
        await channel.declare_queue(name, passive=True)
