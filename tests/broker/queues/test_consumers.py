"""Whose turn it is, and how much each may be given [36, 91, 92, 99-101]."""

from __future__ import annotations

import pytest

from leveret.broker.mailbox import Mailbox
from leveret.broker.queues.commands import Consume, Resume
from leveret.broker.queues.consumers import Consumer, Consumers
from leveret.broker.queues.limiter import Limiter
from leveret.protocol.errors import ChannelException

WINDOW = 20
PLENTY = 1_000


class Bench:
    def __init__(self, *, single_active: bool = False) -> None:
        self.queue = Mailbox("queue")
        self.consumers = Consumers(self.queue, WINDOW, single_active=single_active)
        self.limiters: dict[Mailbox, Limiter] = {}

    def add(
        self,
        tag: str,
        channel: Mailbox | None = None,
        *,
        no_ack: bool = False,
        exclusive: bool = False,
        prefetch: int = 0,
        priority: int = 0,
    ) -> Consumer:
        """A consumer on a channel, by default one of its own."""
        if channel is None:  # an empty mailbox is false
            channel = Mailbox(f"channel of {tag}")
        limiter = self.limiters.setdefault(channel, Limiter(channel))
        consume = Consume(channel, limiter, tag, no_ack, exclusive, prefetch, priority)
        return self.consumers.add(consume, "queue 'q' in vhost '/'")

    def turns(self, count: int) -> list[str]:
        """Who gets the next messages, one by one; shorter if nobody is ready."""
        served = []
        for _ in range(count):
            granted = self.consumers.next_ready(1)
            if granted is None:
                break
            consumer, share = granted
            assert share == 1
            consumer.channel.window -= 1
            served.append(consumer.tag)
        return served

    def settle(self, consumer: Consumer, count: int = 1) -> None:
        """An ack, as the queue's actor books it."""
        consumer.credit += count
        self.consumers.unblock([consumer])


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_nobody(bench: Bench) -> None:
    assert bench.consumers.next_ready(1) is None
    assert not bench.consumers.has_ready
    assert bench.consumers.max_active_priority() is None
    assert len(bench.consumers) == 0


# --- turns -------------------------------------------------------------------------------------


def test_equal_ones_take_turns_in_order_of_arrival(bench: Bench) -> None:
    for tag in "abc":
        bench.add(tag)
    assert bench.turns(7) == ["a", "b", "c", "a", "b", "c", "a"]


def test_one_alone_gets_a_whole_run(bench: Bench) -> None:
    consumer = bench.add("a")
    assert bench.consumers.next_ready(7) == (consumer, 7)


def test_several_get_one_at_a_time(bench: Bench) -> None:
    bench.add("a")
    bench.add("b")
    granted = bench.consumers.next_ready(7)
    assert granted is not None
    assert granted[1] == 1


def test_the_highest_priority_is_served_while_it_can_take(bench: Bench) -> None:
    """[91]"""
    low = bench.add("low", priority=-1)
    bench.add("high", priority=5, prefetch=2)
    bench.add("also high", priority=5, prefetch=1)
    bench.add("middle", priority=0, prefetch=1)
    assert bench.consumers.max_active_priority() == 5
    assert bench.turns(6) == ["high", "also high", "high", "middle", "low", "low"]
    assert bench.consumers.max_active_priority() == -1
    assert bench.consumers.next_ready(9) == (low, 9)


def test_one_that_is_unblocked_joins_at_the_rear(bench: Bench) -> None:
    blocked = bench.add("a", prefetch=1)
    bench.add("b")
    bench.add("c")
    assert bench.turns(4) == ["a", "b", "c", "b"]
    assert not blocked.is_ready, "its turn came and it could not take"
    bench.settle(blocked)
    assert bench.turns(4) == ["c", "b", "a", "c"]


def test_a_high_one_goes_first_again_once_it_is_unblocked(bench: Bench) -> None:
    high = bench.add("high", priority=1, prefetch=1)
    bench.add("low")
    assert bench.turns(3) == ["high", "low", "low"]
    bench.settle(high)
    assert bench.turns(2) == ["high", "low"]


# --- prefetch ----------------------------------------------------------------------------------


def test_prefetch_is_each_consumers_own(bench: Bench) -> None:
    """[101]"""
    channel = Mailbox("both")
    first = bench.add("a", channel, prefetch=2)
    bench.add("b", channel, prefetch=1)
    assert bench.turns(9) == ["a", "b", "a"]
    bench.settle(first, 1)
    assert bench.turns(9) == ["a"]


