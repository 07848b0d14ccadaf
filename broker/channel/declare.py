"""exchange.* and queue.*: what a client may ask of the topology.

Order of checks as RabbitMQ has it: names, permissions, existence, equivalence. The topology is
changed at once (``vhost.py``); questions about a queue's messages go to its actor and are
answered later, while the channel's further methods wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pamqp import commands

from leveret.broker.channel.consume import REPLY_TO, generated_name
from leveret.broker.events import ACTOR
from leveret.broker.exchanges.base import alternate_exchange
from leveret.broker.limits import check_queue_limit
from leveret.broker.queues import commands as q
from leveret.broker.queues.arguments import (
    QueueArguments,
    check_arguments,
    check_equivalent,
    check_server_named,
    dead_letter_exchange,
)
from leveret.broker.queues.record import Queue
from leveret.broker.resource import Kind, Resource
from leveret.broker.vhost import check_declarable, check_not_default
from leveret.protocol.codec import make
from leveret.protocol.errors import access_refused, not_found

if TYPE_CHECKING:
    from leveret.broker.channel.channel import Channel


def stripped(name: str | None) -> str:
    """Names lose carriage returns and line feeds, as they do in RabbitMQ."""
    return (name or "").replace("\r", "").replace("\n", "")


class DeclareMethods:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._vhost = channel.connection.vhost
        self._topology = channel.connection.vhost.topology

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        return {
            commands.Exchange.Declare: self._on_exchange_declare,
            commands.Exchange.Delete: self._on_exchange_delete,
            commands.Exchange.Bind: self._on_exchange_bind,
            commands.Exchange.Unbind: self._on_exchange_unbind,
            commands.Queue.Declare: self._on_queue_declare,
            commands.Queue.Bind: self._on_queue_bind,
            commands.Queue.Unbind: self._on_queue_unbind,
            commands.Queue.Purge: self._on_queue_purge,
            commands.Queue.Delete: self._on_queue_delete,
        }

    def _resource(self, kind: Kind, name: str) -> Resource:
        return Resource(self._vhost.name, kind, name)

    # --- exchanges -------------------------------------------------------------------------------

    def _on_exchange_declare(self, declare: commands.Exchange.Declare) -> None:
        channel = self._channel
        name = stripped(declare.exchange)
        arguments = channel.table(declare.arguments)
        if not declare.passive:
            self._topology.check_type(declare.exchange_type or "")
            check_not_default(name)
            resource = self._resource("exchange", name)
            channel.check_permission(resource, "configure")
            if name not in self._topology.exchanges:
                check_declarable(name)
                self._check_other_exchange(resource, alternate_exchange(resource, arguments))
        self._topology.declare_exchange(
            name,
            declare.exchange_type or "",
            passive=bool(declare.passive),
            durable=bool(declare.durable),
            auto_delete=bool(declare.auto_delete),
            internal=bool(declare.internal),
            arguments=arguments,
        )
        channel.answer_when_saved(make(commands.Exchange.DeclareOk), nowait=bool(declare.nowait))

    def _on_exchange_delete(self, delete: commands.Exchange.Delete) -> None:
        channel = self._channel
        name = stripped(delete.exchange)
        check_not_default(name)
        self._topology.check_deletable(name)
        channel.check_permission(self._resource("exchange", name), "configure")
        self._topology.delete_exchange(name, if_unused=bool(delete.if_unused))
        channel.answer_when_saved(make(commands.Exchange.DeleteOk), nowait=bool(delete.nowait))

    def _on_exchange_bind(self, bind: commands.Exchange.Bind) -> None:
        source, destination = stripped(bind.source), stripped(bind.destination)
        self._check_exchange_ends(source, destination)
        self._topology.bind(
            source,
            self._resource("exchange", destination),
            bind.routing_key or "",
            self._channel.table(bind.arguments),
        )
        self._channel.answer_when_saved(make(commands.Exchange.BindOk), nowait=bool(bind.nowait))

    def _on_exchange_unbind(self, unbind: commands.Exchange.Unbind) -> None:
        source, destination = stripped(unbind.source), stripped(unbind.destination)
        self._check_exchange_ends(source, destination)
        self._topology.unbind(
            source,
            self._resource("exchange", destination),
            unbind.routing_key or "",
            self._channel.table(unbind.arguments),
        )
        self._channel.answer_when_saved(
            make(commands.Exchange.UnbindOk), nowait=bool(unbind.nowait)
        )

    def _check_exchange_ends(self, source: str, destination: str) -> None:
        check_not_default(source)
        check_not_default(destination)
        self._channel.check_permission(self._resource("exchange", destination), "write")
        self._channel.check_permission(self._resource("exchange", source), "read")

    def _check_other_exchange(self, resource: Resource, other: str | None) -> None:
        """Declaring with a dead-letter or alternate exchange needs more than configure [87]."""
        if other is not None:
            self._channel.check_permission(resource, "read")
            self._channel.check_permission(self._resource("exchange", other), "write")

    # --- queues ----------------------------------------------------------------------------------

    def _on_queue_declare(self, declare: commands.Queue.Declare) -> None:
        name = stripped(declare.queue)
        nowait = bool(declare.nowait)
        if name == REPLY_TO or name in self._vhost.reply_consumers:
            self._declared(name, q.CountOk(0, 1), nowait=nowait)
        elif declare.passive:
            self._declare_passively(name, nowait=nowait)
        else:
            self._declare_queue(name, declare, nowait=nowait)

    def _declare_passively(self, name: str, *, nowait: bool) -> None:
        channel = self._channel
        queue = self._topology.queue(name)
        channel.check_exclusive(queue)

        def gone() -> None:
            raise not_found(f"no {queue.name}")

        self._count(queue, gone, nowait=nowait)

    def _declare_queue(self, name: str, declare: commands.Queue.Declare, *, nowait: bool) -> None:
        channel = self._channel
        connection = channel.connection
        arguments = channel.table(declare.arguments)
        if name.startswith("amq."):
            raise access_refused(f"queue name '{name}' contains reserved prefix 'amq.*'")
        if not name:
            check_server_named(arguments)
            name = generated_name("amq.gen-")
        resource = self._resource("queue", name)
        channel.check_permission(resource, "configure")
        exclusive, auto_delete = bool(declare.exclusive), bool(declare.auto_delete)
        # An exclusive queue ends with its connection: it is never durable, whatever is asked.
        durable = bool(declare.durable) and not exclusive
        existing = self._topology.queues.get(name)
        if existing is not None:
            channel.check_exclusive(existing)
            check_equivalent(
                existing,
                durable=durable,
                exclusive=exclusive,
                auto_delete=auto_delete,
                arguments=arguments,
            )
            # Should it be deleted before it answers, it is declared anew.
            self._count(
                existing, lambda: self._declare_queue(name, declare, nowait=nowait), nowait=nowait
            )
            return
        check_queue_limit(self._vhost, name)
        self._channel.connection.tenancy.check_queues(name)
        self._check_other_exchange(resource, dead_letter_exchange(resource, arguments))
        check_arguments(
            resource,
            durable=durable,
            exclusive=exclusive,
            auto_delete=auto_delete,
            arguments=arguments,
        )
        queue = Queue(
            resource,
            durable,
            auto_delete,
            connection if exclusive else None,
            arguments,
            QueueArguments.of(arguments),
        )
        queue.declared_by = self._channel.connection.access.user
        self._vhost.start_queue(queue)
        if exclusive:
            connection.exclusive_queues.add(queue)
        if durable:
            channel.when_saved(lambda: self._declared(name, q.CountOk(0, 0), nowait=nowait))
        else:
            self._declared(name, q.CountOk(0, 0), nowait=nowait)

    def _count(self, queue: Queue, gone: Callable[[], None], *, nowait: bool) -> None:
        def answered(answer: object) -> None:
            if isinstance(answer, q.Gone):
                gone()
                return
            self._declared(queue.name.name, answer, nowait=nowait)

        self._channel.ask(queue, q.Count(self._channel.mailbox), answered)

    def _declared(self, name: str, answer: object, *, nowait: bool) -> None:
        assert isinstance(answer, q.CountOk)
        self._channel.last_queue = name
        if not nowait:
            self._channel.send(
                make(
                    commands.Queue.DeclareOk,
                    queue=name,
                    message_count=answer.ready,
                    consumer_count=answer.consumers,
                )
            )

    def _on_queue_bind(self, bind: commands.Queue.Bind) -> None:
        channel = self._channel
        source = stripped(bind.exchange)
        name, key = self._queue_and_key(bind.queue, bind.routing_key)
        destination = self._check_queue_ends(source, name)
        self._topology.bind(
            source, destination, key, channel.table(bind.arguments), allow=channel.check_exclusive
        )
        channel.answer_when_saved(make(commands.Queue.BindOk), nowait=bool(bind.nowait))

    def _on_queue_unbind(self, unbind: commands.Queue.Unbind) -> None:
        channel = self._channel
        source = stripped(unbind.exchange)
        name, key = self._queue_and_key(unbind.queue, unbind.routing_key)
        destination = self._check_queue_ends(source, name)
        self._topology.unbind(
            source,
            destination,
            key,
            channel.table(unbind.arguments),
            allow=channel.check_exclusive,
        )
        channel.answer_when_saved(make(commands.Queue.UnbindOk), nowait=False)

    def _queue_and_key(self, queue: str | None, key: str | None) -> tuple[str, str]:
        """Both empty: both mean the queue this channel declared last."""
        name = self._channel.queue_name(stripped(queue))
        if not queue and not key:
            key = name
        return name, key or ""

    def _check_queue_ends(self, source: str, name: str) -> Resource:
        check_not_default(source)
        destination = self._resource("queue", name)
        self._channel.check_permission(destination, "write")
        self._channel.check_permission(self._resource("exchange", source), "read")
        return destination

    def _on_queue_purge(self, purge: commands.Queue.Purge) -> None:
        channel = self._channel
        name = channel.queue_name(stripped(purge.queue))
        channel.check_permission(self._resource("queue", name), "read")
        queue = channel.queue(name)
        channel.check_exclusive(queue)
        nowait = bool(purge.nowait)

        def answered(answer: object) -> None:
            if not isinstance(answer, q.Done):
                raise not_found(f"no {queue.name}")
            if not nowait:
                channel.send(make(commands.Queue.PurgeOk, message_count=answer.ready))

        question = q.Purge(channel.mailbox, channel.connection.access.user, ACTOR.get())
        channel.ask(queue, question, answered)

    def _on_queue_delete(self, delete: commands.Queue.Delete) -> None:
        channel = self._channel
        name = channel.queue_name(stripped(delete.queue))
        channel.check_permission(self._resource("queue", name), "configure")
        nowait = bool(delete.nowait)

        def answered(answer: object) -> None:
            # One that is gone, or never was, is fine.
            ready = answer.ready if isinstance(answer, q.Done) else 0
            channel.answer_when_saved(
                make(commands.Queue.DeleteOk, message_count=ready), nowait=nowait
            )

        queue = self._topology.queues.get(name)
        if queue is None:
            answered(q.Gone())
            return
        channel.check_exclusive(queue)
        question = q.Delete(
            channel.mailbox,
            bool(delete.if_unused),
            bool(delete.if_empty),
            channel.connection.access.user,
            ACTOR.get(),
        )
        channel.ask(queue, question, answered)
