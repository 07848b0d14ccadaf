"""Several priorities in one queue: order, ids, confirms, units; and any sequence of operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import rule, run_state_machine_as_test

from leveret.protocol.codec import Properties, write_properties
from leveret.protocol.message import NEEDS_PRIORITY, Message
from leveret.storage.backing_queue import EMPTY, LOADING, Confirm, Entry, Predicate
from leveret.storage.memory_queue import MemoryQueue
from leveret.storage.priority_queue import PriorityQueue
from tests.storage.bench import PRIORITIES, Bench, Seen, UnitOfOne
from tests.storage.priority_stage import MAX_PRIORITY, staged
from tests.storage.test_backing_queue_model import BackingQueueModel, Slot


def message(body: str, priority: int | None = None, *, persistent: bool = True) -> Message:
    header = write_properties(Properties(priority=priority))
    needs = 0 if priority is None else NEEDS_PRIORITY
    return Message(b"\x00\x01q", "", "q", header, body.encode(), needs, persistent)


def run(*messages: tuple[str, int | None]) -> list[Message]:
    return [message(body, priority) for body, priority in messages]


@pytest.fixture(params=PRIORITIES)
def make_bench(request: pytest.FixtureRequest) -> Iterator[Callable[[], Bench]]:
    made: list[Bench] = []

    def make_one() -> Bench:
        while made:
            made.pop().close()
        made.append(Bench(PRIORITIES[request.param]))
        return made[-1]

    yield make_one
    while made:
        made.pop().close()


@pytest.fixture
def bench(make_bench: Callable[[], Bench]) -> Bench:
    return make_bench()


def bodies(bench: Bench) -> str:
    return "".join(seen.body for seen in bench.all_ready())


def taken(bench: Bench, count: int) -> list[Entry]:
    """So many, in as many calls as that takes."""
    entries: list[Entry] = []
    while len(entries) < count:
        entries += bench.take(count - len(entries))
    return entries


# --- order -------------------------------------------------------------------------------------


def test_higher_first_and_in_order_within_each(bench: Bench) -> None:
    bench.queue.publish(run(("a", 1), ("b", 5), ("c", 1), ("d", 3), ("e", 5)), None)
    bench.queue.publish(run(("f", 3), ("g", 0)), None)
    assert bodies(bench) == "bedfacg"


def test_none_is_zero_and_above_the_maximum_is_the_maximum(bench: Bench) -> None:
    highest = MAX_PRIORITY
    bench.queue.publish(
        run(("a", None), ("b", 0), ("c", highest), ("d", 255), ("e", highest)), None
    )
    assert bodies(bench) == "cdeab"


def test_a_later_message_of_higher_priority_overtakes(bench: Bench) -> None:
    bench.queue.publish(run(("a", 1), ("b", 1)), None)
    first = taken(bench, 1)
    bench.queue.publish(run(("c", 2)), None)
    assert [entry.message.body for entry in first] == [b"a"]
    assert bodies(bench) == "cb"


def test_a_requeued_message_goes_back_among_its_equals(bench: Bench) -> None:
    bench.queue.publish(run(("a", 5), ("b", 5), ("c", 1)), None)
    held = taken(bench, 3)
    bench.queue.publish(run(("d", 3), ("e", 5), ("f", 1)), None)
    bench.queue.requeue([entry.seq_id for entry in reversed(held)])
    assert bench.all_ready() == [
        Seen("a", True),
        Seen("b", True),
        Seen("e"),
        Seen("d"),
        Seen("c", True),
        Seen("f"),
    ]


def test_what_is_taken_from_the_head_is_the_highest(bench: Bench) -> None:
    """So a length limit drops the most important first: a surprise that RabbitMQ has, too."""
    bench.queue.publish(run(("a", 0), ("b", 5), ("c", 3)), None)
    head = bench.peek()
    assert isinstance(head, Entry)
    assert head.message.body == b"b"
    assert bench.drop(2) == 2 or bench.drop(1) == 1
    assert bodies(bench) == "a"


def test_an_expired_message_waits_behind_those_of_higher_priority(bench: Bench) -> None:
    def is_expired(entry: Entry) -> bool:
        return entry.expires_at_ms is not None

    bench.queue.publish([message("a", 1)], None, 7)
    bench.queue.publish([message("b", 2)], None)
    assert bench.queue.may_expire
    assert bench.drop_while(is_expired) == 0
    assert bench.take_while(is_expired) == []
    assert [entry.message.body for entry in taken(bench, 1)] == [b"b"]
    assert bench.drop_while(is_expired) == 1


def test_predicates_see_what_fetch_would_give(bench: Bench) -> None:
    bench.queue.publish(run(("a", 3)), None)
    shown: list[Entry] = []
    predicate: Predicate = lambda entry: not shown.append(entry)  # type: ignore[func-returns-value]  # noqa: E731
    assert bench.take_while(predicate) == shown


def test_exact_expiry_goes_by_due_time_over_all_priorities(bench: Bench) -> None:
    bench.queue.set_exact(is_exact=True)
    dues = [("a", 1, 30), ("b", 5, 10), ("c", 1, 20), ("d", 0, 10), ("e", 5, 40), ("f", 3, 99)]
    for body, priority, due_ms in dues:
        bench.queue.publish([message(body, priority)], None, due_ms)
    bench.queue.publish([message("g", 4)], None)
    order: list[int] = []
    while True:
        answer = bench.queue.take_due(50, 2)
        if answer is LOADING:
            bench.run_scheduled()
            continue
        assert isinstance(answer, list)
        if not answer:
            break
        assert len(answer) <= 2
        order += answer
    due = bench.queue.next_due_ms()
    assert due is not None
    assert due > 50
    assert bodies(bench) == "gf"
    bench.queue.requeue(order)
    by_id = {}
    for _ in range(5):
        [entry] = taken(bench, 1)
        by_id[entry.seq_id] = entry.message.body.decode()
    assert "".join(by_id[seq_id] for seq_id in order) == "bdcae"


# --- ids ---------------------------------------------------------------------------------------


def test_ids_of_a_mixed_run_are_those_of_its_messages(bench: Bench) -> None:
    """It goes straight to a consumer as it is, and each message is settled for itself."""
    messages = run(("a", 1), ("b", 5), ("c", 1), ("d", None), ("e", 5))
    given = list(bench.queue.publish_delivered(messages, None))
    assert len(set(given)) == 5
    bench.queue.ack([given[1], given[3]])
    bench.queue.requeue([given[4], given[2], given[0]])
    assert bodies(bench) == "eac"


def test_an_id_of_a_priority_that_was_never_used_is_ignored(bench: Bench) -> None:
    bench.queue.publish(run(("a", 1)), None)
    [entry] = taken(bench, 1)
    for stranger in (entry.seq_id + 1, entry.seq_id + 200, entry.seq_id + (1 << 20)):
        bench.queue.ack([stranger])
        bench.queue.requeue([stranger])
    assert bench.queue.depth() == 1
    assert bench.queue.delivery_count(entry.seq_id + 2) == 0


def test_returns_are_counted_for_each_message(bench: Bench) -> None:
    bench.queue.publish(run(("a", 1), ("b", 5), ("c", 5)), None)
    b, c, a = (entry.seq_id for entry in taken(bench, 3))
    assert bench.queue.count_returns([a, b]) == [1, 1]
    assert bench.queue.count_returns([b, c]) == [2, 1]
    assert [bench.queue.delivery_count(seq_id) for seq_id in (a, b, c)] == [1, 2, 1]


def test_pending_messages_can_be_looked_at() -> None:
    stage, queue = staged(lambda: None, is_paging=False)
    try:
        queue.publish(run(("a", 1), ("b", 5), ("c", 1)), None)
        first, rest = (queue.fetch(2, ack_required=True) for _ in range(2))
        assert isinstance(first, list)
        assert isinstance(rest, list)
        b, a, c = (entry.seq_id for entry in first + rest)
        for part in stage.parts:
            # All of this one, one of the other.
            stage.call(partial(part._limit_ram_acks, 1))
        wanted = [c, b, a + (1 << 20), a]
        assert queue.pending(wanted) is LOADING
        stage.settle()
        answer = queue.pending(wanted)
        assert isinstance(answer, list)
        assert [entry.seq_id for entry in answer] == [c, b, a]
        assert [entry.message.body for entry in answer] == [b"c", b"b", b"a"]
    finally:
        stage.close()


# --- confirms and units ------------------------------------------------------------------------


def test_a_mixed_run_is_confirmed_when_all_of_it_is_safe(bench: Bench) -> None:
    confirm = Confirm("port", 7, 10)
    bench.queue.publish(run(("a", 1), ("b", 5), ("c", 1), ("d", None)), confirm)
    bench.queue.discard(run(("e", 3)), Confirm("port", 11, 11))
    bench.run_scheduled()
    confirmed = bench.queue.drain_confirmed()
    assert sorted(confirmed, key=lambda part: part.first) == [confirm, Confirm("port", 11, 11)]
    assert bench.queue.drain_confirmed() == []


def test_no_part_of_a_run_is_confirmed_before_the_last() -> None:
    """A queue that answers late keeps back the whole."""

    class Late(MemoryQueue):
        is_late = True

        def drain_confirmed(self) -> list[Confirm]:
            return [] if self.is_late else super().drain_confirmed()

    made: dict[int, Late] = {}

    def make(priority: int) -> Late:
        made[priority] = Late(lambda: None)
        return made[priority]

    queue = PriorityQueue(MAX_PRIORITY, make)
    queue.publish(run(("a", 1), ("b", 2), ("c", 1)), Confirm("port", 1, 3))
    made[1].is_late = False
    assert queue.drain_confirmed() == []
    made[2].is_late = False
    assert queue.drain_confirmed() == [Confirm("port", 1, 3)]


def test_a_unit_over_several_priorities(bench: Bench) -> None:
    bench.queue.publish(run(("a", 1), ("b", 5)), None)
    b, a = (entry.seq_id for entry in taken(bench, 2))
    prepared = bench.queue.prepare([(run(("c", 1), ("d", 4), ("e", 1)), None)], [a])
    unit = UnitOfOne(prepared)
    assert bench.queue.depth() == 2
    bench.begin(unit)
    bench.finish(unit)
    assert bench.queue.depth() == 4
    bench.queue.requeue([b])
    assert bodies(bench) == "bdce"


# --- the whole ---------------------------------------------------------------------------------


def test_queues_are_made_when_they_are_needed() -> None:
    made: list[int] = []

    def make(priority: int) -> MemoryQueue:
        made.append(priority)
        return MemoryQueue(lambda: None)

    queue = PriorityQueue(255, make, known=[3])
    assert made == [3]
    assert queue.fetch(1, ack_required=True) is EMPTY
    assert queue.peek() is EMPTY
    assert (queue.drop(1), queue.drop_while(lambda entry: True)) == (0, 0)
    assert queue.fetch_while(lambda entry: True, 1) == []
    queue.publish(run(("a", 200), ("b", 3)), None)
    queue.ack([17])
    assert made == [3, 200]


def test_one_that_is_made_later_is_told_what_was_said_before() -> None:
    told: list[tuple[str, object]] = []

    class Listening(MemoryQueue):
        def set_lazy(self, *, is_lazy: bool) -> None:
            told.append(("lazy", is_lazy))

        def set_ram_duration_target(self, duration_s: float) -> None:
            told.append(("target", duration_s))

        def set_exact(self, *, is_exact: bool) -> None:
            if is_exact:
                told.append(("exact", is_exact))

    queue = PriorityQueue(MAX_PRIORITY, lambda priority: Listening(lambda: None))
    queue.publish(run(("a", 1)), None)
    assert told == []
    queue.set_lazy(is_lazy=True)
    queue.set_ram_duration_target(2.5)
    queue.set_exact(is_exact=True)
    assert told == [("lazy", True), ("target", 2.5), ("exact", True)]
    queue.publish(run(("b", 2)), None)
    assert sorted(told[3:], key=str) == sorted(told[:3], key=str)


def test_memory_lasts_as_long_as_where_it_is_shortest() -> None:
    class Lasting(MemoryQueue):
        def __init__(self, duration_s: float) -> None:
            super().__init__(lambda: None)
            self.duration_s = duration_s

        def ram_duration(self) -> float:
            return self.duration_s

    queue = PriorityQueue(MAX_PRIORITY, lambda priority: Lasting(10.0 - priority))
    assert queue.ram_duration() == math.inf
    queue.publish(run(("a", 1), ("b", 4)), None)
    assert queue.ram_duration() == 6.0


def test_statistics_tell_of_the_whole_and_of_each(bench: Bench) -> None:
    assert bench.queue.statistics()["len"] == 0
    bench.queue.publish(run(("a", 1), ("bb", 5), ("ccc", 1)), None)
    taken(bench, 1)
    statistics = bench.queue.statistics()
    assert (statistics["len"], statistics["pending_acks"]) == (2, 1)
    assert statistics["message_bytes_ready"] == 4
    assert statistics["priority_lengths"] == {5: 0, 1: 2}
    each = statistics["priorities"]
    assert isinstance(each, dict)
    assert each[1]["len"] == 2


def test_purge_and_deletion_reach_all(bench: Bench) -> None:
    bench.queue.publish(run(("a", 1), ("b", 5), ("c", 0)), None)
    taken(bench, 1)
    assert bench.queue.purge() == 2
    assert (len(bench.queue), bench.queue.depth(), bench.queue.ready_bytes) == (0, 1, 0)
    bench.queue.publish(run(("d", 2)), None)
    bench.queue.delete_and_terminate()
    bench.run_scheduled()
    assert bench.queue.depth() == 0


# --- anything ----------------------------------------------------------------------------------

PRIORITY_OF = {"": None, "a": 1, "bb": 3, "cccc": 200}


class PriorityModel(BackingQueueModel):
    """What is in a body says which priority its message has."""

    def messages(self, bodies: list[str]) -> list[Message]:
        return [self.unit_message(body) for body in bodies]

    def unit_message(self, body: str) -> Message:
        return message(body, PRIORITY_OF[body], persistent=self.bench.persistent)

    @property
    def ready(self) -> list[Slot]:
        ready = [slot for slot in self.slots if not slot.is_pending]
        return sorted(ready, key=lambda slot: -min(PRIORITY_OF[slot.body] or 0, MAX_PRIORITY))

    def given(self, expected: list[Slot], count: int) -> list[Slot]:
        """Of the highest priority alone; and all of those, from queues that give all."""
        highest = [slot for slot in expected if slot.body == expected[0].body] if expected else []
        return super().given(highest, count)

    @rule()
    def loaded(self) -> None:
        """The wake comes; but the head may be another by now, and have to be read as well."""
        self.bench.run_scheduled()
        if self.wakes_due is not None:
            assert self.bench.wakes >= self.wakes_due
            self.wakes_due = None

    def is_loading(self, answer: object) -> bool:
        if answer is LOADING and self.wakes_due is not None:
            # Another priority than the one that is being read.
            assert self.ready
            return True
        return super().is_loading(answer)


@pytest.mark.parametrize(
    "examples", [pytest.param(25, id="short"), pytest.param(600, id="long", marks=pytest.mark.slow)]
)
def test_behaves_like_lists(make_bench: Callable[[], Bench], examples: int) -> None:
    class Model(PriorityModel):
        def __init__(self) -> None:
            super().__init__(make_bench)

    run_state_machine_as_test(
        Model,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
