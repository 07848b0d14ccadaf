"""From an exchange and routing keys to queues: pure functions (hop 4).

Upstream: ``vhost.py``, for publishes and for dead letters. Downstream: nothing but the exchanges'
own matching rules; what comes back are queue records, for the delegate.

The default exchange takes keys for queue names. From any other, exchanges are visited once
each: what its type matched, what its route decorators add and, only if the *type* matched
nothing, its alternate exchange. Exchanges among these are visited in turn, queues collected.
Invariants: a queue comes up once, cycles end, names of things that are gone are passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar, cast

from leveret.broker.exchanges.base import Exchange, Headers
from leveret.broker.resource import Resource
from leveret.protocol.errors import precondition_failed
from leveret.protocol.field_table import Field, Table, type_name

CC = "CC"
BCC = "BCC"


class QueueRecord(Protocol):
    """What routing and the topology need to know of a queue."""

    @property
    def name(self) -> Resource: ...

    @property
    def durable(self) -> bool: ...


Q = TypeVar("Q", bound=QueueRecord)
Q_co = TypeVar("Q_co", bound=QueueRecord, covariant=True)


class Topology(Protocol[Q_co]):
    """The exchanges and queues of one virtual host, by name."""

    @property
    def exchanges(self) -> Mapping[str, Exchange]: ...

    @property
    def queues(self) -> Mapping[str, Q_co]: ...


class Hop(NamedTuple):
    """One exchange on the way of a message, for whoever wants the route explained."""

    exchange: Exchange
    matched: Sequence[Resource]
    decorated: Sequence[Resource]
    # Set where nothing matched and there is an alternate exchange, existing or not.
    alternate: str | None


Trace = Callable[[Hop], None]


def route(
    topology: Topology[Q],
    exchange: Exchange,
    keys: Sequence[str],
    headers: Headers,
    trace: Trace | None = None,
) -> list[Q]:
    """The queues a message goes to; ``trace`` is called for each exchange it passes."""
    queues = topology.queues
    if not exchange.name.name:
        names = [key for key in dict.fromkeys(keys) if key in queues]
        if trace is not None:
            trace(Hop(exchange, [queues[name].name for name in names], (), None))
        return [queues[name] for name in names]

    found: dict[str, Q] = {}
    seen = {exchange.name.name}
    ahead = [exchange]
    for current in ahead:  # grows while it is walked
        matched = list(current.matcher.route(keys, headers))
        decorated = [
            where
            for decorator in current.route_decorators
            for where in decorator.route(current, keys, headers)
        ]
        alternate = None if matched else current.alternate
        if trace is not None:
            trace(Hop(current, matched, decorated, alternate))
        next_exchanges = [] if alternate is None else [alternate]
        for destination in (*matched, *decorated):
            if destination.kind == "exchange":
                next_exchanges.append(destination.name)
            elif destination.name not in found:
                queue = queues.get(destination.name)
                if queue is not None:
                    found[destination.name] = queue
        for name in next_exchanges:
            if name not in seen:
                seen.add(name)
                further = topology.exchanges.get(name)
                if further is not None:
                    ahead.append(further)
    return list(found.values())


def sender_selected_keys(headers: Table) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The further routing keys in CC and BCC; raises 406 where one of them is not an array.

    Items that are not long strings are passed over, as RabbitMQ does.
    """
    return _keys(headers, CC), _keys(headers, BCC)


def without_bcc(headers: Table) -> Table:
    """The headers as receivers may see them; the table stays, even if nothing else is in it."""
    return {name: field for name, field in headers.items() if name != BCC}


def _keys(headers: Table, name: str) -> tuple[str, ...]:
    given = headers.get(name)
    if given is None:
        return ()
    if given.tag != "A":
        raise precondition_failed(
            f'invalid message: {{unacceptable_type_in_header,"{name}",{type_name(given.tag)}}}'
        )
    items = cast(list[Field], given.value)
    return tuple(cast(str, item.value) for item in items if item.tag == "S")
