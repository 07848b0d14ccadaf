"""A queue with TTLs, limits, priorities and a dead-letter target, against a list of messages.

The queue is on disk, under random memory pressure, and is stopped and crashed; after each step its
numbers, and at the end all that is in it and in its target, are what plain rules over a plain list
say. What RabbitMQ would do at each message, the list does at each message.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from leveret.broker.queues import commands as c
from leveret.protocol.field_table import Field, Table
from tests.broker.queues.bench import Port
from tests.broker.queues.house import House
from tests.broker.queues.town import deaths, letter, outcome

MAX_PRIORITY = 2
counts = st.integers(0, 6)


@dataclass(eq=False)
class Slot:
    """A message in the model."""

    order: int
    body: bytes
    persistent: bool
    priority: int
    due_ms: int | None
    returns: int = 0
    seq_id: int | None = None


@dataclass
class Rules:
    """What the queue was told."""

    ttl_ms: int | None = None
    is_exact: bool = False
    max_length: int | None = None
    max_bytes: int | None = None
    overflow: str = "drop-head"
    delivery_limit: int | None = None
    has_target: bool = True
    has_priorities: bool = False

    def arguments(self) -> Table:
        table: Table = {}
        if self.ttl_ms is not None:
            table["x-message-ttl"] = Field("I", self.ttl_ms)
        if self.max_length is not None:
            table["x-max-length"] = Field("I", self.max_length)
        if self.max_bytes is not None:
            table["x-max-length-bytes"] = Field("I", self.max_bytes)
        if self.has_target:
            table["x-dead-letter-exchange"] = Field("S", "")
            table["x-dead-letter-routing-key"] = Field("S", "dead")
        if self.has_priorities:
            table["x-max-priority"] = Field("I", MAX_PRIORITY)
        table["x-overflow"] = Field("S", self.overflow)
        return table

    def policy(self) -> dict[str, object]:
        policy: dict[str, object] = {"message-ttl-exact": self.is_exact}
        if self.delivery_limit is not None:
            policy["delivery-limit"] = self.delivery_limit
        return policy


class Reference:
    """The rules, over lists."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.ready: list[Slot] = []
        # In the order in which they died, with the reason.
        self.dead: list[tuple[Slot, str]] = []
        self.expired = self.dropped = self.refused = 0

    def sort(self) -> None:
        self.ready.sort(key=lambda slot: (-slot.priority, slot.order))

    def size(self) -> int:
        return sum(len(slot.body) for slot in self.ready)

    def publish(self, slot: Slot, now_ms: int) -> bool:
        """Whether it was taken."""
        rules = self.rules
        if rules.overflow != "drop-head" and self.is_over(
            len(self.ready) + 1, self.size() + len(slot.body)
        ):
            self.refused += 1
            if rules.overflow == "reject-publish-dlx":
                self.die(slot, "maxlen")
            return False
        if rules.ttl_ms == 0 and not rules.has_target:
            self.expired += 1
            return True
        self.ready.append(slot)
        self.sort()
        self.keep(now_ms)
        return True

    @property
    def is_limited(self) -> bool:
        return self.rules.max_length is not None or self.rules.max_bytes is not None

    def is_over(self, length: int, size: int) -> bool:
        rules = self.rules
        return (rules.max_length is not None and length > rules.max_length) or (
            rules.max_bytes is not None and size > rules.max_bytes
        )

    def die(self, slot: Slot, reason: str) -> None:
        if self.rules.has_target:
            self.dead.append((slot, reason))

    def keep(self, now_ms: int) -> None:
        if self.rules.overflow == "drop-head":
            while self.ready and self.is_over(len(self.ready), self.size()):
                self.dropped += 1
                self.die(self.ready.pop(0), "maxlen")
        if self.rules.is_exact:
            due = [s for s in self.ready if s.due_ms is not None and s.due_ms <= now_ms]
            for slot in sorted(due, key=lambda s: (s.due_ms, s.order)):
                self.ready.remove(slot)
                self.expire(slot)
        while self.ready and self.is_due(self.ready[0], now_ms):
            self.expire(self.ready.pop(0))

    def is_due(self, slot: Slot, now_ms: int) -> bool:
        return slot.due_ms is not None and slot.due_ms <= now_ms

    def expire(self, slot: Slot) -> None:
        self.expired += 1
        self.die(slot, "expired")


