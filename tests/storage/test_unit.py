"""Units: what several queues do together is one commit, or nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from leveret.storage import database as module
from leveret.storage.backing_queue import LOADING
from leveret.storage.commit import Batch, Operation
from leveret.storage.database import Database
from leveret.storage.message_store import MessageStore
from leveret.storage.queue_index import Counters, QueueIndex
from leveret.storage.unit import Unit, commit_in_memory
from leveret.storage.variable_queue import VariableQueue
from tests.storage.bench import message
from tests.storage.stage import EMBED_BELOW, SCHEMA, check_counters
from tests.support.commit_gate import Gate, commit_gate
from tests.support.waiting import wait_until


class Recorded:
    """A part that notes what becomes of it."""

    def __init__(self) -> None:
        self.is_void = False
        self.seen: list[str] = []

    def gather(self, batch: Batch) -> None:
        self.seen.append("begun")

    def committed(self) -> None:
        self.seen.append("committed")

    def voided(self) -> None:
        self.seen.append("voided")


class Ledger:
    """A unit that is put into a list, and what is heard of its end."""

    def __init__(self) -> None:
        self.put: list[Operation] = []
        self.ended: list[bool] = []
        self.unit = Unit(self.put.append, self.ended.append)

    def ask(self, queues: int) -> list[Recorded]:
        for _ in range(queues):
            self.unit.expect()
        self.unit.begin()
        return [Recorded() for _ in range(queues)]

    def commit(self) -> None:
        [operation] = self.put
        commit_in_memory(operation)


# --- who takes part ------------------------------------------------------------------------------


def test_it_is_put_when_the_last_has_joined() -> None:
    ledger = Ledger()
    first, second = ledger.ask(2)
    ledger.unit.join(first)
    assert ledger.put == []
    ledger.unit.join(second)
    assert ledger.put == [ledger.unit]
    assert first.seen == second.seen == [], "it is on its way, and nothing has happened"
    ledger.commit()
    assert first.seen == second.seen == ["begun", "committed"]
    assert ledger.ended == [True]


def test_who_answers_before_all_were_asked_does_not_end_it() -> None:
    ledger = Ledger()
    ledger.unit.expect()
    ledger.unit.join(Recorded())
    assert ledger.put == []
    ledger.unit.begin()
    assert ledger.put == [ledger.unit]


def test_without_anybody_it_is_committed() -> None:
    ledger = Ledger()
    ledger.ask(0)
    ledger.commit()
    assert ledger.ended == [True]


@pytest.mark.parametrize("is_last", [False, True])
def test_who_refuses_makes_it_void_for_all(is_last: bool) -> None:
    """When all have answered: until then nobody knows who has reserved something."""
    ledger = Ledger()
    part, _ = ledger.ask(2)
    answers = [lambda: ledger.unit.join(part), ledger.unit.refuse]
    for answer in answers if is_last else reversed(answers):
        assert ledger.ended == []
        answer()
    assert ledger.put == []
    assert part.seen == ["voided"]
    assert ledger.ended == [False]


def test_who_is_left_out_stops_nobody() -> None:
    ledger = Ledger()
    part, _ = ledger.ask(2)
    ledger.unit.leave_out()
    ledger.unit.join(part)
    ledger.commit()
    assert part.seen == ["begun", "committed"]
    assert ledger.ended == [True]


def test_withdrawn_before_all_have_answered() -> None:
    ledger = Ledger()
    part, late = ledger.ask(2)
    ledger.unit.join(part)
    ledger.unit.withdraw()
    assert part.seen == [], "who has not answered may still reserve something"
    ledger.unit.join(late)
    assert part.seen == late.seen == ["voided"]
    assert ledger.ended == [False]


def test_withdrawn_on_its_way_to_the_disk() -> None:
    ledger = Ledger()
    [part] = ledger.ask(1)
    ledger.unit.join(part)
    ledger.unit.withdraw()
    ledger.commit()
    assert part.seen == ["voided"]
    assert ledger.ended == [False]


def test_withdrawn_when_the_commit_has_begun() -> None:
    """Too late: it may be on disk already."""
    ledger = Ledger()
    [part] = ledger.ask(1)
    ledger.unit.join(part)
    batch = Batch()
    ledger.unit.gather(batch)
    ledger.unit.withdraw()
    for call in batch.after:
        call()
    assert part.seen == ["begun", "committed"]
    assert ledger.ended == [True]


def test_a_part_that_became_void_makes_it_void_for_all() -> None:
    """No part is begun, not even those before it."""
    ledger = Ledger()
    first, second = ledger.ask(2)
    ledger.unit.join(first)
    ledger.unit.join(second)
    second.is_void = True
    ledger.commit()
    assert first.seen == second.seen == ["voided"]
    assert ledger.ended == [False]


# --- on disk -------------------------------------------------------------------------------------


class StoredPart:
    """A part in a variable queue, without the actor between them."""

    is_void = False

    def __init__(self, queue: VariableQueue, bodies: list[str], settled: list[int]) -> None:
        runs = [([message(body, persistent=True) for body in bodies], None)] if bodies else []
        self._prepared = queue.prepare(runs, settled)

    def gather(self, batch: Batch) -> None:
        self._prepared.gather(batch)

    def committed(self) -> None:
        self._prepared.commit()

    def voided(self) -> None:
        raise AssertionError("nobody has made it void")


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    async def at_once(seconds: float) -> None:
        pass

    opened = Database(tmp_path / "vhost.db", schema=SCHEMA, synchronous="OFF", sleep=at_once)
    yield opened
    await opened.abandon()


@pytest.fixture
def gate() -> Iterator[Gate]:
    with commit_gate() as gate:
        yield gate


@pytest.fixture
def queues(database: Database) -> list[VariableQueue]:
    store = MessageStore(EMBED_BELOW)

    def transient() -> QueueIndex:
        raise AssertionError("nothing is paged out")

    return [
        VariableQueue(
            lambda: None,
            QueueIndex(database, store, queue_id, Counters()),
            transient,
            lambda: 0.0,
        )
        for queue_id in (1, 2, 3)
    ]


def put(database: Database, *parts: StoredPart) -> list[bool]:
    ended: list[bool] = []
    unit = Unit(database.put, ended.append)
    for part in parts:
        unit.expect()
        unit.join(part)
    unit.begin()
    return ended


async def on_disk(database: Database) -> list[tuple[int, str]]:
    """Queue and body, in order."""
    rows: list[Any] = await database.read(
        lambda connection: connection.execute(
            "SELECT m.key >> 40, coalesce(m.body, b.body) FROM message m"
            " LEFT JOIN body b ON b.id = m.body_id ORDER BY m.key"
        ).fetchall()
    )
    await database.read(
        lambda connection: check_counters(lambda sql: connection.execute(sql).fetchall())
    )
    return [(queue, body.decode()) for queue, body in rows]


async def test_it_is_one_commit(
    database: Database, gate: Gate, queues: list[VariableQueue]
) -> None:
    first, second, third = queues
    [seq_id] = first.publish_delivered([message("old", persistent=True)], None)
    await database.wait_committed()
    gate.commits.clear()
    gate.shut()
    ended = put(
        database,
        StoredPart(first, ["a"], [seq_id]),
        StoredPart(second, ["b", "one with a body of its own"], []),
        StoredPart(third, ["one with a body of its own"], []),
    )
    await wait_until(lambda: gate.commits)
    assert not ended
    assert [len(queue) for queue in queues] == [0, 0, 0], "not seen before it is on disk"
    assert first.depth() == 1
    assert await on_disk(database) == [(1, "old")]
    gate.open()
    await wait_until(lambda: ended)
    assert ended == [True]
    assert len(gate.commits) == 1
    assert [len(queue) for queue in queues] == [1, 2, 1]
    assert first.depth() == 1
    assert await on_disk(database) == [
        (1, "a"),
        (2, "b"),
        (2, "one with a body of its own"),
        (3, "one with a body of its own"),
    ]


async def test_what_is_settled_may_have_come_with_the_same_commit(
    database: Database, gate: Gate, queues: list[VariableQueue]
) -> None:
    """Published, delivered and settled while another commit ran."""
    gate.shut()
    queues[1].publish([message("before", persistent=True)], None)
    await wait_until(lambda: gate.commits)
    bodies = ["small", "one with a body of its own"]
    given = queues[0].publish_delivered([message(body, persistent=True) for body in bodies], None)
    ended = put(database, StoredPart(queues[0], ["new"], list(given)))
    gate.open()
    await wait_until(lambda: ended)
    assert len(gate.commits) == 2
    assert await on_disk(database) == [(1, "new"), (2, "before")]
    assert queues[0].depth() == 1


async def test_the_cap_of_a_commit_does_not_split_it(
    database: Database,
    gate: Gate,
    queues: list[VariableQueue],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "COMMIT_ROWS", 2)
    ended = put(database, *(StoredPart(queue, list("abcde"), []) for queue in queues))
    behind = put(database, StoredPart(queues[0], ["next"], []))
    await wait_until(lambda: behind)
    assert (ended, behind) == ([True], [True])
    assert [batch.rows for batch in gate.commits] == [15, 1]


async def test_a_commit_that_fails_is_tried_again_as_a_whole(
    database: Database, gate: Gate, queues: list[VariableQueue]
) -> None:
    await database.open()
    gate.failures = [OSError("disk full"), OSError("disk full")]
    ended = put(database, *(StoredPart(queue, ["a"], []) for queue in queues))
    await wait_until(lambda: ended)
    assert ended == [True], "told once"
    first, *again = gate.commits
    assert again == [first, first]
    assert await on_disk(database) == [(1, "a"), (2, "a"), (3, "a")]
    assert [len(queue) for queue in queues] == [1, 1, 1]


async def test_positions_are_those_of_the_commit(
    database: Database, gate: Gate, queues: list[VariableQueue]
) -> None:
    """What was published between the question and the commit stands before it."""
    queue = queues[0]
    part = StoredPart(queue, ["of the unit"], [])
    queue.publish([message("before", persistent=True)], None)
    ended = put(database, part)
    await wait_until(lambda: ended)
    queue.publish([message("after", persistent=True)], None)
    queue.check_invariants()
    entries = queue.fetch(10, ack_required=True)
    assert isinstance(entries, list)
    assert [entry.message.body for entry in entries] == [b"before", b"of the unit", b"after"]
    assert [entry.seq_id for entry in entries] == [0, 1, 2]
    assert not any(entry.redelivered for entry in entries)


async def test_what_is_on_disk_alone_is_read_while_a_unit_is_committed(
    database: Database, gate: Gate, queues: list[VariableQueue]
) -> None:
    """Consumers get what was there before: nobody waits for the commit but who must."""
    queue = queues[0]
    [held] = queue.publish_delivered([message("0", persistent=True)], None)
    queue.publish([message(body, persistent=True) for body in ("1", "2")], None)
    queue.set_lazy(is_lazy=True)
    await database.wait_committed()
    gate.commits.clear()
    gate.shut()
    ended = put(database, StoredPart(queue, ["3"], [held]))
    await wait_until(lambda: gate.commits)
    assert queue.fetch(2, ack_required=True) is LOADING
    await wait_until(lambda: queue.peek() is not LOADING)
    entries = queue.fetch(2, ack_required=True)
    assert isinstance(entries, list)
    assert [entry.message.body for entry in entries] == [b"1", b"2"]
    assert not ended
    gate.open()
    await wait_until(lambda: ended)
    queue.check_invariants()
    await wait_until(lambda: queue.peek() is not LOADING)
    assert await on_disk(database) == [(1, "1"), (1, "2"), (1, "3")]
