"""The topology of one virtual host: exchanges, queues, and the bindings between them.

Upstream: ``channel/declare.py`` changes it, ``channel/publish.py`` and dead-lettering ask it for
routes. Downstream: ``exchanges/`` match; the queue records that come back lead to the delegate.

Everything is synchronous: between two calls the topology is whole. Errors are raised as clients
see them, without the ids of the method, which the channel fills in. Permissions are the
caller's; where RabbitMQ looks at something before it looks at permissions, that check is a
function of its own (``check_not_default``, ``check_declarable``, ``Vhost.check_deletable``).

Invariants: both ends of a binding exist; the matcher and the decorators of an exchange know
exactly its bindings; an auto-delete exchange goes with the last binding from it; no cached
route outlives a change of anything it was made of.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Literal, NamedTuple

from leveret.broker.exchanges.base import Binding, Exchange, Headers, alternate_exchange
from leveret.broker.exchanges.bindings import BindingIndex
from leveret.broker.exchanges.decorators import DecoratorSet, decorate
from leveret.broker.exchanges.router import Hop, Q, Trace, route
from leveret.broker.exchanges.terms import check_same, check_same_flag
from leveret.broker.registry import Registries
from leveret.broker.resource import Kind, Resource
from leveret.protocol.errors import (
    access_refused,
    command_invalid,
    not_found,
    precondition_failed,
)
from leveret.protocol.field_table import Table

log = logging.getLogger(__name__)

RESERVED_PREFIX = "amq."
PREDECLARED = {
    "": "direct",
    "amq.direct": "direct",
    "amq.fanout": "fanout",
    "amq.topic": "topic",
    "amq.headers": "headers",
    "amq.match": "headers",
}
# Copies of what is published and delivered come from it, see tracing.py.
TRACE_EXCHANGE = "amq.rabbitmq.trace"
ROUTES_CACHED = 10_000

Event = Literal[
    "exchange.created",
    "exchange.deleted",
    "queue.created",
    "queue.deleted",
    "binding.created",
    "binding.deleted",
]


class Route(NamedTuple, Generic[Q]):
    """Where every message with one exchange and routing key goes, until the topology changes."""

    exchange: Exchange
    queues: tuple[Q, ...]


class Vhost(Generic[Q]):
    def __init__(self, name: str, registries: Registries) -> None:
        self.name = name
        # Both are changed by the methods below only.
        self.exchanges: dict[str, Exchange] = {}
        self.queues: dict[str, Q] = {}
        # Told of everything that comes and goes, with the exchange, queue record or binding.
        self.events: list[Callable[[Event, object], object]] = []
        self._types = registries.exchange_types
        self._bindings = BindingIndex()
        # Routes by envelope; None where every message must be looked at.
        self._routes: dict[bytes, Route[Q] | None] = {}
        self._decorators = DecoratorSet(registries.exchange_decorators)
        self._decorators.registry.watchers.append(self._decorators_changed)
        for predeclared, kind in PREDECLARED.items():
            self.create_exchange(predeclared, kind, durable=True)
        self.create_exchange(TRACE_EXCHANGE, "topic", durable=True, internal=True)

    def close(self) -> None:
        """Let go of what outlives the virtual host."""
        self._decorators.registry.watchers.remove(self._decorators_changed)

    # --- exchanges -------------------------------------------------------------------------------

    def declare_exchange(
        self,
        name: str,
        kind: str,
        *,
        passive: bool = False,
        durable: bool = False,
        auto_delete: bool = False,
        internal: bool = False,
        arguments: Table | None = None,
    ) -> Exchange:
        """The exchange of that name, made if need be.

        Raises 503 for an unknown type, 406 if it is there and different, 403 for reserved names,
        404 if it should be there (passive) and is not.
        """
        if passive:
            check_not_default(name)
            return self.exchange(name)
        self.check_type(kind)
        check_not_default(name)
        arguments = {} if arguments is None else arguments
        existing = self.exchanges.get(name)
        if existing is None:
            check_declarable(name)
            return self.create_exchange(
                name,
                kind,
                durable=durable,
                auto_delete=auto_delete,
                internal=internal,
                arguments=arguments,
            )
        resource = existing.name
        check_same(resource, "type", existing.type, kind)
        check_same_flag(resource, "durable", current=existing.durable, received=durable)
        check_same_flag(resource, "auto_delete", current=existing.auto_delete, received=auto_delete)
        check_same_flag(resource, "internal", current=existing.internal, received=internal)
        existing.matcher.check_equivalent(existing, arguments)
        return existing

    def check_type(self, kind: str) -> None:
        """Raises 503 for a type nobody has registered."""
        if kind not in self._types:
            what = "unknown" if kind else "invalid"
            raise command_invalid(f"{what} exchange type '{kind}'")

    def create_exchange(
        self,
        name: str,
        kind: str,
        *,
        durable: bool,
        auto_delete: bool = False,
        internal: bool = False,
        arguments: Table | None = None,
    ) -> Exchange:
        """Make one that is not there: for the broker itself, which may use reserved names."""
        factory = self._types.get(kind)
        if factory is None:
            raise command_invalid(f"unknown exchange type '{kind}'")
        arguments = {} if arguments is None else arguments
        resource = self._resource("exchange", name)
        exchange = Exchange(
            resource,
            kind,
            factory(),
            durable=durable,
            auto_delete=auto_delete,
            internal=internal,
            arguments=arguments,
            alternate=alternate_exchange(resource, arguments),
        )
        exchange.matcher.validate(exchange)
        self.exchanges[name] = exchange
        self._routes.clear()
        # Nothing follows the default exchange: its routes are queue names.
        if name:
            decorate(exchange, self._decorators, ())
        self._notify("exchange.created", exchange)
        return exchange

    def exchange(self, name: str) -> Exchange:
        """Raises 404 if there is none of that name."""
        exchange = self.exchanges.get(name)
        if exchange is None:
            raise not_found(f"no {self._resource('exchange', name)}")
        return exchange

    def exchange_for_publish(self, name: str) -> Exchange:
        """The same for a client's message: raises 403 for an internal one."""
        exchange = self.exchange(name)
        if exchange.internal:
            raise access_refused(f"cannot publish to internal {exchange.name}")
        return exchange

    def delete_exchange(self, name: str, *, if_unused: bool = False) -> None:
        """Delete it with its bindings; one that is not there is fine.

        Raises 403 for predeclared ones, 406 if it is in use and must not be.
        """
        self.check_deletable(name)
        exchange = self.exchanges.get(name)
        if exchange is None:
            return
        if if_unused and self._bindings.has_source(name):
            raise precondition_failed(f"{exchange.name} in use")
        self._delete_exchanges([exchange])

    def policy_changed(self, exchange: Exchange, *, alternate: str | None) -> None:
        """Another policy applies; ``alternate`` is what it says, and the argument still wins."""
        given = alternate_exchange(exchange.name, exchange.arguments)
        exchange.alternate = alternate if given is None else given
        self._routes.clear()
        before = exchange.decorators
        decorate(exchange, self._decorators, self.bindings_from(exchange.name.name))
        exchange.matcher.policy_changed(exchange)
        for decorator in exchange.decorators:
            if decorator in before:
                decorator.policy_changed(exchange)

    def check_deletable(self, name: str) -> None:
        """Raises 403 for the default exchange and for reserved names, there or not."""
        check_not_default(name)
        if name.startswith(RESERVED_PREFIX):
            raise access_refused(
                f"deletion of system {self._resource('exchange', name)} not allowed"
            )

    # --- queues ----------------------------------------------------------------------------------

    def add_queue(self, queue: Q) -> None:
        """Make a new queue known; the name must be free."""
        if queue.name.name in self.queues:
            raise ValueError(f"{queue.name} exists")
        self.queues[queue.name.name] = queue
        self._routes.clear()
        self._notify("queue.created", queue)

    def queue(self, name: str) -> Q:
        """Raises 404 if there is none of that name."""
        queue = self.queues.get(name)
        if queue is None:
            raise not_found(f"no {self._resource('queue', name)}")
        return queue

    def remove_queue(self, name: str) -> Q | None:
        """Forget a queue and its bindings; exchanges that lived by these go, too."""
        queue = self.queues.pop(name, None)
        if queue is None:
            return None
        self._routes.clear()
        self._delete_exchanges(self._drop_bindings(self._bindings.by_destination(queue.name)))
        self._notify("queue.deleted", queue)
        return queue

    # --- bindings --------------------------------------------------------------------------------

    def bind(
        self,
        source: str,
        destination: Resource,
        key: str,
        arguments: Table | None = None,
        *,
        allow: Callable[[Q], None] | None = None,
    ) -> Binding:
        """Bind, or return the same binding that is there already.

        ``allow`` is shown a destination queue once nothing else stands in the way; it raises if
        the queue belongs to another connection. Raises 403 for the default exchange, 404 for
        missing ends, 406 for arguments the exchange does not understand.
        """
        self._check_ends(source, destination)
        exchange = self.exchange(source)
        if destination.kind == "exchange":
            self.exchange(destination.name)
            queue = None
        else:
            queue = self.queue(destination.name)
        binding = Binding.of(source, destination, key, {} if arguments is None else arguments)
        exchange.matcher.validate_binding(exchange, binding)
        if queue is not None and allow is not None:
            allow(queue)
        if binding in self._bindings:
            return binding
        exchange.matcher.add_binding(binding)
        self._bindings.add(binding)
        self._routes.clear()
        for decorator in exchange.decorators:
            decorator.add_binding(exchange, binding)
        self._notify("binding.created", binding)
        return binding

    def unbind(
        self,
        source: str,
        destination: Resource,
        key: str,
        arguments: Table | None = None,
        *,
        allow: Callable[[Q], None] | None = None,
    ) -> None:
        """Take a binding away; it is fine if it, or one of its ends, is not there."""
        self._check_ends(source, destination)
        binding = Binding.of(source, destination, key, {} if arguments is None else arguments)
        if binding not in self._bindings:
            return
        if destination.kind == "queue" and allow is not None:
            allow(self.queues[destination.name])
        self._delete_exchanges(self._drop_bindings([binding]))

    def bindings(self) -> Iterator[Binding]:
        return iter(self._bindings)

    def bindings_from(self, source: str) -> Sequence[Binding]:
        return self._bindings.by_source(source)

    def bindings_to(self, destination: Resource) -> Sequence[Binding]:
        return self._bindings.by_destination(destination)

    def durable_bindings(self) -> Iterator[Binding]:
        """Those that survive a restart, because both of their ends do."""
        return (binding for binding in self.bindings() if self.is_durable(binding))

    def is_durable(self, binding: Binding) -> bool:
        destination = binding.destination
        ends: dict[str, Exchange] | dict[str, Q]
        ends = self.exchanges if destination.kind == "exchange" else self.queues
        return self.exchanges[binding.source].durable and ends[destination.name].durable

    # --- routes ----------------------------------------------------------------------------------

    def route(
        self,
        exchange: Exchange,
        routing_key: str,
        extra_keys: Sequence[str],
        headers: Headers,
        trace: Trace | None = None,
    ) -> Sequence[Q]:
        """The queues one message goes to, worked out anew."""
        return route(self, exchange, (routing_key, *extra_keys), headers, trace)

    def cached_route(self, envelope: bytes, exchange: str, routing_key: str) -> Route[Q] | None:
        """The route of a client's messages without further keys; None: look at each message.

        The envelope stands for the pair that follows it. Raises 404 and 403 as
        ``exchange_for_publish`` does.
        """
        try:
            return self._routes[envelope]
        except KeyError:
            found = self._find_route(exchange, routing_key)
        if len(self._routes) >= ROUTES_CACHED:
            self._routes.clear()
        self._routes[envelope] = found
        return found

    def _find_route(self, name: str, routing_key: str) -> Route[Q] | None:
        exchange = self.exchange_for_publish(name)
        hops: list[Hop] = []
        queues = route(self, exchange, (routing_key,), dict, hops.append)
        for hop in hops:
            if hop.exchange.matcher.reads_headers or hop.exchange.route_decorators:
                return None
        return Route(exchange, tuple(queues))

    # --- within ----------------------------------------------------------------------------------

    def _resource(self, kind: Kind, name: str) -> Resource:
        return Resource(self.name, kind, name)

    def _check_ends(self, source: str, destination: Resource) -> None:
        check_not_default(source)
        if destination.kind == "exchange":
            check_not_default(destination.name)

    def _drop_bindings(self, bindings: Sequence[Binding]) -> list[Exchange]:
        """Remove them; return the auto-delete exchanges that have none left."""
        sources: dict[str, None] = {}
        for binding in bindings:
            sources[binding.source] = None
            self._bindings.remove(binding)
            exchange = self.exchanges[binding.source]
            exchange.matcher.remove_binding(binding)
            # Each time, before anybody is told: whoever is may ask for a route.
            self._routes.clear()
            for decorator in exchange.decorators:
                decorator.remove_binding(exchange, binding)
            self._notify("binding.deleted", binding)
        return [
            self.exchanges[name]
            for name in sources
            if self.exchanges[name].auto_delete and not self._bindings.has_source(name)
        ]

    def _delete_exchanges(self, doomed: list[Exchange]) -> None:
        """Delete them and, in turn, those that lose their last binding thereby."""
        for exchange in doomed:  # grows while it is walked
            name = exchange.name.name
            self._drop_bindings(self._bindings.by_source(name))
            orphans = self._drop_bindings(self._bindings.by_destination(exchange.name))
            del self.exchanges[name]
            self._routes.clear()
            exchange.matcher.delete(exchange)
            for decorator in exchange.decorators:
                decorator.delete(exchange)
            self._notify("exchange.deleted", exchange)
            doomed += orphans

    def _decorators_changed(self) -> None:
        self._decorators.refresh()
        self._routes.clear()
        for name, exchange in self.exchanges.items():
            if name:
                decorate(exchange, self._decorators, self.bindings_from(name))

    def _notify(self, event: Event, thing: object) -> None:
        for observer in self.events:
            try:
                observer(event, thing)
            except Exception:
                # Whoever watches must not leave the topology half changed.
                log.exception("virtual host '%s': an observer failed at %s", self.name, event)


def is_predeclared(name: str) -> bool:
    """Every virtual host has it."""
    return not name or name.startswith(RESERVED_PREFIX)


def check_not_default(name: str) -> None:
    """Raises 403 for what nobody may do to the default exchange."""
    if not name:
        raise access_refused("operation not permitted on the default exchange")


def check_declarable(name: str) -> None:
    """Raises 403 if a client must not give this name to a new exchange."""
    if name.startswith(RESERVED_PREFIX):
        raise access_refused(f"exchange name '{name}' contains reserved prefix 'amq.*'")
