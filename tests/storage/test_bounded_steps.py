"""Paging, reading and deleting much is done in short steps: others get their turns between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from leveret.storage import database as database_module
from leveret.storage.backing_queue import LOADING
from leveret.storage.database import CHECKPOINT_BYTES, COMMIT_BYTES, COMMIT_ROWS
from leveret.storage.operations import Barrier
from leveret.storage.queue_paging import PAGING_STEP
from leveret.storage.queue_reading import READ_MESSAGES, READ_POSITIONS
from leveret.storage.queue_state import SEGMENT_SIZE
from leveret.storage.variable_queue import VariableQueue
from tests.storage.bench import message
from tests.storage.stage import Stage

# More than two segments.
COUNT = 40_000


class Backlog:
    """A queue with a backlog, and how often it asked to be woken."""

    def __init__(self) -> None:
        self.wakes = 0
        self.stage = Stage(self._wake, segment_size=SEGMENT_SIZE)
        # Looking at everything after each turn would take minutes.
        self.queue.check_invariants = lambda: None  # type: ignore[method-assign]

    def _wake(self) -> None:
        self.wakes += 1

    @property
    def queue(self) -> VariableQueue:
        return self.stage.queue

    def publish(
        self, first: int, count: int, size: int = 20, *, is_persistent: bool = True
    ) -> None:
        numbers = range(first, first + count)
        run = [message(str(number).rjust(size), persistent=is_persistent) for number in numbers]
        self.stage.call(lambda: self.queue.publish(run, None))

    def check(self) -> None:
        VariableQueue.check_invariants(self.queue)

    def fill(self, *, is_persistent: bool) -> None:
        for first in range(0, COUNT, 2_000):
            self.publish(first, 2_000, is_persistent=is_persistent)
        self.stage.settle()

    def largest_commit(self) -> int:
        """Let all that was put be written; how many rows one commit had at most."""
        largest = 0
        databases = (self.stage.database, self.stage.transient)
        for database in databases:
            self.stage.call(partial(database.put, Barrier(lambda: None)))
        numbers = [database.numbers for database in databases]
        while self.stage.is_busy:
            before = [(each["commits"], each["rows"]) for each in numbers]
            self.stage.turn()
            for (commits, rows), now in zip(before, numbers, strict=True):
                assert now["commits"] <= commits + 1
                largest = max(largest, int(now["rows"] - rows))
        return largest

    def take_all(self) -> list[int]:
        taken: list[int] = []
        while len(self.queue):
            entries = self.stage.call(lambda: self.queue.fetch(1_000, ack_required=False))
            if isinstance(entries, list):
                taken += [int(entry.message.body) for entry in entries]
            self.stage.settle()
        return taken


@pytest.fixture
def empty() -> Iterator[Backlog]:
    made = Backlog()
    yield made
    made.stage.close()


@pytest.fixture
def backlog(empty: Backlog) -> Backlog:
    empty.fill(is_persistent=True)
    return empty


def steps(backlog: Backlog, observe: Callable[[], int]) -> list[int]:
    """What each step of paging moved, until the queue no longer asks for another."""
    moved = []
    backlog.wakes = 1
    while backlog.wakes:
        backlog.wakes = 0
        before = observe()
        backlog.stage.call(backlog.queue.resume)
        moved.append(before - observe())
    return moved


def test_paging_out_is_done_in_steps(backlog: Backlog) -> None:
    queue = backlog.queue
    queue.memory.rates = [1.0, 0.0, 0.0, 0.0]
    assert queue.ram_count == COUNT
    backlog.stage.call(lambda: queue.set_ram_duration_target(100.0))
    assert queue.ram_count == COUNT - PAGING_STEP
    assert max(steps(backlog, lambda: queue.ram_count)) == PAGING_STEP
    assert queue.ram_count == 100
    assert queue.delta.count > 0
    backlog.check()


def page_out(backlog: Backlog) -> None:
    queue = backlog.queue
    backlog.stage.call(lambda: queue.push_q4(COUNT))
    backlog.stage.call(lambda: queue.push_betas_to_deltas(COUNT))
    # The first segment stays as positions.
    assert queue.delta.count == COUNT - SEGMENT_SIZE


def test_positions_are_read_in_steps(backlog: Backlog) -> None:
    """Not a whole segment in one turn, and nothing is read before it is wanted."""
    page_out(backlog)
    queue, stage = backlog.queue, backlog.stage
    numbers: list[int] = []
    grown = 0
    while len(numbers) < COUNT:
        entries = stage.call(partial(queue.fetch, 1_000, ack_required=False))
        if isinstance(entries, list):
            assert len(entries) <= READ_MESSAGES
            numbers += [int(entry.message.body) for entry in entries]
            continue
        assert entries is LOADING
        while stage.is_busy:
            before = len(queue.q3)
            stage.turn()
            grown = max(grown, len(queue.q3) - before)
    assert numbers == list(range(COUNT))
    assert grown == READ_POSITIONS
    backlog.check()


def test_what_is_pending_or_settled_meanwhile_is_not_read_again(backlog: Backlog) -> None:
    """Positions come back from disk for messages that consumers hold, too."""
    queue, stage = backlog.queue, backlog.stage
    held = stage.call(lambda: queue.fetch(20_000, ack_required=True))
    assert isinstance(held, list)
    tags = [entry.seq_id for entry in held]
    # Some come back to the front, some to the second segment, among those that are held.
    stage.call(lambda: queue.requeue(tags[:100] + tags[18_000:18_100]))
    stage.call(lambda: queue.push_q4(COUNT))
    stage.call(lambda: queue.push_betas_to_deltas(COUNT))
    assert (len(queue.q3), queue.delta.start) == (100, tags[18_000])
    numbers: list[int] = []
    has_acked = False
    while len(queue):
        entries = stage.call(lambda: queue.fetch(1_000, ack_required=False))
        if isinstance(entries, list):
            numbers += [int(entry.message.body) for entry in entries]
        while stage.is_busy:
            if queue._is_reading_positions and not has_acked:
                has_acked = True
                stage.call(lambda: queue.ack(tags[18_100:18_200]))
            stage.turn()
    assert has_acked
    assert numbers == [*range(100), *range(18_000, 18_100), *range(20_000, COUNT)]
    assert queue.depth() == 20_000 - 300
    backlog.check()


def test_deleting_fills_the_wal_as_writing_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or SQLite would do a checkpoint of 64 MiB within a commit."""
    backlog = Backlog()
    queue, stage = backlog.queue, backlog.stage
    # In the rows themselves, as most messages are.
    stage.store.embed_below = 4_096
    for first in range(0, 24_000, 2_000):
        backlog.publish(first, 2_000, size=1_000)
        stage.settle()
    written = stage.database.numbers["checkpoints"]
    assert written >= 24_000 * 1_000 // (2 * CHECKPOINT_BYTES)
    while len(queue):
        assert stage.call(lambda: queue.drop(2_000)) == 2_000
        stage.settle()
    deleted = stage.database.numbers["checkpoints"] - written
    assert deleted >= written - 1
    assert stage.database.numbers["wal_bytes"] < 4 * database_module.CHECKPOINT_BYTES
    stage.close()


