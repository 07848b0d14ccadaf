"""What an exchange is: the record, its bindings, and the rule by which it matches.

Upstream: ``vhost.py`` makes exchanges and tells them of their bindings; ``router.py`` asks them.
Downstream: one ``ExchangeType`` instance per exchange, from ``direct.py``, ``fanout.py``,
``topic.py``, ``headers.py`` or an installed package.

Writing an exchange type takes a subclass of ``ExchangeType`` with three methods, registered as
an entry point of the group ``leveret.exchange_types``. All of it is synchronous: nothing here
waits, and between two calls the bindings an instance was told of are exactly those that exist.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast

from leveret.broker.exchanges.terms import check_same_argument
from leveret.broker.resource import Resource
from leveret.protocol.errors import precondition_failed
from leveret.protocol.field_table import Field, Table, encode_table, type_name

if TYPE_CHECKING:
    from leveret.broker.exchanges.decorators import ExchangeDecorator
    from leveret.broker.policies.policy import Policy

ALTERNATE_EXCHANGE = "alternate-exchange"

# The message's headers, decoded only if somebody asks; an empty table where it has none.
Headers = Callable[[], Table]


@dataclass(frozen=True, slots=True)
class Binding:
    """From an exchange to a queue or another exchange; equal in all four parts is the same one."""

    source: str
    destination: Resource
    key: str
    # The arguments sorted and encoded: what makes two tables the same one.
    identity: bytes
    arguments: Table = field(compare=False)

    @classmethod
    def of(cls, source: str, destination: Resource, key: str, arguments: Table) -> Binding:
        canonical = {
            # RabbitMQ reads both 64-bit types as one.
            name: Field("l", item.value) if item.tag == "L" else item
            for name, item in sorted(arguments.items())
        }
        return cls(source, destination, key, encode_table(canonical), arguments)


class ExchangeType(Protocol):
    """The matching rule of one exchange, holding its bindings in the shape it matches best."""

    # True where the answer depends on more than the routing keys and the bindings (headers,
    # chance, time): such routes are worked out for every message instead of being cached.
    reads_headers: bool = False

    @abstractmethod
    def add_binding(self, binding: Binding) -> None:
        """Called once for each binding; it was validated before."""

    @abstractmethod
    def remove_binding(self, binding: Binding) -> None:
        """Called once for each binding that was added."""

    @abstractmethod
    def route(self, keys: Sequence[str], headers: Headers) -> Iterable[Resource]:
        """Where a message with these keys goes; the same destination may come up twice."""

    def validate(self, exchange: Exchange) -> None:
        """Raise a ChannelException if an exchange must not be declared like this."""
        return

    def validate_binding(self, exchange: Exchange, binding: Binding) -> None:
        """Raise a ChannelException if a binding makes no sense to this type."""
        return

    def check_equivalent(self, exchange: Exchange, arguments: Table) -> None:
        """Raise a ChannelException if a redeclaration differs in an argument that matters."""
        check_same_argument(
            exchange.name,
            ALTERNATE_EXCHANGE,
            exchange.arguments.get(ALTERNATE_EXCHANGE),
            arguments.get(ALTERNATE_EXCHANGE),
        )

    def policy_changed(self, exchange: Exchange) -> None:
        """The policy that applies to the exchange is another one, or says something else."""
        return

    def delete(self, exchange: Exchange) -> None:
        """The exchange is gone, and all its bindings before it."""
        return

    def info(self) -> dict[str, object]:
        """What the type adds to a listing of its exchange."""
        return {}


@dataclass(eq=False, slots=True)
class Exchange:
    """One exchange. Name, type, flags and arguments never change."""

    name: Resource
    type: str
    matcher: ExchangeType
    durable: bool = False
    auto_delete: bool = False
    internal: bool = False
    arguments: Table = field(default_factory=dict)
    # Where a message goes that matched nothing: the argument, else what a policy says.
    alternate: str | None = None
    # What applies to it; written by policies/live.py alone.
    policy: Policy | None = None
    operator_policy: Policy | None = None
    # Decorators that follow this exchange, and those among them that add destinations.
    decorators: tuple[ExchangeDecorator, ...] = ()
    route_decorators: tuple[ExchangeDecorator, ...] = ()
    # Messages published to it, and copies that went from it to queues; the channel counts.
    publish_in: int = 0
    publish_out: int = 0

    def statistics(self) -> dict[str, object]:
        return {"publish_in": self.publish_in, "publish_out": self.publish_out}


class Destinations(dict[Resource, int]):
    """Destinations with the number of bindings that lead there."""

    __slots__ = ()

    def add(self, destination: Resource) -> None:
        self[destination] = self.get(destination, 0) + 1

    def remove(self, destination: Resource) -> None:
        left = self[destination] - 1
        if left:
            self[destination] = left
        else:
            del self[destination]


def alternate_exchange(name: Resource, arguments: Table) -> str | None:
    """The argument of that name; raises 406 if it is anything but a long string."""
    given = arguments.get(ALTERNATE_EXCHANGE)
    if given is None:
        return None
    if given.tag != "S":
        raise precondition_failed(
            f"invalid type '{type_name(given.tag)}' for arg '{ALTERNATE_EXCHANGE}' in {name}"
        )
    return cast(str, given.value)
