"""A variable queue through any sequence of operations, page-outs, stops and crashes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test

from leveret.protocol.message import Message
from leveret.storage import queue_index, queue_paging, queue_state, variable_queue
from tests.storage.bench import Bench, message, variable
from tests.storage.stage import Stage
from tests.storage.test_backing_queue_model import BackingQueueModel, Slot

counts = st.integers(0, 6)


class VariableQueueModel(BackingQueueModel):
    """Bodies are unique; those with an "a" are transient, those with a "c" are kept apart."""

    def __init__(self, make_bench: Callable[[], Bench]) -> None:
        super().__init__(make_bench)
        assert self.bench.stage is not None
        self.stage: Stage = self.bench.stage
        # Persistent messages in order of publication, with the number of their confirm; removed
        # once it is certain that they are gone.
        self.history: dict[str, int] = {}
        # Of those: gone, but perhaps not yet on disk.
        self.going: set[str] = set()
        self.expiries: dict[str, int | None] = {}
        self.made = 0

    def new_body(self, body: str) -> str:
        self.made += 1
        return f"{self.made}{body.replace('cccc', 'c' * 12)}"

    def messages(self, bodies: list[str]) -> list[Message]:
        made = []
        for at, body in enumerate(bodies):
            persistent = "a" not in body
            if persistent:
                self.history[body] = self.published + at + 1
            made.append(message(body, persistent=persistent))
        return made

    def discard(self, bodies: list[str]) -> None:
        # Not a rule here: what is discarded is not in the history.
        raise NotImplementedError

    def remove(self, slot: Slot) -> None:
        super().remove(slot)
        self.going.add(slot.body)

    def unit_message(self, body: str) -> Message:
        return message(body, persistent="a" not in body)

    def unit_begun(self) -> None:
        """From here on they may be on disk; 0 is a number that is never confirmed."""
        self.history.update({slot.body: 0 for slot in self.fresh if "a" not in slot.body})
        self.expiries.update({slot.body: slot.expires_at_ms for slot in self.fresh})

    def unit_committed(self) -> None:
        """As good as confirmed; what was settled is off the disk, now and for ever."""
        for slot in self.fresh:
            if slot.body in self.history:
                self.published += 1
                self.confirmed.append(self.published)
                self.history[slot.body] = self.published
        settled = {slot.body for slot in self.reserved}
        super().unit_committed()
        self.going -= settled
        for body in settled & self.history.keys():
            del self.history[body]

    # --- rules -----------------------------------------------------------------------------

    @rule(turns=st.integers(1, 8))
    def turn(self, turns: int) -> None:
        """Reads and commits go a bit further."""
        for _ in range(turns):
            self.stage.turn()

    @rule(q1=counts, q4=counts, betas=counts, acks=counts)
    def page_out(self, q1: int, q4: int, betas: int, acks: int) -> None:
        self.stage.call(lambda: self.stage.queue.push_q1(q1))
        self.stage.call(lambda: self.stage.queue.push_q4(q4))
        self.stage.call(lambda: self.stage.queue.push_betas_to_deltas(betas))
        self.stage.call(lambda: self.stage.queue._limit_ram_acks(acks))

    @rule(data=st.data())
    def riddle(self, data: st.DataObject) -> None:
        """Take some, return a few of them, page those out: pending ones in a delta's range."""
        for _ in range(3):
            self.fetch(8, True, None)
            self.settle()
        self.requeue(data)
        self.page_out(6, 6, 6, 2)

    @rule(is_lazy=st.booleans())
    def set_lazy(self, is_lazy: bool) -> None:
        self.stage.call(lambda: self.stage.queue.set_lazy(is_lazy=is_lazy))

    @rule()
    def resume(self) -> None:
        """A queue that turns lazy goes on with it."""
        self.stage.call(self.stage.queue.resume)

    @rule()
    def settle(self) -> None:
        """All that was asked for is on disk."""
        self.stage.settle()
        for body in self.going & self.history.keys():
            del self.history[body]
        self.going.clear()
        there = [body for _, body in self.on_disk()]
        assert there == [slot.body for slot in self.slots if slot.body in self.history]

    @rule(is_lazy=st.booleans())
    def restart(self, is_lazy: bool) -> None:
        """Stopped in order: everything persistent is there, marked if it was delivered."""
        self.stage.is_lazy = is_lazy
        if self.unit is not None:
            self.unit.is_orphan = True
        self.stage.stop()
        self.stage.start(is_clean=True)
        self.came_back([slot for slot in self.slots if slot.body in self.history])
        for slot in self.slots:
            slot.redelivered = slot.redelivered or slot.is_pending
            slot.is_pending = False
        self.history = {slot.body: self.history[slot.body] for slot in self.slots}

    @rule(is_lazy=st.booleans())
    def crash(self, is_lazy: bool) -> None:
        """Whatever was committed is there, marked as delivered."""
        self.confirms_come_once()
        confirmed = set(self.confirmed)
        self.stage.is_lazy = is_lazy
        self.stage.crash()
        self.stage.start(is_clean=False)
        there = self.on_disk()
        bodies = [body for _, body in there]
        if self.is_committing:
            self.check_unit(bodies)
        order = list(self.history)
        assert bodies == sorted(bodies, key=order.index), "order"
        for body, number in self.history.items():
            assert body in bodies or body in self.going or number not in confirmed, "lost"
        self.came_back(
            [Slot(body, self.expiries[body], False, seq_id, True) for seq_id, body in there]
        )
        self.history = {body: self.history[body] for body in bodies}

    # --- what it needs ---------------------------------------------------------------------

    def check_unit(self, bodies: list[str]) -> None:
        """All of what was being committed happened, or nothing."""
        fresh = {slot.body for slot in self.fresh} & self.history.keys()
        settled = {slot.body for slot in self.reserved}
        is_there = bool(fresh & set(bodies))
        if is_there:
            assert fresh <= set(bodies), "half of it was published"
            assert not settled & set(bodies), "published, but not settled"
        if is_there or not fresh:
            self.going |= settled

    def came_back(self, slots: list[Slot]) -> None:
        self.slots = slots
        self.forget_unit()
        self.going.clear()
        self.wakes_due = None
        # What was not confirmed never will be.
        self.confirmed = list(range(1, self.published + 1))

    def on_disk(self) -> list[tuple[int, str]]:
        rows = self.stage.rows(
            "SELECT m.key & 0xffffffffff, coalesce(m.body, b.body) FROM message m"
            " LEFT JOIN body b ON b.id = m.body_id ORDER BY m.key"
        )
        return [(seq_id, body.decode()) for seq_id, body in rows]

    @invariant()
    def expiries_are_known(self) -> None:
        """Of messages that come back although they were on their way out."""
        self.expiries.update({slot.body: slot.expires_at_ms for slot in self.slots})

    @invariant()
    def files_add_up(self) -> None:
        self.stage.check_files()


@pytest.mark.parametrize(
    "examples",
    [
        pytest.param(40, id="short"),
        pytest.param(600, id="long", marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
)
def test_behaves_like_a_list_over_restarts(examples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # What takes several steps with thousands of messages is to do so with a few.
    monkeypatch.setattr(queue_paging, "PAGING_STEP", 1)
    for module in (queue_index, queue_state, variable_queue):
        monkeypatch.setattr(module, "COMMIT_ROWS", 2)
    benches: list[Bench] = []

    def make_bench() -> Bench:
        while benches:
            benches.pop().close()
        benches.append(Bench(variable()))
        return benches[-1]

    class Model(VariableQueueModel):
        def __init__(self) -> None:
            super().__init__(make_bench)

    try:
        run_state_machine_as_test(
            Model,
            settings=settings(
                max_examples=examples,
                stateful_step_count=60,
                deadline=None,
                suppress_health_check=[HealthCheck.too_slow],
            ),
        )
    finally:
        for bench in benches:
            bench.close()
