"""Exchange decorators: code that follows exchanges of any type and may add destinations.

Upstream: registered by installed packages (group ``leveret.exchange_decorators``); ``vhost.py``
makes one instance per virtual host and asks it of every exchange whether it wants to follow it.
Downstream: ``router.py`` adds what ``route`` answers to what the exchange's type matched.

A decorator sees the same calls however late it was registered: ``create``, then ``add_binding``
for each binding there is, and ``delete`` when it stops following the exchange.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from leveret.broker.resource import Resource

if TYPE_CHECKING:
    from leveret.broker.exchanges.base import Binding, Exchange, Headers
    from leveret.broker.registry import Registry

log = logging.getLogger(__name__)


class Activity(Enum):
    """What a decorator wants of an exchange."""

    NONE = "none"
    NO_ROUTE = "noroute"  # to be told of changes
    ALL = "all"  # to be asked for destinations, too


class ExchangeDecorator(Protocol):
    description: str = ""

    @abstractmethod
    def active_for(self, exchange: Exchange) -> Activity:
        """Asked when the exchange is made and whenever its policy or the decorators change."""

    def create(self, exchange: Exchange) -> None:
        """The exchange is followed from now on."""
        return

    def delete(self, exchange: Exchange) -> None:
        """The exchange is gone or no longer followed."""
        return

    def policy_changed(self, exchange: Exchange) -> None:
        """The exchange's policy changed and the decorator goes on following it."""
        return

    def add_binding(self, exchange: Exchange, binding: Binding) -> None:
        """A binding from the exchange was added."""
        return

    def remove_binding(self, exchange: Exchange, binding: Binding) -> None:
        """A binding from the exchange was removed, also when the exchange is being deleted."""
        return

    def route(
        self, exchange: Exchange, keys: Sequence[str], headers: Headers
    ) -> Iterable[Resource]:
        """Destinations besides those the type matched; asked only of Activity.ALL."""
        return ()


DecoratorFactory = Callable[[], ExchangeDecorator]


class DecoratorSet:
    """One instance of each registered decorator, for one virtual host."""

    def __init__(self, registry: Registry[DecoratorFactory]) -> None:
        self.registry = registry
        # By name and factory: a name registered anew is another decorator.
        self._instances: dict[tuple[str, DecoratorFactory], ExchangeDecorator] = {}
        self.refresh()

    def __iter__(self) -> Iterator[ExchangeDecorator]:
        return iter(self._instances.values())

    def refresh(self) -> None:
        """Keep the instances of what is still registered, add those of what is new."""
        before, self._instances = self._instances, {}
        for name in self.registry:
            factory = self.registry.get(name)
            if factory is None:
                continue
            key = (name, factory)
            try:
                self._instances[key] = before[key] if key in before else factory()
            except Exception:
                # Foreign code: the virtual host must be usable without it.
                log.exception("exchange decorator '%s' cannot be used", name)


def decorate(
    exchange: Exchange, decorators: Iterable[ExchangeDecorator], bindings: Iterable[Binding]
) -> None:
    """Ask every decorator anew and tell those that begin or stop to follow the exchange."""
    before = exchange.decorators
    activity = {decorator: decorator.active_for(exchange) for decorator in decorators}
    now = tuple(d for d, wanted in activity.items() if wanted is not Activity.NONE)
    exchange.decorators = now
    exchange.route_decorators = tuple(d for d in now if activity[d] is Activity.ALL)
    for decorator in before:
        if decorator not in now:
            decorator.delete(exchange)
    beginning = [decorator for decorator in now if decorator not in before]
    if not beginning:
        return
    existing = tuple(bindings)
    for decorator in beginning:
        decorator.create(exchange)
        for binding in existing:
            decorator.add_binding(exchange, binding)
