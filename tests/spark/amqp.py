"""Looking at a broker's queues while Spark uses them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pika  # type: ignore[import-untyped]
from pika.adapters.blocking_connection import BlockingChannel  # type: ignore[import-untyped]

DEADLINE_S = 60.0
STEP_S = 0.02


@contextmanager
def channel_to(url: str) -> Iterator[BlockingChannel]:
    """A channel with confirms."""
    connection = pika.BlockingConnection(pika.URLParameters(url))
    try:
        channel = connection.channel()
        channel.confirm_delivery()
        yield channel
    finally:
        connection.close()


def publish_numbers(channel: BlockingChannel, queue: str, numbers: range) -> None:
    for number in numbers:
        channel.basic_publish("", queue, str(number).encode())


def ready(channel: BlockingChannel, queue: str) -> int:
    return int(channel.queue_declare(queue, passive=True).method.message_count)


def drain(channel: BlockingChannel, queue: str) -> list[tuple[Any, pika.BasicProperties, bytes]]:
    taken = []
    while (got := channel.basic_get(queue, auto_ack=True))[0] is not None:
        taken.append(got)
    return taken


def numbers_in(channel: BlockingChannel, queue: str) -> list[int]:
    """Takes everything out of the queue."""
    return [int(body) for _, _, body in drain(channel, queue)]


def wait_until(condition: Callable[[], object]) -> None:
    """As tests.support.waiting, for tests without an event loop."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in good time"
        time.sleep(STEP_S)
