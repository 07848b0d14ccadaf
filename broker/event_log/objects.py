"""Connections, channels, queues, exchanges, bindings and consumers, written into the event log.

Upstream: ``broker/events.py``, which tells what comes and goes under RabbitMQ's names; on whose
behalf is told by ``ACTOR``, the task that does it. Downstream: ``journal.py``. What belongs to none
of the kinds is an ``audit`` event: users, virtual hosts, policies, limits, alarms.

Owns the lives that have begun, so that their ends can say how long they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec

from leveret.broker.events import ACTOR, INTERNAL_USER, WHO
from leveret.broker.resource import Resource
from leveret.broker.vhost import is_predeclared
from leveret.protocol.field_table import Field

if TYPE_CHECKING:
    from leveret.broker.event_log.journal import Journal
    from leveret.broker.events import Event
    from leveret.broker.exchanges.base import Binding, Exchange
    from leveret.broker.queues.record import Queue
    from leveret.broker.vhost import Vhost
    from leveret.protocol.field_table import Table

# What a start finds on disk, or makes anew each time.
RECOVERED = "recovered"
# What clients say of themselves that is worth a word.
_CLIENT = ("connection_name", "product", "version", "platform")
# Told by connection_open as well, or by nothing but its end.
_LEFT_OUT = frozenset({"user.authentication.success"})

Properties = Mapping[str, Any]


class _Life(NamedTuple):
    since_us: int
    vhost: str
    user: str


class ObjectEvents:
    """To be subscribed to ``Events``."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        # Connections and channels that are open, by pid.
        self._lives: dict[str, _Life] = {}
        self._handlers: dict[str, Callable[[Properties, str], None]] = {
            "connection.created": self._on_connection_created,
            "connection.closed": self._on_connection_closed,
            "channel.created": self._on_channel_created,
            "channel.closed": self._on_channel_closed,
            "user.authentication.failure": self._on_authentication_failure,
            "queue.created": self._on_queue_created,
            "exchange.created": self._on_exchange_created,
            "exchange.deleted": self._on_exchange_deleted,
            "binding.created": lambda properties, _: self._on_binding("bind", properties),
            "binding.deleted": lambda properties, _: self._on_binding("unbind", properties),
            "consumer.created": self._on_consumer_created,
            "consumer.deleted": self._on_consumer_deleted,
        }

    def __call__(self, event: Event) -> None:
        handler = self._handlers.get(event.kind)
        if handler is not None:
            handler(event.properties, event.reason)
        elif event.kind == "queue.deleted":
            self._on_queue_deleted(event.properties, event.reason, event.messages)
        elif event.kind not in _LEFT_OUT:
            self._audit(event.kind, event.properties)

    # --- connections and channels -----------------------------------------------------------------

    def _on_connection_created(self, properties: Properties, reason: str) -> None:
        life = self._begin(properties)
        told: Table = properties["client_properties"]
        attrs = {name: _text(told[name]) for name in _CLIENT if name in told}
        conn, _, peer = ACTOR.get()
        self._journal.event(
            "connection_open",
            ts=life.since_us,
            vhost=life.vhost,
            conn=conn,
            user=life.user,
            peer=peer,
            attrs=attrs,
        )

    def _on_connection_closed(self, properties: Properties, reason: str) -> None:
        """Of one that was never open nothing was told: auth_fail, at most."""
        life = self._lives.pop(properties["pid"], None)
        if life is None:
            return
        conn, _, peer = ACTOR.get()
        self._journal.event(
            "connection_close",
            vhost=life.vhost,
            conn=conn,
            user=life.user,
            peer=peer,
            reason=reason,
            **self._age(life),
        )

    def _on_channel_created(self, properties: Properties, reason: str) -> None:
        life = self._begin(properties)
        self._channel("channel_open", life, ts=life.since_us)

    def _on_channel_closed(self, properties: Properties, reason: str) -> None:
        life = self._lives.pop(properties["pid"], None)
        if life is not None:
            self._channel("channel_close", life, reason=reason, **self._age(life))

    def _on_authentication_failure(self, properties: Properties, reason: str) -> None:
        conn, _, peer = ACTOR.get()
        user = properties.get("name", "")
        self._journal.event("auth_fail", conn=conn, user=user, peer=peer, reason=reason)

    def _begin(self, properties: Properties) -> _Life:
        life = _Life(self._journal.now_us(), properties["vhost"], properties["user"])
        self._lives[properties["pid"]] = life
        return life

    def _age(self, life: _Life) -> dict[str, int]:
        now_us = self._journal.now_us()
        # The clock of the wall may be set back.
        return {"ts": now_us, "hold_us": max(0, now_us - life.since_us)}

    def _channel(self, ev: str, life: _Life, **fields: Any) -> None:
        conn, ch, peer = ACTOR.get()
        self._journal.event(
            ev, vhost=life.vhost, conn=conn, ch=ch, user=life.user, peer=peer, **fields
        )

    # --- topology ---------------------------------------------------------------------------------

    def _on_queue_created(self, properties: Properties, reason: str) -> None:
        name: Resource = properties["name"]
        attrs = queue_attrs(
            properties["arguments"],
            durable=properties["durable"],
            auto_delete=properties["auto_delete"],
            exclusive=properties["exclusive"],
        )
        self._tell("queue_declare", name.vhost, properties, queue=name.name, attrs=attrs)

    def _on_queue_deleted(self, properties: Properties, reason: str, messages: int) -> None:
        name: Resource = properties["name"]
        self._tell(
            "queue_delete", name.vhost, properties, queue=name.name, n=messages, reason=reason
        )

    def _on_exchange_created(self, properties: Properties, reason: str) -> None:
        name: Resource = properties["name"]
        attrs = exchange_attrs(
            properties["type"],
            properties["arguments"],
            durable=properties["durable"],
            auto_delete=properties["auto_delete"],
            internal=properties["internal"],
        )
        self._tell("exchange_declare", name.vhost, properties, exchange=name.name, attrs=attrs)

    def _on_exchange_deleted(self, properties: Properties, reason: str) -> None:
        name: Resource = properties["name"]
        self._tell("exchange_delete", name.vhost, properties, exchange=name.name)

    def _on_binding(self, ev: str, properties: Properties) -> None:
        ends = binding_fields(
            properties["source_name"],
            properties["routing_key"],
            properties["destination_kind"],
            properties["destination_name"],
            properties["arguments"],
        )
        self._tell(ev, properties["vhost"], properties, **ends)

    def _on_consumer_created(self, properties: Properties, reason: str) -> None:
        queue: Resource = properties["queue"]
        attrs = {
            "ack_required": _text(properties["ack_required"]),
            "exclusive": _text(properties["exclusive"]),
            "prefetch_count": _text(properties["prefetch_count"]),
            **_arguments(properties["arguments"]),
        }
        tag = properties["consumer_tag"]
        self._tell("consume", queue.vhost, properties, queue=queue.name, ctag=tag, attrs=attrs)

    def _on_consumer_deleted(self, properties: Properties, reason: str) -> None:
        queue: Resource = properties["queue"]
        tag = properties["consumer_tag"]
        self._tell("cancel", queue.vhost, properties, queue=queue.name, ctag=tag, reason=reason)

    # --- everything else --------------------------------------------------------------------------

    def _audit(self, kind: str, properties: Properties) -> None:
        attrs = {name: _text(value) for name, value in properties.items() if name != WHO}
        vhost, user = attrs.pop("vhost", ""), _user(properties)
        self._journal.event("audit", vhost=vhost, user=user, reason=kind, attrs=attrs)

    def _tell(self, ev: str, vhost: str, properties: Properties, **fields: Any) -> None:
        conn, ch, _ = ACTOR.get()
        user = _user(properties)
        self._journal.event(ev, vhost=vhost, conn=conn, ch=ch, user=user, **fields)


