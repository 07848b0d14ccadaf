"""From a queue to its dead-letter exchange, a batch at a time, in order (DESIGN: units) [85, 86].

Owned by the queue's actor. What is to die waits here, pending in the backing queue. One batch is
under way: its copies in the target queues and its removal from this one are a unit, so a crash
neither loses nor doubles a message. A target that refuses, or is gone, is left out, as RabbitMQ
does; if nothing takes a message it is dropped.

The event log is told of a batch when it is on disk: until then it may begin anew, with other
queues, or in another life of this one.

Upstream: ``actor.py`` (rejects, expiry, length and delivery limits). Downstream: the exchange, and
the mailboxes of the queues it leads to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, Protocol

from leveret.broker.event_log.queue_log import QueueLog
from leveret.broker.queues import commands as c
from leveret.broker.queues.dead_letter import Burial, Reason, cycles
from leveret.broker.queues.units import QueuePart
from leveret.protocol.codec import pick_headers
from leveret.storage.backing_queue import LOADING

if TYPE_CHECKING:
    from leveret.broker.clock import Clock
    from leveret.broker.event_log.messages import MessageLog
    from leveret.broker.flow import Witness
    from leveret.broker.mailbox import Mailbox
    from leveret.broker.queues.effective import QueueOptions
    from leveret.broker.queues.record import Queue
    from leveret.broker.vhost import Vhost
    from leveret.protocol.field_table import Table
    from leveret.protocol.message import Message
    from leveret.storage.backing_queue import BackingQueue, Entry
    from leveret.storage.unit import Unit

# One unit takes so many messages and bytes.
BATCH_MESSAGES = 500
BATCH_BYTES = 1 << 20
# From here on the queue keeps what is to die until some of it has gone.
BACKLOG = 2_000


class Surroundings(Protocol):
    """What a queue needs of its virtual host."""

    @property
    def topology(self) -> Vhost[Queue]: ...

    @property
    def message_log(self) -> MessageLog | None: ...

    @property
    def credit_log(self) -> Witness | None: ...

    def make_unit(self, ended: Callable[[bool], object]) -> Unit: ...


def make_queue_log(
    surroundings: Surroundings | None,
    queue: Queue,
    clock: Clock,
    count_ready: Callable[[], int] = lambda: 0,
) -> QueueLog | None:
    log = None if surroundings is None else surroundings.message_log
    if log is None:
        return None
    return QueueLog(log, queue.name.vhost, queue.name.name, clock, count_ready)


class _Dead(NamedTuple):
    # None: it is no message of this queue (it was refused).
    seq_id: int | None
    # None: to be had of the backing queue.
    message: Message | None
    reason: Reason


class _Death(NamedTuple):
    """What the event log is to be told of one."""

    message: Message
    copy: Message
    reason: Reason
    # Where the copy goes.
    queues: Sequence[str]


# Copies that a queue did not take, its name, and why.
_NotTaken = tuple[Sequence["Message"], str, str]


class SourcePart(QueuePart):
    """The removal of what died. A queue that was deleted has nothing to remove, and need not be
    there; one that crashed has its messages back."""

    __slots__ = ("has_crashed",)

    has_crashed: bool

    @property
    def is_void(self) -> bool:
        return self.has_crashed


class DeadLetters:
    def __init__(
        self,
        queue: Queue,
        backing: BackingQueue,
        surroundings: Surroundings | None,
        clock: Clock,
        options: QueueOptions,
        log: QueueLog | None = None,
    ) -> None:
        self._log = log
        self._queue = queue
        self._backing = backing
        self._surroundings = surroundings
        self._clock = clock
        self._waiting: deque[_Dead] = deque()
        # What the unit under way takes, and its part in this queue.
        self._under_way: list[_Dead] = []
        self._part: SourcePart | None = None
        # The queue was deleted.
        self._has_left = False
        # Messages that died, by reason.
        self.counts: dict[str, int] = {}
        self._exchange: str | None = None
        self._routing_key: str | None = None
        self.configure(options)

    def configure(self, options: QueueOptions) -> None:
        """A policy may change where to from now on."""
        self._exchange = options.dead_letter_exchange
        self._routing_key = options.dead_letter_routing_key

    @property
    def is_wanted(self) -> bool:
        """There is a dead-letter exchange, though it may not exist."""
        return self._exchange is not None and self._surroundings is not None

    @property
    def is_full(self) -> bool:
        return len(self._waiting) >= BACKLOG

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._under_way

    # --- who dies --------------------------------------------------------------------------------

    def add(self, entries: Iterable[Entry], reason: Reason) -> None:
        """Fetched, and pending."""
        self._waiting.extend([_Dead(entry.seq_id, entry.message, reason) for entry in entries])

    def add_pending(self, seq_ids: Iterable[int], reason: Reason) -> None:
        """Pending since they were delivered; their messages may have left memory."""
        self._waiting.extend([_Dead(seq_id, None, reason) for seq_id in seq_ids])

    def add_refused(self, messages: Iterable[Message], reason: Reason) -> None:
        self._waiting.extend([_Dead(None, message, reason) for message in messages])

    # --- a batch ---------------------------------------------------------------------------------

    def step(self, mailbox: Mailbox) -> bool:
        """Begin a unit with what waits, unless one is under way; False: messages must be read."""
        while self._waiting and not self._under_way:
            batch = self._next_batch()
            if batch is None:
                return False
            if not self.is_wanted:
                self._drop(batch)
                continue
            for dead in batch:
                self.counts[dead.reason] = self.counts.get(dead.reason, 0) + 1
            targets, deaths = self._route(batch)
            if targets:
                self._begin(mailbox, batch, targets, deaths)
            else:
                self._tell(deaths, ())
                self._backing.ack([dead.seq_id for dead in batch if dead.seq_id is not None])
        return True

    def _drop(self, batch: Sequence[_Dead]) -> None:
        """There is nowhere to go any more: that they died is all there is to tell."""
        if self._log is not None:
            depth = len(self._backing)
            for reason, run in groupby(batch, attrgetter("reason")):
                if reason != "expired":
                    gone = [dead.message for dead in run if dead.message is not None]
                    self._log.dropped(gone, depth, reason)
        self._backing.ack([dead.seq_id for dead in batch if dead.seq_id is not None])

    def _begin(
        self,
        mailbox: Mailbox,
        batch: list[_Dead],
        targets: dict[Queue, list[Message]],
        deaths: Sequence[_Death],
    ) -> None:
        self._under_way = batch
        seq_ids = [dead.seq_id for dead in batch if dead.seq_id is not None]
        assert self._surroundings is not None
        not_taken: list[_NotTaken] = []

        def note(queue: str, messages: Sequence[Message], reason: str) -> None:
            not_taken.append((messages, queue, reason))

        unit = self._surroundings.make_unit(
            partial(self._on_ended, mailbox, targets, deaths, not_taken)
        )
        for target, messages in targets.items():
            noting = partial(note, target.name.name) if deaths else None
            prepare = c.Prepare(unit, mailbox, messages, (), is_optional=True, not_taken=noting)
            if target.mailbox.put(prepare):
                unit.expect()
        self._part = SourcePart(
            mailbox, lambda: None, self._backing.prepare((), seq_ids), mailbox, {}, 0
        )
        self._part.has_crashed = False
        unit.expect()
        unit.join(self._part)
        unit.begin()

    def _on_ended(
        self,
        mailbox: Mailbox,
        targets: dict[Queue, list[Message]],
        deaths: Sequence[_Death],
        not_taken: list[_NotTaken],
        is_committed: bool,
    ) -> None:
        is_here = mailbox.put_urgent(c.UnitEnded(is_committed))
        if is_committed:
            # At once, before the targets know: whoever is given a copy tells of that.
            if deaths:
                not_taken += _gone(targets, not_taken)
            self._tell(deaths, not_taken)
        elif not is_here and self._has_left:
            # Deleted meanwhile, as was one of its targets: the others get theirs all the same.
            self._send_off(self._under_way)

    def _tell(self, deaths: Sequence[_Death], not_taken: Sequence[_NotTaken]) -> None:
        if self._log is None or not deaths:
            return
        depth = 0 if self._has_left else len(self._backing)
        for death in deaths:
            self._log.dead_lettered(*death, depth)
        for messages, queue, reason in not_taken:
            self._log.not_taken(messages, queue, reason)

    def on_unit_ended(self, *, is_committed: bool) -> None:
        """The next may begin; what came to nothing begins anew, with the queues that are left."""
        if not is_committed:
            for dead in self._under_way:
                self.counts[dead.reason] -= 1
            self._waiting.extendleft(reversed(self._under_way))
        self._under_way = []
        self._part = None

    def _next_batch(self) -> list[_Dead] | None:
        """What one unit takes, with its messages; None if some of them must be read first."""
        chosen: list[_Dead] = []
        size = 0
        for dead in self._waiting:
            if len(chosen) >= BATCH_MESSAGES or size >= BATCH_BYTES:
                break
            if dead.message is not None:
                size += len(dead.message.body)
            chosen.append(dead)
        absent = [
            dead.seq_id for dead in chosen if dead.message is None and dead.seq_id is not None
        ]
        if absent:
            found = self._backing.pending(absent)
            if found is LOADING:
                return None
            messages = {entry.seq_id: entry.message for entry in found}
            chosen = _up_to_last_found(chosen, messages)
        for _ in chosen:
            self._waiting.popleft()
        if absent and self._log is not None:
            # Those that expired in memory were told when they did.
            asked = frozenset(absent)
            expired = [
                dead.message
                for dead in chosen
                if dead.seq_id in asked and dead.reason == "expired" and dead.message is not None
            ]
            if expired:
                self._log.expired(expired, len(self._backing))
        return [dead for dead in chosen if dead.message is not None]

    def _route(self, batch: Sequence[_Dead]) -> tuple[dict[Queue, list[Message]], Sequence[_Death]]:
        """Copies for each queue that is to get some, in order; what is to be told of them."""
        targets: dict[Queue, list[Message]] = {}
        deaths: list[_Death] = []
        if self._surroundings is None or self._exchange is None:
            return targets, deaths
        topology = self._surroundings.topology
        exchange = topology.exchanges.get(self._exchange)
        burial = Burial(
            self._queue.name.name, self._exchange, self._routing_key, int(self._clock.now())
        )
        for dead in batch:
            message = dead.message
            assert message is not None
            is_told = self._log is not None and message.log_id != 0
            if exchange is None:
                # It was never declared, or is gone.
                if is_told:
                    copy = burial.bury(message, dead.reason)
                    deaths.append(_Death(message, copy, dead.reason, ()))
                continue
            copy = burial.bury(message, dead.reason)
            queues = topology.route(
                exchange,
                copy.routing_key,
                copy.extra_keys,
                partial(_headers, copy.header),
            )
            exchange.publish_in += 1
            queues = [queue for queue in queues if not cycles(copy, queue.name.name)]
            exchange.publish_out += len(queues)
            if self._log is not None and is_told:
                self._log.inherit(message, copy)
                names = [queue.name.name for queue in queues]
                deaths.append(_Death(message, copy, dead.reason, names))
            for queue in queues:
                targets.setdefault(queue, []).append(copy)
        return targets, deaths

    # --- the end ---------------------------------------------------------------------------------

    def leave(self) -> None:
        """The queue is deleted: what was to die has died, though nobody waits for its copies.

        But for what has left memory: that goes with the queue.
        """
        self._has_left = True
        waiting = list(self._waiting)
        self._waiting.clear()
        absent = {
            dead.seq_id: dead.reason
            for dead in waiting
            if dead.message is None and dead.seq_id is not None
        }
        found = self._backing.pending_in_memory(absent)
        if self._log is not None:
            # As in _next_batch. Nobody will read the others.
            expired = [seq_id for seq_id, reason in absent.items() if reason == "expired"]
            seen = [found[seq_id] for seq_id in expired if seq_id in found]
            self._log.left("expire", "", len(expired), seen, depth=0)
        batch: list[_Dead] = []
        for dead in waiting:
            if dead.message is None and dead.seq_id is not None:
                if dead.seq_id not in found:
                    continue
                dead = dead._replace(message=found[dead.seq_id])
            batch.append(dead)
        if not self.is_wanted:
            self._drop(batch)
            return
        for dead in batch:
            self.counts[dead.reason] = self.counts.get(dead.reason, 0) + 1
        self._send_off(batch)

    def _send_off(self, batch: Sequence[_Dead]) -> None:
        targets, deaths = self._route(batch)
        self._tell(deaths, ())
        for target, messages in targets.items():
            sizes = [len(message.body) for message in messages]
            target.mailbox.put(
                c.Delivery(
                    messages,
                    self._queue.mailbox,
                    0,
                    0,
                    sum(sizes),
                    max(sizes),
                    sum([message.persistent for message in messages]),
                    is_mandatory=False,
                )
            )

    def crash(self) -> None:
        """The queue starts anew with all that a commit has not taken yet."""
        if self._part is not None:
            self._part.has_crashed = True


def _gone(targets: dict[Queue, list[Message]], not_taken: Iterable[_NotTaken]) -> list[_NotTaken]:
    """Of queues that were deleted, also while the commit was under way: what is not noted yet."""
    gone: list[_NotTaken] = []
    for target, messages in targets.items():
        if target.mailbox.is_closed:
            name = target.name.name
            noted = {id(each) for some, queue, _ in not_taken if queue == name for each in some}
            left = [message for message in messages if id(message) not in noted]
            gone.append((left, name, "queue_deleted"))
    return gone


def _up_to_last_found(chosen: list[_Dead], messages: dict[int, Message]) -> list[_Dead]:
    """With their messages, as far as those are known; without where they are gone.

    What was asked for and stands behind the last that was found is still to be read, or gone if
    nothing was found.
    """
    left = len(messages)
    known: list[_Dead] = []
    for dead in chosen:
        if dead.message is None and dead.seq_id is not None:
            if messages and not left:
                break
            message = messages.get(dead.seq_id)
            left -= message is not None
            dead = dead._replace(message=message)
        known.append(dead)
    return known


def _headers(header: bytes) -> Table:
    return pick_headers(header) or {}
