"""A channel between its client and its queues: confirms, answers, errors, the end."""

from __future__ import annotations

import logging

import pytest
from pamqp import commands

from leveret.broker.channel.context import ChannelClosing, ConnectionFailed, Stop
from leveret.broker.queues import commands as q
from leveret.broker.queues.record import Queue
from leveret.protocol.codec import make
from leveret.protocol.errors import precondition_failed
from leveret.protocol.twin import Message
from tests.broker.channel.bench import ChannelBench, confirmed, settlements, taken


async def select_confirms(bench: ChannelBench) -> None:
    bench.put(make(commands.Confirm.Select))
    await bench.settle()
    bench.sent_one(commands.Confirm.SelectOk)


@pytest.fixture
def queue(bench: ChannelBench) -> Queue:
    return bench.queue("q")


# --- confirms ----------------------------------------------------------------------------------


async def test_a_publish_is_confirmed_by_its_queue(bench: ChannelBench, queue: Queue) -> None:
    await select_confirms(bench)
    bench.publish(queue, b"1")
    await bench.settle()
    (delivery,) = taken(queue, q.Delivery)
    assert delivery.confirm_first == 1
    assert bench.sent() == []
    bench.tell(confirmed(queue, 1, 1))
    await bench.settle()
    assert settlements(bench.sent()) == [("Ack", 1, False)]


async def test_numbers_begin_with_confirm_select(bench: ChannelBench, queue: Queue) -> None:
    """[48] What was published before is not counted."""
    bench.publish(queue, b"before", mandatory=True)
    await select_confirms(bench)
    bench.publish(queue, b"after")
    await bench.settle()
    assert [delivery.confirm_first for delivery in taken(queue, q.Delivery)] == [0, 1]


async def test_confirms_are_coalesced_below_the_first_that_waits(
    bench: ChannelBench, queue: Queue
) -> None:
    """[68]"""
    await select_confirms(bench)
    bench.publish(queue, *[b"x"] * 9)
    await bench.settle()
    bench.tell(confirmed(queue, 1, 3))
    bench.tell(confirmed(queue, 5, 6))
    await bench.settle()
    assert settlements(bench.sent()) == [("Ack", 3, True), ("Ack", 5, False), ("Ack", 6, False)]
    bench.tell(confirmed(queue, 4, 4))
    await bench.settle()
    assert settlements(bench.sent()) == [("Ack", 4, False)]
    bench.tell(confirmed(queue, 7, 9))
    await bench.settle()
    assert settlements(bench.sent()) == [("Ack", 9, True)]


async def test_neither_acks_nor_nacks_reach_over_each_other(
    bench: ChannelBench, queue: Queue
) -> None:
    """[68] The cutoff is also the first of the other kind; nacks go first."""
    await select_confirms(bench)
    bench.publish(queue, *[b"x"] * 8)
    await bench.settle()
    bench.tell(confirmed(queue, 1, 2))
    bench.tell(q.Refused(queue.mailbox, 3, 4))
    bench.tell(confirmed(queue, 5, 5))
    await bench.settle()
    assert settlements(bench.sent()) == [
        ("Nack", 3, False),
        ("Nack", 4, False),
        ("Ack", 2, True),
        ("Ack", 5, False),
    ]
    bench.tell(q.Refused(queue.mailbox, 6, 7))
    bench.tell(confirmed(queue, 8, 8))
    await bench.settle()
    assert settlements(bench.sent()) == [("Nack", 7, True), ("Ack", 8, False)]


async def test_unroutable_is_confirmed_at_once_after_the_return(bench: ChannelBench) -> None:
    """[62]"""
    await select_confirms(bench)
    bench.publish("nowhere", b"1", mandatory=True)
    await bench.settle()
    returned, ack = bench.sent()
    assert isinstance(returned, commands.Basic.Return)
    assert (returned.reply_code, returned.reply_text) == (312, "NO_ROUTE")
    assert settlements([ack]) == [("Ack", 1, False)]


async def test_a_deleted_queue_confirms_and_a_crashed_one_refuses(bench: ChannelBench) -> None:
    """[67]"""
    deleted, crashed = bench.queue("deleted"), bench.queue("crashed")
    await select_confirms(bench)
    bench.publish(deleted, b"1")
    bench.publish(crashed, b"2")
    await bench.settle()
    bench.tell(q.QueueDown(deleted.mailbox, crashed=False))
    await bench.settle()
    assert settlements(bench.sent()) == [("Ack", 1, False)]
    bench.tell(q.QueueDown(crashed.mailbox, crashed=True))
    await bench.settle()
    assert settlements(bench.sent()) == [("Nack", 2, True)]


