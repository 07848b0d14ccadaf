"""What many of these tests do with a client on channel 1, and look up in a broker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pamqp import commands
from pamqp.base import Frame

from leveret.broker.connection.reader import Reader
from leveret.broker.server import Broker
from leveret.protocol.codec import make
from tests.support.raw_client import RawClient, Received, publish


async def make_queue(
    client: RawClient, name: str, *, exclusive: bool = False, durable: bool = False
) -> None:
    declare = make(commands.Queue.Declare, queue=name, exclusive=exclusive, durable=durable)
    await client.call(1, declare, commands.Queue.DeclareOk)


async def select_confirms(client: RawClient) -> None:
    await client.call(1, make(commands.Confirm.Select), commands.Confirm.SelectOk)


async def consume(client: RawClient, queue: str, *, tag: str = "", no_ack: bool = False) -> None:
    question = make(commands.Basic.Consume, queue=queue, consumer_tag=tag, no_ack=no_ack)
    await client.call(1, question, commands.Basic.ConsumeOk)


async def ask(client: RawClient, question: Frame) -> Received:
    await client.tell(1, question)
    return await client.receive()


async def confirmed(client: RawClient, last: int) -> None:
    """Wait for the confirm of everything up to ``last``."""
    while (await client.expect(commands.Basic.Ack)).delivery_tag != last:
        pass


async def drain(client: RawClient, queue: str) -> list[Received]:
    """Everything that is ready in a queue."""
    found: list[Received] = []
    while True:
        got = await ask(client, make(commands.Basic.Get, queue=queue, no_ack=True))
        if isinstance(got.method, commands.Basic.GetEmpty):
            return found
        found.append(got)


async def fill_socket(
    publisher: RawClient, queue: str, is_full: Callable[[], bool], size: int = 10_000
) -> None:
    """Publish to a consumer that does not read until its socket takes no more."""
    while not is_full():
        await publisher.send(publish(1, queue, bytes(size)))
        # Twice through the broker, so that what is left now stays.
        for _ in range(2):
            await make_queue(publisher, queue)


def queue_statistics(broker: Broker, queue: str) -> dict[str, Any]:
    queues: Any = broker.vhosts["/"].statistics()["queues"]
    return queues[queue]


def ready_is(broker: Broker, queue: str, count: int) -> bool:
    return queue_statistics(broker, queue)["messages_ready"] == count


def connections_are(broker: Broker, count: int) -> bool:
    return len(broker.listeners[0].readers) == count


def reader_of(broker: Broker, client: RawClient) -> Reader:
    """The broker's end of a connection."""
    start = f"127.0.0.1:{client.port} "
    return next(r for r in broker.listeners[0].readers if r.name.startswith(start))
