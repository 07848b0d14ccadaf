"""Priorities: a BackingQueue made of several others, one for each priority that is in use [104].

Upstream: the queue actor, through ``backing_queue.py``. Downstream: whatever ``make`` makes, with
the proxy's own ``wake`` and ``spend``; they keep the messages, and all their rules hold within
one priority. Here is only what stands between them:

- a message belongs to the queue of its priority, or of the highest there is, for as long as it
  lives; one without a priority belongs to 0. That queue is made when it is first needed;
- everything that takes from the head takes from the highest priority that is not empty, and from
  that one alone: what is lower comes with the next call. So a message that expired waits behind
  those of higher priority, and a length limit drops the most important first, as in RabbitMQ;
- if that queue answers LOADING, so does the proxy: what is lower must not overtake;
- an id tells its priority in its lowest 8 bits, so nothing has to be remembered about pending
  messages. Ids of one priority are in order; those of several say nothing about each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from leveret.protocol.codec import pick_priority
from leveret.protocol.message import NEEDS_PRIORITY, Message
from leveret.storage.backing_queue import (
    EMPTY,
    LOADING,
    BackingQueue,
    Confirm,
    Entry,
    Loading,
    Nothing,
    Predicate,
    Prepared,
    Run,
)

if TYPE_CHECKING:
    from leveret.storage.commit import Batch

PRIORITY_BITS = 8
_PRIORITY_MASK = (1 << PRIORITY_BITS) - 1

# Makes an Entry of a plain tuple without entering Python: the constructor costs twice as much.
_make_entry: Callable[[tuple[int, Message, bool, int | None]], Entry] = partial(
    tuple.__new__, Entry
)


class _Shared:
    """A confirm whose messages went to several queues; stands for its channel in each of them."""

    __slots__ = ("confirm", "left")

    def __init__(self, confirm: Confirm) -> None:
        self.confirm = confirm
        # Messages that are not yet as safe as they will be.
        self.left = confirm.last - confirm.first + 1


class _Prepared:
    """The parts of one unit in several queues."""

    __slots__ = ("_parts",)

    def __init__(self, parts: list[Prepared]) -> None:
        self._parts = parts

    def gather(self, batch: Batch) -> None:
        for part in self._parts:
            part.gather(batch)

    def commit(self) -> None:
        for part in self._parts:
            part.commit()


class PriorityQueue:
    def __init__(
        self, max_priority: int, make: Callable[[int], BackingQueue], known: Iterable[int] = ()
    ) -> None:
        """``make`` makes the queue of a priority; those ``known`` have messages from before."""
        self._max = max_priority
        self._make = make
        # By priority, highest first; only those that were ever used.
        self._queues: dict[int, BackingQueue] = {}
        # Of messages that were never in one of the queues.
        self._confirmed: list[Confirm] = []
        # What a queue that is made later has to be told; None: nothing was said yet.
        self._ram_duration_target: float | None = None
        self._is_lazy: bool | None = None
        self._is_exact = False
        for priority in known:
            self._queue(priority)

    def _queue(self, priority: int) -> BackingQueue:
        queue = self._queues.get(priority)
        if queue is None:
            queue = self._make(priority)
            queue.set_exact(is_exact=self._is_exact)
            if self._is_lazy is not None:
                queue.set_lazy(is_lazy=self._is_lazy)
            if self._ram_duration_target is not None:
                queue.set_ram_duration_target(self._ram_duration_target)
            queues = {**self._queues, priority: queue}
            self._queues = dict(sorted(queues.items(), reverse=True))
        return queue

    # --- in ------------------------------------------------------------------------------------

    def publish(
        self, messages: Sequence[Message], confirm: Confirm | None, expires_at_ms: int | None = None
    ) -> None:
        for priority, run, part in self._split(messages, confirm):
            self._queue(priority).publish(run, part, expires_at_ms)

    def publish_delivered(
        self, messages: Sequence[Message], confirm: Confirm | None, expires_at_ms: int | None = None
    ) -> Sequence[int]:
        given: dict[int, list[int]] = {}
        for priority, run, part in self._split(messages, confirm):
            seq_ids = self._queue(priority).publish_delivered(run, part, expires_at_ms)
            given[priority] = [seq_id << PRIORITY_BITS | priority for seq_id in seq_ids]
        if len(given) == 1:
            return given.popitem()[1]
        ids = {priority: iter(seq_ids) for priority, seq_ids in given.items()}
        return [next(ids[self._priority(message)]) for message in messages]

    def discard(self, messages: Sequence[Message], confirm: Confirm | None) -> None:
        if confirm is not None:
            self._confirmed.append(confirm)

    def drain_confirmed(self) -> list[Confirm]:
        confirmed, self._confirmed = self._confirmed, []
        for queue in self._queues.values():
            for part in queue.drain_confirmed():
                shared = part.port
                if type(shared) is not _Shared:
                    confirmed.append(part)
                    continue
                shared.left -= part.last - part.first + 1
                if not shared.left:
                    confirmed.append(shared.confirm)
        return confirmed

    def prepare(self, runs: Sequence[Run], settled: Collection[int]) -> Prepared:
        by_priority: dict[int, list[Run]] = {}
        for messages, expires_at_ms in runs:
            for priority, run, _ in self._split(messages, None):
                by_priority.setdefault(priority, []).append((run, expires_at_ms))
        for priority in by_priority:
            self._queue(priority)
        acked = dict(self._own(settled))
        return _Prepared(
            [
                self._queues[priority].prepare(
                    by_priority.get(priority, ()), acked.get(priority, ())
                )
                for priority in dict.fromkeys((*by_priority, *acked))
            ]
        )

    def _split(
        self, messages: Sequence[Message], confirm: Confirm | None
    ) -> list[tuple[int, Sequence[Message], Confirm | None]]:
        """The same run as runs of one priority each, in order within each of them."""
        runs: dict[int, list[Message]] = {}
        header: bytes | None = None
        run: list[Message] = []
        for message in messages:
            # Equal headers are one object where they were published one after the other.
            if message.header is not header:
                header = message.header
                run = runs.setdefault(self._priority(message), [])
            run.append(message)
        if len(runs) == 1:
            return [(next(iter(runs)), messages, confirm)]
        if confirm is None:
            return [(priority, run, None) for priority, run in runs.items()]
        shared = _Shared(confirm)
        return [(priority, run, Confirm(shared, 1, len(run))) for priority, run in runs.items()]

    def _priority(self, message: Message) -> int:
        if not message.needs & NEEDS_PRIORITY:
            return 0
        return min(pick_priority(message.header) or 0, self._max)

    # --- out -----------------------------------------------------------------------------------

    def _first(self) -> tuple[int, BackingQueue] | None:
        """The highest priority of which something is ready."""
        for priority, queue in self._queues.items():
            if len(queue):
                return priority, queue
        return None

    def fetch(
        self, limit: int, *, ack_required: bool, max_bytes: int | None = None
    ) -> list[Entry] | Nothing:
        first = self._first()
        if first is None:
            return EMPTY
        priority, queue = first
        entries = queue.fetch(limit, ack_required=ack_required, max_bytes=max_bytes)
        return _outer(entries, priority) if isinstance(entries, list) else entries

    def fetch_while(
        self, predicate: Predicate, limit: int, *, max_bytes: int | None = None
    ) -> list[Entry] | Loading:
        first = self._first()
        if first is None:
            return []
        priority, queue = first
        entries = queue.fetch_while(_seen_by(predicate, priority), limit, max_bytes=max_bytes)
        return _outer(entries, priority) if isinstance(entries, list) else entries

    def drop_while(self, predicate: Predicate, seen: list[Message] | None = None) -> int | Loading:
        first = self._first()
        if first is None:
            return 0
        priority, queue = first
        return queue.drop_while(_seen_by(predicate, priority), seen)

    def drop(self, count: int, seen: list[Message] | None = None) -> int | Loading:
        first = self._first()
        return 0 if first is None else first[1].drop(count, seen)

    def peek(self) -> Entry | Nothing:
        first = self._first()
        if first is None:
            return EMPTY
        priority, queue = first
        entry = queue.peek()
        return _outer([entry], priority)[0] if isinstance(entry, Entry) else entry

    # --- settling ------------------------------------------------------------------------------

    def _own(self, seq_ids: Iterable[int]) -> Iterable[tuple[int, list[int]]]:
        """Priorities, and the ids that their queues know; strangers are left out."""
        by_priority: dict[int, list[int]] = {}
        for seq_id in seq_ids:
            by_priority.setdefault(seq_id & _PRIORITY_MASK, []).append(seq_id >> PRIORITY_BITS)
        return [each for each in by_priority.items() if each[0] in self._queues]

    def ack(self, seq_ids: Collection[int]) -> None:
        for priority, own in self._own(seq_ids):
            self._queues[priority].ack(own)

    def requeue(self, seq_ids: Collection[int]) -> None:
        for priority, own in self._own(seq_ids):
            self._queues[priority].requeue(own)

    def pending(self, seq_ids: Sequence[int]) -> list[Entry] | Loading:
        found: dict[int, Entry] = {}
        # How many of the answer of a priority are still to come; 0 from the beginning: all of it.
        left: dict[int, int] = {}
        is_loading = False
        # All are asked, so that they read at the same time.
        for priority, own in self._own(seq_ids):
            entries = self._queues[priority].pending(own)
            if entries is LOADING:
                is_loading = True
            else:
                found.update((entry.seq_id, entry) for entry in _outer(entries, priority))
                left[priority] = len(entries)
        if is_loading:
            return LOADING
        known: list[Entry] = []
        answered = {priority for priority, count in left.items() if count}
        for seq_id in seq_ids:
            priority = seq_id & _PRIORITY_MASK
            if priority in answered and not left[priority]:
                # Behind its last: perhaps still to be read, and the order is to be kept.
                break
            if seq_id in found:
                left[priority] -= 1
                known.append(found[seq_id])
        return known

    def pending_in_memory(self, seq_ids: Iterable[int]) -> dict[int, Message]:
        return {
            seq_id << PRIORITY_BITS | priority: message
            for priority, own in self._own(seq_ids)
            for seq_id, message in self._queues[priority].pending_in_memory(own).items()
        }

    def ready_in_memory(self, limit: int) -> list[Message]:
        found: list[Message] = []
        for queue in self._queues.values():
            found += queue.ready_in_memory(limit - len(found))
        return found

    def count_returns(self, seq_ids: Sequence[int]) -> list[int]:
        counts: dict[int, int] = {}
        for priority, own in self._own(seq_ids):
            counted = self._queues[priority].count_returns(own)
            outer = [seq_id << PRIORITY_BITS | priority for seq_id in own]
            counts.update(zip(outer, counted, strict=True))
        return [counts[seq_id] for seq_id in seq_ids]

    def delivery_count(self, seq_id: int) -> int:
        queue = self._queues.get(seq_id & _PRIORITY_MASK)
        return 0 if queue is None else queue.delivery_count(seq_id >> PRIORITY_BITS)

    def purge(self) -> int:
        return sum([queue.purge() for queue in self._queues.values()])

    # --- exact expiry --------------------------------------------------------------------------

    def set_exact(self, *, is_exact: bool) -> None:
        self._is_exact = is_exact
        for queue in self._queues.values():
            queue.set_exact(is_exact=is_exact)

    def next_due_ms(self) -> int | None:
        dues = [queue.next_due_ms() for queue in self._queues.values()]
        return min([due for due in dues if due is not None], default=None)

    def take_due(self, now_ms: int, limit: int) -> list[int] | Loading:
        """In order over all: of the queue that is first what is due before any other's next."""
        taken: list[int] = []
        left = dict(self._queues)
        while len(taken) < limit:
            dues = sorted(
                (due, -priority)
                for priority, queue in left.items()
                if (due := queue.next_due_ms()) is not None and due <= now_ms
            )
            if not dues:
                break
            priority = -dues[0][1]
            until = dues[1][0] if len(dues) > 1 else now_ms
            seq_ids = left[priority].take_due(until, limit - len(taken))
            if seq_ids is LOADING:
                # What is due later must not come before.
                return taken or LOADING
            taken += [seq_id << PRIORITY_BITS | priority for seq_id in seq_ids]
            if not seq_ids:
                # What it says is the earliest it can be: there was none.
                due_ms = left[priority].next_due_ms()
                if due_ms is not None and due_ms <= until:
                    del left[priority]
        return taken

    # --- memory, and the end -------------------------------------------------------------------

    def ram_duration(self) -> float:
        return min([queue.ram_duration() for queue in self._queues.values()], default=math.inf)

    def set_ram_duration_target(self, duration_s: float) -> None:
        self._ram_duration_target = duration_s
        for queue in self._queues.values():
            queue.set_ram_duration_target(duration_s)

    def set_lazy(self, *, is_lazy: bool) -> None:
        self._is_lazy = is_lazy
        for queue in self._queues.values():
            queue.set_lazy(is_lazy=is_lazy)

    def resume(self) -> None:
        for queue in self._queues.values():
            queue.resume()

    def terminate(self) -> None:
        for queue in self._queues.values():
            queue.terminate()

    def delete_and_terminate(self) -> None:
        for queue in self._queues.values():
            queue.delete_and_terminate()

    # --- what others may see -------------------------------------------------------------------

    def is_duplicate(self, message: Message) -> bool:
        return any(queue.is_duplicate(message) for queue in self._queues.values())

    def __len__(self) -> int:
        return sum([len(queue) for queue in self._queues.values()])

    def is_empty(self) -> bool:
        return self._first() is None

    def depth(self) -> int:
        return sum([queue.depth() for queue in self._queues.values()])

    @property
    def paged(self) -> tuple[int, int, int, int]:
        # There may be none yet.
        each = [(0, 0, 0, 0), *[queue.paged for queue in self._queues.values()]]
        out, out_bytes, back, back_bytes = (sum(column) for column in zip(*each, strict=True))
        return out, out_bytes, back, back_bytes

    @property
    def may_expire(self) -> bool:
        return any(queue.may_expire for queue in self._queues.values())

    @property
    def ready_bytes(self) -> int:
        return sum([queue.ready_bytes for queue in self._queues.values()])

    def statistics(self) -> dict[str, object]:
        """What the queues say, numbers added up; and what each of them says."""
        each = {priority: queue.statistics() for priority, queue in self._queues.items()}
        total: dict[str, object] = {
            "mode": "default",
            "len": 0,
            "pending_acks": 0,
            "message_bytes_ready": 0,
            "message_bytes_unacknowledged": 0,
        }
        for statistics in each.values():
            for name, value in statistics.items():
                known = total.get(name)
                if isinstance(value, (int, float)) and isinstance(known, (int, float)):
                    total[name] = known + value
                elif isinstance(value, (int, float, str)):
                    total[name] = value
        return {
            **total,
            "max_priority": self._max,
            "priority_lengths": {priority: len(q) for priority, q in self._queues.items()},
            "priorities": each,
        }


def _outer(entries: list[Entry], priority: int) -> list[Entry]:
    """As the actor knows them."""
    return [
        _make_entry((entry[0] << PRIORITY_BITS | priority, entry[1], entry[2], entry[3]))
        for entry in entries
    ]


def _seen_by(predicate: Predicate, priority: int) -> Predicate:
    return lambda entry: predicate(_outer([entry], priority)[0])
