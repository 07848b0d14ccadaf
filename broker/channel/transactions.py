"""tx.select, commit and rollback [71-74].

Permission, exchange and delivery tags are checked when publish and ack arrive, routing is done
then, too; everything takes effect at commit. commit-ok is sent when every queue has what it was
given as safe as it should be; a queue that refuses makes the commit fail with 406.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pamqp import commands

from leveret.broker.channel.acks import ACK, Entry
from leveret.protocol.codec import make
from leveret.protocol.errors import precondition_failed

if TYPE_CHECKING:
    from leveret.broker.channel.channel import Channel
    from leveret.broker.exchanges.base import Exchange
    from leveret.broker.queues.record import Queue
    from leveret.protocol.message import Message
    from leveret.protocol.twin import AckRun


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
        self._publications: list[Publication] = []
        self._settlements: list[Settlement] = []

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
        """Everything in order: publishes, then acks."""
        channel = self._channel
        publications, self._publications = self._publications, []
        settlements, self._settlements = self._settlements, []
        for publication in publications:
            channel.publishing.deliver(
                publication.exchange,
                publication.messages,
                publication.queues,
                is_mandatory=publication.is_mandatory,
            )
        for method, requeue, entries in settlements:
            channel.acks.tell_queues(method, [entry for _, entry in entries], requeue=requeue)

    def rollback(self) -> None:
        """Forget the messages; what was acked is unacked again, and stays with the channel."""
        self._publications = []
        settlements, self._settlements = self._settlements, []
        for settlement in settlements:
            self._channel.acks.ledger.put_back(settlement.entries)


class TransactionMethods:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        return {
            commands.Tx.Select: self._on_select,
            commands.Tx.Commit: self._on_commit,
            commands.Tx.Rollback: self._on_rollback,
        }

    def _on_select(self, select: commands.Tx.Select) -> None:
        channel = self._channel
        if channel.is_confirming:
            raise precondition_failed("cannot switch from confirm to tx mode")
        if channel.transaction is None:
            channel.transaction = Transaction(channel)
        channel.send(make(commands.Tx.SelectOk))

    def _on_commit(self, commit: commands.Tx.Commit) -> None:
        self._transaction().commit()
        # Answered by on_settled, as soon as no queue is waited for.
        self._channel.hold()
        self.on_settled()

    def on_settled(self) -> None:
        """Called when queues have answered; ends the commit once all have."""
        confirms = self._channel.confirms
        if not confirms.is_settled:
            return
        _, refused = confirms.take_settled()
        self._channel.release()
        if refused:
            raise precondition_failed("partial tx completion")
        self._channel.send(make(commands.Tx.CommitOk))

    def _on_rollback(self, rollback: commands.Tx.Rollback) -> None:
        self._transaction().rollback()
        self._channel.send(make(commands.Tx.RollbackOk))

    def _transaction(self) -> Transaction:
        if self._channel.transaction is None:
            raise precondition_failed("channel is not transactional")
        return self._channel.transaction
