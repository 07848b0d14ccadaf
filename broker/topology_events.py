"""Queues, exchanges and bindings that come and go, told as events.

Upstream: ``Vhost.events``, called in the middle of the change. Downstream: ``events.py``. What a
virtual host brings back at its start is not told: nothing of it is new.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from leveret.broker.events import Events, acting
from leveret.broker.exchanges.base import Binding, Exchange
from leveret.broker.queues.record import Queue

if TYPE_CHECKING:
    from leveret.broker.vhost import Event


class TopologyEvents:
    def __init__(self, events: Events, vhost: str) -> None:
        self._events = events
        self._vhost = vhost

    def __call__(self, event: Event, thing: object) -> None:
        if not self._events.is_heard:
            return
        reason, messages = "", 0
        if isinstance(thing, Queue):
            reason, messages = thing.delete_reason, thing.deleted_messages
            properties = _queue(thing) if event == "queue.created" else _gone(thing)
        elif isinstance(thing, Exchange):
            properties = _exchange(thing) if event == "exchange.created" else _gone(thing)
        elif isinstance(thing, Binding):
            properties = self._binding(thing)
        else:
            return
        self._events.notify(event, properties, reason, messages)

    def _binding(self, binding: Binding) -> dict[str, object]:
        return {
            "source_name": binding.source,
            "source_kind": "exchange",
            "destination_name": binding.destination.name,
            "destination_kind": binding.destination.kind,
            "routing_key": binding.key,
            "arguments": binding.arguments,
            "vhost": self._vhost,
            **acting(),
        }


def _queue(queue: Queue) -> dict[str, object]:
    return {
        "name": queue.name,
        "durable": queue.durable,
        "auto_delete": queue.auto_delete,
        "arguments": queue.arguments,
        "owner_pid": "" if queue.owner is None else queue.owner.pid,
        "exclusive": queue.exclusive,
        **acting(),
    }


def _exchange(exchange: Exchange) -> dict[str, object]:
    return {
        "name": exchange.name,
        "type": exchange.type,
        "durable": exchange.durable,
        "auto_delete": exchange.auto_delete,
        "internal": exchange.internal,
        "arguments": exchange.arguments,
        "policy": "" if exchange.policy is None else exchange.policy.name,
        **acting(),
    }


def _gone(thing: Queue | Exchange) -> dict[str, object]:
    return {"name": thing.name, **acting()}