@pytest.mark.parametrize("is_persistent", [True, False], ids=["persistent", "transient"])
def test_a_queue_turns_lazy_in_steps(empty: Backlog, is_persistent: bool) -> None:
    """What is published meanwhile keeps its place; and it does not last for ever."""
    backlog, queue, stage = empty, empty.queue, empty.stage
    backlog.fill(is_persistent=is_persistent)
    stage.call(lambda: queue.set_lazy(is_lazy=True))
    assert queue.statistics()["mode"] == "lazy"
    assert queue.ram_count == COUNT - PAGING_STEP
    assert backlog.largest_commit() <= COMMIT_ROWS
    published, rounds = COUNT, 0
    while backlog.wakes:
        backlog.wakes = 0
        before = queue.ram_count
        stage.call(queue.resume)
        assert before - queue.ram_count <= PAGING_STEP
        assert backlog.largest_commit() <= COMMIT_ROWS
        if rounds % 4 == 0:
            backlog.publish(published, 100, is_persistent=is_persistent)
            published += 100
        rounds += 1
        backlog.check()
    assert queue.is_lazy
    assert queue.ram_count == 0
    # Their positions, too, but for the first segment.
    assert len(queue.q3) <= SEGMENT_SIZE
    assert backlog.take_all() == list(range(published))


