"""One queue: mailbox, consumers, backing queue (hop 6).

Upstream: ``delegate.py`` puts deliveries and questions into the mailbox; channels put acks,
credit and consumers. Downstream: ``storage/backing_queue.py``.

The actor is the sole owner of its state. ``run`` waits; everything else is a plain function that
decides, so between two awaits nobody sees half a change. One batch is: the control lane whole,
then publishes up to a bound, then what waits goes to consumers that are ready, then what all
that produced (confirms, notices) leaves at once.

Invariant, between batches: no message waits while a consumer is ready (unless it is being read).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby, repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from leveret.broker.flow import Bump, CreditFlow
from leveret.broker.mailbox import Mailbox
from leveret.broker.queues import commands as c
from leveret.broker.queues.consumers import ChannelState, Consumer, Consumers
from leveret.broker.queues.counters import QueueCounters
from leveret.broker.queues.dead_lettering import DeadLetters, Surroundings, make_queue_log
from leveret.broker.queues.delivery_count import with_delivery_count
from leveret.broker.queues.expiry import MessageExpiry, QueueExpiry
from leveret.broker.queues.length_limit import LengthLimit
from leveret.broker.queues.units import QueuePart
from leveret.protocol.errors import ChannelException, precondition_failed
from leveret.protocol.message import NEEDS_EXPIRATION
from leveret.storage.backing_queue import EMPTY, LOADING, BackingQueue, Confirm, Entry, Nothing

if TYPE_CHECKING:
    from leveret.broker.clock import Clock
    from leveret.broker.config import Settings
    from leveret.broker.event_log.queue_log import QueueLog
    from leveret.broker.queues.dead_letter import Reason
    from leveret.broker.queues.decorators import QueueDecorator
    from leveret.broker.queues.record import Queue
    from leveret.protocol.message import Message

log = logging.getLogger(__name__)

# A turn takes at most this much of the publish lane, so that acks and consumers get theirs.
TURN_MESSAGES = 500
TURN_BYTES = 1 << 20
# The least it takes while consumers work off a backlog.
BIASED_MESSAGES = 50
# After consumers took of the backlog, so many turns are left to them alone, unless more runs wait.
PATIENT_TURNS = 8
PATIENT_RUNS = 8
# From this size on a message costs more than one credit and is handed out one by one.
LARGE = 1 << 14
# Of what is too much or too old, so many go before others get their turn.
DROP_MESSAGES = 2_000


# Stands for the store among the peers that credit is owed to.
STORE = Mailbox("store")
# So many messages of a queue that is deleted are told one by one in the event log.
DELETED_TOLD = 10_000


class QueueActor:
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
        self.mailbox: Mailbox = queue.mailbox
        self.counters = QueueCounters(clock)
        self._backing = make_backing(self._wake)
        self._on_deleted = on_deleted
        self._decorators = decorators
        options = queue.effective
        self._limit = LengthLimit(options)
        self._expiry = MessageExpiry(
            clock, lambda: self.mailbox.put_urgent(c.DropExpired()), options.message_ttl_ms
        )
        self._lifetime = QueueExpiry(
            clock, lambda: self.mailbox.put_urgent(c.ExpireQueue()), options.expires_ms
        )
        # What happens to messages here, for the event log; None if it does not want to know.
        self._log = make_queue_log(surroundings, queue)
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
        # What decorators were told last.
        self._told: tuple[int | None, bool] | None = None
        self._handlers: dict[type, Callable[[Any], None]] = {
            c.Delivery: self._on_delivery,
            c.Prepare: self._on_prepare,
            c.PartCommitted: self._on_part_committed,
            c.PartVoided: self._on_part_voided,
            c.Ack: self._on_ack,
            c.Sent: self._on_sent,
            c.Reject: self._on_reject,
            c.Requeue: self._on_requeue,
            c.Get: self._on_get,
            c.Count: self._on_count,
            c.Purge: self._on_purge,
            c.Delete: self._on_delete,
            c.DeleteNow: self._on_delete_now,
            c.Consume: self._on_consume,
            c.Cancel: self._on_cancel,
            c.Resume: self._on_resume,
            c.ChannelDown: self._on_channel_down,
            c.Loaded: self._on_loaded,
            c.Terminate: self._on_terminate,
            c.DropExpired: self._on_drop_expired,
            c.ExpireQueue: self._on_expire_queue,
            c.UnitEnded: self._on_unit_ended,
            c.PolicyChanged: self._on_policy_changed,
            c.ReportRamDuration: self._on_report_ram_duration,
            c.SetRamDuration: self._on_set_ram_duration,
            Bump: self._on_store_bump,
        }

    # --- the loop --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Take batches until the queue is deleted."""
        mailbox = self.mailbox
        self._tell_decorators("startup")
        self._lifetime.used()
        # What came back may have expired, or be too much, meanwhile.
        self._keep_rules()
        while self._is_alive:
            # While the store is behind, publishes wait in their lane, and their senders' credit.
            await mailbox.turn(urgent_only=self._must_wait)
            self._take_control()
            if self._is_alive:
                self._keep_rules()
                delivered = self._deliver_waiting()
                self._take_publishes(delivered)
                self._deliver_waiting()
                # Another may be at the head now, and some of what was to be delivered has died.
                self._keep_rules()
            self._finish_batch()

    @property
    def _must_wait(self) -> bool:
        """Publishes must wait for the store."""
        return self._store_credit.is_blocked or self._parts_committing > 0

    def _take_control(self) -> None:
        # Not in run(), whose last command would be kept for as long as nothing else comes.
        self._taken = iter(self.mailbox.take_urgent())
        for command in self._taken:
            try:
                self._handlers[type(command)](command)
            except Exception:
                self._taken = chain((command,), self._taken)
                raise

    def _take_publishes(self, delivered: int) -> None:
        """``delivered``: what consumers took of the backlog in this turn.

        While they take at full speed, publishers are not let further ahead of them: a backlog
        that both sides could avoid only makes every message late (RabbitMQ's consumer bias [94]).
        Publishers that wait for confirms, so that little of theirs can wait here, are passed over
        for a few turns until consumers take again. A queue whose consumers are slow, or absent,
        takes whatever comes.
        """
        if self._must_wait:
            return
        lane = self.mailbox.ordinary
        messages = size = 0
        limit = TURN_MESSAGES
        if not self._backing.is_empty():
            if delivered:
                limit = max(delivered, BIASED_MESSAGES)
                self._patience = PATIENT_TURNS
            elif self._patience and len(lane) < PATIENT_RUNS:
                self._patience -= 1
                return
        store = self._store_credit
        while lane and self._is_alive and messages < limit and size < TURN_BYTES:
            # A unit that is kept in memory alone is committed by the last Prepare itself.
            if store.is_blocked or self._parts_committing:
                break
            command = lane.popleft()
            try:
                if type(command) is c.Delivery:
                    messages += len(command.messages)
                    size += command.size
                    self._on_delivery(command)
                    if self._is_ruled:
                        self._keep_rules()
                else:
                    messages += 1
                    self._handlers[type(command)](command)
            except Exception:
                self._taken = iter((command,))
                raise

    def _finish_batch(self) -> None:
        for confirm in self._backing.drain_confirmed():
            self._confirm(confirm.port, confirm.first, confirm.last)
        if self._confirms:
            for sender, ranges in self._confirms.items():
                for first, last in ranges:
                    sender.put_urgent(c.Confirmed(self.mailbox, first, last))
            self._confirms = {}
        if self._log is not None:
            self._log.paged(self._backing.paged, len(self._backing))
        for state in self._extended:
            state.last = None
        self._extended.clear()
        self.counters.consumers_ready(is_ready=self._consumers.has_ready)
        if self._decorators:
            self._notify_decorators()

    # --- publishing ------------------------------------------------------------------------------

    def _on_delivery(self, delivery: c.Delivery) -> None:
        """deliver_or_enqueue, for a run, in the seeds' order [76]."""
        sender = delivery.sender
        if not sender.is_closed:
            self._senders.add(sender)
            if delivery.cost:
                self._flow.ack(sender, delivery.cost)
        messages = delivery.messages
        count = len(messages)
        if self._is_ruled or delivery.needs & NEEDS_EXPIRATION:
            self._on_ruled_delivery(delivery)
            return
        # Only what is to outlive the broker is confirmed later, by the backing queue [78].
        first = delivery.confirm_first
        if first:
            persistent = delivery.persistent if self.queue.durable else 0
            if persistent and persistent != count:
                for part in _split_by_persistence(delivery):
                    first = part.confirm_first
                    if not part.persistent:
                        self._confirm(sender, first, first + len(part.messages) - 1)
                        first = 0
                    self._enqueue(part.messages, sender, first, part.largest)
                self.counters.publish += count
                return
            if not persistent:
                self._confirm(sender, first, first + count - 1)
                first = 0
        self._enqueue(messages, sender, first, delivery.largest)
        self.counters.publish += count

    def _on_ruled_delivery(self, delivery: c.Delivery) -> None:
        """The same where there are limits or times: in runs that are alike in both."""
        sender, largest = delivery.sender, delivery.largest
        confirm = delivery.confirm_first
        has_limit = self._limit.refuses or self._limit.drops_head
        for messages, expires_at_ms in self._expiry.runs(delivery.messages):
            at, count = 0, len(messages)
            # What expires at once must not count when the next one comes.
            is_brief = has_limit and self._expiry.is_due(expires_at_ms)
            while at < count:
                if is_brief and at:
                    self._keep_rules()
                taken, refused = self._admit(messages[at : at + 1] if is_brief else messages[at:])
                if refused:
                    end = at + refused
                    if confirm:
                        last = confirm + refused - 1
                        sender.put_urgent(c.Refused(self.mailbox, confirm, last))
                        confirm = last + 1
                    if self._limit.dead_letters_refused and self._dead.is_wanted:
                        self._dead.add_refused(messages[at:end], "maxlen")
                    elif self._log is not None:
                        self._log.dropped(messages[at:end], len(self._backing), "refused")
                    self.counters.refuse += refused
                    at = end
                    continue
                end = at + taken
                for run in _by_persistence(messages[at:end]) if confirm else (messages[at:end],):
                    first = confirm
                    if confirm:
                        confirm += len(run)
                        if not (self.queue.durable and run[0].persistent):
                            # Only what is to outlive the broker is confirmed later [78].
                            self._confirm(sender, first, confirm - 1)
                            first = 0
                    self._enqueue(run, sender, first, largest, expires_at_ms)
                self.counters.publish += taken
                at = end
            if is_brief:
                self._keep_rules()

    def _admit(self, messages: Sequence[Message]) -> tuple[int, int]:
        """How many from the front may come in, or else how many must not [77]."""
        limit = self._limit
        if not limit.refuses:
            return len(messages), 0
        length, size = self._length_to_be()
        if self._consumers.has_ready and not length:
            # What a consumer takes does not count: one by one.
            messages = messages[:1]
        taken = limit.accepted(messages, length, size)
        return taken, 0 if taken else limit.refused(messages, length, size)

    def _enqueue(
        self,
        messages: Sequence[Message],
        sender: Mailbox,
        confirm_first: int,
        largest: int,
        expires_at_ms: int | None = None,
    ) -> None:
        """To consumers what they can take now, the rest to the backing queue.

        ``confirm_first`` is 0 unless the backing queue is to confirm.
        """
        at = 0
        count = len(messages)
        if self._consumers.has_ready and self._backing.is_empty():
            at = self._attempt_delivery(messages, sender, confirm_first, largest, expires_at_ms)
        if at == count:
            return
        if at:
            messages = messages[at:]
            if confirm_first:
                confirm_first += at
        confirm = (
            Confirm(sender, confirm_first, confirm_first + len(messages) - 1)
            if confirm_first
            else None
        )
        if self._expiry.ttl_ms == 0 and not self._dead.is_wanted:
            # Nobody took it at once, and that was its only chance [81].
            self._backing.discard(messages, confirm)
            self.counters.expire += len(messages)
            if self._log is not None:
                self._log.expired(messages, len(self._backing))
            return
        self._backing.publish(messages, confirm, expires_at_ms)
        if expires_at_ms is not None:
            self._is_ruled = True

    def _attempt_delivery(
        self,
        messages: Sequence[Message],
        sender: Mailbox,
        confirm_first: int,
        largest: int,
        expires_at_ms: int | None,
    ) -> int:
        """Hand out from the front while consumers are ready; return how many went."""
        at, count = 0, len(messages)
        while at < count:
            granted = self._consumers.next_ready(1 if largest >= LARGE else count - at)
            if granted is None:
                break
            consumer, share = granted
            run = messages if share == count else messages[at : at + share]
            confirm = (
                Confirm(sender, confirm_first + at, confirm_first + at + share - 1)
                if confirm_first
                else None
            )
            seq_ids: list[int] | None = None
            if consumer.no_ack:
                self._backing.discard(run, confirm)
            else:
                given = self._backing.publish_delivered(run, confirm, expires_at_ms)
                seq_ids = list(given)
                if expires_at_ms is not None:
                    # It may come back.
                    self._is_ruled = True
            cost = share if largest < LARGE else share + (len(run[0].body) >> 14)
            if self._shows_delivery_count:
                run = [with_delivery_count(message, 0) for message in run]
            self._send(consumer, list(run), seq_ids, cost, redelivered=False)
            at += share
        return at

    # --- units -----------------------------------------------------------------------------------

    def _on_prepare(self, prepare: c.Prepare) -> None:
        """Reserve what a unit is to do here; nothing of it happens before its commit begins."""
        channel = prepare.sender
        if not prepare.is_optional:
            # Queues that dead-letter want to know nothing more.
            self._know(channel)
        messages = prepare.messages
        if messages and self._limit.refuses:
            fitting = self._limit.fitting(messages, *self._length_to_be())
            refused = len(messages) - len(fitting)
            self.counters.refuse += refused
            if refused and not prepare.is_optional:
                prepare.unit.refuse()
                return
            if refused and self._log is not None:
                left_out = {id(message) for message in messages} - {id(each) for each in fitting}
                gone = [message for message in messages if id(message) in left_out]
                self._log.dropped(gone, len(self._backing), "refused")
            messages = fitting
        state = self._consumers.channels.get(channel)
        settled: dict[int, Consumer | None] = {}
        if state is not None:
            unacked = state.unacked
            settled = {
                seq_id: unacked.pop(seq_id) for seq_id in prepare.settled if seq_id in unacked
            }
        prepared = self._backing.prepare(self._expiry.runs(messages), settled.keys())
        size = sum([len(message.body) for message in messages])
        self._expected += len(messages)
        self._expected_bytes += size
        prepare.unit.join(
            QueuePart(self.mailbox, self._stall, prepared, channel, settled, len(messages), size)
        )

    def _length_to_be(self) -> tuple[int, int]:
        """Messages and bytes that are ready, those included that units are about to bring."""
        return (
            len(self._backing) + self._expected,
            self._backing.ready_bytes + self._expected_bytes,
        )

    def _stall(self) -> None:
        self._parts_committing += 1

    def _no_longer_expected(self, part: QueuePart) -> None:
        self._expected -= part.count
        self._expected_bytes -= part.size

    def _on_part_committed(self, committed: c.PartCommitted) -> None:
        part = committed.part
        was_empty = self._backing.is_empty()
        if part.count:
            self._parts_committing -= 1
            self._no_longer_expected(part)
        part.prepared.commit()
        if self._backing.may_expire:
            self._is_ruled = True
        self.counters.publish += part.count
        self.counters.ack += len(part.settled)
        consumers = [consumer for consumer in part.settled.values() if consumer is not None]
        for consumer in consumers:
            consumer.credit += 1
        self._consumers.unblock(consumers)
        if part.count and was_empty and self._consumers.has_ready:
            # As with any publish: who is ready gets it before limits and times are kept [76].
            self._deliver_waiting(is_fresh=True)
        state = self._consumers.channels.get(part.channel)
        if state is not None:
            self._consumers.drop_idle_channel(state)

    def _on_part_voided(self, voided: c.PartVoided) -> None:
        """As if it had never been: the channel holds its deliveries again, if it is there."""
        part = voided.part
        self._no_longer_expected(part)
        if part.settled and part.channel.is_closed:
            self._return(sorted(part.settled))
        elif part.settled:
            self._consumers.channel(part.channel).unacked.update(part.settled)

    # --- delivering ------------------------------------------------------------------------------

    def _deliver_waiting(self, *, is_fresh: bool = False) -> int:
        """Serve consumers from the backing queue while both have something to give.

        ``is_fresh``: all of it has come just now, so nothing is too old. Returns how many
        messages went.
        """
        backing, consumers = self._backing, self._consumers
        delivered = 0
        while consumers.has_ready and not self._is_loading and not backing.is_empty():
            granted = consumers.next_ready(len(backing))
            if granted is None:
                break
            consumer, share = granted
            # What has expired is still to be dead-lettered, and counts are known of what is
            # here: it is fetched as pending.
            is_looked_at = self._is_ruled or self._shows_delivery_count
            try:
                entries = backing.fetch(
                    share,
                    ack_required=is_looked_at or not consumer.no_ack,
                    max_bytes=consumer.channel.window * LARGE,
                )
            except Exception:
                # A limit that is shared with other queues outlives this one.
                consumers.unused(consumer, share)
                raise
            if entries is LOADING or entries is EMPTY:
                consumers.unused(consumer, share)
                self._is_loading = entries is LOADING
                break
            if self._is_ruled and not is_fresh:
                entries = self._without_expired(entries)
            if len(entries) < share:
                consumers.unused(consumer, share - len(entries))
            if not entries and self._dead.is_full:
                # All had expired: the rest waits until some of them are on their way.
                break
            self._send_entries(consumer, entries)
            if is_looked_at and consumer.no_ack:
                backing.ack([entry.seq_id for entry in entries])
            delivered += len(entries)
        return delivered

    def _send_entries(self, consumer: Consumer, entries: Sequence[Any]) -> None:
        """Entries as runs of equal ``redelivered``."""
        at, count = 0, len(entries)
        while at < count:
            redelivered = entries[at].redelivered
            end = at + 1
            while end < count and entries[end].redelivered == redelivered:
                end += 1
            run = entries[at:end] if at or end < count else entries
            messages = [entry.message for entry in run]
            if self._shows_delivery_count:
                messages = [self._with_delivery_count(entry) for entry in run]
            seq_ids = None if consumer.no_ack else [entry.seq_id for entry in run]
            cost = len(run) + sum([len(message.body) >> 14 for message in messages])
            self._send(consumer, messages, seq_ids, cost, redelivered=redelivered)
            at = end

    def _send(
        self,
        consumer: Consumer,
        messages: list[Message],
        seq_ids: list[int] | None,
        cost: int,
        *,
        redelivered: bool,
    ) -> None:
        state = consumer.channel
        state.window -= cost
        counters = self.counters
        if seq_ids is None:
            counters.deliver_no_ack += len(messages)
        else:
            counters.deliver += len(messages)
            state.unacked.update(zip(seq_ids, repeat(consumer)))
        if redelivered:
            counters.redeliver += len(messages)
        last = state.last
        if last is not None and last.tag == consumer.tag and last.redelivered == redelivered:
            # Still in the channel's mailbox: one run is cheaper than two.
            last.messages += messages
            if last.seq_ids is not None and seq_ids is not None:
                last.seq_ids += seq_ids
            last.cost += cost
            return
        depth = len(self._backing) if self._log is not None else 0
        state.last = c.Deliver(
            self.mailbox, consumer.tag, messages, seq_ids, cost, depth, redelivered=redelivered
        )
        self._extended.append(state)
        # A channel that is gone says so (ChannelDown), and all it was given is requeued then.
        state.mailbox.put_urgent(state.last)

    def _confirm(self, sender: Mailbox, first: int, last: int) -> None:
        ranges = self._confirms.setdefault(sender, [])
        if ranges and ranges[-1][1] + 1 == first:
            ranges[-1] = (ranges[-1][0], last)
        else:
            ranges.append((first, last))

    # --- settling --------------------------------------------------------------------------------

    def _on_ack(self, ack: c.Ack) -> None:
        settled = self._settle(ack.channel, ack.seq_ids)
        self._backing.ack(settled)
        self.counters.ack += len(settled)

    def _on_reject(self, reject: c.Reject) -> None:
        settled = self._settle(reject.channel, reject.seq_ids)
        self._bury(settled, "rejected")
        self.counters.reject += len(settled)

    def _on_requeue(self, requeue: c.Requeue) -> None:
        self._return(self._settle(requeue.channel, requeue.seq_ids))

    def _return(self, seq_ids: Sequence[int]) -> None:
        """Back to their places; those that came back too often die instead."""
        if self._delivery_limit is not None or self._shows_delivery_count:
            counts = self._backing.count_returns(seq_ids)
            limit = self._delivery_limit
            if limit is not None:
                over = {each for each, count in zip(seq_ids, counts, strict=True) if count > limit}
                if over:
                    self._bury(sorted(over), "delivery_limit")
                    seq_ids = [seq_id for seq_id in seq_ids if seq_id not in over]
        self._backing.requeue(seq_ids)
        self.counters.requeue += len(seq_ids)

    def _bury(self, seq_ids: Sequence[int], reason: Reason) -> None:
        """Pending messages die: to the dead-letter exchange, if there is one."""
        if self._dead.is_wanted:
            self._dead.add_pending(seq_ids, reason)
            self._is_ruled = True
            return
        if self._log is not None and reason == "delivery_limit":
            found = self._backing.pending(seq_ids)
            if found is not LOADING:
                gone = [entry.message for entry in found]
                self._log.dropped(gone, len(self._backing), reason)
        self._backing.ack(seq_ids)

    def _with_delivery_count(self, entry: Entry) -> Message:
        count = self._backing.delivery_count(entry.seq_id)
        return with_delivery_count(entry.message, count)

    def _settle(self, channel: Mailbox, seq_ids: Sequence[int]) -> Sequence[int]:
        """Take deliveries off a channel's account; return those that were on it."""
        state = self._consumers.channels.get(channel)
        if state is None:
            return ()
        pop = state.unacked.pop
        unknown = self  # a value that no consumer is
        touched: list[Consumer] = []
        last: Consumer | None = None
        missing: set[int] = set()
        for seq_id in seq_ids:
            consumer: Any = pop(seq_id, unknown)
            if consumer is unknown:
                missing.add(seq_id)
            elif consumer is not None:
                consumer.credit += 1
                if consumer is not last:
                    last = consumer
                    touched.append(consumer)
        if missing:
            # The queue was restarted since: those numbers are not this channel's any more.
            log.info("%s: settled deliveries of an earlier life were ignored", self.queue.name)
            seq_ids = [seq_id for seq_id in seq_ids if seq_id not in missing]
        for consumer in touched:
            if not consumer.is_ready:
                self._consumers.unblock(touched)
                break
        if not state.unacked:
            self._consumers.drop_idle_channel(state)
        return seq_ids

    def _on_sent(self, sent: c.Sent) -> None:
        state = self._consumers.channels.get(sent.channel)
        if state is not None:
            was_shut = state.window <= 0
            state.window += sent.cost
            if was_shut:
                self._consumers.unblock(state.consumers)
            if not state.consumers:
                self._consumers.drop_idle_channel(state)

    def _on_resume(self, resume: c.Resume) -> None:
        state = self._consumers.channels.get(resume.channel)
        if state is not None:
            self._consumers.unblock(state.consumers)

    # --- consumers -------------------------------------------------------------------------------

    def _on_consume(self, consume: c.Consume) -> None:
        self._know(consume.channel)
        try:
            self._consumers.add(consume, self.queue.name)
        except ChannelException as error:
            consume.channel.put_urgent(c.Failed(error))
            return
        self._had_consumer = True
        self._lifetime.stop()
        consume.channel.put_urgent(c.Done())

    def _on_cancel(self, cancel: c.Cancel) -> None:
        self._consumers.remove(cancel.channel, cancel.tag)
        # Nothing more for this consumer may be appended behind the answer.
        state = self._consumers.channels.get(cancel.channel)
        if state is not None:
            state.last = None
        cancel.channel.put_urgent(c.Done())
        self._consumers_left()

    def _on_channel_down(self, down: c.ChannelDown) -> None:
        self._senders.discard(down.channel)
        self._flow.peer_down(down.channel)
        self._confirms.pop(down.channel, None)
        self._waiting_gets = [get for get in self._waiting_gets if get.channel is not down.channel]
        state = self._consumers.remove_channel(down.channel)
        if state is not None and state.unacked:
            self._return(sorted(state.unacked))
        self._consumers_left()

    def _consumers_left(self) -> None:
        """Some may have been the last."""
        if len(self._consumers):
            return
        if self.queue.auto_delete and self._had_consumer:
            self._end("auto_delete")
        elif self._had_consumer:
            self._had_consumer = self.queue.auto_delete
            self._lifetime.used()

    def _know(self, channel: Mailbox) -> None:
        """It remembers us, too: whoever ends first tells the other."""
        if not channel.is_closed:
            self._senders.add(channel)

    # --- questions -------------------------------------------------------------------------------

    def _on_get(self, get: c.Get) -> None:
        self._know(get.channel)
        if get.channel.is_closed:
            # Its ChannelDown has overtaken the question: nobody would settle what it is given.
            return
        self._lifetime_renewed()
        if self._is_loading:
            self._waiting_gets.append(get)
            return
        entries = self._fetch_one(ack_required=not get.no_ack)
        if entries is LOADING:
            self._is_loading = True
            self._waiting_gets.append(get)
        elif entries is EMPTY:
            self.counters.get_empty += 1
            get.channel.put_urgent(c.GetEmpty())
        else:
            entry = entries[0]
            message = entry.message
            if self._shows_delivery_count:
                message = self._with_delivery_count(entry)
            if get.no_ack:
                self.counters.get_no_ack += 1
                if self._is_ruled or self._shows_delivery_count:
                    self._backing.ack([entry.seq_id])
            else:
                self.counters.get += 1
                self._consumers.channel(get.channel).unacked[entry.seq_id] = None
            if entry.redelivered:
                self.counters.redeliver += 1
            seq_id = None if get.no_ack else entry.seq_id
            get.channel.put_urgent(
                c.GetOk(self.mailbox, message, seq_id, entry.redelivered, len(self._backing))
            )

    def _fetch_one(self, *, ack_required: bool) -> list[Entry] | Nothing:
        """The first that has not expired; where there are rules it is pending in any case."""
        if not self._is_ruled:
            is_pending = ack_required or self._shows_delivery_count
            return self._backing.fetch(1, ack_required=is_pending, max_bytes=1)
        while True:
            entries = self._backing.fetch(1, ack_required=True, max_bytes=1)
            if entries is LOADING or entries is EMPTY:
                return entries
            entries = self._without_expired(entries)
            if entries:
                # What the answer counts as left is not what has expired behind it.
                if not self._is_exact:
                    self._drop_expired()
                return entries

    def _wake(self) -> None:
        """Called by the backing queue when it has read what it was asked for."""
        self.mailbox.put_urgent(c.Loaded())

    def _on_loaded(self, loaded: c.Loaded) -> None:
        self._resume_backing()
        self._is_loading = False
        self._keep_rules()
        gets, self._waiting_gets = self._waiting_gets, []
        for get in gets:
            self._on_get(get)

    def _on_count(self, count: c.Count) -> None:
        self._know(count.channel)
        self._lifetime_renewed()
        count.channel.put_urgent(c.CountOk(len(self._backing), len(self._consumers)))

    def _on_purge(self, purge: c.Purge) -> None:
        self._know(purge.channel)
        purged = self._backing.purge()
        if self._log is not None and purged:
            self._log.purged(purged)
        purge.channel.put_urgent(c.Done(purged))

    def _on_delete(self, delete: c.Delete) -> None:
        self._know(delete.channel)
        name = self.queue.name
        if delete.if_unused and len(self._consumers):
            delete.channel.put_urgent(c.Failed(precondition_failed(f"{name} in use")))
        elif delete.if_empty and not self._backing.is_empty():
            delete.channel.put_urgent(c.Failed(precondition_failed(f"{name} not empty")))
        else:
            delete.channel.put_urgent(c.Done(len(self._backing)))
            self.queue.deleted_by = delete.user
            self._end()

    # --- limits and times ------------------------------------------------------------------------

    def _has_rules(self) -> bool:
        return (
            self._limit.drops_head
            or self._limit.refuses
            or self._expiry.ttl_ms is not None
            or self._backing.may_expire
            or not self._dead.is_idle
        )

    def _keep_rules(self) -> None:
        """Drop what is too much or too old, and send on what is dead [82, 83]."""
        if not self._is_ruled:
            return
        if self._limit.drops_head:
            self._drop_head()
        if self._backing.may_expire:
            if self._is_exact or self._backing.next_due_ms() is not None:
                self._drop_due()
            if not self._is_exact:
                self._drop_expired()
        if not self._dead.is_idle:
            was_full = self._dead.is_full
            if not self._dead.step(self.mailbox):
                self._is_loading = True
            elif was_full and self._dead.is_idle:
                # They were dropped, nobody wanted them: no unit will tell of its end.
                self._drop_later()
        self._is_ruled = self._has_rules()

    def _drop_later(self) -> None:
        """There is more to drop than one turn should take."""
        if not self._has_to_drop:
            self._has_to_drop = True
            self.mailbox.put_urgent(c.DropExpired())

    def _drop_head(self) -> None:
        backing, limit = self._backing, self._limit
        left = DROP_MESSAGES
        while not self._is_loading:
            surplus = limit.surplus(len(backing), backing.ready_bytes)
            if not surplus or self._dead.is_full:
                return
            if left <= 0:
                self._drop_later()
                return
            if self._dead.is_wanted or self._log is not None:
                share = min(surplus, TURN_MESSAGES)
                entries = backing.fetch(share, ack_required=True, max_bytes=TURN_BYTES)
                if entries is LOADING:
                    self._is_loading = True
                elif entries is not EMPTY:
                    left -= len(entries)
                    self.counters.drop += len(entries)
                    if self._dead.is_wanted:
                        self._dead.add(entries, "maxlen")
                    else:
                        backing.ack([entry.seq_id for entry in entries])
                    if self._log is not None and not self._dead.is_wanted:
                        dropped = [entry.message for entry in entries]
                        self._log.dropped(dropped, len(backing), "maxlen")
            else:
                gone = backing.drop(surplus)
                if gone is LOADING:
                    self._is_loading = True
                else:
                    self.counters.drop += gone

    def _drop_expired(self) -> None:
        """From the head, as far as they are due; then wait for the next [83]."""
        backing = self._backing
        now_ms = self._expiry.now_ms()
        left = DROP_MESSAGES

        def is_due(entry: Entry) -> bool:
            return entry.expires_at_ms is not None and entry.expires_at_ms <= now_ms

        def is_due_this_turn(entry: Entry) -> bool:
            nonlocal left
            left -= 1
            return left >= 0 and is_due(entry)

        while not self._is_loading and not self._dead.is_full:
            head = backing.peek()
            if head is LOADING:
                self._is_loading = True
            elif head is EMPTY:
                self._expiry.arm(None)
                return
            elif not is_due(head):
                self._expiry.arm(head.expires_at_ms)
                return
            elif left <= 0:
                self._drop_later()
                return
            elif self._dead.is_wanted or self._log is not None:
                entries = backing.fetch_while(is_due, TURN_MESSAGES, max_bytes=TURN_BYTES)
                if entries is LOADING:
                    self._is_loading = True
                else:
                    left -= len(entries)
                    self._expired(entries)
            else:
                dropped = backing.drop_while(is_due_this_turn)
                if dropped is LOADING:
                    self._is_loading = True
                else:
                    self.counters.expire += dropped

    def _drop_due(self) -> None:
        """With exact expiry: from anywhere, in order of due time."""
        now_ms = self._expiry.now_ms()
        left = DROP_MESSAGES
        while not self._is_loading and not self._dead.is_full:
            next_ms = self._backing.next_due_ms()
            if next_ms is None or next_ms > now_ms:
                self._expiry.arm(next_ms)
                return
            if left <= 0:
                self._drop_later()
                return
            due = self._backing.take_due(now_ms, TURN_MESSAGES)
            if due is LOADING:
                self._is_loading = True
            else:
                left -= len(due)
                self.counters.expire += len(due)
                if self._log is not None:
                    # Those that are on disk alone are told without their numbers: not at all.
                    found = self._backing.pending(due)
                    if found is not LOADING:
                        self._log.expired([each.message for each in found], len(self._backing))
                self._bury(due, "expired")

    def _without_expired(self, entries: list[Entry]) -> list[Entry]:
        """Fetched, and pending: those whose time is over are not to be delivered."""
        now_ms = self._expiry.now_ms()
        expired: list[Entry] = []
        alive: list[Entry] = []
        for entry in entries:
            due_ms = entry.expires_at_ms
            (alive if due_ms is None or due_ms > now_ms else expired).append(entry)
        if not expired:
            return entries
        self._expired(expired)
        return alive

    def _expired(self, entries: list[Entry]) -> None:
        """Fetched, and pending; their time is over."""
        self.counters.expire += len(entries)
        if self._log is not None:
            self._log.expired([entry.message for entry in entries], len(self._backing))
        if self._dead.is_wanted:
            self._dead.add(entries, "expired")
        else:
            self._backing.ack([entry.seq_id for entry in entries])

    def _on_drop_expired(self, drop: c.DropExpired) -> None:
        self._has_to_drop = False
        self._is_ruled = True

    def _on_unit_ended(self, ended: c.UnitEnded) -> None:
        self._dead.on_unit_ended(is_committed=ended.is_committed)
        self._is_ruled = True

    def _lifetime_renewed(self) -> None:
        if self._lifetime.expires_ms is not None and not len(self._consumers):
            self._lifetime.used()

    def _on_expire_queue(self, expire: c.ExpireQueue) -> None:
        if not len(self._consumers):
            self._end("expired")

    def _on_policy_changed(self, changed: c.PolicyChanged) -> None:
        """What is here keeps the expiry it was given when it came."""
        options = changed.options
        self._limit = LengthLimit(options)
        self._expiry.ttl_ms = options.message_ttl_ms
        self._dead.configure(options)
        self._delivery_limit = options.delivery_limit
        if options.expires_ms != self._lifetime.expires_ms:
            self._lifetime.expires_ms = options.expires_ms
            self._lifetime.stop()
            self._lifetime_renewed()
        self._backing.set_lazy(is_lazy=options.queue_mode == "lazy")
        self._is_exact = options.message_ttl_exact
        self._backing.set_exact(is_exact=self._is_exact)
        self._is_ruled = True
        self._tell_decorators("policy_changed")

    # --- memory ----------------------------------------------------------------------------------

    def _on_report_ram_duration(self, report: c.ReportRamDuration) -> None:
        report.monitor.put_urgent(c.RamDuration(self.mailbox, self._backing.ram_duration()))

    def _on_set_ram_duration(self, target: c.SetRamDuration) -> None:
        self._backing.set_ram_duration_target(target.duration_s)

    def _on_store_bump(self, bump: Bump) -> None:
        self._store_credit.handle_bump(bump)
        if self._is_paging:
            self._resume_backing()

    def _resume_backing(self) -> None:
        """What is paged out costs credit, too: what the store has not written is still here [117].

        So a step is made when the store has caught up with the last.
        """
        self._is_paging = self._store_credit.is_blocked
        if not self._is_paging:
            self._backing.resume()

    # --- the end ---------------------------------------------------------------------------------

    def _on_delete_now(self, delete: c.DeleteNow) -> None:
        self._end("exclusive" if self.queue.exclusive else "")

    def _on_terminate(self, terminate: c.Terminate) -> None:
        self._is_alive = False
        self._expiry.arm(None)
        self._lifetime.stop()
        self._backing.terminate()

    def spend(self, cost: int) -> None:
        """The backing queue has handed rows to the store."""
        self._store_credit.send(STORE, cost)

    def _end(self, reason: str = "") -> None:
        """The queue is deleted: nobody finds it from here on; run() leaves after this batch."""
        if not self._is_alive:
            return
        self._is_alive = False
        self.queue.delete_reason = reason
        self._on_deleted(self.queue)
        self._dead.leave()
        if self._log is not None:
            self._tell_deleted(self._log)
        self._backing.delete_and_terminate()
        self._finish_confirms()
        self.say_goodbye(crashed=False)

    def _tell_deleted(self, log: QueueLog) -> None:
        """What goes with the queue: of a large one the first, as far as they are in memory."""
        left = DELETED_TOLD
        while left > 0:
            entries = self._backing.fetch(left, ack_required=False, max_bytes=1 << 40)
            if entries is LOADING or entries is EMPTY:
                return
            left -= len(entries)
            log.dropped([entry.message for entry in entries], 0, "queue_deleted")

    def _finish_confirms(self) -> None:
        for sender, ranges in self._confirms.items():
            for first, last in ranges:
                sender.put_urgent(c.Confirmed(self.mailbox, first, last))
        self._confirms = {}

    def say_goodbye(self, *, crashed: bool) -> None:
        """Answer whoever still waits for this queue, in the order in which they asked."""
        self._expiry.arm(None)
        self._lifetime.stop()
        self._store_credit.end()
        if crashed:
            self._dead.crash()
        for command in [*self._waiting_gets, *self._taken, *self.mailbox.close()]:
            if isinstance(command, c.Delivery):
                if self._log is not None:
                    reason = "queue_crashed" if crashed else "queue_deleted"
                    self._log.dropped(command.messages, 0, reason)
                command.sender.put_urgent(c.Unreceived(self.mailbox, command, crashed))
                self._senders.add(command.sender)
            elif isinstance(command, c.Prepare):
                if command.is_optional:
                    command.unit.leave_out()
                else:
                    command.unit.refuse()
                    self._senders.add(command.sender)
            elif isinstance(command, (c.Get, c.Count, c.Purge, c.Delete, c.Consume, c.Cancel)):
                command.channel.put_urgent(c.Gone())
                self._senders.add(command.channel)
        for consumer in self._consumers:
            consumer.channel.mailbox.put_urgent(c.ConsumerCancelled(consumer.tag))
        for channel in self._senders | self._consumers.channels.keys():
            channel.put_urgent(c.QueueDown(self.mailbox, crashed))
        self._tell_decorators("shutdown")

    def fall_apart(self) -> None:
        """Break the cycles of a queue that is gone, or it waits for the garbage collector."""
        self._handlers.clear()
        del self._backing

    # --- what others may see ---------------------------------------------------------------------

    def statistics(self) -> dict[str, object]:
        unacked = sum(len(state.unacked) for state in self._consumers.channels.values())
        ready = len(self._backing)
        return {
            "messages_ready": ready,
            "messages_unacknowledged": unacked,
            "messages": ready + unacked,
            "message_bytes_ready": self._backing.ready_bytes,
            "consumers": len(self._consumers),
            "mailbox": len(self.mailbox),
            **self.counters.statistics(),
            "dead_letter": dict(self._dead.counts),
            "backing_queue": self._backing.statistics(),
        }

    def _notify_decorators(self) -> None:
        now = (self._consumers.max_active_priority(), self._backing.is_empty())
        if now != self._told:
            self._told = now
            self._tell_decorators("consumer_state_changed", *now)

    def _tell_decorators(self, event: str, *details: object) -> None:
        for decorator in self._decorators:
            try:
                getattr(decorator, event)(self.queue, *details)
            except Exception:
                # Foreign code: the queue must not crash, and crash again, because of it.
                log.exception("%s: a decorator failed at %s", self.queue.name, event)


def _split_by_persistence(delivery: c.Delivery) -> list[c.Delivery]:
    """The same run as runs that are persistent throughout, or not at all."""
    parts: list[c.Delivery] = []
    messages = delivery.messages
    at = 0
    while at < len(messages):
        persistent = messages[at].persistent
        end = at + 1
        while end < len(messages) and messages[end].persistent == persistent:
            end += 1
        run = messages[at:end]
        parts.append(
            c.Delivery(
                run,
                delivery.sender,
                delivery.confirm_first + at,
                0,
                0,
                delivery.largest,
                len(run) if persistent else 0,
                is_mandatory=False,
            )
        )
        at = end
    return parts


def _by_persistence(messages: Sequence[Message]) -> list[Sequence[Message]]:
    return [list(run) for _, run in groupby(messages, attrgetter("persistent"))]