class QueueRules(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.house = House()
        self.port = Port("client")
        self.orders = count()
        self.held: dict[int, Slot] = {}

    @initialize(
        ttl=st.sampled_from([None, None, 0, 100, 300]),
        is_exact=st.booleans(),
        max_length=st.sampled_from([None, None, 0, 3, 8]),
        max_bytes=st.sampled_from([None, None, None, 60]),
        overflow=st.sampled_from(["drop-head", "reject-publish", "reject-publish-dlx"]),
        delivery_limit=st.sampled_from([None, 0, 1, 2]),
        has_target=st.sampled_from([True, True, False]),
        has_priorities=st.booleans(),
    )
    def start(
        self,
        ttl: int | None,
        is_exact: bool,
        max_length: int | None,
        max_bytes: int | None,
        overflow: str,
        delivery_limit: int | None,
        has_target: bool,
        has_priorities: bool,
    ) -> None:
        rules = Rules(
            ttl,
            is_exact,
            max_length,
            max_bytes,
            overflow,
            delivery_limit,
            has_target,
            has_priorities,
        )
        self.model = Reference(rules)
        self.house.declare("dead", {})
        self.house.declare("q", rules.arguments())
        self.house.set_policy(rules.policy())

    def now_ms(self) -> int:
        return int(self.house.clock.now() * 1000 + 0.01)

    # --- rules -----------------------------------------------------------------------------

    @rule(
        sizes=st.lists(st.sampled_from([0, 1, 5, 60]), min_size=1, max_size=5),
        priority=st.integers(0, 3),
        own=st.sampled_from([None, None, 0, 50, 150, 400]),
        persistent=st.sampled_from([True, True, False]),
    )
    def publish(self, sizes: list[int], priority: int, own: int | None, persistent: bool) -> None:
        rules = self.model.rules
        ttls = [ttl for ttl in (rules.ttl_ms, own) if ttl is not None]
        due_ms = self.now_ms() + min(ttls) if ttls else None
        level = min(priority, MAX_PRIORITY) if rules.has_priorities else 0
        messages, taken = [], []
        for number, size in enumerate(sizes, 1):
            order = next(self.orders)
            slot = Slot(order, b"%d " % order + bytes(size), persistent, level, due_ms)
            messages.append(
                letter(
                    slot.body,
                    priority=priority or None,
                    expiration=None if own is None else str(own),
                    persistent=persistent,
                )
            )
            if self.model.publish(slot, self.now_ms()):
                taken.append(number)
        # Where a run is too much as a whole, what goes may be something else than message by
        # message: priorities with bytes, or what has expired behind the head.
        is_apart = rules.overflow == "drop-head" and self.model.is_limited
        confirmed: list[int] = []
        for first, run in enumerate([[each] for each in messages] if is_apart else [messages]):
            confirmed += [first + number for number in outcome(self.house.publish("q", run))[0]]
        assert confirmed == taken
        self.look()

    @rule(no_ack=st.booleans())
    def get(self, no_ack: bool) -> None:
        answer = self.house.get("q", self.port, no_ack=no_ack)
        # What has expired in the middle has not been looked at so far.
        self.model.keep(self.now_ms())
        if not self.model.ready:
            assert answer is None
            return
        slot = self.model.ready.pop(0)
        assert answer is not None
        assert answer.message.body == slot.body
        if not no_ack:
            assert answer.seq_id is not None
            slot.seq_id = answer.seq_id
            self.held[answer.seq_id] = slot
        self.model.keep(self.now_ms())
        self.look()

    @rule(
        kind=st.sampled_from(["ack", "reject", "requeue", "requeue"]),
        chosen=st.sets(st.integers(0, 5), min_size=1),
    )
    @precondition(lambda self: self.held)
    def settle(self, kind: str, chosen: set[int]) -> None:
        held = sorted(self.held, key=lambda seq_id: self.held[seq_id].order)
        seq_ids = [held[place] for place in sorted(chosen) if place < len(held)]
        if not seq_ids:
            return
        slots = [self.held.pop(seq_id) for seq_id in seq_ids]
        commands = {"ack": c.Ack, "reject": c.Reject, "requeue": c.Requeue}
        if kind == "reject":
            for slot in slots:
                self.model.die(slot, "rejected")
        elif kind == "requeue":
            self.return_all(slots)
        self.house.tell("q", commands[kind](self.port.mailbox, seq_ids))
        self.look()

    def return_all(self, slots: list[Slot]) -> None:
        limit = self.model.rules.delivery_limit
        for slot in slots:
            slot.returns += limit is not None
            if limit is not None and slot.returns > limit:
                self.model.die(slot, "delivery_limit")
            else:
                self.model.ready.append(slot)
        self.model.sort()
        self.model.keep(self.now_ms())

    @rule(milliseconds=st.sampled_from([1, 50, 100, 200, 1_000]))
    def pass_time(self, milliseconds: int) -> None:
        self.house.pass_time(milliseconds)
        self.model.keep(self.now_ms())
        self.look()

    @rule(is_exact=st.booleans(), delivery_limit=st.sampled_from([None, 1]))
    def change_policy(self, is_exact: bool, delivery_limit: int | None) -> None:
        rules = self.model.rules
        rules.is_exact, rules.delivery_limit = is_exact, delivery_limit
        self.house.set_policy(rules.policy())
        self.model.keep(self.now_ms())
        self.look()

    @rule()
    def purge(self) -> None:
        self.house.queue("q").mailbox.put(c.Purge(self.port.mailbox))
        self.house.rest()
        assert self.port.take() == [c.Done(len(self.model.ready))]
        self.model.ready.clear()
        self.look()

    @rule(q1=counts, q4=counts, betas=counts, acks=counts)
    def page_out(self, q1: int, q4: int, betas: int, acks: int) -> None:
        self.house.page_out(q1, q4, betas, acks)
        self.look()

    @rule(is_crash=st.booleans(), later_ms=st.sampled_from([0, 0, 120]))
    def restart(self, is_crash: bool, later_ms: int) -> None:
        """What is held comes back; what was not persistent does not."""
        if is_crash:
            self.house.crash()
        else:
            self.house.restart()
        model = self.model
        self.port = Port("client")
        model.expired = model.dropped = model.refused = 0
        model.ready += self.held.values()
        self.held = {}
        model.ready = [slot for slot in model.ready if slot.persistent]
        model.dead = [death for death in model.dead if death[0].persistent]
        model.sort()
        model.keep(self.now_ms())
        self.look()
        self.pass_time(later_ms)

    # --- what always holds -----------------------------------------------------------------

    def look(self) -> None:
        model = self.model
        self.house.check()
        found = self.house.actor("q").statistics()
        expected = {
            "messages_ready": len(model.ready),
            "messages_unacknowledged": len(self.held),
            "message_bytes_ready": model.size(),
            "expire": model.expired,
            "drop": model.dropped,
            "refuse": model.refused,
        }
        assert {name: found[name] for name in expected} == expected
        dead = self.house.actor("dead").statistics()
        assert dead["messages_ready"] == len(model.dead)

    def teardown(self) -> None:
        try:
            if hasattr(self, "model"):
                self.drain()
        finally:
            self.house.close()

    def drain(self) -> None:
        """All that is left can be had, in order, and the dead say what they died of."""
        reader = Port("reader")
        for slot in list(self.model.ready):
            if slot not in self.model.ready:
                continue
            answer = self.house.get("q", reader, no_ack=True)
            assert answer is not None
            assert answer.message.body == slot.body
            self.model.ready.remove(slot)
            self.model.keep(self.now_ms())
        found = []
        while (answer := self.house.get("dead", reader, no_ack=True)) is not None:
            [(queue, reason, times)] = deaths(answer.message)
            assert (queue, times) == ("q", 1)
            found.append((answer.message.body, reason))
        expected = [(slot.body, reason) for slot, reason in self.model.dead]
        if self.model.rules.has_priorities:
            # Which of those that are due at one time goes first is nobody's business.
            assert sorted(found) == sorted(expected)
        else:
            assert found == expected


@pytest.mark.parametrize(
    ("examples", "steps"),
    [
        pytest.param(120, 25, id="short"),
        pytest.param(800, 40, id="long", marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def test_behaves_like_rules_over_a_list(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        QueueRules,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
