"""pika's BlockingConnection: one thread, calls that wait for their answer."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pika  # type: ignore[import-untyped]
import pytest
from pika.adapters.blocking_connection import BlockingChannel  # type: ignore[import-untyped]
from pika.exceptions import (  # type: ignore[import-untyped]
    ChannelClosedByBroker,
    ConnectionClosedByBroker,
    NackError,
    ProbableAccessDeniedError,
    ProbableAuthenticationError,
    UnroutableError,
)

pytestmark = pytest.mark.timeout(20)

DEADLINE_S = 10

Delivery = tuple[Any, pika.BasicProperties, bytes]


@pytest.fixture
def parameters(amqp_url: str) -> pika.URLParameters:
    return pika.URLParameters(amqp_url)


@pytest.fixture
def connection(parameters: pika.URLParameters) -> Iterator[pika.BlockingConnection]:
    connection = pika.BlockingConnection(parameters)
    yield connection
    if connection.is_open:
        connection.close()


@pytest.fixture
def channel(connection: pika.BlockingConnection) -> BlockingChannel:
    """A channel in confirm mode: what was published is in its queues when the call returns."""
    channel = connection.channel()
    channel.confirm_delivery()
    return channel


def publish(channel: BlockingChannel, queue: str, *bodies: bytes) -> None:
    for body in bodies:
        channel.basic_publish("", queue, body)


def drain(channel: BlockingChannel, queue: str) -> list[bytes]:
    """Take what is ready, in order."""
    bodies = []
    while (body := channel.basic_get(queue, auto_ack=True)[2]) is not None:
        bodies.append(body)
    return bodies


def process_until(connection: pika.BlockingConnection, is_done: Callable[[], object]) -> None:
    """Handle what arrives until a condition holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_done():
        assert time.monotonic() < deadline, "it did not happen"
        connection.process_data_events(time_limit=0.1)


def test_basic_get(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, exclusive=True)
    assert channel.basic_get(name) == (None, None, None)
    publish(channel, name, b"one", b"two")

    method, properties, body = channel.basic_get(name)

    assert (body, method.message_count, method.redelivered) == (b"one", 1, False)
    assert (method.exchange, method.routing_key, properties.headers) == ("", name, None)
    channel.basic_ack(method.delivery_tag)
    assert drain(channel, name) == [b"two"]


def test_properties_arrive_as_sent(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, exclusive=True)
    sent = pika.BasicProperties(
        content_type="text/plain",
        content_encoding="utf-8",
        headers={"number": 1, "text": "ä", "flag": False, "list": [1, "b"], "table": {"a": None}},
        delivery_mode=pika.DeliveryMode.Persistent,
        priority=9,
        correlation_id="correlation",
        reply_to="answers",
        expiration="60000",
        message_id="id-1",
        timestamp=1_700_000_000,
        type="order",
        user_id="guest",
        app_id="shop",
        cluster_id="cluster",
    )
    channel.basic_publish("", name, b"body", sent)

    _, received, _ = channel.basic_get(name, auto_ack=True)
    assert received == sent


def test_consume_generator_yields_messages_and_idle_ticks(
    channel: BlockingChannel, name: str
) -> None:
    channel.queue_declare(name, exclusive=True)
    publish(channel, name, b"one", b"two")
    events: list[bytes | None] = []

    for method, _, body in channel.consume(name, inactivity_timeout=0.1):
        events.append(body)
        if method is None:
            break
        channel.basic_ack(method.delivery_tag)
    channel.cancel()

    assert events == [b"one", b"two", None]
    assert drain(channel, name) == []


def test_cancelling_the_generator_returns_what_it_had_not_yielded(
    channel: BlockingChannel, name: str
) -> None:
    channel.queue_declare(name, exclusive=True)
    publish(channel, name, b"one", b"two", b"three")

    for method, _, _ in channel.consume(name):
        channel.basic_ack(method.delivery_tag)
        break
    channel.cancel()

    assert drain(channel, name) == [b"two", b"three"]


def test_generator_ends_when_its_queue_is_deleted(
    connection: pika.BlockingConnection, channel: BlockingChannel, name: str
) -> None:
    channel.queue_declare(name, exclusive=True)
    publish(channel, name, b"only")
    other = connection.channel()
    received = []

    for method, _, body in channel.consume(name):
        received.append(body)
        channel.basic_ack(method.delivery_tag)
        other.queue_delete(name)

    assert received == [b"only"]


def test_callback_consumer_with_process_data_events(
    connection: pika.BlockingConnection, channel: BlockingChannel, name: str
) -> None:
    channel.queue_declare(name, exclusive=True)
    received: list[Delivery] = []
    channel.basic_qos(prefetch_count=2)
    channel.basic_consume(name, lambda _, *delivery: received.append(delivery))
    publish(channel, name, *(b"%d" % number for number in range(5)))

    process_until(connection, lambda: len(received) == 2)
    # Three stay behind: the consumer holds as many as it may.
    assert channel.queue_declare(name, passive=True).method.message_count == 3
    channel.basic_ack(received[-1][0].delivery_tag, multiple=True)
    process_until(connection, lambda: len(received) == 4)

    assert [body for _, _, body in received] == [b"0", b"1", b"2", b"3"]


