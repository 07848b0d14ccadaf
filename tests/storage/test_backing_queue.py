"""What every BackingQueue does; runs once for each implementation in bench.py."""

from __future__ import annotations

from functools import partial

import pytest

from leveret.protocol.message import Message
from leveret.storage.backing_queue import EMPTY, Confirm, Entry
from tests.storage.bench import Bench, Seen, UnitOfOne


def ids(entries: list[Entry]) -> list[int]:
    return [entry.seq_id for entry in entries]


def bodies(entries: list[Entry]) -> str:
    return "".join(entry.message.body.decode() for entry in entries)


# --- order -------------------------------------------------------------------------------------


def test_first_in_first_out(bench: Bench) -> None:
    bench.publish("a", "b")
    bench.publish("c")
    assert bench.all_ready() == [Seen("a"), Seen("b"), Seen("c")]


def test_seq_ids_are_in_order(bench: Bench) -> None:
    """Also over several calls: a message keeps the one it got."""
    given = [*bench.publish_delivered("a", "b", "c"), *bench.publish_delivered("d")]
    assert given == sorted(set(given))
    bench.publish("e")
    bench.queue.requeue(given)
    taken = ids(bench.take())
    assert taken[:-1] == given
    assert taken[-1] > given[-1]


def test_fetch_takes_no_more_than_the_limit(bench: Bench) -> None:
    bench.publish("a", "b", "c")
    assert bodies(bench.take(2)) == "ab"
    assert bodies(bench.take(2)) == "c"


def test_an_empty_queue_says_so(bench: Bench) -> None:
    assert bench.queue.fetch(1, ack_required=True) is EMPTY
    bench.publish("a")
    bench.take()
    assert bench.queue.fetch(1, ack_required=True) is EMPTY


@pytest.mark.parametrize(
    ("max_bytes", "taken"),
    [
        pytest.param(0, "aa", id="one-always-comes"),
        pytest.param(3, "aa", id="a-body-that-does-not-fit-whole-waits"),
        pytest.param(4, "aabb", id="exactly"),
        pytest.param(100, "aabbcc", id="all"),
    ],
)
def test_fetch_stays_within_max_bytes(bench: Bench, max_bytes: int, taken: str) -> None:
    bench.publish("aa", "bb", "cc")
    assert bodies(bench.take(max_bytes=max_bytes)) == taken
    assert bench.queue.ready_bytes == 6 - len(taken)


def test_the_message_itself_comes_back(bench: Bench) -> None:
    published = bench.message("a")
    bench.queue.publish([published], None)
    [entry] = bench.take()
    assert entry.message.body == published.body
    assert entry.message.envelope == published.envelope
    assert entry.message.header == published.header


# --- requeue -----------------------------------------------------------------------------------


def test_requeued_messages_go_back_to_the_head(bench: Bench) -> None:
    bench.publish("a", "b", "c")
    bench.queue.requeue(ids(bench.take(2)))
    assert bench.all_ready() == [Seen("a", True), Seen("b", True), Seen("c")]


def test_requeue_between_others(bench: Bench) -> None:
    bench.publish("a", "b", "c", "d", "e")
    a, b, c, d = ids(bench.take(4))
    bench.queue.requeue([a, c])
    bench.queue.requeue([d, b])
    assert bench.all_ready() == [
        Seen("a", True),
        Seen("b", True),
        Seen("c", True),
        Seen("d", True),
        Seen("e"),
    ]


def test_requeue_behind_all_others(bench: Bench) -> None:
    """A message that went straight to a consumer may be younger than all that wait."""
    older = bench.publish_delivered("a")
    younger = bench.publish_delivered("b", "c")
    bench.queue.requeue(older)
    bench.queue.requeue(younger[1:])
    bench.queue.requeue(younger[:1])
    assert bench.all_ready() == [Seen("a", True), Seen("b", True), Seen("c", True)]


def test_requeue_goes_before_what_was_published_later(bench: Bench) -> None:
    given = bench.publish_delivered("a")
    bench.publish("b")
    bench.queue.requeue(given)
    assert bench.all_ready() == [Seen("a", True), Seen("b")]


def test_single_requeues_in_any_order(bench: Bench) -> None:
    bench.publish(*"abcdefghij")
    taken = ids(bench.take(8))
    for at in (3, 7, 0, 5, 1, 6, 2, 4):
        bench.queue.requeue([taken[at]])
    assert "".join(seen.body for seen in bench.all_ready()) == "abcdefghij"


