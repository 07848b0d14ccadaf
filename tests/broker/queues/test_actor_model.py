"""A queue with channels that publish, consume, get, settle, purge and die, in any order.

What is checked: nothing is lost and nothing doubled, messages leave from the head, what is
unacked is booked where it belongs, no limit is passed, and no message waits while a consumer is
ready. Commands are put one by one, when it can be said exactly what must come of each, or several
at once, as batches are.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

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

from leveret.broker.clock import VirtualClock
from leveret.broker.flow import Bump
from leveret.broker.queues import commands as c
from leveret.broker.queues.actor import QueueActor
from leveret.broker.queues.actor_state import LARGE
from leveret.storage.commit import Batch, Operation
from leveret.storage.memory_queue import MemoryQueue
from leveret.storage.unit import Unit
from tests.broker.queues.bench import SETTINGS, Port, Scheduled, make_queue, message

PORTS = 3
TAGS = ("a", "b")
WINDOW = SETTINGS.delivery_window
CREDIT, MORE_AFTER = SETTINGS.credit_flow_initial, SETTINGS.credit_flow_more_after
LARGE_BODY = 3 * LARGE

ports = st.integers(0, PORTS - 1)
tags = st.sampled_from(TAGS)
# Whether more commands are to come into the same batch.
together = st.booleans()


@dataclass(eq=False)
class Slot:
    """A message in the model."""

    order: int
    state: Literal["queued", "held", "gone"] = "queued"
    redelivered: bool = False
    seq_id: int | None = None


@dataclass(eq=False)
class Subscription:
    tag: str
    no_ack: bool
    prefetch: int
    priority: int
    exclusive: bool
    held: int = 0


@dataclass(eq=False)
class Holding:
    slot: Slot
    # None: basic.get.
    consumer: Subscription | None


@dataclass(eq=False)
class Client(Port):
    """A channel, and what it knows about itself."""

    name: str
    consumers: dict[str, Subscription] = field(default_factory=dict)
    held: dict[int, Holding] = field(default_factory=dict)
    # Cost of what was delivered and is not written out.
    unsent: int = 0
    unconfirmed: set[int] = field(default_factory=set)
    # What it has asked and not yet been answered; a channel asks one thing at a time.
    asked: object | None = None
    asked_for: Subscription | None = None
    limit: int = 0
    # What counts against the limit.
    volume: int = 0

    def __post_init__(self) -> None:
        Port.__init__(self, self.name)


class QueueModel(RuleBasedStateMachine):
    def __init__(self, *, is_loading: bool) -> None:
        super().__init__()
        self.is_loading = is_loading
        self.loop = asyncio.new_event_loop()
        self.scheduled = Scheduled()
        self.slots: list[Slot] = []
        self.names = count()
        self.clients = [self.client() for _ in range(PORTS)]
        # Commands put since the queue was last seen to rest.
        self.put_since = 0
        # Somebody was told so.
        self.was_empty = False

    def client(self) -> Client:
        return Client(f"channel {next(self.names)}")

    @initialize(seed=st.integers(0, 1 << 30), single_active=st.booleans())
    def start(self, seed: int, single_active: bool) -> None:
        loading = random.Random(seed) if self.is_loading else None
        self.single_active = single_active
        self.queue = make_queue(single_active=single_active)
        self.actor = QueueActor(
            self.queue,
            lambda wake: MemoryQueue(wake, loading, self.scheduled.append),
            lambda _: None,
            VirtualClock(),
            SETTINGS,
        )
        self.task = self.loop.create_task(self.actor.run())

    # --- publishing ------------------------------------------------------------------------

    @rule(
        at=ports,
        sizes=st.lists(st.sampled_from([0, 0, 0, 0, LARGE_BODY]), min_size=1, max_size=6),
        persistent=st.lists(st.booleans(), min_size=6, max_size=6),
        confirm=st.booleans(),
        more=together,
    )
    def publish(
        self, at: int, sizes: list[int], persistent: list[bool], confirm: bool, more: bool
    ) -> None:
        client = self.clients[at]
        if client.asked is not None or client.flow.is_blocked:
            return
        messages = []
        for size, is_persistent in zip(sizes, persistent, strict=False):
            slot = Slot(len(self.slots))
            self.slots.append(slot)
            messages.append(message(b"%8d" % slot.order + bytes(size), persistent=is_persistent))
        first = client.next_seq
        client.send(self.queue, client.delivery(messages, confirm=confirm))
        if confirm:
            client.unconfirmed |= set(range(first, client.next_seq))
        self.done(more)

    # --- consuming -------------------------------------------------------------------------

    @rule(
        at=ports,
        tag=tags,
        no_ack=st.booleans(),
        prefetch=st.integers(0, 3),
        priority=st.integers(0, 2),
        exclusive=st.sampled_from([False, False, False, True]),
        more=together,
    )
    def consume(
        self,
        at: int,
        tag: str,
        no_ack: bool,
        prefetch: int,
        priority: int,
        exclusive: bool,
        more: bool,
    ) -> None:
        client = self.clients[at]
        if client.asked is not None or tag in client.consumers:
            return
        client.asked_for = Subscription(tag, no_ack, prefetch, priority, exclusive)
        client.asked = c.Consume(
            client.mailbox, client.limiter, tag, no_ack, exclusive, prefetch, priority
        )
        self.queue.mailbox.put_urgent(client.asked)
        self.done(more)

    @rule(at=ports, tag=tags, more=together)
    def cancel(self, at: int, tag: str, more: bool) -> None:
        client = self.clients[at]
        if client.asked is None and tag in client.consumers:
            client.asked = c.Cancel(client.mailbox, tag)
            self.queue.mailbox.put(client.asked)
            self.done(more)

    @rule(at=ports, no_ack=st.booleans(), more=together)
    def get(self, at: int, no_ack: bool, more: bool) -> None:
        client = self.clients[at]
        if client.asked is None:
            client.asked = c.Get(client.mailbox, no_ack)
            self.queue.mailbox.put(client.asked)
            self.done(more)

    @rule(at=ports)
    def purge(self, at: int) -> None:
        """Alone: else nobody could say what it has purged."""
        client = self.clients[at]
        self.rest()
        if client.asked is None:
            client.asked = c.Purge(client.mailbox)
            self.queue.mailbox.put(client.asked)
            self.done(False)

    @rule(at=ports, limit=st.integers(0, 4))
    def qos(self, at: int, limit: int) -> None:
        client = self.clients[at]
        self.rest()
        if limit and not client.limit:
            client.volume = len(client.held)
        client.limit = limit
        client.limiter.set_limit(limit, len(client.held))
        self.done(False)

    @rule(at=ports, more=together)
    def written(self, at: int, more: bool) -> None:
        client = self.clients[at]
        if client.unsent:
            self.queue.mailbox.put_urgent(c.Sent(client.mailbox, client.unsent))
            client.unsent = 0
            self.done(more)

    # --- settling --------------------------------------------------------------------------

    @rule(
        at=ports,
        kind=st.sampled_from([c.Ack, c.Ack, c.Reject, c.Requeue]),
        chosen=st.sets(st.integers(0, 9), min_size=1),
        more=together,
    )
    def settle(
        self,
        at: int,
        kind: type[c.Ack] | type[c.Reject] | type[c.Requeue],
        chosen: set[int],
        more: bool,
    ) -> None:
        client = self.clients[at]
        held = sorted(client.held)
        seq_ids = [held[place] for place in sorted(chosen) if place < len(held)]
        if client.asked is not None or not seq_ids:
            return
        counted = 0
        for seq_id in seq_ids:
            holding = client.held.pop(seq_id)
            if holding.consumer is not None:
                holding.consumer.held -= 1
                counted += 1
            if kind is c.Requeue:
                holding.slot.state, holding.slot.redelivered = "queued", True
            else:
                holding.slot.state = "gone"
        self.queue.mailbox.put_urgent(kind(client.mailbox, seq_ids))
        if client.limit:
            client.volume = max(0, client.volume - counted)
        client.limiter.give_back(counted)
        self.done(more)

    @rule(
        at=ports,
        count=st.integers(0, 4),
        chosen=st.sets(st.integers(0, 9)),
        fate=st.sampled_from(["committed", "void", "dies before", "dies after"]),
    )
    def transact(self, at: int, count: int, chosen: set[int], fate: str) -> None:
        """Publish and ack as a unit; its channel may die before its commit begins, or after."""
        self.rest()
        client = self.clients[at]
        held = sorted(client.held)
        seq_ids = [held[place] for place in sorted(chosen) if place < len(held)]
        if client.asked is not None:
            return
        slots = [Slot(len(self.slots) + number) for number in range(count)]
        put: list[Operation] = []
        unit = Unit(put.append, lambda is_committed: None)
        unit.expect()
        unit.begin()
        messages = [message(b"%8d" % slot.order) for slot in slots]
        self.queue.mailbox.put(c.Prepare(unit, client.mailbox, messages, seq_ids))
        self.loop.run_until_complete(self.settled())
        if fate in ("void", "dies before"):
            unit.withdraw()
        if fate == "dies before":
            self.die(at, True)
        batch = Batch()
        put[0].gather(batch)
        if fate == "committed":
            self.forget(client, seq_ids)
        elif fate == "dies after":
            for seq_id in seq_ids:
                client.held.pop(seq_id).slot.state = "gone"
            self.die(at, True)
        for call in batch.after:
            call()
        if fate in ("committed", "dies after"):
            self.slots += slots
        self.done(False)

    def forget(self, client: Client, seq_ids: list[int]) -> None:
        """They were settled for good."""
        counted = 0
        for seq_id in seq_ids:
            holding = client.held.pop(seq_id)
            holding.slot.state = "gone"
            if holding.consumer is not None:
                holding.consumer.held -= 1
                counted += 1
        if client.limit:
            client.volume = max(0, client.volume - counted)
        # The channel does so when it hears that the unit has ended.
        client.limiter.give_back(counted)

    @rule(at=ports, more=together)
    def die(self, at: int, more: bool) -> None:
        """Also in the middle of a question."""
        client = self.clients[at]
        # What was delivered and not taken is lost with the mailbox, and back in the queue.
        client.mailbox.close()
        for holding in client.held.values():
            holding.slot.state, holding.slot.redelivered = "queued", True
        self.queue.mailbox.put_urgent(c.ChannelDown(client.mailbox))
        self.clients[at] = self.client()
        self.done(more)

    @precondition(lambda self: self.scheduled)
    @rule()
    def loaded(self) -> None:
        self.rest()
        self.scheduled.run()
        self.done(False)

    # --- what comes of it ------------------------------------------------------------------

    def done(self, more: bool) -> None:
        self.put_since += 1
        if not more:
            self.rest()

    def rest(self) -> None:
        """Let the queue handle all there is, and see what came of it."""
        self.loop.run_until_complete(self.settled())
        is_alone = self.put_since == 1
        self.put_since = 0
        ready = [slot for slot in self.slots if slot.state == "queued"]
        served: list[Subscription] = []
        taken: list[Slot] = []
        self.was_empty = False
        for client in self.clients:
            for item in client.take():
                self.receive(client, item, len(ready), served, taken, is_alone)
        if is_alone and taken:
            head = {slot.order for slot in ready[: len(taken)]}
            assert {slot.order for slot in taken} == head, "not from the head"
        if is_alone and self.was_empty:
            assert len(taken) == len(ready), "not empty at all"
        self.check(served if is_alone else [])

    async def settled(self) -> None:
        async with asyncio.timeout(2):
            # The turns that the queue's task needs.
            while len(self.queue.mailbox) and not self.task.done():  # noqa: ASYNC110
                await asyncio.sleep(0)
        if self.task.done():
            self.task.result()

    def receive(
        self,
        client: Client,
        item: object,
        ready: int,
        served: list[Subscription],
        taken: list[Slot],
        is_alone: bool,
    ) -> None:
        if isinstance(item, c.Deliver):
            consumer = client.consumers[item.tag]
            served.append(consumer)
            assert (item.seq_ids is None) == consumer.no_ack
            seq_ids: list[int | None] = [None] * len(item.messages)
            if item.seq_ids is not None:
                seq_ids = list(item.seq_ids)
            cost = 0
            for each, seq_id in zip(item.messages, seq_ids, strict=True):
                cost += 1 + (len(each.body) >> 14)
                taken.append(self.take(client, each.body, seq_id, consumer, item.redelivered))
            assert item.cost == cost
            client.unsent += cost
        elif isinstance(item, c.GetOk):
            assert isinstance(client.asked, c.Get)
            assert (item.seq_id is None) == client.asked.no_ack
            client.asked = None
            body = item.message.body
            taken.append(self.take(client, body, item.seq_id, None, item.redelivered))
        elif isinstance(item, c.GetEmpty):
            assert isinstance(client.asked, c.Get)
            client.asked = None
            self.was_empty = True
        elif isinstance(item, c.Done):
            self.answered(client, item, ready, is_alone)
        elif isinstance(item, c.Failed):
            wanted, client.asked_for, client.asked = client.asked_for, None, None
            assert wanted is not None
            others = self.consumers()
            if is_alone:
                assert any(other.exclusive for other in others) or wanted.exclusive
        elif isinstance(item, c.Confirmed):
            confirmed = set(range(item.first, item.last + 1))
            assert confirmed <= client.unconfirmed, "confirmed twice, or never published"
            client.unconfirmed -= confirmed
        else:
            assert isinstance(item, Bump), item

    def answered(self, client: Client, done: c.Done, ready: int, is_alone: bool) -> None:
        asked, client.asked = client.asked, None
        if isinstance(asked, c.Consume):
            assert client.asked_for is not None
            if is_alone:
                assert not any(other.exclusive for other in self.consumers())
            client.consumers[asked.tag] = client.asked_for
            client.asked_for = None
        elif isinstance(asked, c.Cancel):
            del client.consumers[asked.tag]
        else:
            assert isinstance(asked, c.Purge)
            assert done.ready == ready
            for slot in self.slots:
                if slot.state == "queued":
                    slot.state = "gone"

    def take(
        self,
        client: Client,
        body: bytes,
        seq_id: int | None,
        consumer: Subscription | None,
        redelivered: bool,
    ) -> Slot:
        slot = self.slots[int(body[:8])]
        assert slot.state == "queued", f"delivered although it is {slot.state}"
        assert redelivered == slot.redelivered
        if seq_id is None:
            slot.state = "gone"
            return slot
        assert slot.seq_id in (None, seq_id)
        slot.seq_id = seq_id
        slot.state = "held"
        client.held[seq_id] = Holding(slot, consumer)
        if consumer is not None:
            consumer.held += 1
            if client.limit:
                client.volume += 1
        return slot

    # --- what always holds -----------------------------------------------------------------

    def consumers(self) -> list[Subscription]:
        return [each for client in self.clients for each in client.consumers.values()]

    def active(self) -> Subscription | None:
        """The single active consumer. Which one that is, is test_consumers.py's to say."""
        chosen = self.actor._consumers.active
        for client in self.clients:
            if chosen is not None and chosen.channel.mailbox is client.mailbox:
                return client.consumers[chosen.tag]
        assert not self.consumers(), "nobody is active"
        return None

    def can_take(self, client: Client, consumer: Subscription) -> bool:
        if self.single_active and consumer is not self.active():
            return False
        if client.unsent >= WINDOW:
            return False
        if consumer.no_ack:
            return True
        if client.limit and client.volume >= client.limit:
            return False
        return not consumer.prefetch or consumer.held < consumer.prefetch

    def check(self, served: list[Subscription]) -> None:
        queued = [slot for slot in self.slots if slot.state == "queued"]
        statistics = self.actor.statistics()
        assert statistics["messages_ready"] == len(queued)
        held = sum(len(client.held) for client in self.clients)
        assert statistics["messages_unacknowledged"] == held
        assert statistics["consumers"] == len(self.consumers())
        least = min((each.priority for each in served), default=0)
        for client in self.clients:
            assert not client.unconfirmed
            assert client.flow.credit(self.queue.mailbox) > CREDIT - MORE_AFTER
            assert client.unsent <= 2 * WINDOW + (LARGE_BODY >> 14)
            if isinstance(client.asked, c.Get):
                assert self.scheduled, "a get waits, and nothing is being read"
            else:
                assert client.asked is None, "a question without an answer"
            for consumer in client.consumers.values():
                is_ready = self.can_take(client, consumer)
                if consumer.prefetch and not consumer.no_ack:
                    assert consumer.held <= consumer.prefetch
                if queued and not self.scheduled:
                    assert not is_ready, "a message waits while a consumer is ready"
                if is_ready and served and not client.limit:
                    assert consumer.priority <= least, "a lower priority was served"
            if client.limit:
                mine = sum(each.consumer is not None for each in client.held.values())
                assert mine <= max(client.limit, client.volume)
        if self.single_active and served:
            assert set(served) == {self.active()}

    def teardown(self) -> None:
        try:
            if hasattr(self, "actor"):
                self.drain()
        finally:
            if hasattr(self, "task"):
                self.task.cancel()
                self.loop.run_until_complete(asyncio.wait([self.task]))
            self.loop.close()

    def drain(self) -> None:
        """In the end everything that is left can be had, in order."""
        self.rest()
        for at in range(PORTS):
            self.die(at, False)
        left = [slot for slot in self.slots if slot.state == "queued"]
        client = self.clients[0]
        for slot in left:
            client.asked = c.Get(client.mailbox, True)
            self.queue.mailbox.put(client.asked)
            self.put_since = 1
            self.rest()
            while client.asked is not None:
                self.scheduled.run()
                self.put_since = 1
                self.rest()
            assert slot.state == "gone"
        assert self.actor.statistics()["messages"] == 0
        assert not self.actor._consumers.channels


@pytest.mark.parametrize("is_loading", [False, True], ids=["memory", "loading"])
@pytest.mark.parametrize(
    "examples", [100, pytest.param(600, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_behaves_like_a_list_of_messages(is_loading: bool, examples: int) -> None:
    class Model(QueueModel):
        def __init__(self) -> None:
            super().__init__(is_loading=is_loading)

    run_state_machine_as_test(
        Model,
        settings=settings(
            max_examples=examples,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
