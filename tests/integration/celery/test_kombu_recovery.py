"""kombu when things go wrong: channel errors, cut connections, pools with dead members.

The line is cut at the client's socket, which both sides see as a lost connection; kombu then
reconnects by itself, and what was not acknowledged must come again.
"""

# mypy: allow-untyped-calls
# (kombu says that it is typed, but few of its functions have signatures.)

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from amqp.exceptions import NotFound, PreconditionFailed  # type: ignore[import-untyped]
from kombu.connection import Connection
from kombu.entity import Queue
from kombu.message import Message
from kombu.messaging import Consumer
from kombu.mixins import ConsumerMixin
from kombu.pools import connections, producers, reset

DEADLINE_S = 10.0

Collect = Callable[[Queue, int], list[Message]]
Drain = Callable[..., None]


def cut(connection: Connection) -> None:
    """Break the socket under kombu's feet, as a failing network would."""
    connection.connection.transport.sock.shutdown(socket.SHUT_RDWR)


def test_channel_error_leaves_the_connection_usable(
    connection: Connection, jobs: Queue, collect: Collect
) -> None:
    broken = connection.channel()
    with pytest.raises(NotFound) as missing:
        jobs(broken).queue_declare(passive=True)
    jobs(connection.channel()).declare()
    with pytest.raises(PreconditionFailed) as unequal:
        Queue(jobs.name, durable=True)(connection.channel()).declare()
    connection.Producer().publish("still here", routing_key=jobs.name)

    assert (missing.value.reply_code, unequal.value.reply_code) == (404, 406)
    assert isinstance(missing.value, connection.channel_errors)
    assert [m.payload for m in collect(jobs, 1)] == ["still here"]


def test_publish_survives_a_cut_connection(
    connection: Connection, jobs: Queue, collect: Collect
) -> None:
    failures: list[Exception] = []
    producer = connection.Producer()
    producer.publish("before", routing_key=jobs.name, declare=[jobs])
    collect(jobs, 1)
    cut(connection)

    producer.publish(
        "after",
        routing_key=jobs.name,
        declare=[jobs],
        retry=True,
        retry_policy={
            "max_retries": 3,
            "interval_start": 0,
            "errback": lambda error, interval: failures.append(error),
        },
    )

    assert failures, "the cut went unnoticed"
    assert [message.payload for message in collect(jobs, 1)] == ["after"]


def test_ensure_revives_a_consumer_and_what_it_had_not_acked(
    connection: Connection, jobs: Queue, drain: Drain
) -> None:
    taken: list[Message] = []
    connection.Producer().publish("twice", routing_key=jobs.name, declare=[jobs])
    consumer = Consumer(connection.default_channel, jobs, on_message=taken.append)
    consumer.consume()
    drain(until=lambda: len(taken) == 1)
    cut(connection)
    drain_again = connection.ensure(
        consumer,
        connection.drain_events,
        max_retries=1,
        interval_start=0,
        on_revive=lambda channel: consumer.consume(),
    )
    end = time.monotonic() + DEADLINE_S
    while len(taken) < 2:
        drain_again(timeout=max(end - time.monotonic(), 0.01))
    taken[1].ack()

    assert [message.payload for message in taken] == ["twice", "twice"]
    assert [message.delivery_info["redelivered"] for message in taken] == [False, True]


class Relay(ConsumerMixin):
    """A service in kombu's style; its line is cut after the first message."""

    def __init__(self, connection: Connection, jobs: Queue) -> None:
        self.connection = connection
        self.jobs = jobs
        self.bodies: list[object] = []
        self.connects = 0
        self.end = time.monotonic() + DEADLINE_S

    def get_consumers(self, consumer_class: Any, channel: Any) -> list[Consumer]:
        return [consumer_class([self.jobs], callbacks=[self.on_job], prefetch_count=1)]

    def on_connection_revived(self) -> None:
        self.connects += 1

    def on_iteration(self) -> None:
        assert time.monotonic() < self.end, f"only {self.bodies} after {self.connects} connects"

    def on_job(self, body: object, message: Message) -> None:
        self.bodies.append(body)
        if self.connects == 1:
            message.channel.connection.transport.sock.shutdown(socket.SHUT_RDWR)
            return
        message.ack()
        self.should_stop = body == "second"


def test_consumer_mixin_reconnects(connection: Connection, jobs: Queue) -> None:
    producer = connection.Producer()
    producer.publish("first", routing_key=jobs.name, declare=[jobs])
    producer.publish("second", routing_key=jobs.name)
    relay = Relay(connection, jobs)

    relay.run()

    assert relay.connects == 2
    assert relay.bodies == ["first", "first", "second"]


@pytest.fixture
def _empty_pools() -> Iterator[None]:
    """kombu's pools are global to the process: leave none of their sockets behind."""
    yield
    reset()


@pytest.mark.usefixtures("_empty_pools")
def test_producer_pool_shares_connections(
    connection: Connection, jobs: Queue, collect: Collect
) -> None:
    with (
        producers[connection].acquire(block=True, timeout=DEADLINE_S) as one,
        producers[connection].acquire(block=True, timeout=DEADLINE_S) as two,
    ):
        one.publish("one", routing_key=jobs.name, declare=[jobs])
        two.publish("two", routing_key=jobs.name)
        assert one.connection is not two.connection

    assert sorted(message.payload for message in collect(jobs, 2)) == ["one", "two"]


@pytest.mark.usefixtures("_empty_pools")
def test_connection_pool_replaces_a_dead_connection(
    connection: Connection, jobs: Queue, collect: Collect
) -> None:
    pool = connections[connection]
    with pool.acquire(block=True, timeout=DEADLINE_S) as pooled:
        pooled.connect()
        cut(pooled)
    with pool.acquire(block=True, timeout=DEADLINE_S) as pooled:
        pooled.ensure_connection(max_retries=3)
        pooled.Producer().publish("alive", routing_key=jobs.name, declare=[jobs], retry=True)

    assert [message.payload for message in collect(jobs, 1)] == ["alive"]
