"""The clients of the demo: each a thread with a connection of its own, as clients are.

Upstream: ``demo_script.py`` says what they do. Downstream: a broker, over AMQP. ``play`` returns
when every message that has a consumer is done with, so that ``Truth`` and the broker's log can be
compared number by number.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, Final

import pika  # type: ignore[import-untyped]
from pika.exceptions import (  # type: ignore[import-untyped]
    AMQPConnectionError,
    ConnectionClosedByBroker,
)

from leveret.spark_jobs import demo_script
from leveret.spark_jobs.demo_script import (
    CONSUMERS,
    EXCHANGES,
    INTRUDER,
    PASSWORD,
    POISON_DELIVERIES,
    POISON_ID,
    QUEUES,
    Consumer,
    Letter,
    Publisher,
    Tenant,
)
from leveret.spark_jobs.demo_truth import Truth

# How often clients look whether the play is over.
_TURN_S: Final = 0.05
# What is left when the publishers end takes this long on a slow machine, at the most.
_DRAIN_S: Final = 120.0
_LOGIN_EVERY_S: Final = 0.2

Progress = Callable[[float, Truth], None]


class DemoError(Exception):
    """The demo could not be played; the text says why."""


def play(port: int, seconds: float, on_progress: Progress | None = None) -> Truth:
    """Play the script to the broker on this port. Raises DemoError, or pika's AMQPError."""
    # Logins that fail on purpose are no news.
    logging.getLogger("pika").setLevel(logging.CRITICAL)
    stage = _Stage(port)
    stage.build()
    written = demo_script.publishers(seconds)
    with ThreadPoolExecutor(len(CONSUMERS) + len(written) + 2, "demo") as pool:
        consuming = [pool.submit(stage.consume, consumer) for consumer in CONSUMERS]
        try:
            stage.wait_consumers(consuming)
            publishing = [pool.submit(stage.publish, one) for one in written]
            publishing.append(pool.submit(stage.connect_again_and_again, seconds))
            publishing.append(pool.submit(stage.guess_passwords))
            stage.wait_played(publishing, consuming, on_progress)
            stage.wait_done(consuming)
        finally:
            stage.is_over.set()
        _raise_first(consuming)
    return stage.truth