def test_redelivered_stays(bench: Bench) -> None:
    bench.publish("a")
    for _ in range(2):
        bench.queue.requeue(ids(bench.take()))
    [entry] = bench.take()
    assert entry.redelivered


def test_redelivered_is_not_inherited(bench: Bench) -> None:
    bench.publish("a")
    bench.queue.requeue(ids(bench.take()))
    bench.queue.ack(ids(bench.take()))
    bench.publish("b")
    assert bench.all_ready() == [Seen("b")]


def test_requeue_ignores_what_is_not_pending(bench: Bench) -> None:
    bench.publish("a", "b")
    [a] = ids(bench.take(1))
    bench.queue.requeue([a, a, a + 1, a + 1000])
    bench.queue.requeue([a])
    assert bench.all_ready() == [Seen("a", True), Seen("b")]
    assert bench.queue.depth() == 0


# --- ack, drop, purge --------------------------------------------------------------------------


def test_ack_forgets(bench: Bench) -> None:
    bench.publish("a", "b")
    taken = ids(bench.take())
    bench.queue.ack(taken[:1])
    bench.queue.requeue(taken)
    assert bench.all_ready() == [Seen("b", True)]


def test_ack_ignores_what_is_not_pending(bench: Bench) -> None:
    bench.publish("a", "b")
    [a] = ids(bench.take(1))
    bench.queue.ack([a, a, a + 1, a + 1000])
    assert bench.all_ready() == [Seen("b")]
    assert bench.queue.depth() == 0


def test_without_acks_nothing_is_pending(bench: Bench) -> None:
    bench.publish("a")
    bench.queue.requeue(ids(bench.take_no_ack()))
    assert bench.queue.depth() == 0


def test_purge_leaves_pending_messages(bench: Bench) -> None:
    bench.publish("a", "b", "c")
    taken = ids(bench.take(1))
    assert bench.queue.purge() == 2
    assert bench.queue.purge() == 0
    bench.queue.requeue(taken)
    assert bench.all_ready() == [Seen("a", True)]


def test_drop_takes_from_the_head(bench: Bench) -> None:
    bench.publish("a", "b", "c")
    assert bench.drop(2) == 2
    assert bench.drop(2) == 1
    assert bench.drop(2) == 0
    assert bench.queue.depth() == 0


def test_drop_counts_no_pending_messages(bench: Bench) -> None:
    bench.publish("a", "b")
    taken = ids(bench.take(1))
    assert bench.drop(5) == 1
    bench.queue.requeue(taken)
    assert bench.all_ready() == [Seen("a", True)]


def test_drop_while_stops_at_the_first_that_stays(bench: Bench) -> None:
    bench.publish("x", "x", "a", "x")
    assert bench.drop_while(lambda entry: entry.message.body == b"x") == 2
    assert bench.all_ready() == [Seen("a"), Seen("x")]


def test_what_is_dropped_is_seen_as_far_as_it_is_in_memory(bench: Bench) -> None:
    for by_predicate in (False, True):
        bench.publish("a", "b", "c")
        seen: list[Message] = []
        drop = partial(bench.queue.drop, 3, seen)
        if by_predicate:
            drop = partial(bench.queue.drop_while, lambda entry: True, seen)
        dropped = bench.settled(drop)
        assert isinstance(dropped, int)
        assert dropped
        shown = [message.body.decode() for message in seen]
        assert shown == [body for body in "abc"[:dropped] if body in shown]
        bench.drop(3)


def test_what_is_in_memory_can_be_looked_at(bench: Bench) -> None:
    bench.publish("a", "b", "c")
    taken = bench.take(1)
    [seq_id] = ids(taken)
    held = bench.queue.pending_in_memory([seq_id, 1 << 40])
    assert held in ({}, {seq_id: taken[0].message})
    seen = [message.body.decode() for message in bench.queue.ready_in_memory(1)]
    assert seen in ([], ["b"])
    assert len(bench.queue) == 2


def test_fetch_while_makes_pending(bench: Bench) -> None:
    bench.publish("x", "x", "a")
    taken = bench.take_while(lambda entry: entry.message.body == b"x")
    assert bodies(taken) == "xx"
    assert len(bench.queue) == 1
    bench.queue.requeue(ids(taken))
    assert bench.all_ready() == [Seen("x", True), Seen("x", True), Seen("a")]


