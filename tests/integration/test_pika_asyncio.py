"""pika in its callback style: AsyncioConnection, and the SelectConnection below BlockingConnection.

Nothing here waits for an answer before it sends the next method: pika queues and pipelines them.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pika  # type: ignore[import-untyped]
import pytest
from pika.adapters.asyncio_connection import AsyncioConnection  # type: ignore[import-untyped]
from pika.exceptions import ProbableAuthenticationError  # type: ignore[import-untyped]

pytestmark = pytest.mark.timeout(20)

DEADLINE_S = 10
COUNT = 200


@pytest.fixture
async def connection(amqp_url: str) -> AsyncIterator[AsyncioConnection]:
    loop = asyncio.get_running_loop()
    opened, closed = loop.create_future(), loop.create_future()
    connection = AsyncioConnection(
        pika.URLParameters(amqp_url),
        on_open_callback=opened.set_result,
        on_open_error_callback=lambda _, error: opened.set_exception(error),
        on_close_callback=lambda _, reason: closed.set_result(reason),
    )
    async with asyncio.timeout(DEADLINE_S):
        await opened
        yield connection
        if connection.is_open:
            connection.close()
        await closed


async def answer(call: Callable[..., Any]) -> Any:
    """Make a call that takes a ``callback``; return the first thing it is called with."""
    answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    call(callback=lambda *values: answered.set_result(values[0] if values else None))
    async with asyncio.timeout(DEADLINE_S):
        return await answered


async def open_channel(connection: AsyncioConnection) -> Any:
    return await answer(lambda callback: connection.channel(on_open_callback=callback))


class ConfirmLedger:
    """What the broker has said about each publish, ``multiple`` spelled out."""

    def __init__(self, expected: int) -> None:
        self.acked: set[int] = set()
        self.nacked: set[int] = set()
        self.complete = asyncio.Event()
        self._expected = expected

    def note(self, frame: Any) -> None:
        method = frame.method
        said = self.acked if isinstance(method, pika.spec.Basic.Ack) else self.nacked
        first = 1 if method.multiple else method.delivery_tag
        said |= set(range(first, method.delivery_tag + 1)) - self.acked - self.nacked
        if len(self.acked) + len(self.nacked) == self._expected:
            self.complete.set()


async def test_publish_with_confirms_consume_and_ack_multiple(
    connection: AsyncioConnection, name: str
) -> None:
    """Everything in callbacks: declare, confirm mode, publish, consume, one ack for all."""
    ledger = ConfirmLedger(COUNT)
    bodies: list[bytes] = []
    tags: list[int] = []
    all_arrived = asyncio.Event()

    def on_open(channel: Any) -> None:
        channel.queue_declare(name, exclusive=True, callback=lambda _: on_declared(channel))

    def on_declared(channel: Any) -> None:
        channel.confirm_delivery(ledger.note, callback=lambda _: on_confirming(channel))

    def on_confirming(channel: Any) -> None:
        channel.basic_consume(name, on_message)
        for number in range(COUNT):
            channel.basic_publish("", name, b"%d" % number)

    def on_message(channel: Any, method: Any, _: object, body: bytes) -> None:
        bodies.append(body)
        tags.append(method.delivery_tag)
        if len(bodies) == COUNT:
            channel.basic_ack(method.delivery_tag, multiple=True)
            channel.close()
            all_arrived.set()

    connection.channel(on_open_callback=on_open)
    async with asyncio.timeout(DEADLINE_S):
        await all_arrived.wait()
        await ledger.complete.wait()

    assert bodies == [b"%d" % number for number in range(COUNT)]
    assert tags == list(range(1, COUNT + 1))
    assert (ledger.acked, ledger.nacked) == (set(range(1, COUNT + 1)), set())
    other = await open_channel(connection)
    found = await answer(
        lambda callback: other.queue_declare(name, passive=True, callback=callback)
    )
    assert found.method.message_count == 0


async def test_nacks_name_the_messages_that_were_refused(
    connection: AsyncioConnection, name: str
) -> None:
    arguments = {"x-max-length": 3, "x-overflow": "reject-publish"}
    ledger = ConfirmLedger(5)
    channel = await open_channel(connection)
    await answer(
        lambda callback: channel.queue_declare(
            name, exclusive=True, arguments=arguments, callback=callback
        )
    )
    channel.confirm_delivery(ledger.note)

    for number in range(5):
        channel.basic_publish("", name, b"%d" % number)
    async with asyncio.timeout(DEADLINE_S):
        await ledger.complete.wait()

    assert (ledger.acked, ledger.nacked) == ({1, 2, 3}, {4, 5})


async def test_return_comes_before_its_confirm(connection: AsyncioConnection, name: str) -> None:
    events: list[str] = []
    ledger = ConfirmLedger(1)
    channel = await open_channel(connection)
    channel.add_on_return_callback(lambda _, method, __, ___: events.append(method.reply_text))

    def on_confirm(frame: Any) -> None:
        events.append(frame.method.NAME)
        ledger.note(frame)

    channel.confirm_delivery(on_confirm)
    channel.basic_publish("", name, b"lost", mandatory=True)
    async with asyncio.timeout(DEADLINE_S):
        await ledger.complete.wait()

    assert events == ["NO_ROUTE", "Basic.Ack"]


async def test_pipelined_methods_are_answered_in_order(
    connection: AsyncioConnection, name: str
) -> None:
    channel = await open_channel(connection)
    answered: list[str] = []
    done = asyncio.Event()

    def note(frame: Any) -> None:
        answered.append(frame.method.NAME)
        if frame.method.NAME == "Queue.DeleteOk":
            done.set()

    channel.exchange_declare(name, "direct", auto_delete=True, callback=note)
    channel.queue_declare(name, exclusive=True, callback=note)
    channel.queue_bind(name, name, "key", callback=note)
    channel.queue_purge(name, callback=note)
    channel.queue_unbind(name, name, "key", callback=note)
    channel.queue_delete(name, callback=note)
    async with asyncio.timeout(DEADLINE_S):
        await done.wait()

    assert answered == [
        "Exchange.DeclareOk",
        "Queue.DeclareOk",
        "Queue.BindOk",
        "Queue.PurgeOk",
        "Queue.UnbindOk",
        "Queue.DeleteOk",
    ]


async def test_consumer_is_told_of_its_queues_end(connection: AsyncioConnection, name: str) -> None:
    channel, other = await open_channel(connection), await open_channel(connection)
    await answer(lambda callback: channel.queue_declare(name, exclusive=True, callback=callback))
    cancelled: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    channel.add_on_cancel_callback(cancelled.set_result)
    await answer(
        lambda callback: channel.basic_consume(
            name, lambda *_: None, consumer_tag="watcher", callback=callback
        )
    )

    other.queue_delete(name)

    async with asyncio.timeout(DEADLINE_S):
        assert (await cancelled).method.consumer_tag == "watcher"


async def test_channel_error_is_told_and_the_connection_goes_on(
    connection: AsyncioConnection, name: str
) -> None:
    channel = await open_channel(connection)
    await answer(lambda callback: channel.queue_declare(name, exclusive=True, callback=callback))
    closed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    channel.add_on_close_callback(lambda _, reason: closed.set_result(reason))

    # No callback: pika then sends it with nowait, and the refusal comes all the same.
    channel.queue_declare(name, exclusive=True, auto_delete=True)

    async with asyncio.timeout(DEADLINE_S):
        reason = await closed
    assert (reason.reply_code, reason.reply_text) == (
        406,
        f"PRECONDITION_FAILED - inequivalent arg 'auto_delete' for queue '{name}' in vhost '/': "
        "received 'true' but current is 'false'",
    )
    assert (await open_channel(connection)).is_open


async def test_wrong_password_is_told_to_the_error_callback(amqp_url: str) -> None:
    parameters = pika.URLParameters(amqp_url)
    parameters.credentials = pika.PlainCredentials("guest", "wrong")
    refused: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    AsyncioConnection(parameters, on_open_error_callback=lambda _, error: refused.set_result(error))

    async with asyncio.timeout(DEADLINE_S):
        error = await refused
    assert isinstance(error, ProbableAuthenticationError)


def test_select_connection_publishes_and_consumes(amqp_url: str, name: str) -> None:
    """pika's own loop, without asyncio."""
    received: list[bytes] = []

    def on_open(connection: Any) -> None:
        connection.channel(on_open_callback=on_channel)

    def on_channel(channel: Any) -> None:
        channel.queue_declare(name, exclusive=True)
        channel.basic_consume(name, on_message)
        channel.basic_publish("", name, b"one")
        channel.basic_publish("", name, b"last")

    def on_message(channel: Any, method: Any, _: object, body: bytes) -> None:
        received.append(body)
        channel.basic_ack(method.delivery_tag)
        if body == b"last":
            channel.connection.close()

    connection = pika.SelectConnection(
        pika.URLParameters(amqp_url),
        on_open_callback=on_open,
        on_open_error_callback=lambda connection, _: connection.ioloop.stop(),
        on_close_callback=lambda connection, _: connection.ioloop.stop(),
    )
    connection.ioloop.call_later(DEADLINE_S, connection.ioloop.stop)
    connection.ioloop.start()
    connection.ioloop.close()

    assert received == [b"one", b"last"]
    assert connection.is_closed
