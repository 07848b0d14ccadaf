"""A BackingQueue that keeps everything in memory: for what need not outlive the broker.

Upstream: the queue actor, through ``backing_queue.py``. Downstream: nothing.

Ready messages stand in two deques side by side, ids and messages, so that a run is taken in by
two ``extend`` calls and no object is made per message. What few messages have (a past delivery,
an expiry) is kept beside them, by id. Being in memory is as safe as it gets here, so confirms
come back at once.

With ``loading`` given it plays a queue whose head is on disk: it answers LOADING at random,
though never twice without a wake in between, and never to the first question after a wake.
Whoever passes tests against that can be given a queue that really reads.
"""

from __future__ import annotations

import asyncio
import math
import random
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice, repeat

from leveret.protocol.message import Message
from leveret.storage.backing_queue import (
    EMPTY,
    LOADING,
    Confirm,
    Entry,
    Loading,
    Nothing,
    Predicate,
    Prepared,
    Run,
)
from leveret.storage.commit import Batch

# Makes an Entry of a plain tuple without entering Python: the constructor costs twice as much.
_make_entry: Callable[[tuple[int, Message, bool, int | None]], Entry] = partial(
    tuple.__new__, Entry
)


class _Prepared:
    """A unit's part: being in memory is as safe as it gets, so all of it happens at the end."""

    __slots__ = ("_queue", "_runs", "_settled")

    def __init__(self, queue: MemoryQueue, runs: Sequence[Run], settled: Collection[int]) -> None:
        self._queue = queue
        self._runs = runs
        self._settled = settled

    def gather(self, batch: Batch) -> None:
        pass

    def commit(self) -> None:
        for messages, expires_at_ms in self._runs:
            self._queue.publish(messages, None, expires_at_ms)
        self._queue.ack(self._settled)