@pytest.mark.parametrize(
    ("crashed", "answer"),
    [pytest.param(False, "Ack", id="deleted"), pytest.param(True, "Nack", id="crashed")],
)
async def test_what_a_queue_did_not_come_to_take(
    bench: ChannelBench, queue: Queue, crashed: bool, answer: str
) -> None:
    """A message that was lost with a crash must not be confirmed."""
    await select_confirms(bench)
    bench.publish(queue, b"1")
    await bench.settle()
    (delivery,) = taken(queue, q.Delivery)
    bench.tell(q.Unreceived(queue.mailbox, delivery, crashed))
    bench.tell(q.QueueDown(queue.mailbox, crashed))
    await bench.settle()
    assert [(name, tag) for name, tag, _ in settlements(bench.sent())] == [(answer, 1)]
    assert not bench.channel.confirms.unconfirmed


async def test_a_mandatory_message_no_queue_took_is_returned(bench: ChannelBench) -> None:
    """[63] One of two is enough to keep it."""
    first, second = bench.queue("first"), bench.queue("second")
    for queue in (first, second):
        bench.put(make(commands.Queue.Bind, queue=queue.name.name, exchange="amq.fanout"))
    await bench.settle()
    bench.sent()
    for taken_by_none in (False, True):
        bench.publish("", b"1", exchange="amq.fanout", mandatory=True)
        await bench.settle()
        (delivery,) = taken(first, q.Delivery)
        assert taken(second, q.Delivery) == [delivery]
        bench.tell(q.Unreceived(first.mailbox, delivery))
        if taken_by_none:
            bench.tell(q.Unreceived(second.mailbox, delivery))
        await bench.settle()
        returned = [type(method) for method in bench.sent()]
        assert returned == [commands.Basic.Return] * taken_by_none


async def test_a_dead_queue_does_not_block_the_publisher(bench: ChannelBench, queue: Queue) -> None:
    """[30] What the channel owes its reader is granted."""
    bench.publish(queue, *[b"x"] * bench.settings.credit_flow_initial)
    await bench.settle()
    assert bench.channel.flow.is_blocked
    assert bench.reader.take_urgent() == []
    bench.tell(q.QueueDown(queue.mailbox, crashed=False))
    await bench.settle()
    assert not bench.channel.flow.is_blocked
    assert len(bench.reader.take_urgent()) == 1


# --- answers -----------------------------------------------------------------------------------


def get_ok(queue: Queue, seq_id: int | None = 0) -> q.GetOk:
    message = Message(b"\x00\x01q", "", "q", b"\x00\x00", b"body", 0, False)
    return q.GetOk(queue.mailbox, message, seq_id, redelivered=False, ready=3)


async def test_methods_wait_for_the_answer_to_the_one_before(
    bench: ChannelBench, queue: Queue
) -> None:
    """Deliveries and confirms go on meanwhile."""
    await select_confirms(bench)
    bench.publish(queue, b"1")
    bench.put(make(commands.Basic.Get, queue="q"))
    bench.put(make(commands.Basic.Qos, prefetch_count=1))
    await bench.settle()
    assert [type(item) for item in queue.mailbox.ordinary] == [q.Delivery, q.Get]
    assert bench.sent() == []
    bench.tell(confirmed(queue, 1, 1))
    await bench.settle()
    assert settlements(bench.sent()) == [("Ack", 1, False)]
    bench.tell(get_ok(queue))
    await bench.settle()
    got, qos_ok = bench.sent()
    assert isinstance(got, commands.Basic.GetOk)
    assert (got.delivery_tag, got.message_count) == (1, 3)
    assert isinstance(qos_ok, commands.Basic.QosOk)


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(make(commands.Basic.Get, queue="q"), id="get"),
        pytest.param(make(commands.Basic.Consume, queue="q"), id="consume"),
        pytest.param(make(commands.Queue.Purge, queue="q"), id="purge"),
    ],
)
async def test_a_queue_that_went_before_it_answered(
    bench: ChannelBench, queue: Queue, method: commands.Basic.Get
) -> None:
    bench.put(method)
    await bench.settle()
    bench.tell(q.Gone())
    await bench.settle()
    closed = bench.sent_one(commands.Channel.Close)
    assert closed.reply_code == 404
    assert closed.reply_text == "NOT_FOUND - no queue 'q' in vhost '/'"
    assert bench.reader.take_urgent() == [
        ChannelClosing(bench.channel.number, bench.channel.mailbox)
    ]