def test_start_and_stop_consuming(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, exclusive=True)
    publish(channel, name, b"one", b"last")
    received = []

    def on_message(_: object, method: Any, __: object, body: bytes) -> None:
        received.append(body)
        channel.basic_ack(method.delivery_tag)
        if body == b"last":
            channel.stop_consuming()

    channel.basic_consume(name, on_message)
    channel.start_consuming()

    assert received == [b"one", b"last"]


def test_basic_cancel_stops_the_consumer(
    connection: pika.BlockingConnection, channel: BlockingChannel, name: str
) -> None:
    channel.queue_declare(name, exclusive=True)
    received: list[Delivery] = []
    tag = channel.basic_consume(name, lambda _, *delivery: received.append(delivery))
    assert channel.queue_declare(name, passive=True).method.consumer_count == 1

    channel.basic_cancel(tag)
    publish(channel, name, b"kept")
    connection.process_data_events(time_limit=0)

    assert channel.queue_declare(name, passive=True).method.consumer_count == 0
    assert (received, drain(channel, name)) == ([], [b"kept"])


def test_deleting_a_queue_cancels_its_consumer(
    connection: pika.BlockingConnection, channel: BlockingChannel, name: str
) -> None:
    channel.queue_declare(name, exclusive=True)
    cancelled: list[Any] = []
    consuming = connection.channel()
    consuming.add_on_cancel_callback(cancelled.append)
    tag = consuming.basic_consume(name, lambda *_: None)

    channel.queue_delete(name)
    process_until(connection, lambda: cancelled)

    assert [frame.method.consumer_tag for frame in cancelled] == [tag]


def test_nack_requeues_and_recover_redelivers(
    connection: pika.BlockingConnection, channel: BlockingChannel, name: str
) -> None:
    channel.queue_declare(name, exclusive=True)
    publish(channel, name, b"one", b"two")
    received: list[Delivery] = []
    consuming = connection.channel()
    consuming.basic_qos(prefetch_count=2)
    consuming.basic_consume(name, lambda _, *delivery: received.append(delivery))

    process_until(connection, lambda: len(received) == 2)
    consuming.basic_nack(0, multiple=True, requeue=True)
    process_until(connection, lambda: len(received) == 4)
    consuming.basic_recover(requeue=True)
    process_until(connection, lambda: len(received) == 6)

    assert [(body, method.redelivered) for method, _, body in received] == [
        (b"one", False),
        (b"two", False),
        (b"one", True),
        (b"two", True),
        (b"one", True),
        (b"two", True),
    ]


def test_unroutable_mandatory_message_raises(channel: BlockingChannel, name: str) -> None:
    with pytest.raises(UnroutableError) as unroutable:
        channel.basic_publish("", name, b"lost", mandatory=True)

    [returned] = unroutable.value.messages
    assert (returned.method.reply_code, returned.method.reply_text) == (312, "NO_ROUTE")
    assert (returned.body, returned.method.routing_key) == (b"lost", name)


def test_unroutable_message_without_confirms_is_returned_to_a_callback(
    connection: pika.BlockingConnection, name: str
) -> None:
    channel = connection.channel()
    returned: list[bytes] = []
    channel.add_on_return_callback(lambda _, __, ___, body: returned.append(body))

    channel.basic_publish("", name, b"lost", mandatory=True)
    process_until(connection, lambda: returned)

    assert returned == [b"lost"]


def test_full_queue_that_rejects_publishes_nacks(channel: BlockingChannel, name: str) -> None:
    arguments = {"x-max-length": 1, "x-overflow": "reject-publish"}
    channel.queue_declare(name, exclusive=True, arguments=arguments)
    publish(channel, name, b"fits")

    with pytest.raises(NackError):
        channel.basic_publish("", name, b"too much")

    assert drain(channel, name) == [b"fits"]


def test_transaction_commit_and_rollback(
    connection: pika.BlockingConnection, channel: BlockingChannel, name: str
) -> None:
    channel.queue_declare(name, exclusive=True)
    transactional = connection.channel()
    transactional.tx_select()

    publish(transactional, name, b"undone")
    transactional.tx_rollback()
    publish(transactional, name, b"kept")
    # A round trip on the channel: the publish has been handled, and is held.
    transactional.basic_qos(prefetch_count=1)
    before = drain(channel, name)
    transactional.tx_commit()

    assert (before, drain(channel, name)) == ([], [b"kept"])


def test_exchange_bind_and_unbind(channel: BlockingChannel, name: str) -> None:
    source, target = f"{name}.source", f"{name}.target"
    channel.exchange_declare(source, "topic")
    channel.exchange_declare(target, "fanout", auto_delete=True)
    channel.queue_declare(name, exclusive=True)
    channel.queue_bind(name, target)
    channel.exchange_bind(destination=target, source=source, routing_key="a.#")

    channel.basic_publish(source, "a.b", b"bound")
    channel.exchange_unbind(destination=target, source=source, routing_key="a.#")
    channel.basic_publish(source, "a.b", b"unbound")

    assert drain(channel, name) == [b"bound"]
    channel.exchange_delete(source, if_unused=True)


