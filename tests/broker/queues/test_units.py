"""A queue's part in a unit: asked, joined, begun, ended; and what goes on meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from leveret.broker.clock import VirtualClock
from leveret.broker.queues import commands as c
from leveret.storage.commit import Batch, Operation
from leveret.storage.unit import Unit, commit_in_memory
from tests.broker.queues.bench import ActorBench, Port, bodies, make_queue, message


class Transaction:
    """A unit whose commit begins and ends when the test says so."""

    def __init__(self) -> None:
        self.ended: list[bool] = []
        self.unit = Unit(self._on_put, self.ended.append)
        self._put: list[Operation] = []
        self._batch = Batch()

    def _on_put(self, operation: Operation) -> None:
        self._put.append(operation)

    @property
    def is_put(self) -> bool:
        return bool(self._put)

    def ask(self, bench: ActorBench, port: Port, *publish: bytes, ack: Sequence[int] = ()) -> None:
        self.unit.expect()
        bench.put(c.Prepare(self.unit, port.mailbox, [message(body) for body in publish], ack))

    def begin(self) -> None:
        [operation] = self._put
        operation.gather(self._batch)

    def end(self) -> None:
        for call in self._batch.after:
            call()


@pytest.fixture
async def bench(clock: VirtualClock) -> AsyncIterator[ActorBench]:
    async with ActorBench(clock) as bench:
        yield bench


@pytest.fixture
def port() -> Port:
    return Port("channel")


@pytest.fixture
def other() -> Port:
    return Port("other channel")


async def asked(
    bench: ActorBench, port: Port, *publish: bytes, ack: Sequence[int] = ()
) -> Transaction:
    """One that the queue has joined."""
    transaction = Transaction()
    transaction.ask(bench, port, *publish, ack=ack)
    transaction.unit.begin()
    await bench.settle()
    assert transaction.is_put
    return transaction


async def holding(bench: ActorBench, port: Port, count: int, *, prefetch: int = 0) -> list[int]:
    """The channel consumes, and holds so many deliveries."""
    port.consume(bench.queue, prefetch=prefetch)
    Port("publisher").publish(bench.queue, *(b"%d" % number for number in range(count)))
    await bench.settle()
    return [
        seq_id
        for item in port.take()
        if isinstance(item, c.Deliver)
        for seq_id in item.seq_ids or ()
    ]


async def got(bench: ActorBench, port: Port) -> list[bytes]:
    """What the get that waited was given, then all the rest."""
    found = [item.message.body for item in port.take() if isinstance(item, c.GetOk)]
    while bench.count("messages_ready"):
        bench.put(c.Get(port.mailbox, no_ack=True))
        await bench.settle()
        found.append(port.take_one(c.GetOk).message.body)
    return found


async def turns(count: int = 5) -> None:
    """Time enough for a queue to do what it can: what is left in a lane stays there."""
    for _ in range(count):
        await asyncio.sleep(0)


# --- the commit ----------------------------------------------------------------------------------


async def test_nothing_is_seen_before_the_commit_ends(
    bench: ActorBench, port: Port, other: Port
) -> None:
    held = await holding(bench, other, 1)
    transaction = await asked(bench, other, b"new", ack=held)
    transaction.begin()
    await turns()
    assert other.take() == []
    assert bench.count("messages_ready") == 0
    assert bench.count("ack") == 0
    transaction.end()
    await bench.settle()
    assert bodies(other.take()) == [b"new"]
    assert bench.count("ack") == 1
    assert transaction.ended == [True]


async def test_while_it_is_committed_other_publishes_wait(
    bench: ActorBench, port: Port, other: Port
) -> None:
    """Its messages have their positions already: nothing may get behind them and be seen first."""
    transaction = await asked(bench, port, b"of the unit")
    other.publish(bench.queue, b"before it began")
    await bench.settle()
    transaction.begin()
    other.publish(bench.queue, b"meanwhile", confirm=True)
    bench.put(c.Get(port.mailbox, no_ack=True))
    await turns()
    assert len(bench.queue.mailbox.ordinary) == 2
    assert bench.queue.mailbox._waiter is not None, "it sleeps, whatever lies in that lane"
    assert port.take() == other.take() == []
    transaction.end()
    await bench.settle()
    assert await got(bench, port) == [
        b"before it began",
        b"of the unit",
        b"meanwhile",
    ]


async def test_while_it_is_committed_acks_and_deliveries_go_on(
    bench: ActorBench, port: Port, other: Port
) -> None:
    held = await holding(bench, other, 3, prefetch=1)
    transaction = await asked(bench, port, b"of the unit")
    transaction.begin()
    for number in (b"1", b"2"):
        bench.put_urgent(c.Ack(other.mailbox, held))
        await bench.settle()
        deliver = other.take_one(c.Deliver)
        assert bodies([deliver]) == [number]
        held = list(deliver.seq_ids or ())
    bench.put_urgent(c.Requeue(other.mailbox, held))
    await bench.settle()
    assert other.take_one(c.Deliver).redelivered
    bench.put_urgent(c.Ack(other.mailbox, held))
    transaction.end()
    await bench.settle()
    assert bodies(other.take()) == [b"of the unit"]


async def test_two_that_are_committed_together_keep_their_order(
    bench: ActorBench, port: Port, other: Port
) -> None:
    one, two = await asked(bench, port, b"1"), await asked(bench, other, b"2")
    one.begin()
    two.begin()
    other.publish(bench.queue, b"3")
    one.end()
    await turns()
    assert bench.count("messages_ready") == 1, "the other is not on disk yet"
    two.end()
    await bench.settle()
    assert await got(bench, port) == [b"1", b"2", b"3"]


async def test_a_unit_in_memory_stands_before_what_comes_behind_it(
    bench: ActorBench, port: Port, other: Port
) -> None:
    """It begins and ends with the last answer, in the middle of a batch of publishes."""
    ended: list[bool] = []
    unit = Unit(commit_in_memory, ended.append)
    unit.expect()
    unit.begin()
    bench.put(c.Prepare(unit, port.mailbox, [message(b"of the unit")], ()))
    other.publish(bench.queue, b"behind it")
    await bench.settle()
    assert ended == [True]
    assert await got(bench, port) == [b"of the unit", b"behind it"]


async def test_prefetch_comes_back_with_the_commit(bench: ActorBench, port: Port) -> None:
    held = await holding(bench, port, 3, prefetch=2)
    transaction = await asked(bench, port, ack=held)
    transaction.begin()
    await turns()
    assert port.take() == []
    transaction.end()
    await bench.settle()
    assert bodies(port.take()) == [b"2"]
    assert bench.count("messages_unacknowledged") == 1


# --- the end of a channel ------------------------------------------------------------------------


async def test_a_channel_that_ends_while_it_is_committed(bench: ActorBench, port: Port) -> None:
    """What the unit settles does not come back, the rest does."""
    held = await holding(bench, port, 3)
    transaction = await asked(bench, port, b"new", ack=held[:2])
    transaction.begin()
    port.mailbox.close()
    bench.put_urgent(c.ChannelDown(port.mailbox))
    await bench.settle()
    assert bench.count("messages_ready") == 1
    transaction.end()
    await bench.settle()
    assert await got(bench, Port("next")) == [b"2", b"new"]


async def test_a_channel_that_ends_before_the_commit_begins(bench: ActorBench, port: Port) -> None:
    held = await holding(bench, port, 3)
    transaction = await asked(bench, port, b"new", ack=held[:2])
    port.mailbox.close()
    transaction.unit.withdraw()
    bench.put_urgent(c.ChannelDown(port.mailbox))
    await bench.settle()
    assert bench.count("messages_ready") == 1
    transaction.begin()
    transaction.end()
    await bench.settle()
    assert transaction.ended == [False]
    assert await got(bench, Port("next")) == [b"0", b"1", b"2"]


async def test_a_channel_whose_end_overtakes_the_question(bench: ActorBench, port: Port) -> None:
    held = await holding(bench, port, 2)
    transaction = Transaction()
    transaction.ask(bench, port, b"new", ack=held)
    transaction.unit.begin()
    port.mailbox.close()
    transaction.unit.withdraw()
    bench.put_urgent(c.ChannelDown(port.mailbox))
    await bench.settle()
    assert transaction.ended == [False]
    assert await got(bench, Port("next")) == [b"0", b"1"]


# --- units that come to nothing ------------------------------------------------------------------


async def test_a_void_unit_gives_its_deliveries_back_to_the_channel(
    bench: ActorBench, port: Port
) -> None:
    """Another queue has refused: this one is as it was before it was asked."""
    held = await holding(bench, port, 3, prefetch=2)
    transaction = Transaction()
    transaction.unit.expect()
    transaction.ask(bench, port, b"new", ack=held)
    transaction.unit.begin()
    await bench.settle()
    assert transaction.ended == []
    transaction.unit.refuse()
    await bench.settle()
    assert transaction.ended == [False]
    assert (bench.count("messages_ready"), bench.count("messages_unacknowledged")) == (1, 2)
    assert port.take() == [], "prefetch is used up as before"
    bench.put_urgent(c.Ack(port.mailbox, held))
    await bench.settle()
    assert bodies(port.take()) == [b"2"]


async def test_a_void_unit_of_a_channel_that_has_only_got(bench: ActorBench, port: Port) -> None:
    """The queue may have forgotten it meanwhile: it held nothing."""
    Port("publisher").publish(bench.queue, b"0")
    bench.put(c.Get(port.mailbox, no_ack=False))
    await bench.settle()
    held = port.take_one(c.GetOk).seq_id
    assert held is not None
    transaction = Transaction()
    transaction.unit.expect()
    transaction.ask(bench, port, ack=[held])
    transaction.unit.begin()
    bench.put_urgent(c.Sent(port.mailbox, 0))
    await bench.settle()
    transaction.unit.refuse()
    await bench.settle()
    assert bench.count("messages_unacknowledged") == 1
    bench.put_urgent(c.ChannelDown(port.mailbox))
    await bench.settle()
    assert bench.count("messages_ready") == 1


# --- the end of the queue ------------------------------------------------------------------------


async def test_a_queue_that_is_deleted_before_the_commit_begins(
    bench: ActorBench, clock: VirtualClock, port: Port
) -> None:
    async with ActorBench(clock, make_queue("other")) as elsewhere:
        transaction = Transaction()
        transaction.ask(bench, port, b"1")
        transaction.ask(elsewhere, port, b"2")
        transaction.unit.begin()
        await bench.settle()
        await elsewhere.settle()
        bench.put_urgent(c.DeleteNow())
        await bench.settle()
        transaction.begin()
        transaction.end()
        await elsewhere.settle()
        assert transaction.ended == [False]
        assert elsewhere.count("messages") == 0


async def test_a_queue_that_is_deleted_before_it_answers(bench: ActorBench, port: Port) -> None:
    transaction = Transaction()
    bench.put_urgent(c.DeleteNow())
    transaction.ask(bench, port, b"1")
    transaction.unit.begin()
    await bench.settle()
    assert transaction.ended == [False]
    assert port.take() == [c.QueueDown(bench.queue.mailbox, crashed=False)]


async def test_a_queue_that_is_deleted_while_it_is_committed(
    bench: ActorBench, clock: VirtualClock, port: Port
) -> None:
    """Too late to change anything: it happens, and goes with the queue."""
    async with ActorBench(clock, make_queue("other")) as elsewhere:
        transaction = Transaction()
        transaction.ask(bench, port, b"1")
        transaction.ask(elsewhere, port, b"2")
        transaction.unit.begin()
        await bench.settle()
        await elsewhere.settle()
        transaction.begin()
        bench.put_urgent(c.DeleteNow())
        await bench.settle()
        transaction.end()
        await elsewhere.settle()
        assert transaction.ended == [True]
        assert elsewhere.count("messages_ready") == 1
