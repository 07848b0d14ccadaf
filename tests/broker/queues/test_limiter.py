"""The limit that all consumers of a channel share [99, 100]."""

from __future__ import annotations

import pytest

from leveret.broker.mailbox import Mailbox
from leveret.broker.queues.commands import Resume
from leveret.broker.queues.limiter import Limiter


@pytest.fixture
def channel() -> Mailbox:
    return Mailbox("channel")


@pytest.fixture
def limiter(channel: Mailbox) -> Limiter:
    return Limiter(channel)


@pytest.fixture
def queue() -> Mailbox:
    return Mailbox("queue")


def is_resumed(queue: Mailbox, channel: Mailbox) -> bool:
    taken = queue.take_urgent()
    assert taken in ([], [Resume(channel)])
    return bool(taken)


def test_without_a_limit_everything_goes(limiter: Limiter, queue: Mailbox) -> None:
    assert limiter.take(queue, 1_000_000) == 1_000_000
    limiter.give_back(5)
    limiter.set_limit(3, 0)
    assert limiter.take(queue, 10) == 3, "what went before was not counted"


def test_no_more_than_the_limit(limiter: Limiter, queue: Mailbox) -> None:
    limiter.set_limit(3, 0)
    assert limiter.take(queue, 2) == 2
    assert limiter.take(queue, 2) == 1
    assert limiter.take(queue, 2) == 0


def test_the_limit_is_for_all_queues_together(limiter: Limiter, queue: Mailbox) -> None:
    limiter.set_limit(3, 0)
    assert limiter.take(queue, 2) == 2
    assert limiter.take(Mailbox("other"), 2) == 1


def test_what_the_channel_holds_already_counts(limiter: Limiter, queue: Mailbox) -> None:
    limiter.set_limit(5, 4)
    assert limiter.take(queue, 5) == 1


def test_a_queue_that_was_refused_hears_when_there_is_room(
    limiter: Limiter, queue: Mailbox, channel: Mailbox
) -> None:
    other = Mailbox("never refused")
    limiter.set_limit(2, 0)
    limiter.take(other, 2)
    assert limiter.take(queue, 1) == 0
    limiter.give_back(1)
    assert is_resumed(queue, channel)
    assert not is_resumed(other, channel)
    limiter.give_back(1)
    assert not is_resumed(queue, channel), "once is enough"


def test_a_queue_that_got_a_part_is_not_told(
    limiter: Limiter, queue: Mailbox, channel: Mailbox
) -> None:
    """It asks again by itself, for the rest, and is refused then."""
    limiter.set_limit(2, 0)
    assert limiter.take(queue, 5) == 2
    limiter.give_back(2)
    assert not is_resumed(queue, channel)


def test_a_higher_limit_makes_room(limiter: Limiter, queue: Mailbox, channel: Mailbox) -> None:
    limiter.set_limit(1, 1)
    assert limiter.take(queue, 1) == 0
    limiter.set_limit(1, 7)
    assert not is_resumed(queue, channel)
    limiter.set_limit(2, 7)
    assert is_resumed(queue, channel), "outstanding counts only where a limit begins"
    assert limiter.take(queue, 5) == 1


def test_a_lower_limit_holds_until_enough_was_acked(
    limiter: Limiter, queue: Mailbox, channel: Mailbox
) -> None:
    limiter.set_limit(5, 0)
    limiter.take(queue, 5)
    limiter.set_limit(2, 5)
    assert limiter.take(queue, 1) == 0
    limiter.give_back(3)
    assert not is_resumed(queue, channel)
    limiter.give_back(1)
    assert is_resumed(queue, channel)


def test_no_limit_any_more(limiter: Limiter, queue: Mailbox, channel: Mailbox) -> None:
    limiter.set_limit(1, 1)
    assert limiter.take(queue, 1) == 0
    limiter.set_limit(0, 0)
    assert is_resumed(queue, channel)
    assert limiter.take(queue, 9) == 9


def test_acks_of_what_was_never_counted_make_no_room(limiter: Limiter, queue: Mailbox) -> None:
    limiter.set_limit(2, 0)
    limiter.give_back(10)
    assert limiter.take(queue, 5) == 2


def test_a_queue_that_is_gone_is_not_told(
    limiter: Limiter, queue: Mailbox, channel: Mailbox
) -> None:
    limiter.set_limit(1, 1)
    limiter.take(queue, 1)
    limiter.forget(queue)
    limiter.give_back(1)
    assert not is_resumed(queue, channel)
