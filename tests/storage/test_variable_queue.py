"""The variable queue's own ways: where messages stand, what is paged out, what is read when."""

from __future__ import annotations

import gc
import resource
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from leveret.protocol.message import Message
from leveret.storage import queue_paging, queue_reading, queue_state
from leveret.storage.backing_queue import EMPTY, LOADING, Confirm, Entry
from leveret.storage.memory_use import INFINITY
from leveret.storage.msg_status import MsgStatus
from leveret.storage.variable_queue import VariableQueue
from tests.storage.bench import message
from tests.storage.stage import Stage


class Show:
    """A stage whose messages are numbered as their positions are, from 1 as in the seeds."""

    def __init__(self, **options: bool) -> None:
        self.wakes = 0
        self.stage = Stage(self._wake, **options)
        self.queue.publish([message("0")], None)
        assert self.queue.drop(1) == 1

    def _wake(self) -> None:
        self.wakes += 1

    @property
    def queue(self) -> VariableQueue:
        return self.stage.queue

    def publish(self, first: int, last: int, *, persistent: bool = True) -> None:
        run = [message(str(number), persistent=persistent) for number in range(first, last + 1)]
        self.stage.call(lambda: self.queue.publish(run, None))

    def push(self, *, q1: int = 0, q4: int = 0) -> None:
        self.stage.call(lambda: self.queue.push_q1(q1))
        self.stage.call(lambda: self.queue.push_q4(q4))

    def betas_to_deltas(self, quota: int = 1000) -> None:
        self.stage.call(lambda: self.queue.push_betas_to_deltas(quota))

    def fetch(self, count: int) -> list[int]:
        """Numbers of exactly so many, however often one must ask; they are acked."""
        got: list[int] = []
        while len(got) < count:
            ask = partial(self.queue.fetch, count - len(got), ack_required=True)
            entries = self.stage.call(ask)
            if entries is LOADING:
                self.stage.settle()
                continue
            assert isinstance(entries, list)
            got += [int(entry.message.body) for entry in entries]
            self.stage.call(partial(self.queue.ack, [entry.seq_id for entry in entries]))
        return got

    def stands(
        self,
        *,
        q4: list[int] | None = None,
        q3: list[int] | None = None,
        delta: list[int] | None = None,
        q2: list[int] | None = None,
        q1: list[int] | None = None,
        delta_numbers: tuple[int, int, int] | None = None,
    ) -> None:
        queue = self.queue
        for name, expected in (("q4", q4), ("q3", q3), ("q2", q2), ("q1", q1)):
            there = [status.seq_id for status in getattr(queue, name)]
            assert there == (expected or []), name
        numbers = (queue.delta.start, queue.delta.end, queue.delta.count)
        if delta_numbers:
            assert numbers == delta_numbers, "delta"
        elif delta:
            assert numbers == (delta[0], delta[-1] + 1, len(delta)), "delta"
        else:
            assert numbers[2] == 0, "delta"


@pytest.fixture
def show() -> Iterator[Show]:
    made = Show()
    yield made
    made.stage.close()


def span(first: int, last: int) -> list[int]:
    return list(range(first, last + 1))


