"""The fanout exchange: a message goes to everything that is bound, whatever its key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from leveret.broker.exchanges.base import Binding, Destinations, ExchangeType, Headers
from leveret.broker.resource import Resource


class FanoutExchange(ExchangeType):
    def __init__(self) -> None:
        self._destinations = Destinations()

    def add_binding(self, binding: Binding) -> None:
        self._destinations.add(binding.destination)

    def remove_binding(self, binding: Binding) -> None:
        self._destinations.remove(binding.destination)

    def route(self, keys: Sequence[str], headers: Headers) -> Iterable[Resource]:
        return list(self._destinations)