async def test_a_queue_that_is_closed_already_is_not_waited_for(
    bench: ChannelBench, queue: Queue
) -> None:
    queue.mailbox.close()
    bench.put(make(commands.Basic.Get, queue="q"))
    await bench.settle()
    assert bench.sent_one(commands.Channel.Close).reply_code == 404


async def test_an_error_in_an_answer_closes_the_channel(bench: ChannelBench, queue: Queue) -> None:
    bench.put(make(commands.Queue.Delete, queue="q", if_empty=True))
    await bench.settle()
    bench.tell(q.Failed(precondition_failed("not empty")))
    await bench.settle()
    closed = bench.sent_one(commands.Channel.Close)
    assert (closed.class_id, closed.method_id) == (50, 40)
    assert closed.reply_text == "PRECONDITION_FAILED - not empty"


# --- deliveries --------------------------------------------------------------------------------


async def consume(bench: ChannelBench, queue: Queue, **options: object) -> None:
    bench.put(make(commands.Basic.Consume, queue=queue.name.name, consumer_tag="tag", **options))
    await bench.settle()
    (asked,) = taken(queue, q.Consume)
    assert asked.tag == "tag"
    bench.tell(q.Done())
    await bench.settle()
    bench.sent_one(commands.Basic.ConsumeOk)


def deliver(queue: Queue, *seq_ids: int, tag: str = "tag") -> q.Deliver:
    message = Message(b"\x00\x01q", "", "q", b"\x00\x00", b"body", 0, False)
    return q.Deliver(
        queue.mailbox,
        tag,
        [message] * len(seq_ids),
        list(seq_ids),
        len(seq_ids),
        redelivered=False,
    )


async def test_deliveries_get_tags_and_open_the_window_again(
    bench: ChannelBench, queue: Queue
) -> None:
    await consume(bench, queue)
    bench.tell(deliver(queue, 5, 6))
    bench.tell(deliver(queue, 7))
    await bench.settle()
    tags = [m.delivery_tag for m in bench.sent() if isinstance(m, commands.Basic.Deliver)]
    assert tags == [1, 2, 3]
    (sent,) = taken(queue, q.Sent)
    assert (sent.channel, sent.cost) == (bench.channel.mailbox, 3)


async def test_a_full_socket_keeps_the_window_shut(bench: ChannelBench, queue: Queue) -> None:
    await consume(bench, queue)
    bench.writer.is_paused = True
    bench.tell(deliver(queue, 5))
    await bench.settle()
    assert taken(queue, q.Sent) == []
    assert bench.writer.waiting == {bench.channel.mailbox}
    bench.writer.is_paused = False
    bench.tell(deliver(queue, 6))
    await bench.settle()
    assert [sent.cost for sent in taken(queue, q.Sent)] == [2]


async def test_acks_reach_each_queue_as_one(bench: ChannelBench, queue: Queue) -> None:
    await consume(bench, queue)
    bench.tell(deliver(queue, 10, 11, 12, 13))
    await bench.settle()
    bench.ack(1, 3)
    bench.nack(2)
    bench.nack(4, requeue=False)
    await bench.settle()
    assert [ack.seq_ids for ack in taken(queue, q.Ack)] == [[10, 12]]


async def test_what_became_of_a_delivery_goes_into_the_right_lane(
    bench: ChannelBench, queue: Queue
) -> None:
    """All of it is news for the queue before anything else is delivered."""
    await consume(bench, queue)
    bench.tell(deliver(queue, 10, 11, 12))
    await bench.settle()
    queue.mailbox.take_urgent()
    bench.ack(1)
    bench.nack(2, requeue=False)
    bench.nack(3, requeue=True)
    await bench.settle()
    assert [type(item) for item in queue.mailbox.take_urgent()] == [q.Ack, q.Reject, q.Requeue]
    assert not queue.mailbox.ordinary


