"""One queue: mailbox, consumers, backing queue (hop 6).

Upstream: ``delegate.py`` puts deliveries and questions into the mailbox; channels put acks,
credit and consumers. Downstream: ``storage/backing_queue.py``.

The actor is the sole owner of its state. ``run`` waits; everything else is a plain function that
decides, so between two awaits nobody sees half a change. One batch is: the control lane whole,
then publishes up to a bound, then what waits goes to consumers that are ready, then what all
that produced (confirms, notices) leaves at once.

Its layers, from the bottom: ``actor_state.py``, ``actor_rules.py``, ``actor_delivering.py`` and
``actor_publishing.py``; here is the loop, and how a queue ends.

Invariant, between batches: no message waits while a consumer is ready (unless it is being read).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from leveret.broker.flow import Bump
from leveret.broker.queues import commands as c
from leveret.broker.queues.dead_lettering import Surroundings
from leveret.broker.queues.goodbye import refuse
from leveret.protocol.errors import ChannelException, precondition_failed
from leveret.storage.backing_queue import BackingQueue

if TYPE_CHECKING:
    from leveret.broker.clock import Clock
    from leveret.broker.config import Settings
    from leveret.broker.queues.decorators import QueueDecorator
    from leveret.broker.queues.record import Queue

from leveret.broker.queues.actor_publishing import Receiver
from leveret.broker.queues.actor_rules import TURN_BYTES, TURN_MESSAGES
from leveret.broker.queues.actor_state import STORE

log = logging.getLogger(__name__)

# The least it takes while consumers work off a backlog.
BIASED_MESSAGES = 50
# After consumers took of the backlog, so many turns are left to them alone, unless more runs wait.
PATIENT_TURNS = 8
PATIENT_RUNS = 8
# So many messages of a queue that is deleted are told one by one in the event log.
DELETED_TOLD = 500


class QueueActor(Receiver):
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
        super().__init__(queue, make_backing, on_deleted, clock, settings, decorators, surroundings)
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

    # --- the loop ---------------------------------------------------------------------------------

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
        if self._log is not None and self._backing.paged is not self._paged:
            self._paged = self._backing.paged
            self._log.paged(self._paged, len(self._backing))
        for state in self._extended:
            state.last = None
        self._extended.clear()
        self.counters.consumers_ready(is_ready=self._consumers.has_ready)
        if self._decorators:
            self._notify_decorators()

    # --- consumers --------------------------------------------------------------------------------

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
            # Its consumers are named there, and it by them.
            state.unacked.clear()
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

    # --- questions --------------------------------------------------------------------------------

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
            self._log.purged(purged, purge.user, purge.actor)
            if self._log.knows_returns:
                states = self._consumers.channels.values()
                held = [seq_id for state in states for seq_id in state.unacked]
                self._log.forget_returns(but=self._backing.pending_in_memory(held).values())
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
            self.queue.deleted_through = delete.actor
            self._end()

    def _on_expire_queue(self, expire: c.ExpireQueue) -> None:
        if not len(self._consumers):
            self._end("expired")

    # --- memory -----------------------------------------------------------------------------------

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

    # --- the end ----------------------------------------------------------------------------------

    def _on_delete_now(self, delete: c.DeleteNow) -> None:
        self._end("exclusive" if self.queue.exclusive else "")

    def _on_terminate(self, terminate: c.Terminate) -> None:
        self._is_alive = False
        self._expiry.arm(None)
        self._lifetime.stop()
        if self._log is not None:
            self._log.tell_unread()
        self._backing.terminate()

    def spend(self, cost: int) -> None:
        """The backing queue has handed rows to the store."""
        self._store_credit.send(STORE, cost)

    def _end(self, reason: str = "") -> None:
        """The queue is deleted: nobody finds it from here on; run() leaves after this batch."""
        if not self._is_alive:
            return
        self._is_alive = False
        if self._log is not None:
            self._log.tell_unread()
        self.queue.delete_reason = reason
        self.queue.deleted_messages = len(self._backing)
        self._on_deleted(self.queue)
        self._dead.leave()
        if self._log is not None:
            # Of a large queue that is but a part: the loop is not to wait for all of it.
            gone = self._backing.ready_in_memory(DELETED_TOLD)
            self._log.dropped(gone, 0, "queue_deleted")
            self._log.forget_returns()
        self._backing.delete_and_terminate()
        self._finish_confirms()
        self.say_goodbye(crashed=False)

    def _finish_confirms(self) -> None:
        for sender, ranges in self._confirms.items():
            for first, last in ranges:
                sender.put_urgent(c.Confirmed(self.mailbox, first, last))
        self._confirms = {}

    @property
    def is_ending(self) -> bool:
        """It was deleted, or told to end: there is no next life for it."""
        return not self._is_alive

    def say_goodbye(self, *, crashed: bool) -> list[object]:
        """Answer whoever still waits for this queue, in the order in which they asked.

        Returns what they had asked."""
        self._expiry.arm(None)
        self._lifetime.stop()
        self._store_credit.end()
        if self._log is not None:
            self._log.tell_unread()
        if crashed:
            self._dead.crash()
        left = [*self._waiting_gets, *self._taken, *self.mailbox.close()]
        self._senders |= refuse(left, self.mailbox, self._log, crashed=crashed)
        for consumer in self._consumers:
            consumer.channel.mailbox.put_urgent(c.ConsumerCancelled(consumer.tag))
        for channel in self._senders | self._consumers.channels.keys():
            channel.put_urgent(c.QueueDown(self.mailbox, crashed))
        self._tell_decorators("shutdown")
        return left

    def fall_apart(self) -> None:
        """Break the cycles of a queue that is gone, or it waits for the garbage collector."""
        self._handlers.clear()
        self._log = None
        del self._backing, self._dead
        self._consumers.fall_apart()

    # --- what others may see ----------------------------------------------------------------------

    @property
    def ready(self) -> int:
        return len(self._backing)

    def statistics(self) -> dict[str, object]:
        unacked = sum(len(state.unacked) for state in self._consumers.channels.values())
        ready = self.ready
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
