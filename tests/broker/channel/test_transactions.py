"""tx.select, commit and rollback [71-74]."""

from __future__ import annotations

import asyncio

import pytest
from pamqp import commands

from leveret.broker.queues import commands as q
from leveret.broker.queues.record import Queue
from leveret.broker.resource import Resource
from leveret.protocol.codec import make
from leveret.protocol.twin import Message
from leveret.storage.commit import Batch
from tests.broker.channel.bench import ChannelBench, taken


class QueuesPart:
    """What a queue that was asked joins with; notes what becomes of it."""

    def __init__(self) -> None:
        self.is_void = False
        self.seen: list[str] = []

    def gather(self, batch: Batch) -> None:
        self.seen.append("begun")

    def committed(self) -> None:
        self.seen.append("committed")

    def voided(self) -> None:
        self.seen.append("voided")


def asked(queue: Queue) -> q.Prepare:
    """The one question the queue was put, and nothing else."""
    [prepare] = taken(queue, object)
    assert isinstance(prepare, q.Prepare)
    return prepare


def join(prepare: q.Prepare) -> QueuesPart:
    part = QueuesPart()
    prepare.unit.join(part)
    return part


def bodies(prepare: q.Prepare) -> list[bytes]:
    return [message.body for message in prepare.messages]


@pytest.fixture
def queue(bench: ChannelBench) -> Queue:
    return bench.queue("q")


async def select(bench: ChannelBench) -> None:
    bench.put(make(commands.Tx.Select))
    await bench.settle()
    bench.sent_one(commands.Tx.SelectOk)


async def got(bench: ChannelBench, queue: Queue, count: int) -> None:
    """The channel holds deliveries 1..count, at positions 10, 11, ... of the queue."""
    bench.put(make(commands.Basic.Consume, queue="q", consumer_tag="tag"))
    await bench.settle()
    bench.tell(q.Done())
    message = Message(b"\x00\x01q", "", "q", b"\x00\x00", b"body", 0, False)
    numbers = list(range(10, 10 + count))
    bench.tell(
        q.Deliver(queue.mailbox, "tag", [message] * count, numbers, count, redelivered=False)
    )
    await bench.settle()
    bench.sent()
    taken(queue, object)


def commit(bench: ChannelBench) -> None:
    bench.put(make(commands.Tx.Commit))


async def test_nothing_happens_before_the_commit(bench: ChannelBench, queue: Queue) -> None:
    await got(bench, queue, 2)
    await select(bench)
    bench.publish(queue, b"1")
    bench.ack(1)
    bench.nack(2)
    await bench.settle()
    assert taken(queue, object) == []


async def test_a_commit_asks_each_queue_once(bench: ChannelBench, queue: Queue) -> None:
    """[73] What was published in its order, and what was acked, as one question."""
    other = bench.queue("other")
    await got(bench, queue, 3)
    await select(bench)
    bench.ack(2)
    bench.publish(queue, b"1")
    bench.publish(other, b"2")
    bench.publish(queue, b"3", b"4")
    bench.ack(1)
    commit(bench)
    await bench.settle()
    prepare = asked(queue)
    assert (bodies(prepare), prepare.settled) == ([b"1", b"3", b"4"], [11, 10])
    assert prepare.sender is bench.channel.mailbox
    elsewhere = asked(other)
    assert (bodies(elsewhere), elsewhere.settled) == ([b"2"], [])
    assert elsewhere.unit is prepare.unit


async def test_what_is_rejected_or_requeued_follows_the_unit(
    bench: ChannelBench, queue: Queue
) -> None:
    await got(bench, queue, 3)
    await select(bench)
    bench.nack(3)
    bench.nack(2, requeue=False)
    bench.publish(queue, b"1")
    bench.ack(1)
    commit(bench)
    await bench.settle()
    join(asked(queue))
    await bench.settle()
    bench.sent_one(commands.Tx.CommitOk)
    settled = [
        (type(item), item.seq_ids)
        for item in taken(queue, object)
        if isinstance(item, q.Requeue | q.Reject | q.Ack)
    ]
    assert settled == [(q.Requeue, [12]), (q.Reject, [11])]