def test_the_seeds_worked_example(show: Show) -> None:
    """Step by step, with segments of five; the two phases of paging by explicit counts."""
    show.publish(1, 9)
    show.stands(q4=span(1, 9))
    show.publish(10, 10)
    show.stands(q4=span(1, 10))
    show.push(q4=3)
    show.stands(q4=span(1, 7), q3=[8, 9, 10])
    show.publish(11, 15)
    show.stands(q4=span(1, 7), q3=[8, 9, 10], q1=span(11, 15))
    show.push(q1=3, q4=3)
    show.stands(q4=span(1, 4), q3=span(5, 13), q1=[14, 15])
    show.betas_to_deltas()
    show.stands(q4=span(1, 4), q3=span(5, 9), q1=[14, 15], delta=span(10, 13))
    show.publish(16, 20)
    show.stands(q4=span(1, 4), q3=span(5, 9), q1=span(14, 20), delta=span(10, 13))
    show.push(q1=4, q4=3)
    show.stands(q4=[1], q3=span(2, 9), q2=span(14, 17), q1=[18, 19, 20], delta=span(10, 13))

    # Here we look ahead: what q3 lacks is asked for before q3 is empty. So hold reading back to
    # see each step, as if a single message were read at a time.
    show.queue._read_ahead = lambda: None  # type: ignore[method-assign]
    assert show.fetch(1) == [1]
    show.stands(q3=span(2, 9), q2=span(14, 17), q1=[18, 19, 20], delta=span(10, 13))
    for status in show.queue.q3:  # as read
        status.message = message(str(status.seq_id))
        show.queue.ram_count += 1
        show.queue._ram_bytes += status.size
        show.queue._ahead_bytes += status.size
    assert show.fetch(2) == [2, 3]
    show.stands(q3=span(4, 9), q2=span(14, 17), q1=[18, 19, 20], delta=span(10, 13))
    assert show.fetch(5) == span(4, 8)
    show.stands(q3=[9], q2=span(14, 17), q1=[18, 19, 20], delta=span(10, 13))
    assert show.fetch(1) == [9]
    show.stands(q2=span(14, 17), q1=[18, 19, 20], delta=span(10, 13))
    # maybe_deltas_to_betas: the delta into q3, and as it is empty then, q2 behind it.
    assert show.stage.call(show.queue.peek) is LOADING
    show.stage.settle()
    show.stands(q3=span(10, 17), q1=[18, 19, 20])
    show.publish(21, 25)
    show.stands(q3=span(10, 17), q1=span(18, 25))
    assert show.fetch(8) == span(10, 17)
    # q3 and the delta are empty: q1 moves into q4.
    show.stands(q4=span(18, 25))
    assert show.fetch(1) == [18]
    show.stands(q4=span(19, 25))


# --- where messages go ---------------------------------------------------------------------------


def test_alphas_stay_in_memory_and_on_disk(show: Show) -> None:
    show.publish(1, 3)
    show.stage.settle()
    assert len(show.stage.rows("SELECT key FROM message")) == 3
    assert show.queue.ram_count == 3


def test_a_transient_message_is_written_when_it_is_paged_out(show: Show) -> None:
    show.publish(1, 3, persistent=False)
    show.stage.settle()
    assert not show.stage.transient.is_open
    show.push(q4=2)
    show.stage.settle()
    rows = show.stage.run(
        show.stage.transient.read(lambda c: c.execute("SELECT key FROM message").fetchall())
    )
    assert len(rows) == 2
    assert show.stage.rows("SELECT key FROM message") == []
    assert show.fetch(3) == [1, 2, 3]
    show.stage.settle()
    rows = show.stage.run(
        show.stage.transient.read(lambda c: c.execute("SELECT key FROM message").fetchall())
    )
    assert rows == []


def test_a_queue_that_is_not_durable_keeps_nothing() -> None:
    show = Show(is_durable=False)
    show.publish(1, 3)
    show.stage.settle()
    assert show.stage.rows("SELECT key FROM message") == []
    show.stage.close()


def test_betas_go_to_the_delta_but_not_the_first_segment(show: Show) -> None:
    show.publish(1, 12)
    show.push(q4=12)
    show.betas_to_deltas()
    show.stands(q3=span(1, 4), delta=span(5, 12))


def test_a_segment_that_is_exactly_full(show: Show) -> None:
    """The delta ends where a read ends: what waits behind it must not stay behind."""
    show.publish(1, 9)
    show.push(q4=9)
    show.betas_to_deltas()
    show.stands(q3=span(1, 4), delta=span(5, 9))
    show.publish(10, 12)
    show.push(q1=1)
    show.stands(q3=span(1, 4), delta=span(5, 9), q2=[10], q1=[11, 12])
    assert show.fetch(12) == span(1, 12)


