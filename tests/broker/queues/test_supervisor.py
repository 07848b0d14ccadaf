"""Queue tasks have an owner: one that crashes is restarted alone, and whoever waits is told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

import pytest

from leveret.broker.clock import VirtualClock
from leveret.broker.config import Settings
from leveret.broker.event_log.journal import Journal
from leveret.broker.event_log.messages import MessageLog
from leveret.broker.mailbox import Mailbox
from leveret.broker.queues import commands as c
from leveret.broker.queues.dead_lettering import Surroundings
from leveret.broker.queues.record import Queue
from leveret.broker.queues.supervisor import QueueSupervisor
from leveret.protocol.lines import ID_BITS
from leveret.protocol.message import Message
from leveret.storage.backing_queue import Confirm, Entry, Nothing
from leveret.storage.memory_queue import MemoryQueue
from tests.broker.event_log.reading import only, read_events
from tests.broker.queues.bench import SETTINGS, Port, bodies, make_queue, settle
from tests.broker.queues.town import Town, letter

POISON = b"poison"


class Fragile(MemoryQueue):
    """Breaks when it is given, or asked for, the wrong thing."""

    # Breaks when it is deleted already.
    _is_late = False

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

    def delete_and_terminate(self) -> None:
        if self._messages and self._messages[0].body == b"undeletable":
            raise RuntimeError("cannot let go of this")
        self._is_late = bool(self._messages) and self._messages[0].body == b"late"
        super().delete_and_terminate()

    def drain_confirmed(self) -> list[Confirm]:
        if self._is_late:
            raise RuntimeError("cannot come to an end")
        return super().drain_confirmed()


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
    def __init__(self, clock: VirtualClock, surroundings: Surroundings | None = None) -> None:
        self.deleted: list[Queue] = []
        self.watcher = Watcher()
        self.is_ready_to_restart = asyncio.Event()
        self.is_ready_to_restart.set()
        # While set, no queue can be built.
        self.is_broken = False
        self.built = 0
        self.clock = clock
        self.supervisor = QueueSupervisor(
            self._make_backing,
            self.deleted.append,
            clock,
            SETTINGS,
            lambda: [self.watcher],
            self._before_restart,
            surroundings,
        )

    def _make_backing(
        self, queue: Queue, wake: Callable[[], None], spend: Callable[[int], None]
    ) -> Fragile:
        self.built += 1
        if self.is_broken:
            raise RuntimeError("cannot be built")
        return Fragile(wake)

    async def _before_restart(self, queue: Queue) -> None:
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

    async def poison(self, queue: Queue) -> None:
        await self.crash(queue, lambda: Port("poisoner").publish(queue, POISON))

    async def wait_built(self, times: int) -> None:
        async with asyncio.timeout(10):
            while self.built < times:  # noqa: ASYNC110 - turns for the queue's task
                await asyncio.sleep(0)

    async def pausing(self) -> Queue:
        """A queue that has crashed twice and is not back yet."""
        queue = self.start("q")
        await self.poison(queue)
        await self.poison(queue)
        await self.take_turns()
        assert self.built == 2
        return queue

    async def take_turns(self) -> None:
        """Enough for any queue that does not wait for the clock."""
        for _ in range(20):
            await asyncio.sleep(0)


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


# --- crashes in a row ----------------------------------------------------------------------------


async def test_pauses_between_crashes_grow(bench: Bench, clock: VirtualClock) -> None:
    queue = bench.start("q")
    await bench.poison(queue)
    await bench.wait_built(2)
    pause_s = 0.1
    # Long enough that time spent in pauses would pass for a long life, if it counted as one.
    for built in range(2, 15):
        await bench.poison(queue)
        clock.advance(pause_s * 0.99)
        await bench.take_turns()
        assert bench.built == built, "not before its time"
        clock.advance(pause_s * 0.02)
        await bench.wait_built(built + 1)
        await bench.take_turns()
        pause_s = min(30.0, pause_s * 2)
    assert pause_s == 30.0


async def test_a_long_life_makes_up_for_crashes(bench: Bench, clock: VirtualClock) -> None:
    queue = await bench.pausing()
    clock.advance(0.1)
    await bench.wait_built(3)
    clock.advance(59)
    await bench.poison(queue)
    await bench.take_turns()
    assert bench.built == 3, "a minute is not over"
    clock.advance(0.2)
    await bench.wait_built(4)
    clock.advance(60)
    await bench.poison(queue)
    await bench.wait_built(5)


async def test_crashes_in_a_row_are_one_traceback(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "leveret.broker.queues.supervisor")
    await bench.pausing()
    first, second = caplog.records
    assert first.getMessage() == "queue 'q' in vhost '/' crashed; it is restarted"
    assert first.exc_info is not None
    assert second.getMessage() == (
        "queue 'q' in vhost '/' crashed again, 2 times in a row (RuntimeError: cannot take this);"
        " it is restarted in 0.1 s"
    )
    assert second.exc_info is None


async def test_what_comes_in_a_pause_waits_for_its_end(
    bench: Bench, clock: VirtualClock, port: Port
) -> None:
    queue = await bench.pausing()
    port.publish(queue, b"1", confirm=True)
    await bench.take_turns()
    assert bench.built == 2
    assert port.take() == []
    clock.advance(0.1)
    await bench.wait_built(3)
    await settle(queue.mailbox)
    assert port.take_one(c.Confirmed).last == 1


async def test_a_queue_that_cannot_be_built_is_tried_again(
    bench: Bench, clock: VirtualClock, port: Port
) -> None:
    """Whoever asks meanwhile is answered, as by one that crashes at its start."""
    bench.is_broken = True
    queue = bench.start("q")
    before = queue.mailbox
    asker = Port("asker")
    queue.mailbox.put(c.Count(asker.mailbox))
    lost = port.publish(queue, b"lost", confirm=True)
    await bench.wait_built(2)
    await bench.take_turns()
    assert bench.built == 2
    assert asker.take() == [c.Gone(), c.QueueDown(before, crashed=True)]
    assert port.take() == [
        c.Unreceived(before, lost, crashed=True),
        c.QueueDown(before, crashed=True),
    ]
    bench.is_broken = False
    port.publish(queue, b"2", confirm=True)
    clock.advance(0.1)
    await bench.wait_built(3)
    await settle(queue.mailbox)
    assert port.take_one(c.Confirmed).last == 2


async def test_a_queue_that_pauses_is_deleted_at_once(bench: Bench) -> None:
    """Or an exclusive one would outlive its owner."""
    queue = await bench.pausing()
    async with asyncio.timeout(10):
        await bench.supervisor.wait_deleted([queue])
    assert bench.deleted == [queue]
    assert bench.supervisor.tasks == []
    assert queue.mailbox.is_closed


async def test_a_queue_that_pauses_is_deleted_for_whoever_asks(bench: Bench, port: Port) -> None:
    queue = await bench.pausing()
    queue.mailbox.put(c.Delete(port.mailbox, False, False, "guest"))
    async with asyncio.timeout(10):
        await asyncio.gather(*bench.supervisor.tasks)
    assert bench.deleted == [queue]
    assert isinstance(port.take()[0], c.Done)


async def test_a_queue_that_cannot_be_built_can_be_deleted(bench: Bench, port: Port) -> None:
    bench.is_broken = True
    queue, other = bench.start("q"), bench.start("other")
    await bench.wait_built(4)
    await bench.take_turns()
    other.mailbox.put(c.Delete(port.mailbox, False, False, "guest"))
    async with asyncio.timeout(10):
        await bench.supervisor.wait_deleted([queue])
        await asyncio.gather(*bench.supervisor.tasks)
    assert set(bench.deleted) == {queue, other}
    assert port.take()[0] == c.Gone()
    assert other.deleted_by == "guest"
    assert bench.supervisor.tasks == []


async def test_only_an_empty_queue_was_to_be_deleted(bench: Bench, port: Port) -> None:
    """Nobody knows whether one that cannot be built is empty."""
    bench.is_broken = True
    queue = bench.start("q")
    queue.mailbox.put(c.Delete(port.mailbox, False, True, "guest"))
    await bench.wait_built(2)
    assert bench.deleted == []
    assert len(bench.supervisor.tasks) == 1


async def test_a_crash_before_the_deletion_does_not_save_the_queue(bench: Bench) -> None:
    queue = bench.start("q")
    await asyncio.sleep(0)
    queue.mailbox.put_urgent("nothing that a queue understands")
    async with asyncio.timeout(10):
        await bench.supervisor.wait_deleted([queue])
    assert bench.deleted == [queue]
    assert bench.supervisor.tasks == []
    assert bench.supervisor.actors == {}


async def test_a_queue_that_crashes_while_it_is_deleted_is_gone(bench: Bench, port: Port) -> None:
    """Nobody could find it any more, or delete it."""
    queue = bench.start("q")
    port.publish(queue, b"undeletable")
    await settle(queue.mailbox)
    before = queue.mailbox
    async with asyncio.timeout(10):
        await bench.supervisor.wait_deleted([queue])
    assert (bench.deleted, bench.built, bench.supervisor.tasks) == ([queue], 1, [])
    assert port.take() == [c.QueueDown(before, crashed=True)]


async def test_a_queue_that_crashes_after_its_deletion_says_goodbye_once(
    bench: Bench, port: Port
) -> None:
    queue = bench.start("q")
    port.publish(queue, b"late")
    await settle(queue.mailbox)
    before = queue.mailbox
    async with asyncio.timeout(10):
        await bench.supervisor.wait_deleted([queue])
    assert (bench.deleted, bench.built, bench.supervisor.tasks) == ([queue], 1, [])
    assert port.take() == [c.QueueDown(before, crashed=False)]


async def test_deletion_waits_for_a_queue_between_two_lives(bench: Bench) -> None:
    queue = bench.start("q")
    bench.is_ready_to_restart.clear()
    await bench.poison(queue)
    deleting = asyncio.create_task(bench.supervisor.wait_deleted([queue]))
    await bench.take_turns()
    assert not deleting.done()
    bench.is_ready_to_restart.set()
    await asyncio.wait_for(deleting, 10)
    assert bench.deleted == [queue]


async def test_a_stop_does_not_wait_for_pauses(bench: Bench, port: Port) -> None:
    """What was put before it is done all the same."""
    queue = await bench.pausing()
    port.publish(queue, b"1", confirm=True)
    async with asyncio.timeout(5):
        await bench.supervisor.stop()
    assert port.take_one(c.Confirmed).last == 1
    assert bench.deleted == []


async def test_who_crashes_during_a_stop_is_not_restarted(bench: Bench, port: Port) -> None:
    queue = bench.start("q")
    port.publish(queue, POISON)
    [task] = bench.supervisor.tasks
    await bench.supervisor.stop()
    assert task.done()
    assert not task.cancelled()
    assert bench.built == 1
    assert bench.deleted == []


async def test_what_was_for_a_queue_that_cannot_be_built_is_told(
    settings: Settings, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """In the event log: it has no actor that could."""
    caplog.set_level(logging.CRITICAL, "leveret.broker.queues.supervisor")
    journal = Journal(replace(settings, event_log="all"), clock)
    await journal.start()
    town = Town(clock)
    town.message_log = MessageLog(journal)
    bench = Bench(clock, town)
    bench.is_broken = True
    queue = bench.start("q")
    lost = letter(b"abc")
    lost.log_id = clock.now_us() << ID_BITS
    publisher = Port("publisher")
    publisher.send(queue, publisher.delivery([lost]))
    bench.is_broken = False
    await bench.take_turns()
    assert any(isinstance(item, c.Unreceived) for item in publisher.take())
    await bench.supervisor.stop()
    await journal.stop()
    dropped = only(read_events(settings.data / "events"), "drop")
    assert (dropped.msg, dropped.queue, dropped.reason) == (lost.log_id, "q", "queue_crashed")
