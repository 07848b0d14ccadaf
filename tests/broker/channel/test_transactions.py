"""tx.select, commit and rollback [71-74]."""

from __future__ import annotations

import pytest
from pamqp import commands

from leveret.broker.queues import commands as q
from leveret.broker.queues.record import Queue
from leveret.protocol.codec import make
from leveret.protocol.twin import Message
from tests.broker.channel.bench import ChannelBench, confirmed, taken


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


async def test_a_commit_publishes_then_acks_in_order(bench: ChannelBench, queue: Queue) -> None:
    """[73]"""
    await got(bench, queue, 3)
    await select(bench)
    bench.ack(2)
    bench.publish(queue, b"1")
    bench.nack(3)
    bench.publish(queue, b"2")
    bench.ack(1)
    commit(bench)
    await bench.settle()
    assert [type(item) for item in queue.mailbox.ordinary] == [q.Delivery, q.Delivery]
    settled = [
        (type(item), item.seq_ids)
        for item in taken(queue, object)
        if isinstance(item, q.Ack | q.Requeue)
    ]
    assert settled == [(q.Ack, [11]), (q.Requeue, [12]), (q.Ack, [10])]


async def test_a_commit_ends_when_every_queue_has_its_messages_safe(bench: ChannelBench) -> None:
    first, second = bench.queue("first"), bench.queue("second")
    await select(bench)
    bench.publish(first, b"1", b"2")
    bench.publish(second, b"3")
    commit(bench)
    bench.publish(first, b"of the next transaction")
    await bench.settle()
    assert bench.sent() == []
    bench.tell(confirmed(second, 3, 3))
    bench.tell(confirmed(first, 1, 1))
    await bench.settle()
    assert bench.sent() == []
    bench.tell(confirmed(first, 2, 2))
    await bench.settle()
    bench.sent_one(commands.Tx.CommitOk)
    assert len(taken(first, q.Delivery)) == 1


async def test_an_empty_commit(bench: ChannelBench) -> None:
    await select(bench)
    commit(bench)
    commit(bench)
    await bench.settle()
    assert [type(method) for method in bench.sent()] == [commands.Tx.CommitOk] * 2


async def test_acks_alone_wait_for_nobody(bench: ChannelBench, queue: Queue) -> None:
    await got(bench, queue, 1)
    await select(bench)
    bench.ack(0, multiple=True)
    commit(bench)
    await bench.settle()
    bench.sent_one(commands.Tx.CommitOk)
    assert len(taken(queue, q.Ack)) == 1


async def test_a_refusal_fails_the_commit(bench: ChannelBench, queue: Queue) -> None:
    await select(bench)
    bench.publish(queue, b"1", b"2")
    commit(bench)
    await bench.settle()
    bench.tell(q.Refused(queue.mailbox, 1, 1))
    bench.tell(confirmed(queue, 2, 2))
    await bench.settle()
    closed = bench.sent_one(commands.Channel.Close)
    assert closed.reply_code == 406
    assert closed.reply_text == "PRECONDITION_FAILED - partial tx completion"


@pytest.mark.parametrize(
    ("crashed", "answer"),
    [
        pytest.param(False, commands.Tx.CommitOk, id="deleted"),
        pytest.param(True, commands.Channel.Close, id="crashed"),
    ],
)
async def test_a_queue_that_goes_during_the_commit(
    bench: ChannelBench, queue: Queue, crashed: bool, answer: type[commands.Tx.CommitOk]
) -> None:
    await select(bench)
    bench.publish(queue, b"1")
    commit(bench)
    await bench.settle()
    bench.tell(q.QueueDown(queue.mailbox, crashed))
    await bench.settle()
    bench.sent_one(answer)


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
    assert [ack.seq_ids for ack in taken(queue, q.Ack)] == [[10, 11, 12]]


async def test_errors_come_at_once(bench: ChannelBench, queue: Queue) -> None:
    """[72] Not with the commit."""
    await got(bench, queue, 1)
    await select(bench)
    bench.ack(1)
    bench.ack(1)
    await bench.settle()
    assert bench.sent_one(commands.Channel.Close).reply_code == 406
    assert taken(queue, q.Ack) == [], "the transaction goes with its channel"


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
