"""The direct exchange: a message goes where its routing key, exactly, is bound."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from leveret.broker.exchanges.base import Binding, Destinations, ExchangeType, Headers
from leveret.broker.resource import Resource


class DirectExchange(ExchangeType):
    def __init__(self) -> None:
        # Keys without destinations are removed.
        self._by_key: dict[str, Destinations] = {}

    def add_binding(self, binding: Binding) -> None:
        self._by_key.setdefault(binding.key, Destinations()).add(binding.destination)

    def remove_binding(self, binding: Binding) -> None:
        destinations = self._by_key[binding.key]
        destinations.remove(binding.destination)
        if not destinations:
            del self._by_key[binding.key]

    def route(self, keys: Sequence[str], headers: Headers) -> Iterable[Resource]:
        return [where for key in keys for where in self._by_key.get(key, ())]