def test_queue_delete_refuses_what_its_flags_say(
    connection: pika.BlockingConnection, channel: BlockingChannel, name: str
) -> None:
    channel.queue_declare(name, exclusive=True)
    publish(channel, name, b"one", b"two")

    with pytest.raises(ChannelClosedByBroker) as refused:
        connection.channel().queue_delete(name, if_empty=True)
    assert (refused.value.reply_code, refused.value.reply_text) == (
        406,
        f"PRECONDITION_FAILED - queue '{name}' in vhost '/' not empty",
    )

    assert channel.queue_delete(name).method.message_count == 2
    # What is not there can be deleted.
    assert channel.queue_delete(name).method.message_count == 0


def test_channel_error_leaves_the_connection_usable(
    connection: pika.BlockingConnection, channel: BlockingChannel, name: str
) -> None:
    mistaken = connection.channel()
    with pytest.raises(ChannelClosedByBroker) as refused:
        mistaken.queue_declare(name, passive=True)

    assert (refused.value.reply_code, refused.value.reply_text) == (
        404,
        f"NOT_FOUND - no queue '{name}' in vhost '/'",
    )
    assert mistaken.is_closed
    channel.queue_declare(name, exclusive=True)
    # The closed channel's number is free again.
    assert connection.channel(mistaken.channel_number).is_open


def test_exclusive_queue_is_never_durable(channel: BlockingChannel, name: str) -> None:
    """Asked for both, the broker drops `durable`: either declaration then means the same queue."""
    channel.queue_declare(name, exclusive=True, durable=True)

    assert channel.queue_declare(name, exclusive=True, durable=False).method.queue == name


def test_connection_error_ends_the_connection(
    connection: pika.BlockingConnection, channel: BlockingChannel, name: str
) -> None:
    with pytest.raises(ConnectionClosedByBroker) as refused:
        channel.exchange_declare(name, "no-such-type")

    assert (refused.value.reply_code, refused.value.reply_text) == (
        503,
        "COMMAND_INVALID - unknown exchange type 'no-such-type'",
    )
    assert connection.is_closed


def test_large_message_is_cut_into_the_negotiated_frames(
    parameters: pika.URLParameters, name: str
) -> None:
    parameters.frame_max = 4096
    body = bytes(range(256)) * 4096
    with closing(pika.BlockingConnection(parameters)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.queue_declare(name, exclusive=True)
        publish(channel, name, body)

        assert drain(channel, name) == [body]


def test_threads_acknowledge_through_the_connection(
    connection: pika.BlockingConnection, channel: BlockingChannel, name: str
) -> None:
    """Work in other threads, acknowledged with add_callback_threadsafe."""
    channel.queue_declare(name, exclusive=True)
    publish(channel, name, *(b"%d" % number for number in range(10)))
    consuming = connection.channel()
    workers: list[threading.Thread] = []
    acked: list[int] = []

    def acknowledge(tag: int) -> None:
        consuming.basic_ack(tag)
        acked.append(tag)

    def on_message(_: object, method: Any, __: object, ___: bytes) -> None:
        def work() -> None:
            connection.add_callback_threadsafe(lambda: acknowledge(method.delivery_tag))

        workers.append(threading.Thread(target=work))
        workers[-1].start()

    consuming.basic_consume(name, on_message)
    process_until(connection, lambda: len(acked) == 10)
    for worker in workers:
        worker.join(DEADLINE_S)
    consuming.close()

    assert drain(channel, name) == []


def test_idle_broker_sends_heartbeats(
    parameters: pika.URLParameters, caplog: pytest.LogCaptureFixture
) -> None:
    """Two of them, so that it is a rhythm and not a single frame."""
    parameters.heartbeat = 1
    caplog.set_level(logging.DEBUG, "pika.heartbeat")
    with closing(pika.BlockingConnection(parameters)) as connection:
        process_until(connection, lambda: caplog.messages.count("Received heartbeat frame") == 2)
        # Ours were taken for what they are.
        assert connection.channel().is_open


def test_update_secret_is_answered(connection: pika.BlockingConnection) -> None:
    connection.update_secret("guest", "rotated")

    assert connection.channel().is_open


def test_wrong_password_is_refused(parameters: pika.URLParameters) -> None:
    parameters.credentials = pika.PlainCredentials("guest", "wrong")

    with pytest.raises(ProbableAuthenticationError, match="ACCESS_REFUSED - Login was refused"):
        pika.BlockingConnection(parameters)


def test_missing_vhost_is_refused(parameters: pika.URLParameters, name: str) -> None:
    parameters.virtual_host = name

    with pytest.raises(ProbableAccessDeniedError, match=f"NOT_ALLOWED - vhost {name} not found"):
        pika.BlockingConnection(parameters)
