"""The playing at LOADING that other tests rely on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from leveret.storage.backing_queue import LOADING
from leveret.storage.memory_queue import MemoryQueue
from tests.storage.bench import message


class Always(random.Random):
    """Would always load."""

    def random(self) -> float:
        return 1.0


def test_loading_and_a_truthful_answer_take_turns() -> None:
    scheduled: list[Callable[[], None]] = []
    wakes: list[int] = []
    queue = MemoryQueue(lambda: wakes.append(1), Always(), scheduled.append)
    queue.publish([message("a"), message("b")], None)
    for left in (1, 0):
        assert queue.fetch(1, ack_required=True) is LOADING
        assert len(scheduled) == 1
        scheduled.pop()()
        assert queue.fetch(1, ack_required=True) is not LOADING
        assert len(queue) == left
    assert len(wakes) == 2


def test_no_second_loading_before_the_wake() -> None:
    scheduled: list[Callable[[], None]] = []
    queue = MemoryQueue(lambda: None, Always(), scheduled.append)
    queue.publish([message("a")], None)
    assert queue.peek() is LOADING
    assert queue.peek() is not LOADING
    assert len(scheduled) == 1


def test_nothing_wakes_after_the_end() -> None:
    scheduled: list[Callable[[], None]] = []
    wakes: list[int] = []
    queue = MemoryQueue(lambda: wakes.append(1), Always(), scheduled.append)
    queue.publish([message("a")], None)
    assert queue.drop(1) is LOADING
    queue.delete_and_terminate()
    scheduled.pop()()
    assert not wakes


def test_nothing_is_remembered_of_messages_that_are_gone() -> None:
    """Or a queue that lives long grows for ever."""
    queue = MemoryQueue(lambda: None)
    given = queue.publish_delivered([message("a"), message("b"), message("c")], None, 5)
    queue.requeue(given)
    assert queue.statistics()["redelivered"] == queue.statistics()["expiring"] == 3
    queue.fetch(1, ack_required=True)
    queue.ack(given[:1])
    queue.fetch(1, ack_required=False)
    queue.drop(1)
    assert queue.statistics()["redelivered"] == queue.statistics()["expiring"] == 0


async def test_the_running_loop_wakes() -> None:
    woken = asyncio.Event()
    queue = MemoryQueue(woken.set, Always())
    queue.publish([message("a")], None)
    assert queue.fetch(1, ack_required=False) is LOADING
    assert not woken.is_set()
    await asyncio.wait_for(woken.wait(), 5)
    assert queue.fetch(1, ack_required=False) is not LOADING