def test_a_queue_may_change_its_mind_about_being_lazy(backlog: Backlog) -> None:
    queue, stage = backlog.queue, backlog.stage
    stage.call(lambda: queue.set_lazy(is_lazy=True))
    held = stage.call(lambda: queue.fetch(3_000, ack_required=True))
    assert isinstance(held, list)
    stage.call(lambda: queue.requeue([entry.seq_id for entry in held]))
    backlog.check()
    stage.call(lambda: queue.set_lazy(is_lazy=False))
    stage.call(queue.resume)
    assert queue.ram_count == COUNT - PAGING_STEP
    backlog.check()
    assert backlog.take_all() == list(range(COUNT))


def test_what_is_acked_at_once_is_deleted_in_parts(backlog: Backlog) -> None:
    queue, stage = backlog.queue, backlog.stage
    held = stage.call(lambda: queue.fetch(COUNT, ack_required=True))
    assert isinstance(held, list)
    stage.call(lambda: queue.ack([entry.seq_id for entry in held]))
    assert backlog.largest_commit() <= COMMIT_ROWS
    stage.settle()
    assert stage.rows("SELECT count(*) FROM message") == [(0,)]


def test_what_is_purged_from_memory_is_deleted_in_parts(backlog: Backlog) -> None:
    """But for what consumers hold, and what is published after it."""
    queue, stage = backlog.queue, backlog.stage
    held = stage.call(lambda: queue.fetch(3_000, ack_required=True))
    assert isinstance(held, list)
    stage.call(lambda: queue.requeue([entry.seq_id for entry in held[:10]]))
    assert stage.call(queue.purge) == COUNT - 3_000 + 10
    backlog.publish(COUNT, 5)
    assert backlog.largest_commit() <= COMMIT_ROWS + 5
    stage.settle()
    assert stage.rows("SELECT count(*) FROM message") == [(3_000 - 10 + 5,)]
    backlog.check()
    assert backlog.take_all() == list(range(COUNT, COUNT + 5))


def test_what_returns_to_a_lazy_queue_is_written_in_parts(empty: Backlog) -> None:
    backlog, queue, stage = empty, empty.queue, empty.stage
    backlog.fill(is_persistent=False)
    held = stage.call(lambda: queue.fetch(COUNT, ack_required=True))
    assert isinstance(held, list)
    stage.call(lambda: queue.set_lazy(is_lazy=True))
    stage.call(lambda: queue.requeue([entry.seq_id for entry in held]))
    assert backlog.largest_commit() <= COMMIT_ROWS
    backlog.check()
    assert backlog.take_all() == list(range(COUNT))


def test_large_messages_are_paged_out_in_parts(empty: Backlog) -> None:
    """Bytes count as rows do."""
    backlog, queue, stage = empty, empty.queue, empty.stage
    stage.transient_store.embed_below = 1 << 20
    for first in range(0, 400, 100):
        backlog.publish(first, 100, size=100_000, is_persistent=False)
    stage.call(lambda: queue.set_lazy(is_lazy=True))
    numbers = stage.transient.numbers
    while stage.is_busy:
        before = numbers["bytes"]
        stage.turn()
        assert numbers["bytes"] - before <= 3 * COMMIT_BYTES
    assert numbers["bytes"] > 400 * 100_000
    assert backlog.take_all() == list(range(400))
