"""From channels into the queue: publishes, and parts in units [76-81].

A layer of ``actor.py``: what is taken in, refused, handed straight to a consumer, confirmed now or
later; and what a transaction or a dead letter brings.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

from leveret.broker.mailbox import Mailbox
from leveret.broker.queues import commands as c
from leveret.broker.queues.consumers import Consumer
from leveret.broker.queues.delivery_count import with_delivery_count
from leveret.broker.queues.units import QueuePart
from leveret.protocol.message import NEEDS_EXPIRATION
from leveret.storage.backing_queue import Confirm

if TYPE_CHECKING:
    from leveret.protocol.message import Message

from leveret.broker.queues.actor_delivering import Deliverer
from leveret.broker.queues.actor_state import LARGE

log = logging.getLogger(__name__)


class Receiver(Deliverer):
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
            if refused and prepare.not_taken is not None:
                left_out = {id(message) for message in messages} - {id(each) for each in fitting}
                gone = [message for message in messages if id(message) in left_out]
                prepare.not_taken(gone, "refused")
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
