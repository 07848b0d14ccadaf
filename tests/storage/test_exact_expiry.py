"""Exact expiry in a variable queue: what is due leaves in order, from memory and from disk."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from leveret.storage.backing_queue import LOADING
from tests.storage.bench import message
from tests.storage.stage import SEGMENT_SIZE, Stage


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage(lambda: None)
    stage.call(lambda: stage.queue.set_exact(is_exact=True))
    yield stage
    stage.close()


def publish(stage: Stage, *dues_ms: int, persistent: bool = True) -> None:
    for due_ms in dues_ms:
        run = [message(str(due_ms), persistent=persistent)]
        stage.call(partial(stage.queue.publish, run, None, due_ms))


def take(stage: Stage, now_ms: int, limit: int) -> list[int]:
    """What one call after the other gives, as due times."""
    found: list[int] = []
    while True:
        next_ms = stage.queue.next_due_ms()
        if next_ms is None or next_ms > now_ms:
            return found
        answer = stage.call(lambda: stage.queue.take_due(now_ms, limit))
        if answer is LOADING:
            stage.settle()
            continue
        pending = {**stage.queue.ram_pending, **stage.queue.disk_pending}
        found += [pending[seq_id].expires_at_ms or 0 for seq_id in answer]


def page_out(stage: Stage) -> None:
    stage.call(lambda: stage.queue.push_q1(100))
    stage.call(lambda: stage.queue.push_q4(100))
    stage.call(lambda: stage.queue.push_betas_to_deltas(100))


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("limit", [1, 3, 100])
def test_memory_and_disk_are_one_order(stage: Stage, limit: int, persistent: bool) -> None:
    """Also where a call does not take all that is due."""
    on_disk = [90, 10, 50, 30, 70, 20, 60, 40, 80, 15, 85]
    in_memory = [12, 88, 55, 5, 33, 77, 44]
    publish(stage, *range(1_000, 1_000 + SEGMENT_SIZE), persistent=persistent)
    publish(stage, *on_disk, persistent=persistent)
    page_out(stage)
    assert stage.queue.delta.count == len(on_disk)
    publish(stage, *in_memory, persistent=persistent)
    early = take(stage, 45, limit)
    assert early == sorted(due for due in on_disk + in_memory if due <= 45)
    late = take(stage, 100, limit)
    assert late == sorted(due for due in on_disk + in_memory if due > 45)
    assert len(stage.queue) == SEGMENT_SIZE


def test_what_was_pending_and_comes_back_into_the_delta_is_found(stage: Stage) -> None:
    publish(stage, 10, 20, 30)
    entries = stage.call(lambda: stage.queue.fetch(2, ack_required=True))
    assert isinstance(entries, list)
    publish(stage, *range(1_000, 1_000 + 2 * SEGMENT_SIZE))
    page_out(stage)
    stage.call(lambda: stage.queue.set_lazy(is_lazy=True))
    stage.call(lambda: stage.queue.requeue([entry.seq_id for entry in entries]))
    assert take(stage, 100, 100) == [10, 20, 30]


def test_a_purge_while_due_ones_are_read_leaves_nothing(stage: Stage) -> None:
    publish(stage, *range(1_000, 1_000 + SEGMENT_SIZE), *range(10, 20))
    page_out(stage)
    assert stage.call(lambda: stage.queue.take_due(100, 100)) is LOADING
    assert stage.call(stage.queue.purge) == SEGMENT_SIZE + 10
    stage.settle()
    assert take(stage, 5_000, 100) == []
    assert stage.queue.depth() == 0


def test_turned_off_while_rows_are_marked_it_marks_them_again(stage: Stage) -> None:
    """What is written meanwhile has no mark."""
    stage.call(lambda: stage.queue.set_exact(is_exact=False))
    publish(stage, *range(1_000, 1_000 + SEGMENT_SIZE), 10)
    stage.settle()
    stage.call(lambda: stage.queue.set_exact(is_exact=True))
    stage.call(lambda: stage.queue.set_exact(is_exact=False))
    publish(stage, 20, 30)
    stage.settle()
    stage.stop()
    stage.start(is_clean=True)
    stage.call(lambda: stage.queue.set_exact(is_exact=True))
    assert take(stage, 100, 100) == [10, 20, 30]
