"""Every BackingQueue against a plain list, through any sequence of operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from leveret.protocol.message import Message
from leveret.storage.backing_queue import EMPTY, LOADING, Confirm, Entry
from tests.storage.bench import Bench, UnitOfOne


@dataclass(eq=False)
class Slot:
    """A message in the model: a list of these, in order of publication, is the queue."""

    body: str
    expires_at_ms: int | None
    is_pending: bool
    seq_id: int | None = None
    redelivered: bool = False
    # Pending, and settled by the unit that was prepared: by nobody else.
    is_reserved: bool = False


runs = st.lists(st.sampled_from(["", "a", "bb", "cccc"]), min_size=1, max_size=6)
expiries = st.one_of(st.none(), st.integers(0, 5))
limits = st.integers(1, 8)
sizes = st.one_of(st.none(), st.integers(0, 10))


class BackingQueueModel(RuleBasedStateMachine):
    def __init__(self, make_bench: Callable[[], Bench]) -> None:
        super().__init__()
        self.bench = make_bench()
        self.queue = self.bench.queue
        self.slots: list[Slot] = []
        # LOADING was answered: it is kept open over other operations until ``loaded``.
        self.wakes_due: int | None = None
        self.published = 0
        self.confirmed: list[int] = []
        # What was prepared and is neither committed nor dropped, and what it publishes.
        self.unit: UnitOfOne | None = None
        self.fresh: list[Slot] = []

    def new_body(self, body: str) -> str:
        return body

    def messages(self, bodies: list[str]) -> list[Message]:
        return [self.bench.message(body) for body in bodies]

    @property
    def ready(self) -> list[Slot]:
        return [slot for slot in self.slots if not slot.is_pending]

    @property
    def pending(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.is_pending]

    @property
    def reserved(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.is_reserved]

    @property
    def is_committing(self) -> bool:
        return self.unit is not None and self.unit.is_begun

    def confirm(self, count: int) -> Confirm:
        first = self.published + 1
        self.published += count
        return Confirm(self, first, self.published)

    def is_loading(self, answer: object) -> bool:
        if answer is not LOADING:
            return False
        assert self.ready, "an empty queue has nothing to load"
        if self.wakes_due is None:
            self.wakes_due = self.bench.wakes + 1
        else:
            assert not self.bench.gives_all, "LOADING again without a wake in between"
        return True

    def given(self, expected: list[Slot], count: int) -> list[Slot]:
        """What a queue gives of all it could give: all, or less but not nothing."""
        assert count <= len(expected)
        if self.bench.gives_all:
            assert count == len(expected)
        else:
            assert count or not expected
        return expected[:count]

    def check_taken(self, entries: list[Entry], expected: list[Slot]) -> None:
        for entry, slot in zip(entries, expected, strict=True):
            assert entry.message.body.decode() == slot.body
            assert entry.redelivered == slot.redelivered
            assert entry.expires_at_ms == slot.expires_at_ms
            assert slot.seq_id in (None, entry.seq_id), "a message keeps its id"
            slot.seq_id = entry.seq_id

    def fitting(self, limit: int, max_bytes: int | None) -> list[Slot]:
        taken: list[Slot] = []
        for slot in self.ready[:limit]:
            size = sum(len(other.body) for other in taken) + len(slot.body)
            if taken and max_bytes is not None and size > max_bytes:
                break
            taken.append(slot)
        return taken

    # --- rules -----------------------------------------------------------------------------

    @precondition(lambda self: not self.is_committing)
    @rule(bodies=runs, expiry=expiries)
    def publish(self, bodies: list[str], expiry: int | None) -> None:
        bodies = [self.new_body(body) for body in bodies]
        self.queue.publish(self.messages(bodies), self.confirm(len(bodies)), expiry)
        self.slots += [Slot(body, expiry, is_pending=False) for body in bodies]

    @precondition(lambda self: not self.ready and not self.is_committing)  # or it would overtake
    @rule(bodies=runs, expiry=expiries)
    def publish_delivered(self, bodies: list[str], expiry: int | None) -> None:
        bodies = [self.new_body(body) for body in bodies]
        given = self.queue.publish_delivered(
            self.messages(bodies), self.confirm(len(bodies)), expiry
        )
        self.slots += [
            Slot(body, expiry, is_pending=True, seq_id=seq_id)
            for body, seq_id in zip(bodies, given, strict=True)
        ]

    @rule(bodies=runs)
    def discard(self, bodies: list[str]) -> None:
        self.queue.discard(self.messages(bodies), self.confirm(len(bodies)))

    @rule(limit=limits, ack_required=st.booleans(), max_bytes=sizes)
    def fetch(self, limit: int, ack_required: bool, max_bytes: int | None) -> None:
        answer = self.queue.fetch(limit, ack_required=ack_required, max_bytes=max_bytes)
        if self.is_loading(answer):
            return
        if not self.ready:
            assert answer is EMPTY
            return
        assert isinstance(answer, list)
        expected = self.given(self.fitting(limit, max_bytes), len(answer))
        self.check_taken(answer, expected)
        for slot in expected:
            slot.is_pending = True
            if not ack_required:
                self.remove(slot)

    @rule(limit=limits, max_bytes=sizes, now=st.integers(0, 5))
    def fetch_expired(self, limit: int, max_bytes: int | None, now: int) -> None:
        answer = self.queue.fetch_while(
            lambda entry: entry.expires_at_ms is not None and entry.expires_at_ms <= now,
            limit,
            max_bytes=max_bytes,
        )
        if self.is_loading(answer):
            return
        assert isinstance(answer, list)
        expected: list[Slot] = []
        for slot in self.fitting(limit, max_bytes):
            if slot.expires_at_ms is None or slot.expires_at_ms > now:
                break
            expected.append(slot)
        expected = self.given(expected, len(answer))
        self.check_taken(answer, expected)
        for slot in expected:
            slot.is_pending = True

    @rule(now=st.integers(0, 5))
    def drop_expired(self, now: int) -> None:
        answer = self.queue.drop_while(
            lambda entry: entry.expires_at_ms is not None and entry.expires_at_ms <= now
        )
        if self.is_loading(answer):
            return
        assert isinstance(answer, int)
        expired: list[Slot] = []
        for slot in self.ready:
            if slot.expires_at_ms is None or slot.expires_at_ms > now:
                break
            expired.append(slot)
        for slot in self.given(expired, answer):
            self.remove(slot)

    @rule(count=limits)
    def drop(self, count: int) -> None:
        answer = self.queue.drop(count)
        if self.is_loading(answer):
            return
        assert isinstance(answer, int)
        for slot in self.given(self.ready[:count], answer):
            self.remove(slot)

    @rule()
    def peek(self) -> None:
        answer = self.queue.peek()
        if self.is_loading(answer):
            return
        if self.ready:
            assert isinstance(answer, Entry)
            self.check_taken([answer], self.ready[:1])
        else:
            assert answer is EMPTY

    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        chosen = self.choose_pending(data)
        self.queue.ack([slot.seq_id for slot in chosen if slot.seq_id is not None])
        for slot in chosen:
            self.remove(slot)

    @rule(data=st.data())
    def requeue(self, data: st.DataObject) -> None:
        chosen = self.choose_pending(data)
        self.queue.requeue([slot.seq_id for slot in chosen if slot.seq_id is not None])
        for slot in chosen:
            slot.is_pending = False
            slot.redelivered = True

    @precondition(lambda self: self.unit is None)
    @rule(bodies=st.one_of(st.just([]), runs), expiry=expiries, data=st.data())
    def prepare(self, bodies: list[str], expiry: int | None, data: st.DataObject) -> None:
        bodies = [self.new_body(body) for body in bodies]
        chosen = self.choose_pending(data)
        self.fresh = [Slot(body, expiry, is_pending=False) for body in bodies]
        for slot in chosen:
            slot.is_reserved = True
        prepared = self.queue.prepare(
            [([self.unit_message(body) for body in bodies], expiry)] if bodies else [],
            [slot.seq_id for slot in chosen if slot.seq_id is not None],
        )
        self.unit = UnitOfOne(prepared, self.unit_begun, self.unit_committed)

    @precondition(lambda self: self.unit is not None and not self.unit.is_begun)
    @rule()
    def begin_unit(self) -> None:
        assert self.unit is not None
        self.bench.begin(self.unit)

    @precondition(lambda self: self.is_committing)
    @rule()
    def finish_unit(self) -> None:
        assert self.unit is not None
        self.bench.finish(self.unit)

    @precondition(lambda self: self.unit is not None and not self.unit.is_begun)
    @rule()
    def drop_unit(self) -> None:
        """It was void: as if nobody had asked."""
        self.forget_unit()

    def unit_message(self, body: str) -> Message:
        return self.bench.message(body)

    def unit_begun(self) -> None:
        """Its messages have their positions."""

    def unit_committed(self) -> None:
        for slot in self.reserved:
            self.remove(slot)
        self.slots += self.fresh
        self.forget_unit()

    def forget_unit(self) -> None:
        self.unit = None
        self.fresh = []
        for slot in self.reserved:
            slot.is_reserved = False

    @rule(strangers=st.lists(st.integers(10_000, 10_010)), again=st.booleans())
    def settle_strangers(self, strangers: list[int], again: bool) -> None:
        """Ids that were never given, and of messages that are ready, are ignored."""
        ready = [slot.seq_id for slot in self.ready if slot.seq_id is not None]
        (self.queue.requeue if again else self.queue.ack)(strangers + ready)

    @rule()
    def purge(self) -> None:
        assert self.queue.purge() == len(self.ready)
        for slot in self.ready:
            self.remove(slot)

    @rule()
    def loaded(self) -> None:
        """What was being read is there: the wake comes, and the next question is answered."""
        wakes = self.bench.wakes
        self.bench.run_scheduled()
        if self.wakes_due is None:
            return
        # A queue that writes also wakes for confirms.
        assert self.bench.wakes >= self.wakes_due
        assert self.bench.wakes == self.wakes_due or not self.bench.gives_all
        # Where it came before, the queue may be another by now.
        is_new = wakes < self.wakes_due
        self.wakes_due = None
        if is_new:
            assert self.queue.peek() is not LOADING

    # --- what always holds -----------------------------------------------------------------

    @invariant()
    def counts_agree(self) -> None:
        ready = self.ready
        assert len(self.queue) == len(ready)
        assert self.queue.is_empty() == (not ready)
        assert self.queue.depth() == len(self.slots)
        assert self.queue.ready_bytes == sum(len(slot.body) for slot in ready)

    @invariant()
    def confirms_come_once(self) -> None:
        for part in self.queue.drain_confirmed():
            assert part.port is self
            self.confirmed += range(part.first, part.last + 1)
        assert len(self.confirmed) == len(set(self.confirmed))

    def teardown(self) -> None:
        """In the end everything can be had, in order, and all of it was confirmed."""
        if self.is_committing:
            self.finish_unit()
        self.bench.run_scheduled()
        self.confirms_come_once()
        assert sorted(self.confirmed) == list(range(1, self.published + 1))
        pending = [slot.seq_id for slot in self.pending if slot.seq_id is not None]
        self.queue.requeue(pending)
        for slot in self.pending:
            slot.is_pending, slot.redelivered = False, True
        left = [(slot.body, slot.redelivered) for slot in self.ready]
        assert [tuple(seen) for seen in self.bench.all_ready()] == left

    def choose_pending(self, data: st.DataObject) -> list[Slot]:
        pending = [slot for slot in self.pending if not slot.is_reserved]
        if not pending:
            return []
        places = data.draw(st.lists(st.integers(0, len(pending) - 1), unique=True))
        return [pending[place] for place in places]

    def remove(self, slot: Slot) -> None:
        self.slots = [other for other in self.slots if other is not slot]


def test_behaves_like_a_list(make_bench: Callable[[], Bench]) -> None:
    class Model(BackingQueueModel):
        def __init__(self) -> None:
            super().__init__(make_bench)

    run_state_machine_as_test(
        Model,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
