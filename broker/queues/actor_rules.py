"""What is too much, too old or came back too often leaves the queue [82-85].

A layer of ``actor.py``. ``_keep_rules`` is called wherever that may have changed and does nothing
for a queue without limits, times and dead letters.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from leveret.broker.queues import commands as c
from leveret.broker.queues.length_limit import LengthLimit
from leveret.storage.backing_queue import EMPTY, LOADING, Entry

if TYPE_CHECKING:
    from leveret.broker.queues.dead_letter import Reason
    from leveret.protocol.message import Message

from leveret.broker.queues.actor_state import ActorState

log = logging.getLogger(__name__)

# A turn takes at most this much of the publish lane, so that acks and consumers get theirs.
TURN_MESSAGES = 500
TURN_BYTES = 1 << 20
# Of what is too much or too old, so many go before others get their turn.
DROP_MESSAGES = 2_000


class RuleKeeper(ActorState):
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
            if self._dead.is_wanted:
                share = min(surplus, TURN_MESSAGES)
                entries = backing.fetch(share, ack_required=True, max_bytes=TURN_BYTES)
                if entries is LOADING:
                    self._is_loading = True
                elif entries is not EMPTY:
                    left -= len(entries)
                    self.counters.drop += len(entries)
                    self._dead.add(entries, "maxlen")
            else:
                # Nothing is read for the event log's sake: it would keep all others waiting.
                seen: list[Message] | None = None if self._log is None else []
                gone = backing.drop(min(surplus, left), seen)
                if gone is LOADING:
                    self._is_loading = True
                else:
                    left -= gone
                    self.counters.drop += gone
                    if self._log is not None and seen is not None:
                        self._log.left("drop", "maxlen", gone, seen)

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
            elif self._dead.is_wanted:
                entries = backing.fetch_while(is_due, TURN_MESSAGES, max_bytes=TURN_BYTES)
                if entries is LOADING:
                    self._is_loading = True
                else:
                    left -= len(entries)
                    self._expired(entries)
            else:
                seen: list[Message] | None = None if self._log is None else []
                dropped = backing.drop_while(is_due_this_turn, seen)
                if dropped is LOADING:
                    self._is_loading = True
                else:
                    self.counters.expire += dropped
                    if self._log is not None and seen is not None:
                        self._log.left("expire", "", dropped, seen)

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

    def _return(self, seq_ids: Sequence[int]) -> None:
        """Back to their places; those that came back too often die instead."""
        if self._counts_returns:
            counts = self._backing.count_returns(seq_ids)
            limit = self._delivery_limit
            if limit is not None:
                over = {each for each, count in zip(seq_ids, counts, strict=True) if count > limit}
                if over:
                    self._tell_counts(over)
                    self._bury(sorted(over), "delivery_limit")
                    seq_ids = [seq_id for seq_id in seq_ids if seq_id not in over]
        self._backing.requeue(seq_ids)
        self.counters.requeue += len(seq_ids)

    @property
    def _counts_returns(self) -> bool:
        """The backing queue counts how often messages come back, also over a restart."""
        return self._delivery_limit is not None or self._shows_delivery_count

    def _tell_counts(self, seq_ids: Collection[int]) -> None:
        """The log is to know how often these, which are pending, came back."""
        if self._log is not None:
            count = self._backing.delivery_count
            found = self._backing.pending_in_memory(seq_ids)
            self._log.learn_returns((found[each], count(each)) for each in found)

    def _bury(self, seq_ids: Sequence[int], reason: Reason) -> None:
        """Pending messages die: to the dead-letter exchange, if there is one."""
        if self._dead.is_wanted:
            self._dead.add_pending(seq_ids, reason)
            self._is_ruled = True
            return
        # What was rejected is told by the channel.
        if self._log is not None and reason != "rejected":
            seen = list(self._backing.pending_in_memory(seq_ids).values())
            ev, why = ("expire", "") if reason == "expired" else ("drop", reason)
            self._log.left(ev, why, len(seq_ids), seen)
        self._backing.ack(seq_ids)

    def _on_drop_expired(self, drop: c.DropExpired) -> None:
        self._has_to_drop = False
        self._is_ruled = True

    def _on_unit_ended(self, ended: c.UnitEnded) -> None:
        self._dead.on_unit_ended(is_committed=ended.is_committed)
        if self._waits_for_burial:
            self._waits_for_burial = False
            self._wake()
        self._is_ruled = True

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
