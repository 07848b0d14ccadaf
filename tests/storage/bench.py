"""Every BackingQueue implementation, ready to be tested: add yours to ``IMPLEMENTATIONS``."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple, TypeVar, cast

from leveret.protocol.message import Message
from leveret.storage.backing_queue import (
    LOADING,
    BackingQueue,
    Confirm,
    Entry,
    Nothing,
    Predicate,
    Prepared,
)
from leveret.storage.commit import Batch
from leveret.storage.memory_queue import MemoryQueue
from leveret.storage.priority_queue import PriorityQueue
from tests.storage.priority_stage import MAX_PRIORITY, staged
from tests.storage.stage import Driven, Stage

T = TypeVar("T")


def message(body: str, *, persistent: bool = False) -> Message:
    return Message(b"\x00\x01q", "", "q", b"\x00\x00", body.encode(), 0, persistent)


class Seen(NamedTuple):
    """An entry as tests compare it."""

    body: str
    redelivered: bool = False


class UnitOfOne:
    """What was prepared, as a unit of its own: begun and committed when the test likes."""

    def __init__(
        self,
        prepared: Prepared,
        begun: Callable[[], None] = lambda: None,
        committed: Callable[[], None] = lambda: None,
    ) -> None:
        self._prepared = prepared
        self._begun = begun
        self._committed = committed
        self.is_begun = False
        self.is_committed = False
        # The queue has ended meanwhile: on disk it happens all the same.
        self.is_orphan = False

    def gather(self, batch: Batch) -> None:
        self._prepared.gather(batch)
        self.is_begun = True
        self._begun()
        batch.after.append(self.on_disk)

    def on_disk(self) -> None:
        if not self.is_orphan:
            self._prepared.commit()
        self.is_committed = True
        self._committed()


class Bench:
    """A queue under test, with the patience of an actor: LOADING is waited out, and checked."""

    def __init__(self, make: Callable[[Bench], BackingQueue]) -> None:
        self.wakes = 0
        self.scheduled: list[Callable[[], None]] = []
        # Where the queue reads and writes, if it does.
        self.stage: Stage | None = None
        # Does a call that can give more give less?
        self.gives_all = True
        self.persistent = False
        self.queue = make(self)

    def close(self) -> None:
        if self.stage is not None:
            self.stage.close()

    def wake(self) -> None:
        self.wakes += 1

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.scheduled.append(callback)

    def message(self, body: str) -> Message:
        return message(body, persistent=self.persistent)

    def run_scheduled(self) -> None:
        """Let everything that is under way come to its end."""
        if self.stage is not None:
            self.stage.settle()
        scheduled, self.scheduled = self.scheduled, []
        for callback in scheduled:
            callback()

    def settled(self, ask: Callable[[], T | Nothing]) -> T | Nothing:
        """The answer; after LOADING exactly one wake must come, and the answer with it."""
        self.run_scheduled()
        wakes = self.wakes
        answer = ask()
        if answer is LOADING:
            self.run_scheduled()
            assert self.wakes == wakes + 1
            answer = ask()
            assert answer is not LOADING
        return answer

    def prepare(self, *bodies: str, settled: Collection[int] = ()) -> UnitOfOne:
        runs = [([self.message(body) for body in bodies], None)] if bodies else []
        return UnitOfOne(self.queue.prepare(runs, settled))

    def begin(self, unit: UnitOfOne) -> None:
        """Its commit begins, and does not end if it has to write something."""
        if self.stage is None:
            unit.gather(Batch())
            return
        self.stage.call(partial(self.stage.database.put, unit))
        while not unit.is_begun:
            self.stage.turn()

    def finish(self, unit: UnitOfOne) -> None:
        """Its commit ends."""
        if self.stage is None:
            unit.on_disk()
            return
        while not unit.is_committed:
            self.stage.turn()

    def publish(self, *bodies: str, confirm: Confirm | None = None) -> None:
        self.queue.publish([self.message(body) for body in bodies], confirm)

    def publish_delivered(self, *bodies: str, confirm: Confirm | None = None) -> Sequence[int]:
        return self.queue.publish_delivered([self.message(body) for body in bodies], confirm)

    def take(self, limit: int = 1000, *, max_bytes: int | None = None) -> list[Entry]:
        """Fetch with acks; an empty list if there is nothing."""
        return self._all(
            lambda limit, room: self._entries(
                lambda: self.queue.fetch(limit, ack_required=True, max_bytes=room)
            ),
            limit,
            max_bytes,
        )

    def take_no_ack(self, limit: int = 1000) -> list[Entry]:
        return self._all(
            lambda limit, room: self._entries(lambda: self.queue.fetch(limit, ack_required=False)),
            limit,
            None,
        )

    def take_while(
        self, predicate: Predicate, limit: int = 1000, *, max_bytes: int | None = None
    ) -> list[Entry]:
        return self._all(
            lambda limit, room: self._entries(
                lambda: self.queue.fetch_while(predicate, limit, max_bytes=room)
            ),
            limit,
            max_bytes,
        )

    def drop(self, count: int) -> int:
        """In as many calls as that takes."""
        dropped = self.settled(partial(self.queue.drop, count))
        assert isinstance(dropped, int)
        if self.gives_all or dropped in (0, count):
            return dropped
        return dropped + self.drop(count - dropped)

    def drop_while(self, predicate: Predicate) -> int:
        """All that go, in as many calls as that takes."""
        total = 0
        while True:
            dropped = self.settled(lambda: self.queue.drop_while(predicate))
            assert isinstance(dropped, int)
            if not dropped:
                return total
            total += dropped

    def peek(self) -> Entry | Nothing:
        return self.settled(self.queue.peek)

    def all_ready(self) -> list[Seen]:
        """Take everything out, in as many calls as that takes."""
        seen: list[Seen] = []
        while not self.queue.is_empty():
            seen += [
                Seen(entry.message.body.decode(), entry.redelivered) for entry in self.take_no_ack()
            ]
        return seen

    def _all(
        self,
        ask: Callable[[int, int | None], list[Entry]],
        limit: int,
        max_bytes: int | None,
    ) -> list[Entry]:
        """What fits within both limits, also from a queue that gives less at a time."""
        entries = ask(limit, max_bytes)
        while entries and not self.gives_all and len(entries) < limit:
            room = None
            if max_bytes is not None:
                room = max_bytes - sum(len(entry.message.body) for entry in entries)
                head = self.peek()
                if not isinstance(head, Entry) or len(head.message.body) > room:
                    break
            more = ask(limit - len(entries), room)
            if not more:
                break
            entries += more
        return entries

    def _entries(self, ask: Callable[[], list[Entry] | Nothing]) -> list[Entry]:
        answer = self.settled(ask)
        return answer if isinstance(answer, list) else []


def _memory(bench: Bench) -> BackingQueue:
    return MemoryQueue(bench.wake)


def _memory_loading(bench: Bench) -> BackingQueue:
    return MemoryQueue(bench.wake, random.Random(1), bench.call_soon)


def variable(
    *,
    is_durable: bool = True,
    persistent: bool = True,
    is_lazy: bool = False,
    is_paging: bool = False,
) -> Callable[[Bench], BackingQueue]:
    def make(bench: Bench) -> BackingQueue:
        bench.stage = Stage(bench.wake, is_durable=is_durable, is_lazy=is_lazy)
        bench.gives_all = False
        bench.persistent = persistent
        driven = Driven(bench.stage, random.Random(2) if is_paging else None)
        return cast(BackingQueue, driven)

    return make


def _priorities(bench: Bench) -> BackingQueue:
    return PriorityQueue(MAX_PRIORITY, lambda priority: MemoryQueue(bench.wake))


def _priorities_loading(bench: Bench) -> BackingQueue:
    chance = random.Random(4)
    return PriorityQueue(
        MAX_PRIORITY, lambda priority: MemoryQueue(bench.wake, chance, bench.call_soon)
    )


def _priorities_paging(bench: Bench) -> BackingQueue:
    bench.stage, queue = staged(bench.wake, is_paging=True)
    bench.gives_all = False
    bench.persistent = True
    return queue


# Those that keep several priorities apart; the shared suite uses one.
PRIORITIES: dict[str, Callable[[Bench], BackingQueue]] = {
    "priorities": _priorities,
    "priorities-loading": _priorities_loading,
    "priorities-paging": _priorities_paging,
}

IMPLEMENTATIONS: dict[str, Callable[[Bench], BackingQueue]] = {
    "memory": _memory,
    "memory-loading": _memory_loading,
    "variable": variable(),
    "variable-paging": variable(is_paging=True),
    "variable-lazy": variable(is_lazy=True),
    "transient": variable(persistent=False),
    "transient-paging": variable(persistent=False, is_paging=True),
    "not-durable-paging": variable(is_durable=False, is_paging=True),
    **PRIORITIES,
}
