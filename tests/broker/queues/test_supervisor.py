"""Queue tasks have an owner: one that crashes is restarted alone, and whoever waits is told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from leveret.broker.clock import VirtualClock
from leveret.broker.mailbox import Mailbox
from leveret.broker.queues import commands as c
from leveret.broker.queues.record import Queue
from leveret.broker.queues.supervisor import QueueSupervisor
from leveret.protocol.message import Message
from leveret.storage.backing_queue import Confirm, Entry, Nothing
from leveret.storage.memory_queue import MemoryQueue
from tests.broker.queues.bench import SETTINGS, Port, bodies, make_queue, settle

POISON = b"poison"


class Fragile(MemoryQueue):
    """Breaks when it is given, or asked for, the wrong thing."""

    def publish(
        self, messages: Sequence[Message], confirm: Confirm | None, expires_at_ms: int | None = None
    ) -> None:
        if any(message.body == POISON for message in messages):
            raise RuntimeError("cannot take this")
        super().publish(messages, confirm, expires_at_ms)

    def fetch(
        self, limit: int, *, ack_required: bool, max_bytes: int | None = None
    ) -> list[Entry] | Nothing:
        if self._messages and self._messages[0].body == b"unreadable":
            raise RuntimeError("cannot read this")
        return super().fetch(limit, ack_required=ack_required, max_bytes=max_bytes)


class Watcher:
    """A decorator that notes what happens to its queue."""

    description = "watches"

    def __init__(self) -> None:
        self.seen: list[str] = []

    def active_for(self, queue: Queue) -> bool:
        return True

    def startup(self, queue: Queue) -> None:
        self.seen.append("startup")

    def shutdown(self, queue: Queue) -> None:
        self.seen.append("shutdown")

    def policy_changed(self, queue: Queue) -> None:
        pass

    def consumer_state_changed(
        self, queue: Queue, max_active_priority: int | None, is_empty: bool
    ) -> None:
        pass


class Bench:
    def __init__(self, clock: VirtualClock) -> None:
        self.deleted: list[Queue] = []
        self.watcher = Watcher()
        self.is_ready_to_restart = asyncio.Event()
        self.is_ready_to_restart.set()
        self.supervisor = QueueSupervisor(
            lambda queue, wake, spend: Fragile(wake),
            self.deleted.append,
            clock,
            SETTINGS,
            lambda: [self.watcher],
            self._before_restart,
        )

    async def _before_restart(self) -> None:
        await self.is_ready_to_restart.wait()

    def start(self, name: str) -> Queue:
        queue = make_queue(name)
        self.supervisor.start(queue)
        return queue

    async def crash(self, queue: Queue, put: Callable[[], object]) -> Mailbox:
        """Make it crash; returns the address it had."""
        before = queue.mailbox
        put()
        async with asyncio.timeout(10):
            while queue.mailbox is before:  # noqa: ASYNC110 - turns for the queue's task
                await asyncio.sleep(0)
        return before


@pytest.fixture
async def bench(clock: VirtualClock, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Bench]:
    # Crashes are logged with their traceback, and meant.
    caplog.set_level(logging.CRITICAL, "leveret.broker.queues.supervisor")
    bench = Bench(clock)
    yield bench
    await bench.supervisor.stop()


@pytest.fixture
def port() -> Port:
    return Port("channel")


async def test_a_crashed_queue_starts_again_under_its_name(bench: Bench, port: Port) -> None:
    queue = bench.start("q")
    before = await bench.crash(queue, lambda: port.publish(queue, POISON))
    assert before.is_closed
    assert bench.deleted == []
    assert [task.get_name() for task in bench.supervisor.tasks] == ["queue 'q' in vhost '/'"]
    after = Port("another")
    after.publish(queue, b"1", confirm=True)
    after.consume(queue)
    await settle(queue.mailbox)
    taken = after.take()
    assert bodies(taken) == [b"1"]
    assert any(isinstance(item, c.Confirmed) for item in taken)


async def test_what_comes_between_two_lives_is_for_the_second(bench: Bench, port: Port) -> None:
    """The store must have caught up before the queue is read again; publishers go on."""
    queue = bench.start("q")
    bench.is_ready_to_restart.clear()
    await bench.crash(queue, lambda: port.publish(queue, POISON))
    after = Port("another")
    after.publish(queue, b"1", confirm=True)
    bench.is_ready_to_restart.set()
    await settle(queue.mailbox)
    assert after.take_one(c.Confirmed).last == 1


async def test_a_crash_leaves_other_queues_alone(bench: Bench, port: Port) -> None:
    queue, other = bench.start("q"), bench.start("other")
    port.publish(other, b"1")
    await settle(other.mailbox)
    actor = bench.supervisor.actors[other]
    await bench.crash(queue, lambda: port.publish(queue, POISON))
    assert bench.supervisor.actors[other] is actor
    assert actor.statistics()["messages_ready"] == 1
    assert not other.mailbox.is_closed


async def test_publishers_hear_that_their_messages_are_lost(bench: Bench, port: Port) -> None:
    """[67] Those it had, the one it broke on, and those it never came to."""
    queue = bench.start("q")
    earlier = Port("earlier")
    earlier.publish(queue, b"0")
    await settle(queue.mailbox)
    poison, behind = None, None

    def put() -> None:
        nonlocal poison, behind
        poison = port.publish(queue, b"1", POISON, confirm=True)
        behind = port.publish(queue, b"3", confirm=True)

    before = await bench.crash(queue, put)
    assert earlier.take() == [c.QueueDown(before, crashed=True)]
    assert port.take() == [
        c.Unreceived(before, poison, crashed=True),  # type: ignore[arg-type]
        c.Unreceived(before, behind, crashed=True),  # type: ignore[arg-type]
        c.QueueDown(before, crashed=True),
    ]


async def test_consumers_are_cancelled(bench: Bench, port: Port) -> None:
    queue = bench.start("q")
    port.consume(queue, "a", prefetch=1)
    port.consume(queue, "b", prefetch=1)
    await settle(queue.mailbox)
    port.take()
    other = Port("other")
    before = await bench.crash(
        queue, lambda: [other.publish(queue, b"1", b"2"), other.publish(queue, POISON)]
    )
    taken = port.take()
    assert bodies(taken) == [b"1", b"2"]
    assert [item for item in taken if not isinstance(item, c.Deliver)] == [
        c.ConsumerCancelled("a"),
        c.ConsumerCancelled("b"),
        c.QueueDown(before, crashed=True),
    ]


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(lambda queue, port: queue.mailbox.put(c.Get(port, False)), id="it-breaks-on"),
        pytest.param(lambda queue, port: queue.mailbox.put(c.Purge(port)), id="behind-it"),
    ],
)
async def test_whoever_asked_is_answered(
    bench: Bench, port: Port, ask: Callable[[Queue, Mailbox], object]
) -> None:
    """Or its channel would wait for ever, and its connection with it."""
    queue = bench.start("q")
    port.publish(queue, b"unreadable")
    await settle(queue.mailbox)
    culprit, asker = Port("culprit"), Port("asker")

    def put() -> None:
        queue.mailbox.put(c.Get(culprit.mailbox, False))
        ask(queue, asker.mailbox)

    before = await bench.crash(queue, put)
    assert culprit.take() == [c.Gone(), c.QueueDown(before, crashed=True)]
    assert asker.take() == [c.Gone(), c.QueueDown(before, crashed=True)]


async def test_consumers_taken_in_the_batch_that_crashes_are_answered(
    bench: Bench, port: Port
) -> None:
    """In the control lane, before and behind what breaks it."""
    queue = bench.start("q")
    port.publish(queue, b"unreadable")
    await settle(queue.mailbox)
    first, second = Port("first"), Port("second")

    def put() -> None:
        first.consume(queue)
        queue.mailbox.put_urgent("nothing that a queue understands")
        second.consume(queue)

    before = await bench.crash(queue, put)
    assert first.take() == [
        c.Done(),
        c.ConsumerCancelled("tag"),
        c.QueueDown(before, crashed=True),
    ]
    assert second.take() == [c.Gone(), c.QueueDown(before, crashed=True)]


async def test_a_shared_limit_gets_back_what_a_crash_had_taken(bench: Bench, port: Port) -> None:
    """The channel's consumers of other queues must not be held by messages nobody has."""
    queue = bench.start("q")
    port.limiter.set_limit(2, 0)
    port.publish(queue, b"unreadable")
    await settle(queue.mailbox)
    await bench.crash(queue, lambda: port.consume(queue))
    assert port.limiter.take(Mailbox("another queue"), 5) == 2


