"""What comes, goes and changes in the broker, told to whoever listens [140].

Upstream: everybody in whose hands something happens: connections, channels, topologies, users,
virtual hosts, policies, limits, alarms. Downstream: the listeners; the event exchange is one. While
nobody listens ``is_heard`` is false, and who has something to tell looks at that before it gathers
what there is to say: an event nobody wants costs one attribute.

Events are named as RabbitMQ's event exchange names them (``queue.created``), with its properties in
its order. Values are plain: text, numbers, booleans, lists, dictionaries, a ``Resource``, or a
``Table`` of arguments. Listeners are called at once, in the middle of whatever happens: they note
the event and act later, and change nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from leveret.broker.clock import Clock

log = logging.getLogger(__name__)

# Who does something without being a user: the broker itself, and the command line.
INTERNAL_USER = "rmq-internal"
CLI_USER = "rmq-cli"

# On whose behalf the running task acts. A connection sets it when it is open; its channels, and
# the tasks of queues they declare, begin with the same.
ACTING_USER: ContextVar[str] = ContextVar("acting_user", default=INTERNAL_USER)


class Actor(NamedTuple):
    """The connection and channel, by their numbers in the event log, and the client's address."""

    conn: int = 0
    ch: int = 0
    peer: str = ""


NOBODY = Actor()
# Through which channel; inherited in the same way.
ACTOR: ContextVar[Actor] = ContextVar("actor", default=NOBODY)

WHO = "user_who_performed_action"


class Event(NamedTuple):
    kind: str
    properties: Mapping[str, object]
    timestamp_ms: int
    # Why, where that is known, and how many messages went with it; RabbitMQ's events do not tell.
    reason: str = ""
    messages: int = 0


Listener = Callable[[Event], object]


class Events:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._listeners: list[Listener] = []
        # Somebody listens: only then is it worth gathering what there is to say.
        self.is_heard = False

    def subscribe(self, listener: Listener) -> None:
        self._listeners.append(listener)
        self.is_heard = True

    def unsubscribe(self, listener: Listener) -> None:
        """Fine if it does not listen."""
        if listener in self._listeners:
            self._listeners.remove(listener)
        self.is_heard = bool(self._listeners)

    def notify(
        self, kind: str, properties: Mapping[str, object], reason: str = "", messages: int = 0
    ) -> None:
        """Tell everybody; a listener that fails is logged and takes nobody with it."""
        event = Event(kind, properties, int(self._clock.now() * 1000), reason, messages)
        for listener in tuple(self._listeners):
            try:
                listener(event)
            except Exception:
                log.exception("a listener failed at %s", kind)


def acting() -> dict[str, object]:
    """On whose behalf it happens, as the last property of most events."""
    return {WHO: ACTING_USER.get()}


def parameter_event(
    vhost: str, component: str, name: str, value: Mapping[str, object]
) -> dict[str, object]:
    """Of a runtime parameter of a virtual host; ``value`` is empty where it is cleared."""
    return {"vhost": vhost, "component": component, "name": name, **value, **acting()}
