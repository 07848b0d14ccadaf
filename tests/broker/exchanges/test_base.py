"""What makes two bindings the same one."""

from __future__ import annotations

import pytest

from leveret.broker.exchanges.base import Binding
from leveret.broker.resource import Resource
from leveret.protocol.field_table import Field, Table

Q = Resource("/", "queue", "q")
ONE = Field("I", 1)
TWO = Field("I", 2)


def test_order_of_arguments_does_not_matter() -> None:
    first = Binding.of("x", Q, "k", {"a": ONE, "b": TWO})
    second = Binding.of("x", Q, "k", {"b": TWO, "a": ONE})
    assert first == second
    assert hash(first) == hash(second)


def test_the_two_64_bit_types_are_one() -> None:
    first = Binding.of("x", Q, "k", {"a": Field("l", 1)})
    assert first == Binding.of("x", Q, "k", {"a": Field("L", 1)})


@pytest.mark.parametrize(
    ("source", "destination", "key", "arguments"),
    [
        pytest.param("y", Q, "k", {"a": ONE}, id="source"),
        pytest.param("x", Resource("/", "exchange", "q"), "k", {"a": ONE}, id="kind"),
        pytest.param("x", Q, "K", {"a": ONE}, id="key"),
        pytest.param("x", Q, "k", {"a": TWO}, id="value"),
        pytest.param("x", Q, "k", {"a": Field("l", 1)}, id="type-of-a-value"),
        pytest.param("x", Q, "k", {}, id="no-arguments"),
    ],
)
def test_any_other_part_makes_another_binding(
    source: str, destination: Resource, key: str, arguments: Table
) -> None:
    assert Binding.of("x", Q, "k", {"a": ONE}) != Binding.of(source, destination, key, arguments)


def test_arguments_are_kept_as_given() -> None:
    given: Table = {"b": TWO, "a": Field("L", 1)}
    kept = Binding.of("x", Q, "k", given).arguments
    assert list(kept.items()) == [("b", TWO), ("a", Field("L", 1))]
