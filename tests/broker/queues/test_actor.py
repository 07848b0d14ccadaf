"""One queue's task, driven through its mailbox: what it sends back, and in which order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from leveret.broker.clock import VirtualClock
from leveret.broker.flow import Bump
from leveret.broker.queues import commands as c
from leveret.broker.queues.actor_rules import TURN_MESSAGES
from leveret.broker.queues.actor_state import LARGE
from leveret.storage.backing_queue import BackingQueue, Confirm
from leveret.storage.memory_queue import MemoryQueue
from tests.broker.queues.bench import (
    SETTINGS,
    ActorBench,
    Port,
    Scheduled,
    bodies,
    make_queue,
    message,
)

WINDOW = SETTINGS.delivery_window


class Always(random.Random):
    """Would always load."""

    def random(self) -> float:
        return 1.0


class SlowConfirms(MemoryQueue):
    """Messages are safe when the test says so."""

    def __init__(self, wake: Callable[[], None]) -> None:
        super().__init__(wake)
        self.unsafe: list[Confirm] = []
        self.safe: list[Confirm] = []

    def drain_confirmed(self) -> list[Confirm]:
        self.unsafe += super().drain_confirmed()
        safe, self.safe = self.safe, []
        return safe


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


async def consuming(bench: ActorBench, port: Port, tag: str = "tag", **options: object) -> None:
    port.consume(bench.queue, tag, **options)  # type: ignore[arg-type]
    await bench.settle()
    port.take_one(c.Done)


def delivered(port: Port) -> c.Deliver:
    return port.take_one(c.Deliver)


def seq_ids(deliver: c.Deliver) -> Sequence[int]:
    assert deliver.seq_ids is not None
    return deliver.seq_ids


# --- publishing --------------------------------------------------------------------------------


async def test_messages_wait_for_a_consumer_in_order(bench: ActorBench, port: Port) -> None:
    port.publish(bench.queue, b"1", b"2")
    port.publish(bench.queue, b"3")
    await bench.settle()
    assert port.take() == []
    assert bench.count("messages_ready") == 3
    port.consume(bench.queue)
    await bench.settle()
    done, deliver = port.take()
    assert done == c.Done(), "consume-ok comes before the first delivery"
    assert bodies([deliver]) == [b"1", b"2", b"3"]
    assert bench.count("messages_unacknowledged") == 3


async def test_a_consumer_that_is_ready_gets_messages_at_once(
    bench: ActorBench, port: Port, other: Port
) -> None:
    await consuming(bench, port)
    other.publish(bench.queue, b"1", b"2")
    await bench.settle()
    deliver = delivered(port)
    assert bodies([deliver]) == [b"1", b"2"]
    assert deliver.tag == "tag"
    assert not deliver.redelivered
    assert deliver.queue is bench.queue.mailbox
    assert seq_ids(deliver) == [0, 1]
    assert bench.count("messages_ready") == 0


async def test_deliveries_of_one_batch_are_one_run(
    bench: ActorBench, port: Port, other: Port
) -> None:
    await consuming(bench, port)
    other.publish(bench.queue, b"1")
    other.publish(bench.queue, b"2", b"3")
    await bench.settle()
    assert bodies([delivered(port)]) == [b"1", b"2", b"3"]


async def test_nothing_overtakes_what_waits(bench: ActorBench, port: Port) -> None:
    """A message that could go straight to the consumer goes behind those in the queue."""
    await consuming(bench, port, prefetch=1)
    port.publish(bench.queue, b"1", b"2")
    await bench.settle()
    first = delivered(port)
    port.publish(bench.queue, b"3")
    bench.put_urgent(c.Ack(port.mailbox, seq_ids(first)))
    await bench.settle()
    assert bodies([delivered(port)]) == [b"2"]


async def test_a_turn_takes_a_bounded_share_of_the_publishes(bench: ActorBench, port: Port) -> None:
    """So that a question in the control lane is not held up by all that was published."""
    for _ in range(5):
        bench.put(port.delivery([message(b"x")] * (TURN_MESSAGES // 2)))
    bench.put(c.Count(port.mailbox))
    left = [len(bench.queue.mailbox)]
    while left[-1]:
        await asyncio.sleep(0)
        left.append(len(bench.queue.mailbox))
    assert len(set(left)) > 3, "it took several turns"
    assert [item for item in port.take() if not isinstance(item, Bump)] == [
        c.CountOk(5 * (TURN_MESSAGES // 2), 0)
    ]


@pytest.mark.parametrize("no_ack", [False, True])
async def test_large_messages_cost_more_of_the_window(
    bench: ActorBench, port: Port, no_ack: bool
) -> None:
    await consuming(bench, port, no_ack=no_ack)
    body = bytes(4 * LARGE)
    for _ in range(4):
        port.publish(bench.queue, body)
    await bench.settle()
    deliver = delivered(port)
    assert len(deliver.messages) == 2, "one costs 5 of a window of 10"
    assert deliver.cost == 10
    bench.put_urgent(c.Sent(port.mailbox, 5))
    await bench.settle()
    assert len(delivered(port).messages) == 1


async def test_a_prefetch_that_large_messages_did_not_use_is_not_lost(
    bench: ActorBench, port: Port
) -> None:
    """Fewer come than were granted, where their bodies would be too much at once."""
    for _ in range(6):
        port.publish(bench.queue, bytes(6 * LARGE))
    await bench.settle()
    port.consume(bench.queue, prefetch=5)
    count = 0
    for _ in range(6):
        await bench.settle()
        for item in port.take():
            if isinstance(item, c.Deliver):
                count += len(item.messages)
                bench.put_urgent(c.Sent(port.mailbox, item.cost))
    assert count == 5


async def test_credit_is_granted_for_what_was_taken(bench: ActorBench, port: Port) -> None:
    for _ in range(SETTINGS.credit_flow_initial):
        port.publish(bench.queue, b"x")
    assert port.flow.is_blocked
    await bench.settle()
    port.take()
    assert not port.flow.is_blocked
    assert port.flow.credit(bench.queue.mailbox) == SETTINGS.credit_flow_initial


# --- confirms ----------------------------------------------------------------------------------


async def test_confirms_of_a_batch_leave_as_one(bench: ActorBench, port: Port) -> None:
    port.publish(bench.queue, b"1", b"2", confirm=True)
    port.publish(bench.queue, b"3", confirm=True)
    port.publish(bench.queue, b"not to be confirmed")
    await bench.settle()
    confirmed = port.take_one(c.Confirmed)
    assert (confirmed.queue, confirmed.first, confirmed.last) == (bench.queue.mailbox, 1, 3)


@pytest.mark.parametrize("has_consumer", [False, True])
async def test_what_is_to_outlive_the_broker_is_confirmed_when_it_is_safe(
    clock: VirtualClock, port: Port, other: Port, has_consumer: bool
) -> None:
    """[78] In a mixed run the transient ones are confirmed before, whatever stands between."""
    async with ActorBench(clock, make_backing=SlowConfirms) as bench:
        if has_consumer:
            await consuming(bench, other)
        backing = bench.actor._backing
        assert isinstance(backing, SlowConfirms)
        messages = [message(b"%d" % at, persistent=at in (1, 2)) for at in range(5)]
        port.send(bench.queue, port.delivery(messages, confirm=True))
        await bench.settle()
        ranges = [(item.first, item.last) for item in port.take() if isinstance(item, c.Confirmed)]
        assert ranges == [(1, 1), (4, 5)]
        assert backing.unsafe == [Confirm(port.mailbox, 2, 3)]
        backing.safe = [Confirm(port.mailbox, 2, 2)]
        bench.put_urgent(c.Loaded())
        await bench.settle()
        confirmed = port.take_one(c.Confirmed)
        assert (confirmed.first, confirmed.last) == (2, 2)
        assert bodies(other.take()) == [b"0", b"1", b"2", b"3", b"4"] * has_consumer


async def test_a_transient_queue_confirms_persistent_messages_at_once(
    clock: VirtualClock, port: Port
) -> None:
    queue = make_queue(durable=False)
    async with ActorBench(clock, queue, SlowConfirms) as bench:
        port.publish(queue, b"1", confirm=True, persistent=True)
        await bench.settle()
        assert port.take_one(c.Confirmed).last == 1


async def test_one_that_goes_to_a_consumer_without_acks_is_confirmed(
    bench: ActorBench, port: Port, other: Port
) -> None:
    await consuming(bench, other, no_ack=True)
    port.publish(bench.queue, b"1", confirm=True, persistent=True)
    await bench.settle()
    assert port.take_one(c.Confirmed).last == 1
    assert delivered(other).seq_ids is None
    assert bench.count("messages") == 0


# --- settling ----------------------------------------------------------------------------------


async def test_ack_and_reject_end_a_message(bench: ActorBench, port: Port) -> None:
    await consuming(bench, port)
    port.publish(bench.queue, b"1", b"2", b"3")
    await bench.settle()
    first, second, _ = seq_ids(delivered(port))
    bench.put_urgent(c.Ack(port.mailbox, [first]))
    bench.put_urgent(c.Reject(port.mailbox, [second]))
    await bench.settle()
    assert bench.count("messages_unacknowledged") == bench.count("messages") == 1
    assert (bench.count("ack"), bench.count("reject")) == (1, 1)
    assert port.take() == []


async def test_a_requeued_message_goes_back_to_its_place(bench: ActorBench, port: Port) -> None:
    """[98]"""
    port.publish(bench.queue, b"1", b"2", b"3", b"4")
    bench.put(c.Get(port.mailbox, False))
    bench.put(c.Get(port.mailbox, False))
    await bench.settle()
    got = [item for item in port.take() if isinstance(item, c.GetOk)]
    assert [item.message.body for item in got] == [b"1", b"2"]
    bench.put_urgent(
        c.Requeue(port.mailbox, [item.seq_id for item in got if item.seq_id is not None])
    )
    port.consume(bench.queue)
    await bench.settle()
    _, again, rest = port.take()
    assert isinstance(again, c.Deliver)
    assert isinstance(rest, c.Deliver)
    assert (bodies([again]), again.redelivered) == ([b"1", b"2"], True)
    assert (bodies([rest]), rest.redelivered) == ([b"3", b"4"], False)


async def test_what_others_hold_cannot_be_settled(
    bench: ActorBench, port: Port, other: Port
) -> None:
    await consuming(bench, port)
    port.publish(bench.queue, b"1")
    await bench.settle()
    (seq_id,) = seq_ids(delivered(port))
    bench.put_urgent(c.Ack(other.mailbox, [seq_id]))
    bench.put_urgent(c.Requeue(other.mailbox, [seq_id]))
    await bench.settle()
    assert bench.count("messages_unacknowledged") == 1
    assert port.take() == []


async def test_numbers_nobody_knows_do_not_spoil_those_beside_them(
    bench: ActorBench, port: Port
) -> None:
    await consuming(bench, port, prefetch=2)
    port.publish(bench.queue, b"1", b"2", b"3")
    await bench.settle()
    first, _ = seq_ids(delivered(port))
    bench.put_urgent(c.Ack(port.mailbox, [first, 999]))
    await bench.settle()
    assert bodies(port.take()) == [b"3"], "the consumer has room for one more"
    assert bench.actor.statistics()["backing_queue"]["pending_acks"] == 2  # type: ignore[index]


async def test_an_ack_after_a_cancel_is_booked(bench: ActorBench, port: Port) -> None:
    await consuming(bench, port, prefetch=1)
    port.publish(bench.queue, b"1", b"2")
    await bench.settle()
    first = delivered(port)
    bench.put(c.Cancel(port.mailbox, "tag"))
    await bench.settle()
    assert port.take_one(c.Done) == c.Done()
    bench.put_urgent(c.Ack(port.mailbox, seq_ids(first)))
    await bench.settle()
    assert port.take() == []
    assert bench.count("messages_unacknowledged") == 0
    assert bench.count("messages_ready") == 1


# --- consumers ---------------------------------------------------------------------------------


async def test_nothing_comes_behind_the_answer_to_a_cancel(bench: ActorBench, port: Port) -> None:
    await consuming(bench, port)
    port.publish(bench.queue, b"1")
    bench.put(c.Cancel(port.mailbox, "tag"))
    port.publish(bench.queue, b"2")
    await bench.settle()
    before, done = port.take()
    assert bodies([before]) == [b"1"]
    assert done == c.Done()
    assert bench.count("messages_ready") == 1


async def test_a_consumer_that_comes_back_under_its_tag(bench: ActorBench, port: Port) -> None:
    """Its deliveries stand behind its own consume-ok, not in the run of the one before."""
    port.publish(bench.queue, b"1", b"2")
    port.consume(bench.queue, prefetch=1)
    await bench.settle()
    assert bodies(port.take()) == [b"1"]
    bench.put(c.Cancel(port.mailbox, "tag"))
    await bench.settle()
    port.consume(bench.queue, no_ack=True)
    port.publish(bench.queue, b"3")
    await bench.settle()
    taken = port.take()
    assert [type(item) for item in taken] == [c.Done, c.Done, c.Deliver]
    assert bodies(taken) == [b"2", b"3"]


async def test_a_refused_consumer(bench: ActorBench, port: Port, other: Port) -> None:
    await consuming(bench, port, exclusive=True)
    other.consume(bench.queue)
    await bench.settle()
    failed = other.take_one(c.Failed)
    assert failed.error.code == 403
    assert bench.count("consumers") == 1


async def test_a_full_window_stops_deliveries_until_they_are_out(
    bench: ActorBench, port: Port
) -> None:
    await consuming(bench, port, no_ack=True)
    for _ in range(3):
        port.publish(bench.queue, *[b"x"] * WINDOW)
    await bench.settle()
    assert len(bodies(port.take())) == WINDOW
    bench.put_urgent(c.Sent(port.mailbox, 3))
    await bench.settle()
    assert len(bodies(port.take())) == 3
    bench.put_urgent(c.Sent(port.mailbox, WINDOW))
    await bench.settle()
    assert len(bodies(port.take())) == WINDOW


async def test_the_shared_limit_resumes(bench: ActorBench, port: Port) -> None:
    port.limiter.set_limit(2, 0)
    await consuming(bench, port, "a")
    await consuming(bench, port, "b")
    port.publish(bench.queue, *[b"%d" % at for at in range(5)])
    await bench.settle()
    held = [
        number for item in port.take() if isinstance(item, c.Deliver) for number in seq_ids(item)
    ]
    assert held == [0, 1]
    bench.put_urgent(c.Ack(port.mailbox, [0]))
    port.limiter.give_back(1)
    await bench.settle()
    assert bodies(port.take()) == [b"2"]


async def test_what_is_requeued_under_a_shared_limit_comes_again_first(
    bench: ActorBench, port: Port
) -> None:
    port.limiter.set_limit(1, 0)
    await consuming(bench, port)
    port.publish(bench.queue, b"1", b"2")
    await bench.settle()
    first = delivered(port)
    bench.put_urgent(c.Requeue(port.mailbox, seq_ids(first)))
    port.limiter.give_back(1)
    await bench.settle()
    again = delivered(port)
    assert bodies([again]) == [b"1"]
    assert again.redelivered


async def test_a_channel_that_is_gone_gives_back_what_it_held(
    bench: ActorBench, port: Port, other: Port
) -> None:
    """[96] In order, and marked."""
    await consuming(bench, port)
    port.publish(bench.queue, b"1", b"2", b"3")
    await bench.settle()
    _, second, _ = seq_ids(delivered(port))
    bench.put_urgent(c.Ack(port.mailbox, [second]))
    other.publish(bench.queue, b"4")
    await bench.settle()
    port.mailbox.close()
    other.consume(bench.queue)
    bench.put_urgent(c.ChannelDown(port.mailbox))
    await bench.settle()
    _, again = other.take()
    assert isinstance(again, c.Deliver)
    assert again.redelivered
    assert bodies([again]) == [b"1", b"3", b"4"]


async def test_publishes_of_a_channel_that_is_gone_still_count(
    bench: ActorBench, port: Port
) -> None:
    """Its end is told in the control lane and overtakes them; nothing is kept of the channel."""
    port.publish(bench.queue, b"1", confirm=True)
    port.mailbox.close()
    bench.put_urgent(c.ChannelDown(port.mailbox))
    await bench.settle()
    assert bench.count("messages_ready") == 1
    assert not bench.actor._senders
    assert not bench.actor._consumers.channels


# --- questions ---------------------------------------------------------------------------------


async def test_get(bench: ActorBench, port: Port) -> None:
    port.publish(bench.queue, b"1", b"2")
    bench.put(c.Get(port.mailbox, False))
    bench.put(c.Get(port.mailbox, True))
    bench.put(c.Get(port.mailbox, True))
    await bench.settle()
    first, second, third = port.take()
    assert isinstance(first, c.GetOk)
    assert (first.message.body, first.seq_id, first.ready) == (b"1", 0, 1)
    assert isinstance(second, c.GetOk)
    assert (second.message.body, second.seq_id, second.ready) == (b"2", None, 0)
    assert third == c.GetEmpty()
    assert bench.count("messages_unacknowledged") == 1


async def test_a_get_that_is_overtaken_by_the_end_of_its_channel_takes_nothing(
    bench: ActorBench, port: Port, other: Port
) -> None:
    port.publish(bench.queue, b"1")
    bench.put(c.Get(other.mailbox, False))
    other.mailbox.close()
    bench.put_urgent(c.ChannelDown(other.mailbox))
    await bench.settle()
    assert bench.count("messages_ready") == 1
    assert bench.actor._consumers.channels == {}


async def test_nothing_is_kept_of_a_channel_that_only_looked(bench: ActorBench, port: Port) -> None:
    port.publish(bench.queue, b"1", b"2")
    bench.put(c.Get(port.mailbox, True))
    bench.put(c.Get(port.mailbox, False))
    await bench.settle()
    bench.put_urgent(c.Ack(port.mailbox, [1]))
    await bench.settle()
    assert bench.actor._consumers.channels == {}


async def test_a_get_does_not_count_against_a_prefetch(bench: ActorBench, port: Port) -> None:
    port.publish(bench.queue, b"1", b"2", b"3")
    bench.put(c.Get(port.mailbox, False))
    await bench.settle()
    port.take()
    port.consume(bench.queue, prefetch=1)
    await bench.settle()
    assert bodies(port.take()) == [b"2"]
    bench.put_urgent(c.Ack(port.mailbox, [0]))
    await bench.settle()
    assert port.take() == []


async def test_questions_see_what_was_published_before(bench: ActorBench, port: Port) -> None:
    port.publish(bench.queue, b"1", b"2")
    bench.put(c.Count(port.mailbox))
    bench.put(c.Purge(port.mailbox))
    port.publish(bench.queue, b"3")
    bench.put(c.Count(port.mailbox))
    await bench.settle()
    assert port.take() == [c.CountOk(2, 0), c.Done(2), c.CountOk(1, 0)]


async def test_purge_leaves_what_was_delivered(bench: ActorBench, port: Port) -> None:
    await consuming(bench, port, prefetch=1)
    port.publish(bench.queue, b"1", b"2", b"3")
    await bench.settle()
    held = delivered(port)
    bench.put(c.Purge(port.mailbox))
    await bench.settle()
    assert port.take_one(c.Done) == c.Done(2)
    bench.put_urgent(c.Requeue(port.mailbox, seq_ids(held)))
    await bench.settle()
    assert bodies(port.take()) == [b"1"]


# --- a backing queue that reads ----------------------------------------------------------------


@pytest.fixture
async def loading(clock: VirtualClock) -> AsyncIterator[tuple[ActorBench, Scheduled]]:
    """A queue that must read before each answer; reads end when the test says so."""
    scheduled = Scheduled()

    def make(wake: Callable[[], None]) -> BackingQueue:
        return MemoryQueue(wake, Always(), scheduled.append)

    async with ActorBench(clock, make_backing=make) as bench:
        yield bench, scheduled


async def test_consumers_wait_for_what_is_read(
    loading: tuple[ActorBench, Scheduled], port: Port
) -> None:
    bench, scheduled = loading
    port.publish(bench.queue, b"1")
    await bench.settle()
    await consuming(bench, port, prefetch=1)
    port.publish(bench.queue, b"2")
    await bench.settle()
    assert port.take() == []
    scheduled.run()
    await bench.settle()
    assert bodies(port.take()) == [b"1"], "with the prefetch that was not used up by waiting"


async def test_gets_wait_and_keep_their_order(
    loading: tuple[ActorBench, Scheduled], port: Port, other: Port
) -> None:
    bench, scheduled = loading
    port.publish(bench.queue, b"1", b"2")
    bench.put(c.Get(port.mailbox, False))
    bench.put(c.Get(other.mailbox, False))
    bench.put(c.Get(port.mailbox, False))
    await bench.settle()
    assert port.take() == other.take() == []
    scheduled.run()
    await bench.settle()
    assert port.take_one(c.GetOk).message.body == b"1"
    assert other.take() == []
    scheduled.run()
    await bench.settle()
    assert other.take_one(c.GetOk).message.body == b"2"
    assert port.take_one(c.GetEmpty) == c.GetEmpty()


async def test_a_get_of_a_channel_that_is_gone_takes_nothing(
    loading: tuple[ActorBench, Scheduled], port: Port, other: Port
) -> None:
    bench, scheduled = loading
    port.publish(bench.queue, b"1")
    bench.put(c.Get(other.mailbox, False))
    await bench.settle()
    other.mailbox.close()
    bench.put_urgent(c.ChannelDown(other.mailbox))
    await bench.settle()
    scheduled.run()
    await bench.settle()
    assert bench.count("messages_ready") == 1
    assert bench.count("messages_unacknowledged") == 0


async def test_a_get_that_waits_for_what_is_purged(
    loading: tuple[ActorBench, Scheduled], port: Port, other: Port
) -> None:
    bench, scheduled = loading
    port.publish(bench.queue, b"1")
    bench.put(c.Get(port.mailbox, False))
    bench.put(c.Purge(other.mailbox))
    await bench.settle()
    assert other.take_one(c.Done) == c.Done(1)
    scheduled.run()
    await bench.settle()
    assert port.take_one(c.GetEmpty) == c.GetEmpty()


async def test_a_get_that_waits_when_the_queue_is_deleted(
    loading: tuple[ActorBench, Scheduled], port: Port, other: Port
) -> None:
    bench, scheduled = loading
    other.publish(bench.queue, b"1")
    bench.put(c.Get(port.mailbox, False))
    await bench.settle()
    bench.put_urgent(c.DeleteNow())
    await bench.settle()
    assert port.take() == [c.Gone(), c.QueueDown(bench.queue.mailbox, crashed=False)]
    scheduled.run()


# --- the end -----------------------------------------------------------------------------------


async def ended(bench: ActorBench) -> None:
    assert bench.task is not None
    await asyncio.wait_for(bench.task, 10)
    assert bench.deleted == [bench.queue]
    assert bench.queue.mailbox.is_closed


async def test_delete(bench: ActorBench, port: Port, other: Port) -> None:
    await consuming(bench, other)
    port.publish(bench.queue, b"1", b"2", confirm=True)
    bench.put(c.Delete(port.mailbox, False, False, "guest"))
    await bench.settle()
    await ended(bench)
    taken = port.take()
    assert c.Done(0) in taken
    assert taken[-1] == c.QueueDown(bench.queue.mailbox, False)
    assert [type(item) for item in other.take()] == [c.Deliver, c.ConsumerCancelled, c.QueueDown]


async def test_a_confirm_of_the_last_batch_comes_before_the_end(
    bench: ActorBench, port: Port
) -> None:
    port.publish(bench.queue, b"1", confirm=True)
    bench.put(c.Delete(port.mailbox, False, False, "guest"))
    await bench.settle()
    await ended(bench)
    kinds = [type(item) for item in port.take()]
    assert kinds.index(c.Confirmed) < kinds.index(c.QueueDown)


@pytest.mark.parametrize(
    ("if_unused", "if_empty", "text"),
    [
        pytest.param(True, False, "PRECONDITION_FAILED - queue 'q' in vhost '/' in use", id="used"),
        pytest.param(
            False, True, "PRECONDITION_FAILED - queue 'q' in vhost '/' not empty", id="not-empty"
        ),
    ],
)
async def test_a_delete_with_conditions(
    bench: ActorBench, port: Port, if_unused: bool, if_empty: bool, text: str
) -> None:
    await consuming(bench, port, prefetch=1)
    port.publish(bench.queue, b"1", b"2")
    await bench.settle()
    port.take()
    bench.put(c.Delete(port.mailbox, if_unused, if_empty, "guest"))
    await bench.settle()
    assert port.take_one(c.Failed).error.reply_text == text
    assert not bench.deleted


async def test_what_was_not_delivered_is_handed_back(
    bench: ActorBench, port: Port, other: Port
) -> None:
    """Behind a delete: deliveries, and questions of others."""
    bench.put(c.Delete(port.mailbox, False, False, "guest"))
    late = port.publish(bench.queue, b"late", confirm=True)
    bench.put(c.Get(other.mailbox, False))
    await ended(bench)
    done, unreceived, down = port.take()
    assert done == c.Done(0)
    assert isinstance(unreceived, c.Unreceived)
    assert unreceived.delivery is late
    assert down == c.QueueDown(bench.queue.mailbox, False)
    assert other.take() == [c.Gone(), c.QueueDown(bench.queue.mailbox, crashed=False)]


async def test_an_auto_delete_queue_goes_with_its_last_consumer(
    clock: VirtualClock, port: Port, other: Port
) -> None:
    """[90]"""
    async with ActorBench(clock, make_queue(auto_delete=True)) as bench:
        bench.put_urgent(c.ChannelDown(Port("a stranger").mailbox))
        await bench.settle()
        assert not bench.deleted, "not before it had one"
        await consuming(bench, port)
        await consuming(bench, other)
        bench.put(c.Cancel(port.mailbox, "tag"))
        await bench.settle()
        assert not bench.deleted
        bench.put_urgent(c.ChannelDown(other.mailbox))
        await bench.settle()
        await ended(bench)


async def test_whoever_comes_in_the_batch_that_ends_the_queue_is_told(
    clock: VirtualClock, port: Port, other: Port
) -> None:
    """Not given a consumer on a queue that is gone."""
    async with ActorBench(clock, make_queue(auto_delete=True)) as bench:
        await consuming(bench, port)
        bench.put_urgent(c.ChannelDown(port.mailbox))
        other.consume(bench.queue)
        await bench.settle()
        await ended(bench)
        assert other.take() == [c.Gone(), c.QueueDown(bench.queue.mailbox, crashed=False)]


async def test_channels_hear_of_the_end_once(bench: ActorBench, port: Port) -> None:
    await consuming(bench, port, "a")
    await consuming(bench, port, "b")
    port.publish(bench.queue, b"1")
    await bench.settle()
    port.take()
    bench.put_urgent(c.DeleteNow())
    await bench.settle()
    await ended(bench)
    assert sorted(type(item).__name__ for item in port.take()) == [
        "ConsumerCancelled",
        "ConsumerCancelled",
        "QueueDown",
    ]