def test_a_recovered_delta_that_ends_before_its_range(show: Show) -> None:
    """Its last positions were transient: when nothing is left in it, it is empty."""
    show.publish(1, 5)
    show.publish(6, 8, persistent=False)
    show.stage.stop()
    show.stage.start(is_clean=True)
    show.publish(9, 12)
    show.push(q1=2)
    show.stands(delta_numbers=(0, 9, 5), q2=[9, 10], q1=[11, 12])
    assert show.fetch(9) == [*span(1, 5), *span(9, 12)]


def test_lazy_publishes_while_the_delta_is_read(show: Show) -> None:
    show.stage.call(lambda: show.queue.set_lazy(is_lazy=True))
    show.publish(1, 3)
    assert show.stage.call(show.queue.peek) is LOADING
    show.stage.turn()
    show.publish(4, 9)
    show.stage.settle()
    assert show.fetch(9) == span(1, 9)


def test_switching_to_lazy_pages_everything_out(show: Show) -> None:
    show.publish(1, 10)
    show.push(q4=4)
    show.publish(11, 14)
    show.stage.call(lambda: show.queue.set_lazy(is_lazy=True))
    assert show.queue.ram_count == 0
    show.publish(15, 16)
    assert show.queue.ram_count == 0
    show.stage.call(lambda: show.queue.set_lazy(is_lazy=False))
    show.publish(17, 18)
    assert show.queue.ram_count == 2
    assert show.fetch(18) == span(1, 18)


def test_what_is_dropped_is_not_read(show: Show) -> None:
    show.publish(1, 4)
    show.push(q4=4)
    assert show.stage.call(lambda: show.queue.drop(3)) == 3
    assert show.queue.disk_reads == 0
    assert show.fetch(1) == [4]


def test_what_was_dropped_in_memory_is_seen(show: Show) -> None:
    show.publish(1, 6)
    show.push(q4=4)
    seen: list[Message] = []
    assert show.stage.call(lambda: show.queue.drop(5, seen)) == 5
    assert [each.body for each in seen] == [b"1", b"2"]
    assert show.queue.disk_reads == 0


def test_looking_at_what_is_in_memory_reads_nothing(show: Show) -> None:
    show.publish(1, 6)
    show.stage.call(lambda: show.queue.fetch(2, ack_required=True))
    show.push(q4=2)
    show.stage.call(lambda: show.queue._limit_ram_acks(1))
    assert [each.body for each in show.queue.ready_in_memory(9)] == [b"3", b"4"]
    assert [each.body for each in show.queue.ready_in_memory(1)] == [b"3"]
    assert list(show.queue.pending_in_memory([1, 2])) == [1]
    assert show.queue.disk_reads == 0
    assert show.fetch(4) == span(3, 6)


# --- reading -------------------------------------------------------------------------------------


def test_one_wake_for_a_read_however_often_it_was_asked(show: Show) -> None:
    show.publish(1, 2)
    show.push(q4=2)
    show.stage.settle()
    wakes = show.wakes
    for _ in range(3):
        assert show.stage.call(lambda: show.queue.fetch(1, ack_required=True)) is LOADING
    show.stage.settle()
    assert show.wakes == wakes + 1
    assert show.fetch(2) == [1, 2]


def test_reading_ahead_is_bounded_by_bytes(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_reading, "READ_BYTES", 1000)
    run = [message("x" * 400, persistent=True) for _ in range(10)]
    show.stage.call(lambda: show.queue.publish(run, None))
    show.push(q4=10)
    for left in range(9, 0, -1):
        while show.stage.call(lambda: show.queue.fetch(1, ack_required=False)) is LOADING:
            show.stage.settle()
        show.stage.settle()
        assert len(show.queue) == left
        assert show.queue.ram_count <= 3


