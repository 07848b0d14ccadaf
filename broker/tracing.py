"""The firehose: a copy of every publish and every delivery of a virtual host [152].

While tracing is on for a virtual host its ``tracer`` is one of these, else None: that is all the
channels look at, once per run. Copies go to the exchange ``amq.rabbitmq.trace``, with RabbitMQ's
routing keys (``publish.{exchange}``, ``deliver.{queue}``) and headers, and the body as it is. They
cost the channel credit as its own publishes do, so that whoever is traced goes no faster than the
copies are taken.

Messages that come from the trace exchange are not traced: a client that consumes them would see
each of its own deliveries again, for ever. Tracing is off after a restart, as in RabbitMQ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from leveret.broker import delegate
from leveret.broker.exchanges.router import sender_selected_keys
from leveret.broker.node import NODE_NAME
from leveret.broker.own_messages import make_message
from leveret.broker.queues.commands import Delivery
from leveret.broker.vhost import TRACE_EXCHANGE
from leveret.protocol.codec import Properties, read_properties
from leveret.protocol.errors import AmqpError
from leveret.protocol.field_table import Field, Table

if TYPE_CHECKING:
    from leveret.broker.channel.channel import Channel
    from leveret.broker.queues.record import Queue
    from leveret.broker.vhost import Vhost
    from leveret.protocol.message import Message

_KEY_MAX = 255
_INT32 = range(-(2**31), 2**31)
_LARGE = 14


class Tracer:
    def __init__(self, topology: Vhost[Queue]) -> None:
        self._topology = topology

    def published(
        self, channel: Channel, messages: Sequence[Message], queues: Sequence[Queue]
    ) -> None:
        """A run with one exchange, as it was routed."""
        routed = Field("A", [Field("S", queue.name.name) for queue in queues])
        self._trace(
            channel,
            f"publish.{messages[0].exchange}",
            messages,
            {},
            {"routed_queues": routed},
        )

    def delivered(
        self, channel: Channel, queue: str, messages: Sequence[Message], *, redelivered: bool
    ) -> None:
        """A run for one consumer, or what a basic.get got."""
        others = [message for message in messages if message.exchange != TRACE_EXCHANGE]
        if others:
            self._trace(
                channel,
                f"deliver.{queue}",
                others,
                {"redelivered": Field("I", int(redelivered))},
                {},
            )

    def _trace(
        self, channel: Channel, key: str, messages: Sequence[Message], first: Table, last: Table
    ) -> None:
        # Names have up to 255 bytes, and so has a key.
        key = key.encode("utf-8", "surrogateescape")[:_KEY_MAX].decode("utf-8", "surrogateescape")
        exchange = self._topology.exchanges[TRACE_EXCHANGE]
        queues = self._topology.route(exchange, key, (), dict)
        exchange.publish_in += len(messages)
        if not queues:
            return
        exchange.publish_out += len(messages) * len(queues)
        connection = channel.connection
        context: Table = {
            **first,
            "vhost": Field("S", connection.vhost.name),
            "connection": Field("S", connection.name),
            "channel": Field("I", channel.number),
            "user": Field("S", connection.access.user),
            **last,
        }
        copies = [
            make_message(
                TRACE_EXCHANGE,
                key,
                Properties(headers={**_description(message), **context}),
                message.body,
            )
            for message in messages
        ]
        sizes = [len(copy.body) for copy in copies]
        cost = len(copies) + sum([size >> _LARGE for size in sizes])
        delivery = Delivery(
            copies,
            channel.mailbox,
            0,
            cost if channel.connection.settings.classic_queue_flow_control == "on" else 0,
            sum(sizes),
            max(sizes),
            0,
            is_mandatory=False,
            needs=copies[0].needs,
        )
        channel.touched.update([queue.mailbox for queue in queues])
        delegate.deliver(queues, delivery, channel.flow)


def _description(message: Message) -> Table:
    """What is told of a message itself."""
    properties = read_properties(message.header)
    keys = (message.routing_key, *(message.extra_keys or _selected_keys(properties)))
    return {
        "exchange_name": Field("S", message.exchange),
        "routing_keys": Field("A", [Field("S", key) for key in keys]),
        "properties": Field("F", _table_of(properties)),
        "node": Field("S", NODE_NAME),
    }


def _selected_keys(properties: Properties) -> tuple[str, ...]:
    """Of a message that came back from disk: its CC is still there."""
    try:
        cc, _ = sender_selected_keys(properties.headers or {})
    except AmqpError:
        return ()
    return cc


def _table_of(properties: Properties) -> Table:
    """The properties that are there, the last one first, as RabbitMQ has them."""
    table: Table = {}
    for name in reversed(Properties.__slots__):
        value = getattr(properties, name)
        if value is None:
            continue
        if isinstance(value, dict):
            field = Field("F", value)
        elif isinstance(value, int):
            field = Field("I" if value in _INT32 else "l", value)
        else:
            field = Field("S", value)
        table["type" if name == "message_type" else name] = field
    return table
