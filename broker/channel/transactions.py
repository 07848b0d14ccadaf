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
    from leveret.broker.exchanges.base import Exchange
    from leveret.broker.mailbox import Mailbox
    from leveret.broker.queues.record import Queue
    from leveret.protocol.message import Message
    from leveret.protocol.twin import AckRun
    from leveret.storage.unit import Unit


class Publication(NamedTuple):
    """A run that was checked and routed, waiting for the commit."""

    exchange: Exchange
    messages: Sequence[Message]
    queues: Sequence[Queue]
    is_mandatory: bool


class Settlement(NamedTuple):
    method: int
    requeue: bool
    entries: list[tuple[int, Entry]]


class Transaction:
    """What a transactional channel has gathered since its last commit or rollback."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._mailbox = channel.mailbox
        self._publications: list[Publication] = []
        self._settlements: list[Settlement] = []
        # The commit that is under way.
        self.unit: Unit | None = None

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
        messages: dict[Mailbox, list[Message]] = {}
        for publication in self._publications:
            # A queue that was deleted since is as good as not bound.
            queues = [queue for queue in publication.queues if not queue.mailbox.is_closed]
            if channel.log is not None:
                channel.log.publish(
                    publication.messages,
                    queues,
                    0,
                    sum([message.persistent for message in publication.messages]),
                    is_mandatory=publication.is_mandatory,
                )
            if not queues:
                channel.publishing.unroutable(
                    publication.messages, is_mandatory=publication.is_mandatory
                )
            for queue in queues:
                messages.setdefault(queue.mailbox, []).extend(publication.messages)
        settled: dict[Mailbox, list[int]] = {}
        for settlement in self._settlements:
            if settlement.method == ACK:
                for _, (source, seq_id) in settlement.entries:
                    settled.setdefault(source.queue, []).append(seq_id)
        unit = self.unit = channel.connection.vhost.make_unit(self._on_unit_ended)
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

    def withdraw(self) -> None:
        """The channel ends: its deliveries go back, so a commit that has not begun must not be."""
        if self.unit is not None:
            self.unit.withdraw()

    def fail(self) -> None:
        """Nothing of it happened; the channel ends, and what was settled goes back."""
        log = self._channel.log
        if log is not None:
            for publication in self._publications:
                names = [queue.name.name for queue in publication.queues]
                log.withdrawn(publication.messages, names)
        self.forget()

    def forget(self) -> None:
        self._publications = []
        self._settlements = []
        self.unit = None

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