async def test_decorators_hear_of_every_life(bench: Bench, port: Port) -> None:
    queue = bench.start("q")
    await bench.crash(queue, lambda: port.publish(queue, POISON))
    queue.mailbox.put_urgent(c.DeleteNow())
    await asyncio.gather(*bench.supervisor.tasks)
    assert bench.watcher.seen == ["startup", "shutdown", "startup", "shutdown"]


async def test_a_deleted_queue_leaves_nothing(bench: Bench) -> None:
    queue, other = bench.start("q"), bench.start("other")
    await bench.supervisor.wait_deleted([queue])
    assert bench.deleted == [queue]
    assert list(bench.supervisor.actors) == [other]
    assert len(bench.supervisor.tasks) == 1
    await bench.supervisor.wait_deleted([queue])
    await bench.supervisor.wait_deleted([])


async def test_stopping_is_not_deleting(bench: Bench, port: Port) -> None:
    queue = bench.start("q")
    port.publish(queue, b"1")
    await settle(queue.mailbox)
    await bench.supervisor.stop()
    assert bench.deleted == []
    assert bench.supervisor.tasks == []
    assert port.take() == [], "nobody is told that anything was lost"


async def test_what_was_put_before_the_stop_is_done(bench: Bench, port: Port) -> None:
    queue = bench.start("q")
    port.publish(queue, b"1", confirm=True)
    await bench.supervisor.stop()
    assert port.take_one(c.Confirmed).last == 1
