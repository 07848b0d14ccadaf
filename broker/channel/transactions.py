"""tx.select, commit and rollback [71-74].

Permission, exchange and delivery tags are checked when publish and ack arrive, routing is done
then, too; everything takes effect at commit. What is published and acked then is one unit
(``storage/unit.py``): every queue has all of it, on disk where it is to last, before commit-ok is
sent, and before a consumer sees any of it; a crash, or a queue that refuses, leaves nothing of it.
What is rejected or requeued follows right after the unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pamqp import commands

from leveret.broker.channel.acks import ACK, Entry
from leveret.broker.queues import commands as q
from leveret.protocol.codec import make
from leveret.protocol.errors import precondition_failed

if TYPE_CHECKING:
    from leveret.broker.channel.channel import Channel
    from leveret.broker.event_log.messages import ChannelLog
    from leveret.broker.exchanges.base import Exchange
    from leveret.broker.mailbox import Mailbox
    from leveret.broker.queues.record import Queue
    from leveret.protocol.message import Message
    from leveret.protocol.twin import AckRun
    from leveret.storage.commit import Batch
    from leveret.storage.unit import Unit


class Publication(NamedTuple):
    """A run that was checked and routed, waiting for the commit."""

    exchange: Exchange
    messages: Sequence[Message]
    queues: Sequence[Queue]
    is_mandatory: bool
    # They were replies, which go at once: the log knows of them.
    is_replied: bool = False


class Settlement(NamedTuple):
    method: int
    requeue: bool
    entries: list[tuple[int, Entry]]


class _Told:
    """A commit that is under way, as the event log tells it if its channel ends before it does.

    It joins the unit beside the parts of the queues. Until the commit begins, a channel that ends
    makes the unit void; from then on the disk alone is waited for, and what the unit acks neither
    goes back nor is acked yet.
    """

    is_void = False

    def __init__(self, log: ChannelLog) -> None:
        self._log = log
        # As it was told when the commit was asked for.
        self._published: list[tuple[Sequence[Message], Sequence[Queue]]] = []
        self._has_begun = False
        # None until the unit has ended.
        self._is_committed: bool | None = None
        # What is acked once it has ended, where the channel has gone.
        self._left: Sequence[int] = ()

    def publish(self, publication: Publication, queues: Sequence[Queue]) -> None:
        messages = publication.messages
        persistent = sum([message.persistent for message in messages])
        self._log.publish(messages, queues, 0, persistent, is_mandatory=publication.is_mandatory)
        if queues:
            self._published.append((messages, queues))

    def withdrawn(self, reason: str) -> None:
        """Nothing of it happened."""
        for messages, queues in self._published:
            self._log.withdrawn(messages, [queue.name.name for queue in queues], reason)

    def leave(self, acked: Sequence[int]) -> Sequence[int]:
        """The channel ends, and has not heard how it went; of ``acked``, what is undecided."""
        if self._is_committed:
            self._log.acked(acked)
        elif self._is_committed is None and self._has_begun:
            self._left = acked
            return acked
        else:
            self.withdrawn("channel_closed" if self._is_committed is None else "refused")
        return ()

    def gather(self, batch: Batch) -> None:
        self._has_begun = True

    def committed(self) -> None:
        self._is_committed = True
        if self._left:
            self._log.acked(self._left)

    def voided(self) -> None:
        self._is_committed = False


class Transaction:
    """What a transactional channel has gathered since its last commit or rollback."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._mailbox = channel.mailbox
        self._publications: list[Publication] = []
        self._settlements: list[Settlement] = []
        # The commit that is under way, and what the event log is told of it.
        self.unit: Unit | None = None
        self._told: _Told | None = None

    def publish(self, publication: Publication) -> None:
        self._publications.append(publication)

    def settle(self, run: AckRun) -> None:
        """Unknown tags are an error at once; the rest waits for the commit."""
        requeue = run.method != ACK and run.requeue
        ledger = self._channel.acks.ledger
        for tag in run.tags:
            entries = ledger.pop(tag, multiple=run.multiple)
            self._settlements.append(Settlement(run.method, requeue, entries))

    def commit(self) -> None:
        """Ask the queues concerned; ``on_ended`` hears how it went."""
        channel = self._channel
        told = self._told = None if channel.log is None else _Told(channel.log)
        messages: dict[Mailbox, list[Message]] = {}
        for publication in self._publications:
            # A queue that was deleted since is as good as not bound.
            queues = [queue for queue in publication.queues if not queue.mailbox.is_closed]
            # A reply that no queue takes as well has been told of.
            is_told = bool(queues) or not publication.is_replied
            if told is not None and is_told:
                told.publish(publication, queues)
            if not queues:
                channel.publishing.unroutable(
                    publication.messages,
                    is_mandatory=publication.is_mandatory,
                    is_told=is_told,
                )
            for queue in queues:
                messages.setdefault(queue.mailbox, []).extend(publication.messages)
        settled: dict[Mailbox, list[int]] = {}
        for settlement in self._settlements:
            if settlement.method == ACK:
                for _, (source, seq_id) in settlement.entries:
                    settled.setdefault(source.queue, []).append(seq_id)
        unit = self.unit = channel.connection.vhost.make_unit(self._on_unit_ended)
        if told is not None:
            unit.expect()
            unit.join(told)
        for address in dict.fromkeys((*messages, *settled)):
            prepare = q.Prepare(
                unit, channel.mailbox, messages.get(address, []), settled.get(address, [])
            )
            if address.put(prepare):
                channel.touched.add(address)
                unit.expect()
            elif address in channel.crashed:
                # What it had delivered comes again, so it cannot be settled along with the rest.
                # Deliveries of a queue that was deleted are settled by its end.
                unit.expect()
                unit.refuse()
        unit.begin()

    def _on_unit_ended(self, is_committed: bool) -> None:
        self._mailbox.put_urgent(q.UnitEnded(is_committed))

    def finish(self) -> None:
        """The unit has happened: what is left of the transaction is told to whom it concerns."""
        channel = self._channel
        publications, settlements = self._publications, self._settlements
        self.forget()
        for publication in publications:
            count = len(publication.messages)
            publication.exchange.publish_in += count
            publication.exchange.publish_out += count * len(publication.queues)
            channel.counters.publish += count
        for method, requeue, entries in settlements:
            if channel.log is not None:
                channel.acks.tell_log(method, [tag for tag, _ in entries], requeue=requeue)
            if method == ACK:
                channel.acks.note_acked([entry for _, entry in entries])
            else:
                channel.acks.tell_queues(method, [entry for _, entry in entries], requeue=requeue)

    def withdraw(self) -> Sequence[int]:
        """The channel ends: its deliveries go back, so a commit that has not begun must not be.

        The tags of those that do not go back, as one that has begun is about to ack them; only
        where the event log wants to know.
        """
        if self.unit is None:
            return ()
        self.unit.withdraw()
        if self._told is None:
            return ()
        acked = [entries for method, _, entries in self._settlements if method == ACK]
        return self._told.leave([tag for entries in acked for tag, _ in entries])

    def fail(self) -> None:
        """Nothing of it happened; the channel ends, and what was settled goes back."""
        if self._told is not None:
            self._told.withdrawn("refused")
        self.forget()

    def forget(self) -> None:
        self._publications = []
        self._settlements = []
        self.unit = self._told = None

    def rollback(self) -> None:
        """Forget the messages; what was acked is unacked again, and stays with the channel."""
        self._publications = []
        settlements, self._settlements = self._settlements, []
        for settlement in settlements:
            self._channel.acks.ledger.put_back(settlement.entries)
        timeout = self._channel.acks.timeout
        if settlements and not timeout.is_watching:
            timeout.begin()