def test_fetch_while_is_bounded(bench: Bench) -> None:
    bench.publish("aa", "bb", "cc")
    assert bodies(bench.take_while(lambda entry: True, 1)) == "aa"
    assert bodies(bench.take_while(lambda entry: True, max_bytes=1)) == "bb"
    assert bench.take_while(lambda entry: False) == []
    assert len(bench.queue) == 1


def test_predicates_see_what_fetch_would_give(bench: Bench) -> None:
    bench.queue.publish([bench.message("a")], None, 7)
    bench.publish("b")
    bench.queue.requeue(ids(bench.take(1)))
    shown: list[Entry] = []

    def look(entry: Entry) -> bool:
        shown.append(entry)
        return True

    taken = bench.take_while(look)
    assert shown == taken
    assert [(entry.redelivered, entry.expires_at_ms) for entry in taken] == [
        (True, 7),
        (False, None),
    ]


# --- expiry ------------------------------------------------------------------------------------


def test_expiry_is_kept(bench: Bench) -> None:
    bench.queue.publish([bench.message("a"), bench.message("b")], None, 1000)
    bench.publish("c")
    assert [entry.expires_at_ms for entry in bench.take()] == [1000, 1000, None]


def test_requeue_keeps_the_expiry(bench: Bench) -> None:
    given = bench.queue.publish_delivered([bench.message("a")], None, 1000)
    bench.queue.requeue(given)
    [entry] = bench.take()
    assert entry.expires_at_ms == 1000


def test_drop_while_expired(bench: Bench) -> None:
    for expiry in (10, 30, 20):
        bench.queue.publish([bench.message(str(expiry))], None, expiry)

    def is_expired(entry: Entry) -> bool:
        return entry.expires_at_ms is not None and entry.expires_at_ms <= 20

    assert bench.drop_while(is_expired) == 1
    assert bench.all_ready() == [Seen("30"), Seen("20")]


def test_peek_leaves_the_head(bench: Bench) -> None:
    assert bench.peek() is EMPTY
    bench.queue.publish([bench.message("a")], None, 5)
    head = bench.peek()
    assert isinstance(head, Entry)
    assert (head.message.body, head.redelivered, head.expires_at_ms) == (b"a", False, 5)
    assert bench.take() == [head]


# --- counts ------------------------------------------------------------------------------------


def test_counts(bench: Bench) -> None:
    queue = bench.queue
    bench.publish("a", "bb", "ccc")
    assert (len(queue), queue.is_empty(), queue.depth(), queue.ready_bytes) == (3, False, 3, 6)
    taken = ids(bench.take(2))
    assert (len(queue), queue.is_empty(), queue.depth(), queue.ready_bytes) == (1, False, 3, 3)
    queue.requeue(taken[:1])
    queue.ack(taken[1:])
    assert (len(queue), queue.is_empty(), queue.depth(), queue.ready_bytes) == (2, False, 2, 4)
    bench.drop(1)
    assert (len(queue), queue.is_empty(), queue.depth(), queue.ready_bytes) == (1, False, 1, 3)
    queue.purge()
    assert (len(queue), queue.is_empty(), queue.depth(), queue.ready_bytes) == (0, True, 0, 0)


def test_statistics_agree_with_the_counts(bench: Bench) -> None:
    bench.publish("a", "bb", "ccc")
    bench.take(1)
    statistics = bench.queue.statistics()
    assert statistics["len"] == 2
    assert statistics["pending_acks"] == 1
    assert statistics["message_bytes_ready"] == 5
    assert statistics["message_bytes_unacknowledged"] == 1


def test_nothing_is_a_duplicate(bench: Bench) -> None:
    published = bench.message("a")
    bench.queue.publish([published], None)
    assert not bench.queue.is_duplicate(published)


# --- confirms ----------------------------------------------------------------------------------


def confirmed(bench: Bench) -> list[tuple[object, int]]:
    """Single numbers, since a confirm may come back in parts."""
    bench.run_scheduled()
    return [
        (part.port, number)
        for part in bench.queue.drain_confirmed()
        for number in range(part.first, part.last + 1)
    ]


def test_every_number_is_confirmed_once(bench: Bench) -> None:
    one, two = object(), object()
    bench.publish("a", "b", confirm=Confirm(one, 1, 2))
    bench.publish("c")
    bench.publish_delivered("d", confirm=Confirm(two, 1, 1))
    bench.queue.discard([bench.message("e")], Confirm(one, 3, 3))
    assert sorted(confirmed(bench), key=lambda pair: (pair[0] is two, pair[1])) == [
        (one, 1),
        (one, 2),
        (one, 3),
        (two, 1),
    ]
    assert confirmed(bench) == []


