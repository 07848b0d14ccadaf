"""The seam between a queue and what keeps its messages (hop 7).

Upstream: the queue actor, sole caller. Downstream: whatever the implementation uses; this file
knows none of them. Every implementation passes the suite in ``tests/storage``.

A backing queue holds *ready* messages, in order, and *pending* ones: delivered and not yet
settled. Each message gets the next sequence id when it is published, and order in the queue is
order of ids, always: a message that is requeued goes back to the place it had. Its ``redelivered``
flag is set from then on. (Where there are priorities, that is so within each of them.)

Operations never wait. One that needs a message which is not in memory answers ``LOADING``,
changes nothing, and starts reading; when that is done the implementation calls the ``wake`` it
was constructed with, from the event loop, once for each LOADING. The same call then succeeds.
Publishes, acks, requeues and purges go on meanwhile. Counts are exact at any time, so an empty
queue answers ``EMPTY``, never LOADING.

Everything works on runs: the costs below are paid per call, not per message.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol

from leveret.protocol.message import Message

if TYPE_CHECKING:
    from leveret.storage.commit import Batch


class Entry(NamedTuple):
    """A message at its place in one queue."""

    seq_id: int
    message: Message
    redelivered: bool
    # Wall clock, milliseconds; None if it lives for ever. Given at publish, kept by a requeue.
    expires_at_ms: int | None = None


class Confirm(NamedTuple):
    """Sequence numbers ``first`` to ``last`` of one publishing channel, in a run's order."""

    # Stands for that channel; handed back as it came and never looked into.
    port: Any
    first: int
    last: int


class Nothing(enum.Enum):
    """Why there are no entries. An enumeration, so that ``is`` narrows the type."""

    EMPTY = "empty"
    LOADING = "loading"


EMPTY: Final = Nothing.EMPTY
LOADING: Final = Nothing.LOADING

Loading = Literal[Nothing.LOADING]
Predicate = Callable[[Entry], bool]


# Messages that came together, and when they expire (None: never).
Run = tuple[Sequence[Message], int | None]


class Prepared(Protocol):
    """What a unit (``unit.py``) does to one backing queue; nothing until ``gather``."""

    def gather(self, batch: Batch) -> None:
        """Its commit begins: messages get their positions, rows go into the batch.

        Until ``commit`` nothing else may be published.
        """

    def commit(self) -> None:
        """It is on disk: messages are ready, what was settled is forgotten."""