def _user(properties: Properties) -> str:
    who: str = properties.get(WHO, "")
    return "" if who == INTERNAL_USER else who


def tell_recovered(
    journal: Journal, vhost: str, topology: Vhost[Queue], ready_in: Callable[[Queue], int | None]
) -> None:
    """What a virtual host has from its start on, but for what every one has."""
    exchanges: list[Exchange] = [
        exchange for name, exchange in topology.exchanges.items() if not is_predeclared(name)
    ]
    for exchange in exchanges:
        attrs = exchange_attrs(
            exchange.type,
            exchange.arguments,
            durable=exchange.durable,
            auto_delete=exchange.auto_delete,
            internal=exchange.internal,
        )
        journal.event(
            "exchange_declare",
            vhost=vhost,
            exchange=exchange.name.name,
            reason=RECOVERED,
            attrs=attrs,
        )
    for name, queue in topology.queues.items():
        attrs = queue_attrs(
            queue.arguments,
            durable=queue.durable,
            auto_delete=queue.auto_delete,
            exclusive=queue.exclusive,
        )
        journal.event(
            "queue_declare",
            vhost=vhost,
            queue=name,
            depth=ready_in(queue),
            reason=RECOVERED,
            attrs=attrs,
        )
    binding: Binding
    for binding in topology.bindings():
        ends = binding_fields(
            binding.source,
            binding.key,
            binding.destination.kind,
            binding.destination.name,
            binding.arguments,
        )
        journal.event("bind", vhost=vhost, reason=RECOVERED, **ends)


# --- attributes: text, and only what is not as usual ----------------------------------------------


def queue_attrs(
    arguments: Table, *, durable: bool, auto_delete: bool, exclusive: bool
) -> dict[str, str]:
    flags = {"durable": durable, "auto_delete": auto_delete, "exclusive": exclusive}
    return {**_flags(flags), **_arguments(arguments)}


def exchange_attrs(
    kind: str, arguments: Table, *, durable: bool, auto_delete: bool, internal: bool
) -> dict[str, str]:
    flags = {"durable": durable, "auto_delete": auto_delete, "internal": internal}
    return {"type": kind, **_flags(flags), **_arguments(arguments)}


def binding_fields(
    source: str, key: str, kind: str, destination: str, arguments: Table
) -> dict[str, Any]:
    attrs = _arguments(arguments)
    if kind == "queue":
        return {"exchange": source, "rk": key, "queue": destination, "attrs": attrs}
    return {"exchange": source, "rk": key, "attrs": {"destination": destination, **attrs}}


def _flags(flags: Mapping[str, bool]) -> dict[str, str]:
    return {name: "true" for name, is_set in flags.items() if is_set}


def _arguments(arguments: Table) -> dict[str, str]:
    return {name: _text(field) for name, field in arguments.items()}


def _text(value: object) -> str:
    """Text as it is, everything else as JSON."""
    plain = _plain(value)
    if isinstance(plain, str):
        return plain
    try:
        return msgspec.json.encode(plain).decode()
    except (TypeError, ValueError):
        return str(plain)


def _plain(value: object) -> object:
    if isinstance(value, Field):
        return _plain(value.value)
    if isinstance(value, Resource):
        return value.name
    if isinstance(value, bytes | bytearray):
        return value.decode("utf-8", "replace")
    if isinstance(value, Mapping):
        entries = cast("Mapping[object, object]", value)
        return {str(name): _plain(item) for name, item in entries.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in cast("list[object]", value)]
    return value
