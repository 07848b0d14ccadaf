"""An exchange type: spreads messages over its destinations by routing key."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

from leveret.broker.exchanges.base import Binding, ExchangeType, Headers
from leveret.broker.resource import Resource


class ModuloExchange(ExchangeType):
    """Equal keys always meet the same destination, as long as the bindings stay."""

    def __init__(self) -> None:
        self._destinations: list[Resource] = []

    def add_binding(self, binding: Binding) -> None:
        self._destinations.append(binding.destination)

    def remove_binding(self, binding: Binding) -> None:
        self._destinations.remove(binding.destination)

    def route(self, keys: Sequence[str], headers: Headers) -> Iterable[Resource]:
        if not self._destinations:
            return ()
        number = zlib.crc32(keys[0].encode("utf-8", "surrogateescape"))
        return (self._destinations[number % len(self._destinations)],)