async def test_what_was_acked_before_an_unknown_tag_counts(
    bench: ChannelBench, queue: Queue
) -> None:
    await consume(bench, queue)
    bench.tell(deliver(queue, 10, 11))
    await bench.settle()
    bench.sent()
    bench.ack(1, 9)
    await bench.settle()
    closed = bench.sent_one(commands.Channel.Close)
    assert closed.reply_text == "PRECONDITION_FAILED - unknown delivery tag 9"
    assert (closed.class_id, closed.method_id) == (60, 80)
    urgent = queue.mailbox.take_urgent()
    assert [type(item) for item in urgent] == [q.Sent, q.Ack, q.ChannelDown]


async def test_a_consumer_ended_by_its_queue(bench: ChannelBench, queue: Queue) -> None:
    await consume(bench, queue)
    bench.tell(q.ConsumerCancelled("tag"))
    bench.tell(q.ConsumerCancelled("tag"))
    await bench.settle()
    assert bench.sent_one(commands.Basic.Cancel).consumer_tag == "tag"


async def test_clients_that_did_not_ask_get_no_cancel(bench: ChannelBench, queue: Queue) -> None:
    bench.connection.wants_cancel_notices = False
    await consume(bench, queue)
    bench.tell(q.ConsumerCancelled("tag"))
    await bench.settle()
    assert bench.sent() == []


# --- the shared limit --------------------------------------------------------------------------


async def test_acks_make_room_in_the_shared_limit_and_gets_do_not(
    bench: ChannelBench, queue: Queue
) -> None:
    """[100]"""
    bench.put(make(commands.Basic.Qos, prefetch_count=2, global_=True))
    await bench.settle()
    bench.sent_one(commands.Basic.QosOk)
    await consume(bench, queue)
    assert bench.channel.limiter.take(queue.mailbox, 2) == 2
    bench.tell(deliver(queue, 10, 11))
    bench.put(make(commands.Basic.Get, queue="q"))
    await bench.settle()
    bench.tell(get_ok(queue, 12))
    await bench.settle()
    bench.ack(3)
    await bench.settle()
    assert bench.channel.limiter.take(queue.mailbox, 1) == 0
    bench.ack(1)
    await bench.settle()
    assert bench.channel.limiter.take(queue.mailbox, 1) == 1


# --- the end -----------------------------------------------------------------------------------


async def test_close_gives_back_before_it_is_answered(bench: ChannelBench, queue: Queue) -> None:
    await consume(bench, queue)
    bench.put(make(commands.Channel.Close, reply_code=200))
    await bench.settle()
    bench.sent_one(commands.Channel.CloseOk)
    assert taken(queue, q.ChannelDown) == [q.ChannelDown(bench.channel.mailbox)]
    assert bench.channel.mailbox.is_closed
    assert bench.task is not None
    await bench.task
    assert taken(queue, q.ChannelDown) == [], "once"


async def test_what_came_before_the_end_of_the_connection_is_done(
    bench: ChannelBench, queue: Queue
) -> None:
    bench.publish(queue, b"1")
    bench.put(Stop())
    await bench.settle()
    assert bench.task is not None
    await bench.task
    assert [type(item) for item in queue.mailbox.ordinary] == [q.Delivery]
    assert taken(queue, q.ChannelDown) == [q.ChannelDown(bench.channel.mailbox)]
    assert bench.sent() == []


async def test_a_close_that_crosses_an_error_is_answered(bench: ChannelBench) -> None:
    """The client waits for close-ok, whatever else it hears: both are owed."""
    bench.put(make(commands.Basic.Get, queue="missing"))
    bench.put(make(commands.Channel.Close, reply_code=200))
    await bench.settle()
    assert [type(method) for method in bench.sent()] == [
        commands.Channel.Close,
        commands.Channel.CloseOk,
    ]


async def test_a_bug_ends_the_connection_and_says_nothing(
    bench: ChannelBench,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    queue: Queue,
) -> None:
    await consume(bench, queue)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(bench.channel.acks.ledger, "pop_each", fail)
    with caplog.at_level(logging.CRITICAL):
        bench.ack(1)
        await bench.settle()
    (failed,) = bench.reader.take_urgent()
    assert isinstance(failed, ConnectionFailed)
    assert (failed.error.code, failed.error.reply_text) == (541, "INTERNAL_ERROR")
    assert taken(queue, q.ChannelDown) == [q.ChannelDown(bench.channel.mailbox)]