async def test_a_commit_ends_when_every_queue_has_joined(bench: ChannelBench) -> None:
    first, second = bench.queue("first"), bench.queue("second")
    await select(bench)
    bench.publish(first, b"1", b"2")
    bench.publish(second, b"3")
    commit(bench)
    bench.publish(first, b"of the next transaction")
    commit(bench)
    await bench.settle()
    one = join(asked(second))
    await bench.settle()
    assert bench.sent() == []
    assert one.seen == [], "nothing happens before all have answered"
    other = join(asked(first))
    assert one.seen == other.seen == ["begun", "committed"]
    await bench.settle()
    bench.sent_one(commands.Tx.CommitOk)
    assert bodies(asked(first)) == [b"of the next transaction"]


async def test_an_empty_commit(bench: ChannelBench) -> None:
    await select(bench)
    commit(bench)
    commit(bench)
    await bench.settle()
    assert [type(method) for method in bench.sent()] == [commands.Tx.CommitOk] * 2


async def test_acks_alone_are_a_unit_too(bench: ChannelBench, queue: Queue) -> None:
    await got(bench, queue, 2)
    await select(bench)
    bench.ack(0, multiple=True)
    commit(bench)
    await bench.settle()
    assert bench.sent() == []
    prepare = asked(queue)
    assert (prepare.messages, prepare.settled) == ([], [10, 11])
    join(prepare)
    await bench.settle()
    bench.sent_one(commands.Tx.CommitOk)


def assert_failed(bench: ChannelBench) -> None:
    closed = bench.sent_one(commands.Channel.Close)
    assert closed.reply_code == 406
    assert closed.reply_text == "PRECONDITION_FAILED - partial tx completion"


async def test_a_refusal_fails_the_commit(bench: ChannelBench, queue: Queue) -> None:
    """Nothing happens anywhere: not in the queue that joined, and nothing is requeued."""
    other = bench.queue("other")
    await got(bench, queue, 2)
    await select(bench)
    bench.publish(queue, b"1")
    bench.publish(other, b"2")
    bench.ack(1)
    bench.nack(2)
    commit(bench)
    await bench.settle()
    part = join(asked(queue))
    asked(other).unit.refuse()
    assert part.seen == ["voided"]
    await bench.settle()
    assert_failed(bench)
    assert taken(queue, object) == [q.ChannelDown(bench.channel.mailbox)]


async def test_a_queue_that_ends_before_the_commit_begins(
    bench: ChannelBench, queue: Queue
) -> None:
    """Deleted or crashed: it has joined, and cannot keep its word."""
    other = bench.queue("other")
    await select(bench)
    bench.publish(queue, b"1")
    bench.publish(other, b"2")
    commit(bench)
    await bench.settle()
    lost = join(asked(queue))
    lost.is_void = True
    part = join(asked(other))
    assert lost.seen == part.seen == ["voided"]
    await bench.settle()
    assert_failed(bench)


@pytest.mark.parametrize("crashed", [False, True])
async def test_deliveries_of_a_queue_that_ended(
    bench: ChannelBench, queue: Queue, crashed: bool
) -> None:
    """Deleted: there is nothing to settle. Crashed: they come again, so the ack cannot happen."""
    other = bench.queue("other")
    await got(bench, queue, 1)
    await select(bench)
    queue.mailbox.close()
    bench.tell(q.QueueDown(queue.mailbox, crashed))
    bench.publish(other, b"1")
    bench.ack(1)
    commit(bench)
    await bench.settle()
    part = join(asked(other))
    await bench.settle()
    if crashed:
        assert_failed(bench)
        assert part.seen == ["voided"]
    else:
        bench.sent_one(commands.Tx.CommitOk)
        assert part.seen == ["begun", "committed"]


async def test_a_channel_that_ends_withdraws_its_commit(bench: ChannelBench, queue: Queue) -> None:
    """Its deliveries go back to their queues: they must not be settled as well."""
    other = bench.queue("other")
    await got(bench, queue, 1)
    await select(bench)
    bench.publish(other, b"1")
    bench.ack(1)
    commit(bench)
    await bench.settle()
    part = join(asked(queue))
    assert bench.task is not None
    bench.task.cancel()
    await asyncio.wait([bench.task])
    assert taken(queue, object) == [q.ChannelDown(bench.channel.mailbox)]
    late = join(taken(other, q.Prepare)[0])
    assert part.seen == late.seen == ["voided"]