class _Stage:
    """What all clients share."""

    def __init__(self, port: int) -> None:
        self.truth = Truth()
        self.is_over = threading.Event()
        self._port = port
        self._began = time.monotonic()
        self._consumers_ready = threading.Semaphore(0)

    # --- the director's part ---------------------------------------------------------------------

    def build(self) -> None:
        for tenant in (demo_script.SHOP, demo_script.BILLING, demo_script.TELEMETRY):
            connection = self._connect(tenant)
            channel = connection.channel()
            for exchange in EXCHANGES:
                if exchange.tenant == tenant:
                    channel.exchange_declare(exchange.name, exchange.type, durable=True)
            for queue in QUEUES:
                if queue.tenant == tenant:
                    channel.queue_declare(queue.name, durable=True, arguments=queue.arguments)
                    channel.queue_bind(queue.name, queue.exchange, queue.binding_key)
            connection.close()

    def wait_consumers(self, consuming: list[Future[None]]) -> None:
        """Nothing is published before all consumers are there: none is late, none is favoured."""
        for _ in CONSUMERS:
            while not self._consumers_ready.acquire(timeout=_TURN_S):
                _raise_first(consuming)
        self._began = time.monotonic()

    def wait_played(
        self,
        publishing: list[Future[None]],
        consuming: list[Future[None]],
        on_progress: Progress | None,
    ) -> None:
        waiting = set(publishing)
        while waiting:
            _, waiting = wait(waiting, timeout=0.25, return_when=FIRST_EXCEPTION)
            _raise_first([*publishing, *consuming])
            if on_progress is not None:
                on_progress(time.monotonic() - self._began, self.truth)

    def wait_done(self, consuming: list[Future[None]]) -> None:
        consumed = {(consumer.tenant.vhost, consumer.queue) for consumer in CONSUMERS}
        deadline = time.monotonic() + _DRAIN_S
        while self.truth.open_places(consumed):
            _raise_first(consuming)
            if time.monotonic() > deadline:
                left = ", ".join("/".join(place) for place in self.truth.open_places(consumed))
                raise DemoError(f"the consumers of {left} did not get all messages in time")
            time.sleep(_TURN_S)

    # --- the clients -----------------------------------------------------------------------------

    def publish(self, publisher: Publisher) -> None:
        connection = self._connect(publisher.tenant)
        channel = connection.channel()
        if publisher.confirms:
            channel.confirm_delivery()
        for letter in publisher.letters:
            if not self._wait_for(letter, connection.sleep):
                break
            self._send(channel, publisher.tenant, letter)
        connection.close()

    def connect_again_and_again(self, seconds: float) -> None:
        tenant = demo_script.LEGACY
        for letter in demo_script.legacy_letters(seconds):
            if not self._wait_for(letter, time.sleep):
                break
            connection = self._connect(tenant)
            self._send(connection.channel(), tenant, letter)
            connection.close()

    def guess_passwords(self) -> None:
        for _ in range(demo_script.BAD_LOGINS):
            try:
                self._connect(INTRUDER, password="letmein").close()
            except (AMQPConnectionError, ConnectionClosedByBroker):
                self.truth.refused(INTRUDER)
            if self.is_over.wait(_LOGIN_EVERY_S):
                break

    def consume(self, consumer: Consumer) -> None:
        connection = self._connect(consumer.tenant)
        channel = connection.channel()
        channel.basic_qos(prefetch_count=consumer.prefetch)
        worker = _Worker(consumer, self.truth)
        channel.basic_consume(
            consumer.queue,
            worker.on_message,
            auto_ack=consumer.auto_ack,
            consumer_tag=consumer.ctag,
        )
        self._consumers_ready.release()
        while not self.is_over.is_set():
            connection.process_data_events(time_limit=_TURN_S)
            worker.ack_rest(channel)
        connection.close()

    def _wait_for(self, letter: Letter, sleep: Callable[[float], None]) -> bool:
        """Until the letter's time has come; false if the play was broken off."""
        early_s = self._began + letter.at - time.monotonic()
        if early_s > 0:
            sleep(early_s)
        return not self.is_over.is_set()

    def _send(self, channel: Any, tenant: Tenant, letter: Letter) -> None:
        properties = pika.BasicProperties(
            message_id=letter.message_id, delivery_mode=2 if letter.persistent else 1
        )
        body = b"." * letter.size
        channel.basic_publish(letter.exchange, letter.rk, body, properties, letter.mandatory)
        self.truth.sent(tenant, letter)

    def _connect(self, tenant: Tenant, password: str = PASSWORD) -> Any:
        connection = pika.BlockingConnection(
            pika.ConnectionParameters(
                "127.0.0.1",
                self._port,
                tenant.vhost,
                pika.PlainCredentials(tenant.user, password),
                client_properties={"connection_name": f"demo {tenant.user}"},
            )
        )
        self.truth.connected(tenant)
        return connection


class _Worker:
    """What a consumer does with its messages."""

    def __init__(self, consumer: Consumer, truth: Truth) -> None:
        self._consumer = consumer
        self._truth = truth
        self._tries: Counter[str] = Counter()
        # Since the last ack: how many, and the last of them.
        self._unacked = 0
        self._last_tag = 0

    def on_message(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        consumer, truth = self._consumer, self._truth
        truth.given(consumer, len(body))
        if consumer.work_s:
            time.sleep(consumer.work_s)
        if properties.message_id == POISON_ID:
            self._tries[POISON_ID] += 1
            is_last = self._tries[POISON_ID] == POISON_DELIVERIES
            channel.basic_nack(method.delivery_tag, requeue=not is_last)
            truth.failed(consumer, is_discarded=is_last)
        elif consumer.auto_ack:
            truth.finished(consumer, 1)
        else:
            self._unacked += 1
            self._last_tag = method.delivery_tag
            if self._unacked >= consumer.acks_every:
                self.ack_rest(channel)

    def ack_rest(self, channel: Any) -> None:
        if self._unacked:
            channel.basic_ack(self._last_tag, multiple=self._unacked > 1)
            self._truth.finished(self._consumer, self._unacked)
            self._unacked = 0


def _raise_first(futures: list[Future[None]]) -> None:
    for future in futures:
        if future.done():
            future.result()
