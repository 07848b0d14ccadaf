"""What a variable queue remembers of single messages goes when they go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from leveret.storage.backing_queue import Entry
from leveret.storage.variable_queue import VariableQueue
from tests.storage.bench import message
from tests.storage.stage import Stage

FAR_MS = 1 << 50
ROUNDS = 4_000
# Stale entries an exact queue may keep, and a little more.
KEPT = 1_100


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage(lambda: None, is_durable=False)
    yield stage
    stage.close()


def take(queue: VariableQueue, *, ack_required: bool) -> Entry:
    entries = queue.fetch(1, ack_required=ack_required)
    assert isinstance(entries, list)
    return entries[0]


def remembered(queue: VariableQueue) -> int:
    """Due times of an exact queue."""
    assert queue._exact is not None
    return len(queue._exact._heap)


def test_due_times_of_messages_that_were_consumed_long_before(stage: Stage) -> None:
    queue = stage.queue
    queue.set_exact(is_exact=True)
    for number in range(ROUNDS):
        queue.publish([message(str(number))], None, FAR_MS + number)
        take(queue, ack_required=False)
    queue.check_invariants()
    assert remembered(queue) <= KEPT


def test_due_times_of_a_message_that_comes_back_again_and_again(stage: Stage) -> None:
    queue = stage.queue
    queue.set_exact(is_exact=True)
    queue.publish([message("a"), message("b")], None, FAR_MS)
    for _ in range(ROUNDS):
        queue.requeue([take(queue, ack_required=True).seq_id])
    assert remembered(queue) <= KEPT
    assert queue.next_due_ms() == FAR_MS, "those that are there are not forgotten"
    assert queue.take_due(FAR_MS, ROUNDS) == [0, 1]


@pytest.mark.parametrize(
    "remove",
    [
        pytest.param(lambda queue: queue.drop(1), id="dropped"),
        pytest.param(lambda queue: queue.purge(), id="purged"),
        pytest.param(lambda queue: queue.drop_while(lambda entry: True), id="expired"),
        pytest.param(partial(take, ack_required=False), id="no-ack"),
        pytest.param(lambda queue: queue.ack([take(queue, ack_required=True).seq_id]), id="acked"),
    ],
)
def test_how_often_it_came_back(stage: Stage, remove: Callable[[VariableQueue], object]) -> None:
    queue = stage.queue
    queue.publish([message("held"), message("a")], None)
    held, returned = (take(queue, ack_required=True).seq_id for _ in range(2))
    queue.count_returns([held, returned])
    queue.requeue([returned])
    assert queue.delivery_count(returned) == 1
    remove(queue)
    assert queue.delivery_count(returned) == 0
    assert queue.delivery_count(held) == 1, "it is still there"