class BackingQueue(Protocol):
    """What a queue actor relies on. Mind that an empty one is false, as all that have a length."""

    def publish(
        self, messages: Sequence[Message], confirm: Confirm | None, expires_at_ms: int | None = None
    ) -> None:
        """Add a run at the rear. ``expires_at_ms`` holds for all of it."""

    def publish_delivered(
        self, messages: Sequence[Message], confirm: Confirm | None, expires_at_ms: int | None = None
    ) -> Sequence[int]:
        """Take in a run that goes straight to a consumer: pending, never ready.

        Only for an empty queue, or the run would overtake. Returns its ids.
        """

    def discard(self, messages: Sequence[Message], confirm: Confirm | None) -> None:
        """Note a run that is not to be kept at all; it is confirmed like any other."""

    def drain_confirmed(self) -> list[Confirm]:
        """Confirms whose messages became as safe as they will be since the last call.

        A confirm may come back in parts; each number comes back exactly once.
        """

    def fetch(
        self, limit: int, *, ack_required: bool, max_bytes: int | None = None
    ) -> list[Entry] | Nothing:
        """Take up to ``limit`` entries from the head; with ``ack_required`` they become pending.

        The bodies stay within ``max_bytes`` together, but one entry comes whatever its size.
        Fewer than asked for may come although more are ready. Never an empty list.
        """

    def fetch_while(
        self, predicate: Predicate, limit: int, *, max_bytes: int | None = None
    ) -> list[Entry] | Loading:
        """As fetch with acks, but only while ``predicate`` holds; may be an empty list.

        For messages that are dead-lettered: ack them once they are in safety elsewhere.
        """

    def drop_while(self, predicate: Predicate, seen: list[Message] | None = None) -> int | Loading:
        """Remove from the head while ``predicate`` holds; return how many went.

        Call again until it answers 0: it may stop where memory ends. ``seen`` gets those of them
        that were in memory.
        """

    def drop(self, count: int, seen: list[Message] | None = None) -> int | Loading:
        """Remove up to ``count`` from the head; return how many went, 0 only if none is ready.

        ``seen`` gets those of them that were in memory: nothing is read for it.
        """

    def peek(self) -> Entry | Nothing:
        """The head, where it stays: whose expiry the next timer is set for."""

    def ack(self, seq_ids: Collection[int]) -> None:
        """Forget pending messages; ids that are not pending are ignored."""

    def requeue(self, seq_ids: Collection[int]) -> None:
        """Return pending messages to their places; ids that are not pending are ignored."""

    def pending(self, seq_ids: Sequence[int]) -> list[Entry] | Loading:
        """Those of the ids that are pending, as they were fetched: to be dead-lettered.

        Those behind the last entry of the answer may be still to be read: ask again. Nothing,
        if none of them is pending.
        """

    def pending_in_memory(self, seq_ids: Iterable[int]) -> dict[int, Message]:
        """By id, those that are pending and in memory: nothing is read for it."""

    def ready_in_memory(self, limit: int) -> list[Message]:
        """What is ready and in memory, from the head, up to ``limit``; it stays where it is."""

    def count_returns(self, seq_ids: Sequence[int]) -> list[int]:
        """Pending messages come back once more: count it, for good; the new counts."""

    def delivery_count(self, seq_id: int) -> int:
        """How often a message has come back, as counted by ``count_returns``."""

    def prepare(self, runs: Sequence[Run], settled: Collection[int]) -> Prepared:
        """Publish ``runs`` and ack ``settled``, which are pending, as part of a unit.

        Whoever asks settles those in no other way until the unit is committed or void.
        """

    def purge(self) -> int:
        """Remove all that is ready; return how many that were. Pending ones stay."""

    def is_duplicate(self, message: Message) -> bool:
        """Has it been here before? For proxies that know; others say no."""

    def __len__(self) -> int:
        """Messages that are ready."""

    def is_empty(self) -> bool:
        """Is none ready?"""

    def depth(self) -> int:
        """Messages that are ready or pending."""

    @property
    def paged(self) -> tuple[int, int, int, int]:
        """Messages and bytes that left memory so far, and that came back into it."""

    @property
    def may_expire(self) -> bool:
        """Some message that is ready may have an expiry; False only if none has."""

    @property
    def ready_bytes(self) -> int:
        """Size of the bodies that are ready."""

    def ram_duration(self) -> float:
        """How many seconds what is in memory lasts at the present rates; infinity: for ever."""

    def set_ram_duration_target(self, duration_s: float) -> None:
        """So long may messages in memory last; the rest goes to disk, a step at a time.

        Those who have no disk do nothing.
        """

    def set_exact(self, *, is_exact: bool) -> None:
        """Keep track of when messages are due, wherever they stand."""

    def next_due_ms(self) -> int | None:
        """In an exact queue: nothing that is ready is due before; None: nothing ever is."""

    def take_due(self, now_ms: int, limit: int) -> list[int] | Loading:
        """In an exact queue: what is ready and due becomes pending; ids in order of due time.

        Call again until it answers with nothing.
        """

    def set_lazy(self, *, is_lazy: bool) -> None:
        """Keep messages on disk alone, or in memory while there is room.

        Those who have no disk do nothing.
        """

    def resume(self) -> None:
        """Called after each wake, before anything else: a step of work that waits, if any."""

    def terminate(self) -> None:
        """The queue stops and will be back: keep what is to outlive it. The last call, no wakes."""

    def delete_and_terminate(self) -> None:
        """The queue is gone for good: keep nothing. The last call, no wakes."""

    def statistics(self) -> dict[str, object]:
        """What a person who looks into this queue wants to see."""