def test_a_purge_makes_a_read_void(show: Show) -> None:
    show.publish(1, 12)
    show.push(q4=12)
    show.betas_to_deltas()
    assert show.stage.call(show.queue.peek) is LOADING
    show.stage.turn()
    assert show.stage.call(show.queue.purge) == 12
    show.publish(13, 14)
    show.stage.settle()
    assert show.wakes >= 1
    assert show.fetch(2) == [13, 14]
    show.stage.settle()
    assert show.stage.rows("SELECT key FROM message") == []


@pytest.fixture
def riddled(show: Show) -> Show:
    """1 to 20 were delivered, and all but five are pending: most in the range of the delta."""
    show.publish(1, 20)
    show.stage.call(lambda: show.queue.fetch(20, ack_required=True))
    show.stage.call(lambda: show.queue.requeue([1, 5, 8, 12, 20]))
    show.push(q4=5)
    show.betas_to_deltas()
    show.stands(q3=[1], delta_numbers=(5, 21, 4))
    # So that a read waits for no commit, and what comes meanwhile is not on disk when it reads.
    show.stage.settle()
    show.stage.run(show.stage.database.read(lambda connection: None))
    return show


def begin_reading(show: Show) -> None:
    assert show.stage.call(show.queue.peek) is LOADING
    show.stage.turn()
    assert show.queue._is_reading_positions


def test_what_is_pending_in_the_range_of_a_delta_is_not_read(riddled: Show) -> None:
    assert riddled.fetch(5) == [1, 5, 8, 12, 20]
    assert riddled.queue.depth() == 15


def test_what_happens_while_a_delta_is_read(riddled: Show) -> None:
    """Nothing is doubled and nothing is lost, and all have their places."""
    begin_reading(riddled)
    riddled.stage.call(lambda: riddled.queue.requeue([6, 9, 19]))
    riddled.stage.call(lambda: riddled.queue.ack([7, 10, 18]))
    riddled.stage.call(lambda: riddled.queue._limit_ram_acks(3))
    riddled.publish(21, 22)
    riddled.stage.settle()
    assert riddled.fetch(10) == [1, 5, 6, 8, 9, 12, 19, 20, 21, 22]
    riddled.stage.settle()
    assert riddled.queue.depth() == 9
    assert len(riddled.stage.rows("SELECT key FROM message")) == 9
    riddled.stage.check_files()


def test_a_purge_leaves_what_is_pending_in_the_range_of_a_delta(riddled: Show) -> None:
    assert riddled.stage.call(riddled.queue.purge) == 5
    riddled.stage.call(lambda: riddled.queue._limit_ram_acks(15))
    riddled.stage.settle()
    pending = [*span(2, 4), 6, 7, *span(9, 11), *span(13, 19)]
    riddled.stage.call(lambda: riddled.queue.requeue(pending))
    assert riddled.fetch(15) == pending
    riddled.stage.settle()
    riddled.stage.check_files()


def test_the_front_of_a_delta_stands_still_while_it_is_read(show: Show) -> None:
    show.publish(1, 12)
    show.push(q4=12)
    show.betas_to_deltas(5)
    show.stands(q3=span(1, 7), delta=span(8, 12))
    begin_reading(show)
    show.betas_to_deltas()
    show.stands(q3=span(1, 7), delta=span(8, 12))
    show.publish(13, 16)
    show.push(q1=3)
    show.betas_to_deltas()
    show.stands(q3=span(1, 7), delta=span(8, 15), q1=[16])
    show.stage.settle()
    assert show.fetch(16) == span(1, 16)