async def test_one_of_two_queues_was_deleted_before_the_commit(
    bench: ChannelBench, queue: Queue
) -> None:
    """As unbound: the message is for the other, and is not returned."""
    other = bench.queue("other")
    for name in ("q", "other"):
        bench.vhost.topology.bind("amq.fanout", Resource("/", "queue", name), "", {})
    await select(bench)
    bench.publish("", b"1", exchange="amq.fanout", mandatory=True)
    await bench.settle()
    queue.mailbox.close()
    commit(bench)
    await bench.settle()
    join(asked(other))
    await bench.settle()
    bench.sent_one(commands.Tx.CommitOk)


async def test_a_queue_that_was_deleted_before_the_commit(
    bench: ChannelBench, queue: Queue
) -> None:
    """Routed when it was published, gone when it was to be delivered: nobody else answers."""
    await select(bench)
    bench.publish(queue, b"1", mandatory=True)
    await bench.settle()
    queue.mailbox.close()
    commit(bench)
    await bench.settle()
    assert [type(method) for method in bench.sent()] == [
        commands.Basic.Return,
        commands.Tx.CommitOk,
    ]


async def test_returns_come_at_commit(bench: ChannelBench) -> None:
    """[72]"""
    await select(bench)
    bench.publish("nowhere", b"1", mandatory=True)
    await bench.settle()
    assert bench.sent() == []
    commit(bench)
    await bench.settle()
    assert [type(method) for method in bench.sent()] == [
        commands.Basic.Return,
        commands.Tx.CommitOk,
    ]


async def test_rollback_forgets_messages_and_keeps_deliveries(
    bench: ChannelBench, queue: Queue
) -> None:
    """[74] Nothing is requeued: the tags are as good as before."""
    await got(bench, queue, 3)
    await select(bench)
    bench.publish(queue, b"1")
    bench.ack(2, multiple=True)
    bench.nack(3)
    bench.put(make(commands.Tx.Rollback))
    await bench.settle()
    bench.sent_one(commands.Tx.RollbackOk)
    assert taken(queue, object) == []
    assert len(bench.channel.acks.ledger) == 3
    bench.ack(3, multiple=True)
    commit(bench)
    await bench.settle()
    prepare = asked(queue)
    assert (prepare.messages, prepare.settled) == ([], [10, 11, 12])


async def test_errors_come_at_once(bench: ChannelBench, queue: Queue) -> None:
    """[72] Not with the commit."""
    await got(bench, queue, 1)
    await select(bench)
    bench.ack(1)
    bench.ack(1)
    await bench.settle()
    assert bench.sent_one(commands.Channel.Close).reply_code == 406
    assert taken(queue, q.Prepare) == [], "the transaction goes with its channel"


@pytest.mark.parametrize("method", [commands.Tx.Commit, commands.Tx.Rollback])
async def test_without_select(bench: ChannelBench, method: type[commands.Tx.Commit]) -> None:
    bench.put(make(method))
    await bench.settle()
    closed = bench.sent_one(commands.Channel.Close)
    assert closed.reply_text == "PRECONDITION_FAILED - channel is not transactional"


async def test_confirms_and_transactions_exclude_each_other(bench: ChannelBench) -> None:
    """[71] Selecting twice is nothing."""
    await select(bench)
    await select(bench)
    bench.put(make(commands.Confirm.Select))
    await bench.settle()
    closed = bench.sent_one(commands.Channel.Close)
    assert closed.reply_text == "PRECONDITION_FAILED - cannot switch from tx to confirm mode"


async def test_nor_the_other_way_round(bench: ChannelBench) -> None:
    bench.put(make(commands.Confirm.Select, nowait=True))
    bench.put(make(commands.Tx.Select))
    await bench.settle()
    closed = bench.sent_one(commands.Channel.Close)
    assert closed.reply_text == "PRECONDITION_FAILED - cannot switch from confirm to tx mode"
