"""The ``-ok`` of what changes the durable topology comes when the change is on disk, not before.

Commits are held in the writer's own thread; everything else is as in earnest.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pamqp import commands
from pamqp.base import Frame

from leveret.broker.server import Broker
from leveret.protocol.codec import make
from tests.support.raw_client import RawClient
from tests.support.slow_writer import SlowWriter, slow_writer

pytestmark = pytest.mark.timeout(60)

# Round trips of others; what is answered without waiting is answered long before these are over.
ROUND_TRIPS = 30

DECLARED: list[tuple[Frame, type[Frame]]] = [
    (make(commands.Queue.Declare, queue="there", durable=True), commands.Queue.DeclareOk),
    (make(commands.Queue.Declare, queue="bound", durable=True), commands.Queue.DeclareOk),
    (
        make(commands.Exchange.Declare, exchange="there", exchange_type="fanout", durable=True),
        commands.Exchange.DeclareOk,
    ),
    (make(commands.Queue.Bind, queue="bound", exchange="there"), commands.Queue.BindOk),
    (
        make(commands.Exchange.Bind, destination="there", source="amq.fanout"),
        commands.Exchange.BindOk,
    ),
]
CHANGES: list[tuple[Frame, type[Frame]]] = [
    (make(commands.Queue.Declare, queue="new", durable=True), commands.Queue.DeclareOk),
    (
        make(commands.Exchange.Declare, exchange="new", exchange_type="direct", durable=True),
        commands.Exchange.DeclareOk,
    ),
    (make(commands.Queue.Bind, queue="there", exchange="there"), commands.Queue.BindOk),
    (
        make(commands.Exchange.Bind, destination="there", source="amq.direct"),
        commands.Exchange.BindOk,
    ),
    (make(commands.Queue.Unbind, queue="bound", exchange="there"), commands.Queue.UnbindOk),
    (
        make(commands.Exchange.Unbind, destination="there", source="amq.fanout"),
        commands.Exchange.UnbindOk,
    ),
    (make(commands.Queue.Delete, queue="there"), commands.Queue.DeleteOk),
    (make(commands.Exchange.Delete, exchange="there"), commands.Exchange.DeleteOk),
]


@pytest.fixture
def writer() -> Iterator[SlowWriter]:
    with slow_writer() as slow:
        yield slow


@pytest.mark.parametrize(
    ("change", "answer"), CHANGES, ids=[change.name.lower() for change, _ in CHANGES]
)
async def test_ok_waits_for_the_commit(
    broker: Broker, writer: SlowWriter, change: Frame, answer: type[Frame]
) -> None:
    async with (
        await RawClient.open(broker.port, channels=2) as client,
        await RawClient.open(broker.port) as other,
    ):
        for method, done in DECLARED:
            await client.call(1, method, done)
        writer.hold()
        await client.tell(1, change)
        question = make(commands.Basic.Qos, prefetch_count=10)
        for _ in range(ROUND_TRIPS):
            # On the same connection: an answer to the change would come first.
            await client.call(2, question, commands.Basic.QosOk)
            await other.call(1, question, commands.Basic.QosOk)
        writer.release()
        received = await client.receive()
        assert received.channel == 1
        assert isinstance(received.method, answer)
