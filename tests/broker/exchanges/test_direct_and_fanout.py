"""Direct and fanout: the two rules that need no search."""

from __future__ import annotations

import pytest

from leveret.broker.exchanges.base import Binding, ExchangeType
from leveret.broker.exchanges.direct import DirectExchange
from leveret.broker.exchanges.fanout import FanoutExchange
from leveret.broker.resource import Resource
from leveret.protocol.field_table import Field, Table


def binding(key: str, queue: str = "q", arguments: Table | None = None) -> Binding:
    return Binding.of("x", Resource("/", "queue", queue), key, arguments or {})


def names(exchange: ExchangeType, *keys: str) -> list[str]:
    return sorted(where.name for where in exchange.route(keys, dict))


def test_direct_takes_the_exact_key() -> None:
    exchange = DirectExchange()
    exchange.add_binding(binding("a"))
    exchange.add_binding(binding("", "unnamed"))
    found = {key: names(exchange, key) for key in ("a", "A", "", "a.b", "#")}
    assert found == {"a": ["q"], "A": [], "": ["unnamed"], "a.b": [], "#": []}


def test_direct_takes_any_of_several_keys() -> None:
    exchange = DirectExchange()
    for key in ("a", "b", "c"):
        exchange.add_binding(binding(key, key))
    assert names(exchange, "a", "c", "d") == ["a", "c"]


def test_fanout_ignores_the_key() -> None:
    exchange = FanoutExchange()
    exchange.add_binding(binding("one", "p"))
    exchange.add_binding(binding("two", "q"))
    assert names(exchange, "whatever", "else") == ["p", "q"]


def test_fanout_answers_a_destination_once() -> None:
    exchange = FanoutExchange()
    exchange.add_binding(binding("one"))
    exchange.add_binding(binding("two"))
    assert names(exchange, "") == ["q"]


@pytest.mark.parametrize("kind", [DirectExchange, FanoutExchange])
def test_destination_stays_until_its_last_binding_goes(kind: type[ExchangeType]) -> None:
    """Bindings that differ in their arguments only are two."""
    exchange = kind()
    first, second = binding("k"), binding("k", arguments={"a": Field("I", 1)})
    exchange.add_binding(first)
    exchange.add_binding(second)
    exchange.remove_binding(first)
    assert names(exchange, "k") == ["q"]
    exchange.remove_binding(second)
    assert names(exchange, "k") == []


@pytest.mark.parametrize("kind", [DirectExchange, FanoutExchange])
def test_routes_may_be_cached_and_headers_are_not_read(kind: type[ExchangeType]) -> None:
    def headers() -> Table:
        raise AssertionError("nobody needs them")

    exchange = kind()
    exchange.add_binding(binding("k"))
    assert not exchange.reads_headers
    assert len(list(exchange.route(["k"], headers))) == 1