def test_a_purge_in_many_steps_leaves_no_ghosts(
    show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions are read again only when the range that was purged is really gone."""
    monkeypatch.setattr("leveret.storage.operations.DROP_ROWS", 2)
    show.publish(1, 30)
    [entry] = _list(show.stage.call(lambda: show.queue.fetch(1, ack_required=True)))
    show.stage.call(lambda: show.queue.set_lazy(is_lazy=True))
    show.stage.call(lambda: show.queue.set_lazy(is_lazy=False))
    show.stage.settle()
    assert show.stage.call(show.queue.purge) == 29
    show.stage.call(lambda: show.queue.requeue([entry.seq_id]))
    show.publish(31, 40)
    show.stage.call(lambda: show.queue.set_lazy(is_lazy=True))
    assert show.fetch(11) == [1, *span(31, 40)]
    assert show.stage.call(show.queue.peek) is EMPTY


def _list(entries: object) -> list[Entry]:
    assert isinstance(entries, list)
    return entries


def test_nothing_wakes_after_the_end(show: Show) -> None:
    show.publish(1, 2)
    show.push(q4=2)
    show.stage.settle()
    assert show.stage.call(show.queue.peek) is LOADING
    wakes = show.wakes
    show.stage.stop()
    assert show.wakes == wakes
    show.stage.start(is_clean=True)
    assert show.fetch(2) == [1, 2]


# --- confirms ------------------------------------------------------------------------------------


def test_confirms_come_after_the_commit(show: Show) -> None:
    run = [message("1", persistent=True)]
    show.stage.call(lambda: show.queue.publish(run, Confirm("port", 1, 1)))
    assert show.queue.drain_confirmed() == []
    assert show.wakes == 0
    show.stage.settle()
    assert show.wakes == 1
    assert show.queue.drain_confirmed() == [Confirm("port", 1, 1)]


def test_one_wake_for_all_confirms_that_wait(show: Show) -> None:
    for number in (1, 2, 3):
        run = [message(str(number), persistent=True)]
        show.stage.call(partial(show.queue.publish, run, Confirm("port", number, number)))
    show.stage.settle()
    assert show.wakes == 1
    assert len(show.queue.drain_confirmed()) == 3


def test_a_message_acked_before_its_commit_is_never_written(show: Show) -> None:
    show.stage.settle()
    commits = show.stage.database.numbers["commits"]
    run = [message("1", persistent=True)]
    given = show.stage.call(lambda: show.queue.publish_delivered(run, Confirm("port", 1, 1)))
    show.stage.call(lambda: show.queue.ack(given))
    assert show.queue.drain_confirmed() == [Confirm("port", 1, 1)]
    show.stage.settle()
    assert show.queue.drain_confirmed() == []
    assert show.stage.database.numbers["commits"] == commits


def test_a_run_is_confirmed_by_acks_once_all_of_it_was_acked(show: Show) -> None:
    run = [message(str(number), persistent=True) for number in (1, 2, 3)]
    given = show.stage.call(lambda: show.queue.publish_delivered(run, Confirm("port", 1, 3)))
    show.stage.call(lambda: show.queue.ack([given[2], given[0]]))
    assert show.queue.drain_confirmed() == []
    show.stage.call(lambda: show.queue.ack([given[1]]))
    assert show.queue.drain_confirmed() == [Confirm("port", 1, 3)]


def test_acks_of_transient_messages_confirm_no_others(show: Show) -> None:
    """A run may hold both kinds: nobody stands for the third message, which is not acked."""
    run = [
        message("1", persistent=True),
        message("2", persistent=False),
        message("3", persistent=True),
    ]
    given = show.stage.call(lambda: show.queue.publish_delivered(run, Confirm("port", 1, 3)))
    show.stage.call(lambda: show.queue.ack(given[:2]))
    assert show.queue.drain_confirmed() == []
    show.stage.call(lambda: show.queue.ack(given[2:]))
    assert show.queue.drain_confirmed() == [Confirm("port", 1, 3)]


def test_acks_of_transient_messages_alone_confirm_nothing(show: Show) -> None:
    run = [message("1", persistent=True), message("2", persistent=False)]
    given = show.stage.call(lambda: show.queue.publish_delivered(run, Confirm("port", 1, 2)))
    show.stage.call(lambda: show.queue.ack(given[1:]))
    assert show.queue.drain_confirmed() == []
    show.stage.settle()
    assert show.queue.drain_confirmed() == [Confirm("port", 1, 2)]


def test_acks_confirm_in_the_order_of_publishing(show: Show) -> None:
    first, second = (
        show.stage.call(
            partial(
                show.queue.publish_delivered,
                [message(str(number), persistent=True)],
                Confirm("port", number, number),
            )
        )
        for number in (1, 2)
    )
    show.stage.call(lambda: show.queue.ack(second))
    assert show.queue.drain_confirmed() == []
    show.stage.call(lambda: show.queue.ack(first))
    assert show.queue.drain_confirmed() == [Confirm("port", 1, 1), Confirm("port", 2, 2)]


def test_acks_confirm_nothing_while_messages_wait(show: Show) -> None:
    """Publishers would only get further ahead of consumers."""
    run = [message("1", persistent=True)]
    given = show.stage.call(lambda: show.queue.publish_delivered(run, Confirm("port", 1, 1)))
    show.stage.call(lambda: show.queue.publish([message("2")], None))
    show.stage.call(lambda: show.queue.ack(given))
    assert show.queue.drain_confirmed() == []
    show.stage.settle()
    assert show.queue.drain_confirmed() == [Confirm("port", 1, 1)]


# --- restarts ------------------------------------------------------------------------------------


def test_positions_that_were_only_in_memory_are_not_given_again(show: Show) -> None:
    """After a clean stop nothing that is published later may look delivered."""
    show.publish(1, 1)
    show.publish(2, 9, persistent=False)
    show.fetch(9)
    show.publish(10, 10)
    show.stage.stop()
    show.stage.start(is_clean=True)
    show.publish(11, 14)
    show.push(q1=4)
    entries: list[Entry] = []
    while len(entries) < 5:
        answer = show.stage.call(lambda: show.queue.fetch(9, ack_required=True))
        if answer is LOADING:
            show.stage.settle()
        else:
            entries += _list(answer)
    assert [(int(e.message.body), e.redelivered) for e in entries] == [
        (number, False) for number in span(10, 14)
    ]


def test_after_an_unclean_stop_all_are_marked_for_good(show: Show) -> None:
    show.publish(1, 2)
    show.stage.settle()
    show.stage.crash()
    show.stage.start(is_clean=False)
    show.publish(3, 3)
    show.stage.stop()
    show.stage.start(is_clean=True)
    head = show.stage.call(show.queue.peek)
    assert head is LOADING
    show.stage.settle()
    entries = _list(show.stage.call(lambda: show.queue.fetch(9, ack_required=True)))
    assert [entry.redelivered for entry in entries] == [True, True, False]


def test_a_queue_started_anew_on_a_live_index(show: Show) -> None:
    """What was handed over and is not committed yet is part of the queue."""
    show.publish(1, 5)
    show.stage.settle()
    show.fetch(2)
    show.publish(6, 9)
    # Their rows in the transient file may still be there: their positions are not given again.
    show.publish(100, 105, persistent=False)
    old = show.queue
    show.stage.queue = VariableQueue(
        show._wake, old._index, old._make_transient_index, lambda: 0.0, is_clean=False
    )
    old._end()
    assert len(show.queue) == 7
    assert show.queue._next_seq == old._next_seq
    show.publish(10, 10)
    assert show.fetch(8) == span(3, 10)
    show.stage.settle()
    show.stage.check_files()


def test_counting_wrong_does_not_hang(show: Show, caplog: pytest.LogCaptureFixture) -> None:
    """A file somebody has tampered with: believe what is there."""
    show.publish(1, 9)
    show.stage.settle()
    show.stage.stop()
    show.stage.start(is_clean=True)
    show.stage.run(
        show.stage.database.call_writer(
            lambda c: c.execute("DELETE FROM message WHERE key & 0xff IN (4, 9)")
        )
    )
    show.stage.is_damaged = True
    show.queue.check_invariants = lambda: None  # type: ignore[method-assign]
    assert show.fetch(7) == [1, 2, 3, 5, 6, 7, 8]
    assert show.stage.call(lambda: show.queue.fetch(1, ack_required=True)) is EMPTY
    assert show.queue.ready_bytes == 0
    assert "not on disk" in caplog.text
    assert show.queue.lost == 2


def test_a_queue_that_lost_everything_goes_on(show: Show) -> None:
    show.publish(1, 9)
    show.stage.stop()
    show.stage.start(is_clean=True)
    show.stage.run(
        show.stage.database.call_writer(lambda c: c.execute("DELETE FROM message").fetchall())
    )
    show.stage.is_damaged = True
    show.publish(10, 11)
    assert show.fetch(2) == [10, 11]
    assert show.stage.call(lambda: show.queue.fetch(1, ack_required=True)) is EMPTY


# --- memory --------------------------------------------------------------------------------------


def test_no_limit_pages_nothing(show: Show) -> None:
    show.publish(1, 9)
    assert show.queue.memory.target_ram_count == INFINITY
    assert not show.stage.call(show.queue.reduce_memory_use)
    show.stands(q4=span(1, 9))


def test_paging_goes_on_in_steps(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_paging, "PAGING_STEP", 4)
    show.publish(1, 10)
    show.stage.settle()
    wakes = show.wakes
    show.stage.call(lambda: show.queue.set_ram_duration_target(0))
    assert show.queue.ram_count == 6
    for left in (2, 0):
        assert show.wakes == wakes + 1
        wakes = show.wakes
        show.stage.call(show.queue.resume)
        assert show.queue.ram_count == left
    assert show.wakes == wakes
    assert show.fetch(10) == span(1, 10)


def test_paging_what_cannot_be_paged_ends(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read ahead stays in memory whatever the target; that must not spin."""
    monkeypatch.setattr(queue_paging, "PAGING_STEP", 2)
    show.publish(1, 10)
    show.push(q4=10)
    assert show.stage.call(show.queue.peek) is LOADING
    show.stage.settle()
    assert show.queue.ram_count == 10
    show.queue.memory.target_ram_count = 0
    assert not show.stage.call(show.queue.reduce_memory_use)


def test_unacked_messages_leave_memory(show: Show) -> None:
    show.publish(1, 6)
    taken = _list(show.stage.call(lambda: show.queue.fetch(6, ack_required=True)))
    show.queue.memory.target_ram_count = 2
    show.stage.call(show.queue.reduce_memory_use)
    assert (list(show.queue.ram_pending), len(show.queue.disk_pending)) == ([1, 2], 4)
    show.stage.call(lambda: show.queue.requeue([entry.seq_id for entry in taken]))
    assert show.fetch(6) == span(1, 6)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def statuses() -> int:
    return sum(isinstance(thing, MsgStatus) for thing in gc.get_objects())


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(100_000, id="100,000"),
        pytest.param(1_000_000, id="1,000,000", marks=pytest.mark.slow),
    ],
)
def test_a_delta_is_four_integers(count: int) -> None:
    """A queue of ten million messages needs no more memory than one of a hundred thousand."""
    stage = Stage(lambda: None, segment_size=queue_state.SEGMENT_SIZE)
    queue = stage.queue
    queue.memory.target_ram_count = 0
    # Looking at everything after each turn would take hours.
    queue.check_invariants = lambda: None  # type: ignore[method-assign]
    gc.collect()
    before = resident_bytes()
    for _ in range(count // 2_000):
        publish_run(stage, 2_000)
    after = resident_bytes()
    assert len(queue) == count
    assert queue.delta.count > count - 40_000
    assert statuses() < 50_000
    assert after - before < 30 << 20
    del queue.check_invariants
    queue.check_invariants()
    stage.close()


def publish_run(stage: Stage, count: int) -> None:
    run = [message("x" * 20, persistent=True) for _ in range(count)]
    stage.call(lambda: stage.queue.publish(run, None))
    stage.call(stage.queue.resume)
    stage.settle()
