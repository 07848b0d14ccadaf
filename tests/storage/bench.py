"""Every BackingQueue implementation, ready to be tested: add yours to ``IMPLEMENTATIONS``."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from leveret.protocol.message import Message
from leveret.storage.backing_queue import LOADING, BackingQueue, Confirm, Entry, Nothing, Predicate
from leveret.storage.memory_queue import MemoryQueue

T = TypeVar("T")


def message(body: str) -> Message:
    return Message(b"\x00\x01q", "", "q", b"\x00\x00", body.encode(), 0, False)


class Seen(NamedTuple):
    """An entry as tests compare it."""

    body: str
    redelivered: bool = False


class Bench:
    """A queue under test, with the patience of an actor: LOADING is waited out, and checked."""

    def __init__(self, make: Callable[[Bench], BackingQueue]) -> None:
        self.wakes = 0
        self.scheduled: list[Callable[[], None]] = []
        self.queue = make(self)

    def wake(self) -> None:
        self.wakes += 1

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.scheduled.append(callback)

    def run_scheduled(self) -> None:
        scheduled, self.scheduled = self.scheduled, []
        for callback in scheduled:
            callback()

    def settled(self, ask: Callable[[], T | Nothing]) -> T | Nothing:
        """The answer; after LOADING exactly one wake must come, and the answer with it."""
        self.run_scheduled()
        answer = ask()
        if answer is LOADING:
            wakes = self.wakes
            self.run_scheduled()
            assert self.wakes == wakes + 1
            answer = ask()
            assert answer is not LOADING
        return answer

    def publish(self, *bodies: str, confirm: Confirm | None = None) -> None:
        self.queue.publish([message(body) for body in bodies], confirm)

    def publish_delivered(self, *bodies: str, confirm: Confirm | None = None) -> int:
        return self.queue.publish_delivered([message(body) for body in bodies], confirm)

    def take(self, limit: int = 1000, *, max_bytes: int | None = None) -> list[Entry]:
        """Fetch with acks; an empty list if there is nothing."""
        return self._entries(
            lambda: self.queue.fetch(limit, ack_required=True, max_bytes=max_bytes)
        )

    def take_no_ack(self, limit: int = 1000) -> list[Entry]:
        return self._entries(lambda: self.queue.fetch(limit, ack_required=False))

    def take_while(
        self, predicate: Predicate, limit: int = 1000, *, max_bytes: int | None = None
    ) -> list[Entry]:
        return self._entries(lambda: self.queue.fetch_while(predicate, limit, max_bytes=max_bytes))

    def drop(self, count: int) -> int:
        dropped = self.settled(lambda: self.queue.drop(count))
        assert isinstance(dropped, int)
        return dropped

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

    def _entries(self, ask: Callable[[], list[Entry] | Nothing]) -> list[Entry]:
        answer = self.settled(ask)
        return answer if isinstance(answer, list) else []


def _memory(bench: Bench) -> BackingQueue:
    return MemoryQueue(bench.wake)


def _memory_loading(bench: Bench) -> BackingQueue:
    return MemoryQueue(bench.wake, random.Random(1), bench.call_soon)


IMPLEMENTATIONS: dict[str, Callable[[Bench], BackingQueue]] = {
    "memory": _memory,
    "memory-loading": _memory_loading,
}
