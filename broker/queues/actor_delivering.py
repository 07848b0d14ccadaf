"""From the queue to consumers and basic.get, and what they answer.

A layer of ``actor.py``: who is given what, credit and accounts of channels, acks, rejects and
requeues.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

from leveret.broker.mailbox import Mailbox
from leveret.broker.queues import commands as c
from leveret.broker.queues.consumers import Consumer
from leveret.broker.queues.delivery_count import with_delivery_count
from leveret.storage.backing_queue import EMPTY, LOADING, Entry, Nothing

if TYPE_CHECKING:
    from leveret.protocol.message import Message

from leveret.broker.queues.actor_rules import TURN_MESSAGES, RuleKeeper
from leveret.broker.queues.actor_state import LARGE

log = logging.getLogger(__name__)


class Deliverer(RuleKeeper):
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
            if redelivered:
                self._tell_returns(run)
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
        is_taken = state.mailbox.put_urgent(state.last)
        if not is_taken and seq_ids is None and self._log is not None:
            self._log.dropped(messages, depth, "channel_closed")

    def _tell_returns(self, entries: Sequence[Entry]) -> None:
        """Before they are delivered again; what an earlier boot counted is known here alone."""
        if self._log is not None and self._counts_returns:
            count = self._backing.delivery_count
            self._log.learn_returns((entry.message, count(entry.seq_id)) for entry in entries)

    def _with_delivery_count(self, entry: Entry) -> Message:
        count = self._backing.delivery_count(entry.seq_id)
        return with_delivery_count(entry.message, count)

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
            if entry.redelivered:
                self._tell_returns(entries)
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
        for _ in range(TURN_MESSAGES):
            if self._dead.is_full:
                self._waits_for_burial = True
                return LOADING
            entries = self._backing.fetch(1, ack_required=True, max_bytes=1)
            if entries is LOADING or entries is EMPTY:
                return entries
            entries = self._without_expired(entries)
            if entries:
                # What the answer counts as left is not what has expired behind it.
                if not self._is_exact:
                    self._drop_expired()
                return entries
        # Many have expired: others get their turn.
        self._wake()
        return LOADING

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