def test_a_run_is_cut_to_the_prefetch(bench: Bench) -> None:
    consumer = bench.add("a", prefetch=3)
    assert bench.consumers.next_ready(10) == (consumer, 3)
    assert bench.consumers.next_ready(10) is None
    bench.settle(consumer, 2)
    assert bench.consumers.next_ready(10) == (consumer, 2)


def test_prefetch_means_nothing_where_no_ack_is_due(bench: Bench) -> None:
    consumer = bench.add("a", prefetch=1, no_ack=True)
    assert bench.consumers.next_ready(10) == (consumer, 10)
    assert bench.consumers.next_ready(10) == (consumer, 10)


def test_what_was_granted_and_not_delivered_may_be_granted_again(bench: Bench) -> None:
    consumer = bench.add("a", prefetch=3)
    channel = consumer.channel.mailbox
    bench.limiters[channel].set_limit(3, 0)
    assert bench.consumers.next_ready(3) == (consumer, 3)
    bench.consumers.unused(consumer, 2)
    assert bench.consumers.next_ready(3) == (consumer, 2)


# --- the shared limit --------------------------------------------------------------------------


def test_consumers_of_a_channel_share_its_limit(bench: Bench) -> None:
    channel = Mailbox("shared")
    first = bench.add("a", channel)
    second = bench.add("b", channel)
    bench.add("c")
    bench.limiters[channel].set_limit(2, 0)
    assert bench.turns(6) == ["a", "b", "c", "c", "c", "c"]
    bench.limiters[channel].give_back(1)
    assert bench.queue.take_urgent() == [Resume(channel)]
    bench.consumers.unblock([first, second])
    assert bench.turns(3) == ["c", "a", "c"]


def test_one_that_never_acks_is_not_limited(bench: Bench) -> None:
    consumer = bench.add("a", no_ack=True)
    bench.limiters[consumer.channel.mailbox].set_limit(1, 1)
    assert bench.consumers.next_ready(5) == (consumer, 5)


# --- the window --------------------------------------------------------------------------------


def test_no_more_than_the_window_is_under_way(bench: Bench) -> None:
    """[36] Also where no ack is due."""
    consumer = bench.add("a", no_ack=True)
    assert bench.consumers.next_ready(PLENTY) == (consumer, WINDOW)
    consumer.channel.window -= WINDOW
    assert bench.consumers.next_ready(PLENTY) is None
    consumer.channel.window += 5
    bench.consumers.unblock([consumer])
    assert bench.consumers.next_ready(PLENTY) == (consumer, 5)


def test_the_window_is_the_channels(bench: Bench) -> None:
    channel = Mailbox("both")
    bench.add("a", channel)
    bench.add("b", channel)
    other = bench.add("c")
    assert bench.turns(3 * WINDOW).count("c") == WINDOW
    assert other.channel.window == 0


def test_a_window_overdrawn_by_a_large_message_must_come_back_first(bench: Bench) -> None:
    consumer = bench.add("a")
    consumer.channel.window = -30
    assert bench.consumers.next_ready(1) is None
    consumer.channel.window += 30
    bench.consumers.unblock([consumer])
    assert not bench.consumers.has_ready
    consumer.channel.window += 1
    bench.consumers.unblock([consumer])
    assert bench.consumers.has_ready


def test_an_ack_does_not_open_the_window(bench: Bench) -> None:
    consumer = bench.add("a", prefetch=PLENTY)
    bench.turns(WINDOW)
    assert bench.turns(1) == []
    bench.settle(consumer, 3)
    assert not bench.consumers.has_ready


# --- exclusive and single active ---------------------------------------------------------------


def test_an_exclusive_consumer_keeps_others_out(bench: Bench) -> None:
    exclusive = bench.add("a", exclusive=True)
    with pytest.raises(ChannelException) as caught:
        bench.add("b")
    assert caught.value.code == 403
    assert caught.value.reply_text == "ACCESS_REFUSED - queue 'q' in vhost '/' in exclusive use"
    assert len(bench.consumers.channels) == 1, "nothing is kept of one that was refused"
    bench.consumers.remove(exclusive.channel.mailbox, "a")
    bench.add("b")


def test_a_queue_in_use_cannot_be_had_exclusively(bench: Bench) -> None:
    bench.add("a")
    with pytest.raises(ChannelException):
        bench.add("b", exclusive=True)
    assert [consumer.tag for consumer in bench.consumers] == ["a"]