class TransactionMethods:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        return {
            commands.Tx.Select: self._on_select,
            commands.Tx.Commit: self._on_commit,
            commands.Tx.Rollback: self._on_rollback,
            q.UnitEnded: self._on_unit_ended,
        }

    def _on_select(self, select: commands.Tx.Select) -> None:
        channel = self._channel
        if channel.is_confirming:
            raise precondition_failed("cannot switch from confirm to tx mode")
        if channel.transaction is None:
            channel.transaction = Transaction(channel)
        channel.send(make(commands.Tx.SelectOk))

    def _on_commit(self, commit: commands.Tx.Commit) -> None:
        # Released when the unit has ended: what the client sent behind it waits.
        self._channel.hold()
        self._transaction().commit()

    def _on_unit_ended(self, ended: q.UnitEnded) -> None:
        transaction = self._transaction()
        self._channel.release()
        if not ended.is_committed:
            transaction.fail()
            raise precondition_failed("partial tx completion")
        transaction.finish()
        self._channel.send(make(commands.Tx.CommitOk))

    def _on_rollback(self, rollback: commands.Tx.Rollback) -> None:
        self._transaction().rollback()
        self._channel.send(make(commands.Tx.RollbackOk))

    def _transaction(self) -> Transaction:
        if self._channel.transaction is None:
            raise precondition_failed("channel is not transactional")
        return self._channel.transaction
