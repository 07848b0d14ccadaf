"""The exchange ``amq.rabbitmq.event``: events of the broker as messages [141].

What RabbitMQ's plug-in rabbitmq_event_exchange does, built in. One per virtual host that has the
exchange; it listens to ``Events`` only while something is bound to it. An event is a persistent
message without a body, with the event's kind as routing key and its properties as headers, typed
and ordered as RabbitMQ's are: in reverse, arguments as text in the notation of Erlang.

Events are noted as they happen and published together at the loop's next turn: a topology that is
half changed is not asked for routes. What is noted is bounded, and so is what a queue that does not
keep up is given (``own_messages.py``); what is too much is dropped and counted.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, cast

from leveret.broker.exchanges.base import Binding
from leveret.broker.own_messages import hand_over, make_message
from leveret.broker.queues.erlang_terms import notation
from leveret.broker.resource import Resource
from leveret.protocol.codec import Properties
from leveret.protocol.field_table import Field, Table, type_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from leveret.broker.events import Event, Events
    from leveret.broker.queues.record import Queue
    from leveret.broker.vhost import Event as TopologyEvent
    from leveret.broker.vhost import Vhost
    from leveret.protocol.message import Message

log = logging.getLogger(__name__)

EVENT_EXCHANGE = "amq.rabbitmq.event"
# Events that may wait for the loop's next turn.
BACKLOG = 10_000
_PERSISTENT = 2


class EventExchange:
    def __init__(self, events: Events, topology: Vhost[Queue]) -> None:
        """Makes the exchange. To be called before bindings to it are brought back."""
        self._events = events
        self._topology = topology
        self._exchange = topology.create_exchange(
            EVENT_EXCHANGE, "topic", durable=True, internal=True
        )
        self._noted: list[Event] = []
        self._is_bound = False
        # Copies that queues, or the backlog, had no room for.
        self.dropped = 0
        # In front of whoever reports the topology's changes: of the first binding, too.
        topology.events.insert(0, self._on_topology)

    def close(self) -> None:
        """The virtual host stops."""
        self._events.unsubscribe(self._note)
        self._noted = []

    def _on_topology(self, event: TopologyEvent, thing: object) -> None:
        if not isinstance(thing, Binding) or thing.source != EVENT_EXCHANGE:
            return
        is_bound = bool(self._topology.bindings_from(EVENT_EXCHANGE))
        if is_bound != self._is_bound:
            self._is_bound = is_bound
            if is_bound:
                self._events.subscribe(self._note)
            else:
                self._events.unsubscribe(self._note)

    def _note(self, event: Event) -> None:
        if len(self._noted) >= BACKLOG:
            self._drop(1)
            return
        if not self._noted:
            asyncio.get_running_loop().call_soon(self._publish)
        self._noted.append(event)

    def _publish(self) -> None:
        noted, self._noted = self._noted, []
        exchange = self._exchange
        by_queue: dict[Queue, list[Message]] = {}
        for event in noted:
            queues = self._topology.route(exchange, event.kind, (), dict)
            exchange.publish_in += 1
            exchange.publish_out += len(queues)
            if queues:
                message = _message(event)
                for queue in queues:
                    by_queue.setdefault(queue, []).append(message)
        for queue, messages in by_queue.items():
            left_out = hand_over((queue,), messages)
            if left_out:
                self._drop(left_out)

    def _drop(self, count: int) -> None:
        if not self.dropped:
            log.warning("events come faster than they can be published: some are dropped")
        self.dropped += count


def _message(event: Event) -> Message:
    headers = _table(event.properties)
    headers["timestamp_in_ms"] = Field("l", event.timestamp_ms)
    properties = Properties(
        headers=headers,
        delivery_mode=_PERSISTENT,
        timestamp=event.timestamp_ms // 1000,
    )
    return make_message(EVENT_EXCHANGE, event.kind, properties, b"")


def _table(properties: Mapping[str, object]) -> Table:
    """The last one first. A resource also tells its virtual host."""
    table: Table = {}
    for name, value in reversed(list(properties.items())):
        if isinstance(value, Resource):
            table[name] = Field("S", value.name)
            table["vhost"] = Field("S", value.vhost)
        else:
            table[name] = _field(value)
    return table


def _field(value: object) -> Field:
    if isinstance(value, bool):
        return Field("t", value)
    if isinstance(value, int):
        return Field("l", value)
    if isinstance(value, float):
        return Field("f", value)
    if isinstance(value, list | tuple):
        return Field("A", [_field(item) for item in cast("list[object]", value)])
    if isinstance(value, dict):
        entries = cast("dict[str, object]", value)
        if all(isinstance(item, Field) for item in entries.values()):
            # Arguments; an empty list is what Erlang has for none.
            return Field("A", _terms(cast(Table, entries)))
        return Field("F", _table(entries))
    return Field("S", "" if value is None else str(value))


def _terms(arguments: Table) -> list[Field]:
    return [
        Field("S", f"{{{notation(Field('S', name))},{type_name(field.tag)},{notation(field)}}}")
        for name, field in arguments.items()
    ]