class MemoryQueue:
    def __init__(
        self,
        wake: Callable[[], None],
        loading: random.Random | None = None,
        call_soon: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        """``call_soon`` runs a wake later; if not given, the running event loop does."""
        # The id that the next message gets.
        self._next_seq_id = 0
        # Ready messages and their ids, head first, ids ascending.
        self._ids: deque[int] = deque()
        self._messages: deque[Message] = deque()
        self._ready_bytes = 0
        # Delivered and not settled.
        self._pending: dict[int, Message] = {}
        # Ids, ready or pending, that have been requeued.
        self._redelivered: set[int] = set()
        # Expiry of those, ready or pending, that have one.
        self._expiries: dict[int, int] = {}
        # How often those that were returned and counted came back.
        self._returns: dict[int, int] = {}
        # It is to be asked for what is due, wherever that stands.
        self._is_exact = False
        self._confirmed: list[Confirm] = []

        self._wake = wake
        self._loading = loading
        self._call_soon = call_soon
        # LOADING was answered and the wake has not come.
        self._is_waking = False
        # The wake has come and nothing was asked since.
        self._is_awake = False
        self._is_terminated = False

    # --- in ------------------------------------------------------------------------------------

    def publish(
        self, messages: Sequence[Message], confirm: Confirm | None, expires_at_ms: int | None = None
    ) -> None:
        ids = self._take_ids(len(messages), expires_at_ms)
        self._ids.extend(ids)
        self._messages.extend(messages)
        self._ready_bytes += _size(messages)
        if confirm is not None:
            self._confirmed.append(confirm)

    def publish_delivered(
        self, messages: Sequence[Message], confirm: Confirm | None, expires_at_ms: int | None = None
    ) -> Sequence[int]:
        ids = self._take_ids(len(messages), expires_at_ms)
        self._pending.update(zip(ids, messages, strict=True))
        if confirm is not None:
            self._confirmed.append(confirm)
        return ids

    def discard(self, messages: Sequence[Message], confirm: Confirm | None) -> None:
        if confirm is not None:
            self._confirmed.append(confirm)

    def drain_confirmed(self) -> list[Confirm]:
        confirmed, self._confirmed = self._confirmed, []
        return confirmed

    def _take_ids(self, count: int, expires_at_ms: int | None) -> range:
        first = self._next_seq_id
        self._next_seq_id = first + count
        ids = range(first, first + count)
        if expires_at_ms is not None:
            self._expiries.update(dict.fromkeys(ids, expires_at_ms))
        return ids

    def prepare(self, runs: Sequence[Run], settled: Collection[int]) -> Prepared:
        return _Prepared(self, runs, settled)

    # --- out -----------------------------------------------------------------------------------

    def fetch(
        self, limit: int, *, ack_required: bool, max_bytes: int | None = None
    ) -> list[Entry] | Nothing:
        if not self._ids:
            return EMPTY
        if self._must_load():
            return LOADING
        count = 1 if limit == 1 else self._fitting(limit, max_bytes)
        if count == 1:
            return [self._take_one(ack_required=ack_required)]
        return self._take(count, ack_required=ack_required)

    def fetch_while(
        self, predicate: Predicate, limit: int, *, max_bytes: int | None = None
    ) -> list[Entry] | Loading:
        if self._must_load():
            return LOADING
        count = self._matching(predicate, self._fitting(limit, max_bytes))
        return self._take(count, ack_required=True)

    def drop_while(self, predicate: Predicate, seen: list[Message] | None = None) -> int | Loading:
        if self._must_load():
            return LOADING
        return self._drop(self._matching(predicate, len(self)), seen)

    def drop(self, count: int, seen: list[Message] | None = None) -> int | Loading:
        return LOADING if self._must_load() else self._drop(min(count, len(self)), seen)

    def peek(self) -> Entry | Nothing:
        if not self._ids:
            return EMPTY
        return LOADING if self._must_load() else next(self._entries(self._ids, self._messages))

    def _fitting(self, limit: int, max_bytes: int | None) -> int:
        """How many from the head are within both bounds; one at least, if there is one."""
        count = min(limit, len(self._ids))
        if max_bytes is None or self._ready_bytes <= max_bytes:
            return count
        size = 0
        for at, message in enumerate(islice(self._messages, count)):
            size += len(message.body)
            if size > max_bytes and at:
                return at
        return count

    def _matching(self, predicate: Predicate, limit: int) -> int:
        """How many from the head satisfy ``predicate``, looking at ``limit`` at most."""
        count = 0
        for entry in islice(self._entries(self._ids, self._messages), limit):
            if not predicate(entry):
                break
            count += 1
        return count

    def _entries(self, ids: Iterable[int], messages: Iterable[Message]) -> Iterator[Entry]:
        past = self._redelivered
        redelivered = map(past.__contains__, ids) if past else repeat(False)
        expiries = map(self._expiries.get, ids) if self._expiries else repeat(None)
        return map(_make_entry, zip(ids, messages, redelivered, expiries, strict=False))

    def _take(self, count: int, *, ack_required: bool) -> list[Entry]:
        ids, messages = self._pop(count)
        entries = list(self._entries(ids, messages))
        if ack_required:
            self._pending.update(zip(ids, messages, strict=True))
        else:
            self._forget(ids)
        return entries

    def _take_one(self, *, ack_required: bool) -> Entry:
        """As _take, for the basic.get or the message of a slow queue: a fifth of the cost."""
        seq_id, message = self._ids.popleft(), self._messages.popleft()
        self._ready_bytes -= len(message.body)
        past = seq_id in self._redelivered
        entry = _make_entry((seq_id, message, past, self._expiries.get(seq_id)))
        if ack_required:
            self._pending[seq_id] = message
        else:
            self._forget((seq_id,))
        return entry

    def _drop(self, count: int, seen: list[Message] | None = None) -> int:
        ids, messages = self._pop(count)
        if seen is not None:
            seen += messages
        self._forget(ids)
        return count

    def _pop(self, count: int) -> tuple[list[int], list[Message]]:
        pop_id, pop_message = self._ids.popleft, self._messages.popleft
        ids = [pop_id() for _ in range(count)]
        messages = [pop_message() for _ in range(count)]
        self._ready_bytes -= _size(messages)
        return ids, messages

    # --- settling ------------------------------------------------------------------------------

    def ack(self, seq_ids: Collection[int]) -> None:
        pop = self._pending.pop
        known = [seq_id for seq_id in seq_ids if pop(seq_id, None) is not None]
        self._forget(known)

    def pending(self, seq_ids: Sequence[int]) -> list[Entry] | Loading:
        pending = self._pending
        known = [seq_id for seq_id in seq_ids if seq_id in pending]
        return list(self._entries(known, [pending[seq_id] for seq_id in known]))

    def pending_in_memory(self, seq_ids: Iterable[int]) -> dict[int, Message]:
        pending = self._pending
        return {seq_id: pending[seq_id] for seq_id in seq_ids if seq_id in pending}

    def ready_in_memory(self, limit: int) -> list[Message]:
        return list(islice(self._messages, limit))

    def count_returns(self, seq_ids: Sequence[int]) -> list[int]:
        for seq_id in seq_ids:
            self._returns[seq_id] = self._returns.get(seq_id, 0) + 1
        return [self._returns[seq_id] for seq_id in seq_ids]

    def delivery_count(self, seq_id: int) -> int:
        return self._returns.get(seq_id, 0)

    def requeue(self, seq_ids: Collection[int]) -> None:
        pending = self._pending
        returned = [
            (seq_id, pending.pop(seq_id)) for seq_id in sorted(set(seq_ids) & pending.keys())
        ]
        if not returned:
            return
        self._redelivered.update(seq_id for seq_id, _ in returned)
        self._ready_bytes += _size([message for _, message in returned])
        ids, messages = self._ids, self._messages
        # All that changes lies between these two places: mostly none, at the head.
        start = self._place_of(returned[0][0])
        end = self._place_of(returned[-1][0])
        ids.rotate(-start)
        messages.rotate(-start)
        if end > start:
            between = [(ids.popleft(), messages.popleft()) for _ in range(end - start)]
            returned = sorted(between + returned)
        returned.reverse()
        ids.extendleft([seq_id for seq_id, _ in returned])
        messages.extendleft([message for _, message in returned])
        ids.rotate(start)
        messages.rotate(start)

    def _place_of(self, seq_id: int) -> int:
        """How many ready messages stand before ``seq_id``; cheap if they are few."""
        ids = self._ids
        length = len(ids)
        # A deque is slow in its middle: go there only if the head says so.
        end = 1
        while end <= length and ids[end - 1] < seq_id:
            end <<= 1
        return bisect_left(ids, seq_id, end >> 1, min(end, length))

    def purge(self) -> int:
        return self._drop(len(self._ids))

    def _forget(self, ids: Collection[int]) -> None:
        """These are neither ready nor pending any more."""
        if self._redelivered:
            self._redelivered.difference_update(ids)
        if self._expiries:
            for seq_id in ids:
                self._expiries.pop(seq_id, None)
        if self._returns:
            for seq_id in ids:
                self._returns.pop(seq_id, None)

    # --- loading, for tests --------------------------------------------------------------------

    def _must_load(self) -> bool:
        """Answer LOADING this time? Also sees to it that the wake comes."""
        if self._loading is None or not self._ids or self._is_waking:
            return False
        if self._is_awake or self._loading.random() < 0.5:
            self._is_awake = False
            return False
        self._is_waking = True
        call_soon = self._call_soon or asyncio.get_running_loop().call_soon
        call_soon(self._on_loaded)
        return True

    def _on_loaded(self) -> None:
        self._is_waking = False
        self._is_awake = True
        if not self._is_terminated:
            self._wake()

    # --- the rest ------------------------------------------------------------------------------

    def is_duplicate(self, message: Message) -> bool:
        return False

    def __len__(self) -> int:
        return len(self._ids)

    def is_empty(self) -> bool:
        return not self._ids

    def depth(self) -> int:
        return len(self._ids) + len(self._pending)

    @property
    def paged(self) -> tuple[int, int, int, int]:
        return 0, 0, 0, 0

    @property
    def may_expire(self) -> bool:
        return bool(self._expiries)

    @property
    def ready_bytes(self) -> int:
        return self._ready_bytes

    def ram_duration(self) -> float:
        return math.inf

    def set_ram_duration_target(self, duration_s: float) -> None:
        """All there is is memory."""

    def set_exact(self, *, is_exact: bool) -> None:
        self._is_exact = is_exact

    def next_due_ms(self) -> int | None:
        if not self._is_exact:
            return None
        pending = self._pending
        times = (due for seq_id, due in self._expiries.items() if seq_id not in pending)
        return min(times, default=None)

    def take_due(self, now_ms: int, limit: int) -> list[int] | Loading:
        due = sorted(
            (expiry, seq_id)
            for seq_id, expiry in self._expiries.items()
            if expiry <= now_ms and seq_id not in self._pending
        )
        taken = [seq_id for _, seq_id in due[:limit]]
        for seq_id in taken:
            place = self._place_of(seq_id)
            message = self._messages[place]
            del self._ids[place], self._messages[place]
            self._ready_bytes -= len(message.body)
            self._pending[seq_id] = message
        return taken

    def set_lazy(self, *, is_lazy: bool) -> None:
        """There is no disk."""

    def resume(self) -> None:
        pass

    def terminate(self) -> None:
        self.delete_and_terminate()

    def delete_and_terminate(self) -> None:
        self._is_terminated = True
        self.purge()
        self.ack(list(self._pending))

    def statistics(self) -> dict[str, object]:
        return {
            "mode": "memory",
            "len": len(self._ids),
            "pending_acks": len(self._pending),
            "next_seq_id": self._next_seq_id,
            "redelivered": len(self._redelivered),
            "expiring": len(self._expiries),
            "message_bytes_ready": self._ready_bytes,
            "message_bytes_unacknowledged": _size(self._pending.values()),
        }


def _size(messages: Collection[Message]) -> int:
    return sum([len(message.body) for message in messages])