def test_a_single_active_consumer_gets_everything() -> None:
    """[92]"""
    bench = Bench(single_active=True)
    for tag, priority in (("a", 0), ("b", 9), ("c", 0)):
        bench.add(tag, priority=priority)
    assert bench.turns(3) == ["a", "a", "a"]
    assert len(bench.consumers) == 3


def test_the_next_in_line_becomes_active() -> None:
    bench = Bench(single_active=True)
    consumers = [bench.add(tag) for tag in "abc"]
    bench.consumers.remove(consumers[1].channel.mailbox, "b")
    assert bench.consumers.active is consumers[0]
    bench.consumers.remove(consumers[0].channel.mailbox, "a")
    assert bench.consumers.active is consumers[2]
    assert bench.turns(2) == ["c", "c"]
    bench.consumers.remove(consumers[2].channel.mailbox, "c")
    assert bench.consumers.active is None
    bench.add("d")
    assert bench.turns(1) == ["d"]


def test_the_highest_priority_in_line_becomes_active() -> None:
    """Nobody is replaced for it: only when the active one goes."""
    bench = Bench(single_active=True)
    first = bench.add("first")
    bench.add("low")
    bench.add("high", priority=2)
    bench.add("also high", priority=2)
    bench.consumers.remove(first.channel.mailbox, "first")
    assert bench.turns(2) == ["high", "high"]


def test_those_in_line_get_nothing_while_the_active_one_is_blocked() -> None:
    bench = Bench(single_active=True)
    active = bench.add("a", prefetch=1)
    waiting = bench.add("b")
    assert bench.turns(3) == ["a"]
    bench.consumers.unblock([waiting])
    assert bench.turns(1) == []
    bench.settle(active)
    assert bench.turns(1) == ["a"]


def test_a_single_active_queue_has_no_exclusive_consumers() -> None:
    bench = Bench(single_active=True)
    with pytest.raises(ChannelException):
        bench.add("a", exclusive=True)


# --- going -------------------------------------------------------------------------------------


def test_a_cancelled_consumer_gets_nothing_more_though_acks_come(bench: Bench) -> None:
    consumer = bench.add("a", prefetch=1)
    assert bench.turns(1) == ["a"]
    assert bench.consumers.remove(consumer.channel.mailbox, "a") is consumer
    bench.settle(consumer)
    assert not bench.consumers.has_ready
    assert bench.consumers.remove(consumer.channel.mailbox, "a") is None


def test_a_tag_is_known_by_its_channel(bench: Bench) -> None:
    first = bench.add("same")
    second = bench.add("same")
    bench.consumers.remove(first.channel.mailbox, "same")
    assert list(bench.consumers) == [second]


def test_a_channel_is_kept_while_something_is_outstanding(bench: Bench) -> None:
    """Its window, or what it has not acked; then it is forgotten."""
    consumer = bench.add("a")
    state, channel = consumer.channel, consumer.channel.mailbox
    state.window -= 1
    state.unacked[7] = consumer
    bench.consumers.remove(channel, "a")
    state.unacked.clear()
    bench.consumers.drop_idle_channel(state)
    assert bench.consumers.channels == {channel: state}
    state.window += 1
    bench.consumers.drop_idle_channel(state)
    assert bench.consumers.channels == {}


def test_a_channel_that_is_gone_takes_its_consumers_along(bench: Bench) -> None:
    channel = Mailbox("gone")
    first = bench.add("a", channel, exclusive=False)
    bench.add("b", channel)
    bench.add("c")
    first.channel.unacked[1] = first
    limiter = bench.limiters[channel]
    limiter.set_limit(1, 1)
    bench.turns(3)
    state = bench.consumers.remove_channel(channel)
    assert state is first.channel
    assert state.unacked == {1: first}, "the caller requeues them"
    assert [consumer.tag for consumer in bench.consumers] == ["c"]
    limiter.give_back(1)
    assert bench.queue.take_urgent() == []
    assert bench.consumers.remove_channel(channel) is None


def test_an_exclusive_or_active_consumer_of_a_channel_that_is_gone() -> None:
    bench = Bench(single_active=True)
    channel = Mailbox("gone")
    bench.add("a", channel)
    bench.add("b", channel)
    last = bench.add("c")
    bench.consumers.remove_channel(channel)
    assert bench.consumers.active is last
    assert bench.turns(1) == ["c"]
