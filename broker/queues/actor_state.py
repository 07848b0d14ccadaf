"""What a queue's actor knows: its mailbox, backing queue, consumers, limits and credit.

The lowest layer of ``actor.py``, which tells what the whole of it does. Above it:
``actor_rules.py`` (limits, times, dead letters), ``actor_delivering.py`` (to consumers, and their
answers), ``actor_publishing.py`` (from channels, and units).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from leveret.broker.flow import CreditFlow
from leveret.broker.mailbox import Mailbox
from leveret.broker.queues import commands as c
from leveret.broker.queues.consumers import ChannelState, Consumers
from leveret.broker.queues.counters import QueueCounters
from leveret.broker.queues.dead_lettering import DeadLetters, Surroundings, make_queue_log
from leveret.broker.queues.expiry import MessageExpiry, QueueExpiry
from leveret.broker.queues.length_limit import LengthLimit
from leveret.storage.backing_queue import BackingQueue

if TYPE_CHECKING:
    from leveret.broker.clock import Clock
    from leveret.broker.config import Settings
    from leveret.broker.queues.decorators import QueueDecorator
    from leveret.broker.queues.record import Queue

log = logging.getLogger(__name__)

# From this size on a message costs more than one credit and is handed out one by one.
LARGE = 1 << 14
# Stands for the store among the peers that credit is owed to.
STORE = Mailbox("store")


class ActorState:
    def __init__(
        self,
        queue: Queue,
        make_backing: Callable[[Callable[[], None]], BackingQueue],
        on_deleted: Callable[[Queue], None],
        clock: Clock,
        settings: Settings,
        decorators: Sequence[QueueDecorator] = (),
        surroundings: Surroundings | None = None,
    ) -> None:
        """Without ``surroundings`` there is nowhere to dead-letter to."""
        self.queue = queue
        mailbox = self.mailbox = queue.mailbox
        self.counters = QueueCounters(clock)
        self._backing = make_backing(self._wake)
        self._on_deleted = on_deleted
        self._decorators = decorators
        options = queue.effective
        self._limit = LengthLimit(options)
        self._expiry = MessageExpiry(
            clock, lambda: mailbox.put_urgent(c.DropExpired()), options.message_ttl_ms
        )
        self._lifetime = QueueExpiry(
            clock, lambda: mailbox.put_urgent(c.ExpireQueue()), options.expires_ms
        )
        # What happens to messages here, for the event log; None if it does not want to know.
        self._log = make_queue_log(surroundings, queue, clock, self._backing.__len__)
        self._dead = DeadLetters(queue, self._backing, surroundings, clock, options, self._log)
        # After so many returns a message is dead; None: never.
        self._delivery_limit = options.delivery_limit
        # Deliveries say how often the message has come back.
        self._shows_delivery_count = options.queue_type == "quorum"
        self._is_exact = options.message_ttl_exact
        self._backing.set_exact(is_exact=self._is_exact)
        # A DropExpired is under way that goes on with what _keep_rules has left.
        self._has_to_drop = False
        # There are limits or times to keep: publishes take the longer way.
        self._is_ruled = self._has_rules()
        witness = None if surroundings is None else surroundings.credit_log
        self._flow = CreditFlow(
            self.mailbox,
            settings.credit_flow_initial,
            settings.credit_flow_more_after,
            witness,
        )
        # What the store may still be given before its commits have caught up.
        self._store_credit = CreditFlow(self.mailbox, settings.store_credit, 1, witness)
        self._consumers = Consumers(
            self.mailbox,
            settings.delivery_window,
            single_active=queue.options.single_active_consumer,
        )
        # Units whose commit has begun and has not ended: their messages have positions, so
        # nothing else may be published until they are here.
        self._parts_committing = 0
        # What units that this queue has joined are to bring: it has its place already.
        self._expected = 0
        self._expected_bytes = 0
        # Channels that have published or asked something here; told when the queue goes.
        self._senders: set[Mailbox] = set()
        # Sequence numbers to confirm at the end of the batch, per publishing channel.
        self._confirms: dict[Mailbox, list[tuple[int, int]]] = {}
        # The backing queue may have work left that waits for the store's credit.
        self._is_paging = False
        # The backing queue is reading; fetch again once it says so.
        self._is_loading = False
        # A get met so many that have expired that some of the dead must be gone first.
        self._waits_for_burial = False
        # Gets that came while the backing queue was reading.
        self._waiting_gets: list[c.Get] = []
        # Channels given something in this batch: their last Deliver may still be extended.
        self._extended: list[ChannelState] = []
        # Turns in which publishers are still passed over, see _take_publishes.
        self._patience = 0
        # An auto-delete queue goes when its last consumer does, not before it had one.
        self._had_consumer = False
        # Taken from the control lane and not yet handled; the command at hand after a crash.
        self._taken: Iterator[object] = iter(())
        # False: the batch at hand is the last one.
        self._is_alive = True
        # What the event log was told last of messages that left memory and came back.
        self._paged = self._backing.paged
        # What decorators were told last.
        self._told: tuple[int | None, bool] | None = None

    def _has_rules(self) -> bool:
        return (
            self._limit.drops_head
            or self._limit.refuses
            or self._expiry.ttl_ms is not None
            or self._backing.may_expire
            or not self._dead.is_idle
        )

    def _confirm(self, sender: Mailbox, first: int, last: int) -> None:
        ranges = self._confirms.setdefault(sender, [])
        if ranges and ranges[-1][1] + 1 == first:
            ranges[-1] = (ranges[-1][0], last)
        else:
            ranges.append((first, last))

    def _know(self, channel: Mailbox) -> None:
        """It remembers us, too: whoever ends first tells the other."""
        if not channel.is_closed:
            self._senders.add(channel)

    def _wake(self) -> None:
        """Called by the backing queue when it has read what it was asked for."""
        self.mailbox.put_urgent(c.Loaded())

    def _lifetime_renewed(self) -> None:
        if self._lifetime.expires_ms is not None and not len(self._consumers):
            self._lifetime.used()

    def _tell_decorators(self, event: str, *details: object) -> None:
        for decorator in self._decorators:
            try:
                getattr(decorator, event)(self.queue, *details)
            except Exception:
                # Foreign code: the queue must not crash, and crash again, because of it.
                log.exception("%s: a decorator failed at %s", self.queue.name, event)
