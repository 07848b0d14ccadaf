"""How much virtual hosts and users may have: connections, channels, queues, consumers.

``Usage`` counts what a virtual host or a user has and knows what they may have; each virtual host
owns its own, ``Limits`` those of users. A connection that is let in holds a ``Tenancy`` in both
and, through it, counts its channels and consumers; what it did not give back goes when it leaves.
Upstream: the handshake, the reader and the channels, whose checks these are; ``broker.limits``
for the command line and for programs that embed the broker. Downstream: the stores.

The limits RabbitMQ has too are refused with its codes and words (530 ends the connection, 406 the
channel). A limit that is lowered ends nothing that is there; a negative one is none.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Literal

from leveret.broker.events import acting, parameter_event
from leveret.broker.parameters import NoSuchParameter, ParameterError, pairs, term
from leveret.protocol.errors import not_allowed, precondition_failed

if TYPE_CHECKING:
    from leveret.broker.auth.users import Users
    from leveret.broker.events import Events
    from leveret.broker.live_vhost import LiveVhost
    from leveret.storage.broker_store import BrokerStore

log = logging.getLogger(__name__)

MAX_CONNECTIONS = "max-connections"
MAX_CHANNELS = "max-channels"
MAX_QUEUES = "max-queues"
MAX_CONSUMERS = "max-consumers"

VHOST_LIMITS = (MAX_CONNECTIONS, MAX_QUEUES, MAX_CHANNELS, MAX_CONSUMERS)
USER_LIMITS = (MAX_CONNECTIONS, MAX_QUEUES, MAX_CHANNELS, MAX_CONSUMERS)

# Under these a virtual host's and a user's limits are kept.
VHOST_COMPONENT, VHOST_PARAMETER = "vhost-limits", "limits"
USER_COMPONENT = "user-limits"

Counted = Literal["connections", "channels", "consumers"]


class Usage:
    """What one virtual host or user has, and may have."""

    __slots__ = ("channels", "connections", "consumers", "limits")

    def __init__(self) -> None:
        # Replaced as a whole, never changed.
        self.limits: Mapping[str, int] = {}
        self.connections = 0
        self.channels = 0
        self.consumers = 0

    def limit_reached(self, limit: str, count: int) -> int | None:
        """The limit, if so many are as many as there may be."""
        allowed = self.limits.get(limit, -1)
        return allowed if 0 <= allowed <= count else None


class Tenancy:
    """One connection's part in the usage of its virtual host and its user.

    Made without arguments it is nobody's, and without limits.
    """

    __slots__ = (
        "_channels",
        "_consumers",
        "_is_over",
        "_queues_of",
        "_user",
        "_vhost",
        "names",
    )

    def __init__(
        self,
        vhost: Usage | None = None,
        user: Usage | None = None,
        names: tuple[str, str] = ("", ""),
        queues_of: Callable[[str], int] = lambda user: 0,
    ) -> None:
        """``queues_of`` counts what a user has declared, in all virtual hosts."""
        self._queues_of = queues_of
        self._vhost = Usage() if vhost is None else vhost
        self._user = Usage() if user is None else user
        # Of the virtual host and the user, for reply texts.
        self.names = names
        self._channels = 0
        self._consumers = 0
        # Nothing is counted any more: the connection has ended.
        self._is_over = False
        self._count("connections", 1)

    def open_channel(self) -> None:
        """Raises 530."""
        vhost, user = self.names
        limit = self._user.limit_reached(MAX_CHANNELS, self._user.channels)
        if limit is not None:
            raise not_allowed(
                f"number of channels opened for user '{user}' has reached"
                f" the maximum allowed user limit of ({limit})"
            )
        limit = self._vhost.limit_reached(MAX_CHANNELS, self._vhost.channels)
        if limit is not None:
            raise not_allowed(
                f"number of channels opened in vhost '{vhost}' has reached"
                f" the maximum allowed limit of ({limit})"
            )
        self._channels += 1
        self._count("channels", 1)

    def close_channel(self) -> None:
        if not self._is_over:
            self._channels -= 1
            self._count("channels", -1)

    def add_consumer(self) -> None:
        """Raises 406."""
        vhost, user = self.names
        limit = self._vhost.limit_reached(MAX_CONSUMERS, self._vhost.consumers)
        if limit is not None:
            raise precondition_failed(
                f"cannot consume: consumer limit in vhost '{vhost}' ({limit}) is reached"
            )
        limit = self._user.limit_reached(MAX_CONSUMERS, self._user.consumers)
        if limit is not None:
            raise precondition_failed(
                f"cannot consume: consumer limit for user '{user}' ({limit}) is reached"
            )
        self._consumers += 1
        self._count("consumers", 1)

    def check_queues(self, name: str) -> None:
        """Raises 406 if the user may declare no further queue; counted only where there is a limit.

        Queues have no connection, so they are not counted along but found.
        """
        user = self.names[1]
        if MAX_QUEUES in self._user.limits:
            limit = self._user.limit_reached(MAX_QUEUES, self._queues_of(user))
            if limit is not None:
                raise precondition_failed(
                    f"cannot declare queue '{name}': queue limit for user '{user}' ({limit})"
                    " is reached"
                )

    def remove_consumers(self, count: int) -> None:
        if not self._is_over:
            self._consumers -= count
            self._count("consumers", -count)

    def leave(self) -> None:
        """The connection has ended; twice is fine."""
        if not self._is_over:
            self._count("connections", -1)
            self._count("channels", -self._channels)
            self._count("consumers", -self._consumers)
            self._is_over = True

    def _count(self, what: Counted, change: int) -> None:
        for usage in (self._vhost, self._user):
            setattr(usage, what, getattr(usage, what) + change)


class Limits:
    def __init__(
        self,
        vhosts: Mapping[str, LiveVhost],
        known_users: Users,
        store: BrokerStore | None,
        events: Events,
    ) -> None:
        """Without a store users' limits are kept in memory alone."""
        self._events = events
        self._vhosts = vhosts
        self._known_users = known_users
        self._store = store
        # Of users that have limits or are connected.
        self._users: dict[str, Usage] = {}
        # A user's limits are read, changed and written in turns.
        self._changing_user = asyncio.Lock()

    # --- administration: each change returns when it is on disk ----------------------------------

    async def set_vhost(self, vhost: str, limits: Mapping[str, object]) -> None:
        """Set these and leave the others. Raises ParameterError."""
        live = self._vhost(vhost)
        changed = {**live.usage.limits, **check_limits(limits, VHOST_LIMITS, VHOST_PARAMETER)}
        live.usage.limits = changed
        await live.save_parameter(VHOST_COMPONENT, VHOST_PARAMETER, json.dumps(changed))
        _tell_vhost(live, changed)

    async def clear_vhost(self, vhost: str, limit: str | None = None) -> None:
        """One limit, or all. Raises ParameterError."""
        live = self._vhost(vhost)
        left = _without(live.usage.limits, limit, f"vhost '{vhost}'")
        live.usage.limits = left
        await live.save_parameter(
            VHOST_COMPONENT, VHOST_PARAMETER, json.dumps(left) if left else None
        )
        _tell_vhost(live, left)

    async def set_user(self, user: str, limits: Mapping[str, object]) -> None:
        """Set these and leave the others. Raises ParameterError."""
        self._check_user(user)
        checked = check_limits(limits, USER_LIMITS, USER_COMPONENT)
        async with self._changing_user:
            changed = {**self.user(user), **checked}
            await self._save_user(user, changed)
        self._tell_user(user, changed)

    async def clear_user(self, user: str, limit: str | None = None) -> None:
        """One limit, or all. Raises ParameterError."""
        self._check_user(user)
        async with self._changing_user:
            left = _without(self.user(user), limit, f"user '{user}'")
            await self._save_user(user, left)
        self._tell_user(user, left)

    def vhost(self, name: str) -> dict[str, int]:
        return dict(self._vhost(name).usage.limits)

    def user(self, name: str) -> dict[str, int]:
        usage = self._users.get(name)
        return {} if usage is None else dict(usage.limits)

    def all_vhosts(self) -> dict[str, dict[str, int]]:
        """Those that have any."""
        return {n: dict(live.usage.limits) for n, live in self._vhosts.items() if live.usage.limits}

    def all_users(self) -> dict[str, dict[str, int]]:
        """Those that have any."""
        return {n: dict(usage.limits) for n, usage in self._users.items() if usage.limits}

    def load(self, parameters: Mapping[tuple[str, str], object]) -> None:
        """At start: users' limits, among what the store has."""
        for (component, user), limits in parameters.items():
            if component != USER_COMPONENT:
                continue
            try:
                self._apply_to_user(user, check_limits(limits, USER_LIMITS, USER_COMPONENT))
            except ParameterError as error:
                # Written by another version: they are kept on disk.
                log.error("limits of user '%s' cannot be brought back: %s", user, error)

    def forget_user(self, name: str) -> None:
        """The user is deleted; connections that still end are counted as before."""
        self._apply_to_user(name, {})

    # --- connections -----------------------------------------------------------------------------

    def admit(self, user: str, live: LiveVhost) -> Tenancy:
        """Let a connection in, and count it. Raises 530."""
        limit = live.usage.limit_reached(MAX_CONNECTIONS, live.usage.connections)
        if limit is not None:
            raise not_allowed(
                f"access to vhost '{live.name}' refused for user '{user}':"
                f" connection limit ({limit}) is reached"
            )
        usage = self._usage_of(user)
        limit = usage.limit_reached(MAX_CONNECTIONS, usage.connections)
        if limit is not None:
            raise not_allowed(
                f"Connection refused for user '{user}': user connection limit ({limit}) is reached"
            )
        return Tenancy(live.usage, usage, (live.name, user), self._queues_of)

    def leave(self, tenancy: Tenancy) -> None:
        tenancy.leave()
        self._forget_idle(tenancy.names[1])

    # --- within ----------------------------------------------------------------------------------

    def _queues_of(self, user: str) -> int:
        queues = chain.from_iterable(
            live.topology.queues.values() for live in self._vhosts.values()
        )
        return sum(queue.declared_by == user for queue in queues)

    async def _save_user(self, user: str, limits: dict[str, int]) -> None:
        def saved() -> None:
            self._apply_to_user(user, limits)

        if self._store is None:
            saved()
        elif limits:
            await self._store.save_parameter(USER_COMPONENT, user, limits, saved)
        else:
            await self._store.delete_parameter(USER_COMPONENT, user, saved)

    def _tell_user(self, user: str, limits: Mapping[str, int]) -> None:
        if self._events.is_heard:
            kind = "user.limits.set" if limits else "user.limits.cleared"
            whose = {"name": VHOST_PARAMETER, **acting(), "username": user}
            self._events.notify(kind, {**whose, **limits})

    def _apply_to_user(self, name: str, limits: dict[str, int]) -> None:
        self._usage_of(name).limits = limits
        self._forget_idle(name)

    def _usage_of(self, user: str) -> Usage:
        return self._users.setdefault(user, Usage())

    def _forget_idle(self, user: str) -> None:
        usage = self._users.get(user)
        if usage is not None and not usage.connections and not usage.limits:
            del self._users[user]

    def _vhost(self, name: str) -> LiveVhost:
        live = self._vhosts.get(name)
        if live is None:
            raise ParameterError(f"there is no vhost '{name}', or it is down")
        return live

    def _check_user(self, name: str) -> None:
        if name not in self._known_users:
            raise ParameterError(f"there is no user '{name}'")


