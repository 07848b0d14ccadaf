"""Named things that extend the broker: exchange types, interceptors, decorators, mechanisms.

Upstream: the built-in modules and installed packages register here, through the same door.
Downstream: whoever needs a thing by its name asks here (``vhost.py`` for exchange types and
decorators, the channel for interceptors, the handshake for mechanisms).

What is registered is a factory, called once for each place where the thing is used. A package
announces its own with an entry point::

    [project.entry-points."leveret.exchange_types"]
    x-nearest = "my_package.exchange:NearestExchange"

Invariants: a name belongs to one thing until that is unregistered; a package that cannot be
loaded is named in the log and left out, and the broker starts without it.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from leveret.broker.exchanges.base import ExchangeType
    from leveret.broker.exchanges.decorators import ExchangeDecorator
    from leveret.broker.queues.decorators import QueueDecorator

log = logging.getLogger(__name__)

T = TypeVar("T")

ENTRY_POINT_PREFIX = "leveret."


class RegistryError(ValueError):
    """A name that is taken, or a thing that cannot be registered."""


class Registry(Generic[T]):
    """Things of one kind by name, in the order they came."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        # Called without arguments after every change, in the order they were added.
        self.watchers: list[Callable[[], None]] = []
        self._things: dict[str, T] = {}

    def register(self, name: str, thing: T) -> None:
        """Raises RegistryError where the name is taken: whoever came first keeps it."""
        if name in self._things:
            raise RegistryError(f"{self.kind} '{name}' is registered already")
        self._things[name] = thing
        self._changed()

    def unregister(self, name: str) -> None:
        """Forget a name; one that is not there is fine."""
        if self._things.pop(name, None) is not None:
            self._changed()

    def get(self, name: str) -> T | None:
        return self._things.get(name)

    def things(self) -> list[T]:
        return list(self._things.values())

    def names(self) -> list[str]:
        return list(self._things)

    def __contains__(self, name: object) -> bool:
        return name in self._things

    def __iter__(self) -> Iterator[str]:
        return iter(self._things)

    def __len__(self) -> int:
        return len(self._things)

    def _changed(self) -> None:
        for watcher in tuple(self.watchers):
            watcher()


@dataclass(frozen=True, slots=True)
class Registries:
    """All registries of one broker; the name of a field is also its group of entry points."""

    exchange_types: Registry[Callable[[], ExchangeType]] = field(
        default_factory=lambda: Registry("exchange type")
    )
    interceptors: Registry[Callable[..., Any]] = field(
        default_factory=lambda: Registry("interceptor")
    )
    exchange_decorators: Registry[Callable[[], ExchangeDecorator]] = field(
        default_factory=lambda: Registry("exchange decorator")
    )
    queue_decorators: Registry[Callable[[], QueueDecorator]] = field(
        default_factory=lambda: Registry("queue decorator")
    )
    auth_mechanisms: Registry[Callable[..., Any]] = field(
        default_factory=lambda: Registry("auth mechanism")
    )

    def load_entry_points(self) -> None:
        """Register what installed packages announce; what fails is logged and skipped."""
        for group in fields(self):
            registry: Registry[Callable[..., Any]] = getattr(self, group.name)
            for entry in importlib.metadata.entry_points(group=ENTRY_POINT_PREFIX + group.name):
                _load(registry, entry)


def _load(registry: Registry[Callable[..., Any]], entry: importlib.metadata.EntryPoint) -> None:
    package = entry.dist.name if entry.dist is not None else entry.value
    try:
        factory = entry.load()
        if not callable(factory):
            raise RegistryError(f"{entry.value} is not callable")
        registry.register(entry.name, factory)
    except (Exception, SystemExit) as error:
        # Foreign code may fail in any way, also by leaving; the broker must start all the same.
        log.error(
            "%s '%s' of package %s cannot be used: %s: %s",
            registry.kind,
            entry.name,
            package,
            type(error).__name__,
            error,
        )
    else:
        log.info("%s '%s' loaded from package %s", registry.kind, entry.name, package)
