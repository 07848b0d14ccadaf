"""The bindings of one virtual host, found by either end.

Upstream: ``vhost.py``, which alone adds and removes. Look-ups answer a copy in order of
creation, so that what was found can be removed while it is walked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from leveret.broker.exchanges.base import Binding
from leveret.broker.resource import Resource

K = TypeVar("K")


class BindingIndex:
    def __init__(self) -> None:
        # Every binding is in both; an end without bindings is in neither.
        self._by_source: dict[str, dict[Binding, None]] = {}
        self._by_destination: dict[Resource, dict[Binding, None]] = {}

    def add(self, binding: Binding) -> None:
        self._by_source.setdefault(binding.source, {})[binding] = None
        self._by_destination.setdefault(binding.destination, {})[binding] = None

    def remove(self, binding: Binding) -> None:
        _remove(self._by_source, binding.source, binding)
        _remove(self._by_destination, binding.destination, binding)

    def by_source(self, exchange: str) -> tuple[Binding, ...]:
        return tuple(self._by_source.get(exchange, ()))

    def by_destination(self, destination: Resource) -> tuple[Binding, ...]:
        return tuple(self._by_destination.get(destination, ()))

    def has_source(self, exchange: str) -> bool:
        return exchange in self._by_source

    def __contains__(self, binding: Binding) -> bool:
        return binding in self._by_source.get(binding.source, ())

    def __iter__(self) -> Iterator[Binding]:
        return (binding for bindings in self._by_source.values() for binding in bindings)


def _remove(index: dict[K, dict[Binding, None]], end: K, binding: Binding) -> None:
    bindings = index[end]
    del bindings[binding]
    if not bindings:
        del index[end]