def _tell_vhost(live: LiveVhost, limits: Mapping[str, int]) -> None:
    """Limits are a parameter, and RabbitMQ tells of them as both."""
    events = live.events
    if not events.is_heard:
        return
    done = "set" if limits else "cleared"
    value: dict[str, object] = {"value": dict(limits)} if limits else {}
    events.notify(
        f"parameter.{done}", parameter_event(live.name, VHOST_COMPONENT, VHOST_PARAMETER, value)
    )
    events.notify(f"vhost.limits.{done}", {"name": VHOST_PARAMETER, **acting(), **limits})


def check_limits(limits: object, known: Iterable[str], what: str) -> dict[str, int]:
    """The limits, if they are such. Raises ParameterError."""
    if not isinstance(limits, Mapping):
        raise ParameterError(f"{what} not a list {term(limits)}")
    known = tuple(known)
    checked: dict[str, int] = {}
    for name, value in limits.items():
        if name not in known:
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise ParameterError(f"{name} should be a number, actually was {term(value)}")
        checked[name] = value
    unknown = {str(name): value for name, value in limits.items() if name not in known}
    if unknown:
        raise ParameterError(
            f"Unrecognised terms {pairs(unknown)} in {what}\nthe limits are {', '.join(known)}"
        )
    return checked


def limits_from_json(text: str, known: Iterable[str], what: str) -> dict[str, int]:
    """What was kept on disk. Raises ParameterError."""
    try:
        limits = json.loads(text)
    except ValueError as error:
        raise ParameterError(f"{what} not JSON: {error}") from error
    return check_limits(limits, known, what)


def check_queue_limit(live: LiveVhost, name: str) -> None:
    """Raises 406 if the virtual host may have no further queue."""
    limit = live.usage.limit_reached(MAX_QUEUES, len(live.topology.queues))
    if limit is not None:
        raise precondition_failed(
            f"cannot declare queue '{name}': queue limit in vhost '{live.name}' ({limit})"
            " is reached"
        )


def _without(limits: Mapping[str, int], limit: str | None, whose: str) -> dict[str, int]:
    if limit is None:
        return {}
    if limit not in limits:
        raise NoSuchParameter(f"there is no limit '{limit}' for {whose}")
    return {name: value for name, value in limits.items() if name != limit}
