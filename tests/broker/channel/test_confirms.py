"""Which numbers wait for which queues, against a plain dict, and how they are told [65-68]."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from leveret.broker.channel.confirms import Confirms, Ranges, split_at
from leveret.broker.mailbox import Mailbox

A, B, C = (Mailbox(name) for name in "abc")
QUEUES = [A, B, C]


def numbers(ranges: Ranges) -> list[int]:
    return [number for first, last in ranges for number in range(first, last + 1)]


@pytest.fixture
def confirms() -> Confirms:
    return Confirms()


def publish(confirms: Confirms, count: int, *queues: Mailbox) -> int:
    first = confirms.take_numbers(count)
    confirms.expect(first, first + count - 1, queues)
    return first


def test_numbers_begin_at_one_and_follow_each_other(confirms: Confirms) -> None:
    assert confirms.take_numbers(3) == 1
    assert confirms.take_numbers(1) == 4
    assert confirms.next_seq == 5


def test_a_run_is_confirmed_when_every_queue_has(confirms: Confirms) -> None:
    publish(confirms, 5, A, B)
    confirms.confirmed_by(A, 1, 5)
    assert not confirms.has_news
    assert confirms.unconfirmed == 5
    confirms.confirmed_by(B, 1, 5)
    assert not confirms.unconfirmed
    assert confirms.take_settled() == ([(1, 5)], [])
    assert not confirms.has_news


def test_queues_answer_for_parts(confirms: Confirms) -> None:
    """Persistent and transient messages of one run, or a store that commits half of it."""
    publish(confirms, 10, A, B)
    confirms.confirmed_by(A, 3, 5)
    confirms.confirmed_by(B, 4, 8)
    assert confirms.take_settled() == ([(4, 5)], [])
    assert confirms.oldest_waiting() == 1
    confirms.confirmed_by(A, 1, 2)
    confirms.confirmed_by(B, 1, 3)
    assert confirms.take_settled() == ([(1, 3)], [])
    assert confirms.oldest_waiting() == 6
    assert confirms.unconfirmed == 5


def test_an_answer_may_span_runs(confirms: Confirms) -> None:
    publish(confirms, 2, A)
    publish(confirms, 2, A, B)
    publish(confirms, 2, A)
    confirms.confirmed_by(A, 1, 6)
    assert confirms.take_settled() == ([(1, 2), (5, 6)], [])
    assert confirms.oldest_waiting() == 3


def test_settled_ranges_come_in_order_and_merged(confirms: Confirms) -> None:
    for _ in range(4):
        publish(confirms, 1, A)
    for number in (3, 1, 4, 2):
        confirms.confirmed_by(A, number, number)
    assert confirms.take_settled() == ([(1, 4)], [])


def test_what_nobody_was_to_get_is_confirmed_at_once(confirms: Confirms) -> None:
    publish(confirms, 1, A)
    confirms.confirm(confirms.take_numbers(2), 3)
    assert confirms.take_settled() == ([(2, 3)], [])
    assert confirms.oldest_waiting() == 1


def test_one_refusal_is_enough(confirms: Confirms) -> None:
    """[66] And what the other queue says afterwards changes nothing."""
    publish(confirms, 3, A, B)
    confirms.refused_by(A, 2, 2)
    confirms.confirmed_by(A, 1, 1)
    confirms.confirmed_by(A, 3, 3)
    confirms.confirmed_by(B, 1, 3)
    assert confirms.take_settled() == ([(1, 1), (3, 3)], [(2, 2)])
    assert not confirms.unconfirmed


def test_a_deleted_queue_counts_as_having_confirmed(confirms: Confirms) -> None:
    """[67]"""
    publish(confirms, 2, A)
    publish(confirms, 2, A, B)
    publish(confirms, 1, B)
    confirms.queue_down(A, crashed=False)
    assert confirms.take_settled() == ([(1, 2)], [])
    confirms.confirmed_by(B, 3, 5)
    assert confirms.take_settled() == ([(3, 5)], [])


def test_a_crashed_queue_refuses_everything_it_was_given(confirms: Confirms) -> None:
    """[67] Also what another queue has safely."""
    publish(confirms, 2, A)
    publish(confirms, 2, A, B)
    publish(confirms, 1, B)
    confirms.confirmed_by(B, 3, 4)
    confirms.queue_down(A, crashed=True)
    assert confirms.take_settled() == ([], [(1, 4)])
    assert confirms.oldest_waiting() == 5


def test_answers_of_strangers_are_ignored(confirms: Confirms) -> None:
    publish(confirms, 3, A)
    confirms.confirmed_by(B, 1, 3)
    confirms.confirmed_by(B, 2, 2)
    confirms.refused_by(B, 1, 1)
    confirms.queue_down(B, crashed=True)
    confirms.confirmed_by(A, 7, 9)
    assert not confirms.has_news
    assert confirms.unconfirmed == 3


@pytest.mark.parametrize(
    ("ranges", "cutoff", "below", "rest"),
    [
        pytest.param([], 5, 0, [], id="nothing"),
        pytest.param([(1, 4)], 5, 4, [], id="all-below"),
        pytest.param([(5, 7)], 5, 0, [5, 6, 7], id="all-above"),
        pytest.param([(1, 7)], 5, 4, [5, 6, 7], id="cut-in-two"),
        pytest.param([(1, 2), (4, 4), (6, 7)], 5, 4, [6, 7], id="the-greatest-below"),
        pytest.param([(5, 5)], 5, 0, [5], id="the-cutoff-itself-is-above"),
    ],
)
def test_split(ranges: Ranges, cutoff: int, below: int, rest: list[int]) -> None:
    assert split_at(ranges, cutoff) == (below, rest)


@given(
    chosen=st.sets(st.integers(1, 30)),
    cutoff=st.integers(1, 31),
)
def test_split_like_a_list(chosen: set[int], cutoff: int) -> None:
    ranges: Ranges = []
    for number in sorted(chosen):
        if ranges and ranges[-1][1] + 1 == number:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    below = [number for number in sorted(chosen) if number < cutoff]
    assert split_at(ranges, cutoff) == (
        below[-1] if below else 0,
        [number for number in sorted(chosen) if number >= cutoff],
    )


class ConfirmsModel(RuleBasedStateMachine):
    """Against a dict from number to the queues it waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.confirms = Confirms()
        self.waiting: dict[int, set[Mailbox]] = {}
        self.published = 0
        self.confirmed: set[int] = set()
        self.refused: set[int] = set()

    def settle(self, number: int, settled: set[int]) -> None:
        del self.waiting[number]
        settled.add(number)

    @rule(count=st.integers(1, 8), queues=st.sets(st.sampled_from(QUEUES)))
    def publish(self, count: int, queues: set[Mailbox]) -> None:
        first = self.confirms.take_numbers(count)
        assert first == self.published + 1
        self.published += count
        if queues:
            self.confirms.expect(first, self.published, queues)
        else:
            self.confirms.confirm(first, self.published)
        for number in range(first, self.published + 1):
            self.waiting[number] = set(queues)
            if not queues:
                self.settle(number, self.confirmed)

    @rule(queue=st.sampled_from(QUEUES), data=st.data())
    def confirm(self, queue: Mailbox, data: st.DataObject) -> None:
        first, last = self.span(data)
        self.confirms.confirmed_by(queue, first, last)
        for number in range(first, last + 1):
            left = self.waiting.get(number)
            if left is not None and queue in left:
                left.discard(queue)
                if not left:
                    self.settle(number, self.confirmed)

    @rule(queue=st.sampled_from(QUEUES), data=st.data())
    def refuse(self, queue: Mailbox, data: st.DataObject) -> None:
        first, last = self.span(data)
        self.confirms.refused_by(queue, first, last)
        for number in range(first, last + 1):
            if queue in self.waiting.get(number, ()):
                self.settle(number, self.refused)

    @rule(queue=st.sampled_from(QUEUES), crashed=st.booleans())
    def queue_down(self, queue: Mailbox, crashed: bool) -> None:
        self.confirms.queue_down(queue, crashed=crashed)
        for number, left in list(self.waiting.items()):
            if queue in left:
                left.discard(queue)
                if crashed:
                    self.settle(number, self.refused)
                elif not left:
                    self.settle(number, self.confirmed)

    @rule()
    def take(self) -> None:
        assert self.confirms.has_news == bool(self.confirmed or self.refused)
        confirmed, refused = self.confirms.take_settled()
        assert numbers(confirmed) == sorted(self.confirmed)
        assert numbers(refused) == sorted(self.refused)
        for ranges in (confirmed, refused):
            gaps = pairwise(ranges)
            assert all(last + 1 < first for (_, last), (first, _) in gaps), "not merged"
        self.confirmed, self.refused = set(), set()

    def span(self, data: st.DataObject) -> tuple[int, int]:
        first = data.draw(st.integers(1, self.published + 2))
        return first, data.draw(st.integers(first, self.published + 3))

    @invariant()
    def the_same_numbers_wait(self) -> None:
        assert self.confirms.unconfirmed == len(self.waiting)
        assert (self.confirms.unconfirmed == 0) == (not self.waiting)
        assert self.confirms.oldest_waiting() == min(self.waiting, default=self.published + 1)

    def teardown(self) -> None:
        self.take()


TestConfirmsModel = ConfirmsModel.TestCase
TestConfirmsModel.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