def test_discarded_messages_are_not_kept(bench: Bench) -> None:
    bench.queue.discard([bench.message("a")], None)
    assert bench.queue.depth() == 0
    assert confirmed(bench) == []


def test_a_message_that_is_gone_is_still_confirmed(bench: Bench) -> None:
    bench.publish("a", confirm=Confirm("port", 1, 1))
    bench.queue.ack(ids(bench.take()))
    assert confirmed(bench) == [("port", 1)]


# --- units -------------------------------------------------------------------------------------


def test_nothing_of_a_unit_happens_before_its_commit_ends(bench: Bench) -> None:
    bench.publish("a", "b")
    [held] = ids(bench.take(1))
    unit = bench.prepare("c", "d", settled=[held])
    assert (len(bench.queue), bench.queue.depth()) == (1, 2)
    bench.begin(unit)
    if not unit.is_committed:
        assert (len(bench.queue), bench.queue.depth()) == (1, 2)
    bench.finish(unit)
    assert (len(bench.queue), bench.queue.depth()) == (3, 3)
    assert bench.all_ready() == [Seen("b"), Seen("c"), Seen("d")]


def test_a_unit_that_is_dropped_leaves_no_trace(bench: Bench) -> None:
    bench.publish("a")
    [held] = ids(bench.take())
    bench.prepare("c", "d", settled=[held])
    bench.publish("b")
    bench.queue.requeue([held])
    assert bench.all_ready() == [Seen("a", True), Seen("b")]


def test_what_is_published_before_a_commit_begins_comes_first(bench: Bench) -> None:
    unit = bench.prepare("b")
    bench.publish("a")
    bench.begin(unit)
    bench.finish(unit)
    bench.publish("c")
    entries = bench.take()
    assert bodies(entries) == "abc"
    assert ids(entries) == sorted(ids(entries))


def test_other_work_goes_on_while_a_unit_is_committed(bench: Bench) -> None:
    bench.publish(*"abcdef")
    a, b, c, d = ids(bench.take(4))
    unit = bench.prepare("g", "h", settled=[b, d])
    bench.begin(unit)
    bench.queue.ack([a])
    bench.queue.requeue([c])
    assert bench.drop(1) == 1
    bench.finish(unit)
    assert bench.all_ready() == [Seen("e"), Seen("f"), Seen("g"), Seen("h")]
    assert bench.queue.depth() == 0


def test_a_purge_while_a_unit_is_committed(bench: Bench) -> None:
    """What the unit brings was not there yet, and what it settles is not ready."""
    bench.publish(*"abcdef")
    held = ids(bench.take(2))
    unit = bench.prepare("g", settled=held[:1])
    bench.begin(unit)
    if not unit.is_committed:
        assert bench.queue.purge() == 4
        bench.finish(unit)
        assert bench.all_ready() == [Seen("g")]
    bench.queue.requeue(held)
    assert Seen("b", True) in bench.all_ready()


def test_what_a_unit_settles_is_off_the_disk_with_it(bench: Bench) -> None:
    """Bodies large and small; of those that are on disk at all."""
    bench.publish("a", "b" * 20, "c")
    held = ids(bench.take(2))
    unit = bench.prepare("d" * 20, settled=held)
    bench.begin(unit)
    bench.finish(unit)
    assert bodies(bench.take()) == "c" + "d" * 20
    if bench.stage is not None:
        bench.stage.check_files()
        [(rows,)] = bench.stage.rows("SELECT count(*) FROM message")
        assert rows in (0, 2)


def test_a_unit_keeps_the_expiry(bench: Bench) -> None:
    runs = [([bench.message("a")], 1000), ([bench.message("b")], None)]
    unit = UnitOfOne(bench.queue.prepare(runs, []))
    bench.begin(unit)
    bench.finish(unit)
    assert [entry.expires_at_ms for entry in bench.take()] == [1000, None]


# --- the end -----------------------------------------------------------------------------------


def test_deleting_empties(bench: Bench) -> None:
    bench.publish("a", "b")
    bench.take(1)
    bench.queue.delete_and_terminate()
    bench.run_scheduled()
    assert bench.queue.depth() == 0
    assert bench.queue.ready_bytes == 0
