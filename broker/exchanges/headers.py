"""The headers exchange: bindings ask for headers by their values, routing keys do not matter.

``x-match`` says how many of a binding's arguments must be found: ``all`` (the default) or
``any``. Arguments beginning with ``x-`` take part only with ``all-with-x`` and ``any-with-x``;
a void argument asks for the header to be there with any value.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from leveret.broker.exchanges.base import Binding, Exchange, ExchangeType, Headers
from leveret.broker.exchanges.terms import comparable, term
from leveret.broker.resource import Resource
from leveret.protocol.errors import precondition_failed
from leveret.protocol.field_table import Table, type_name

X_MATCH = "x-match"
MODES = ("all", "any", "all-with-x", "any-with-x")


class _Wanted(NamedTuple):
    """A binding's arguments, prepared for matching."""

    one_is_enough: bool
    present: tuple[str, ...]
    equal: tuple[tuple[str, Hashable], ...]

    def matches(self, headers: dict[str, Hashable]) -> bool:
        # Of no arguments at all, any() is false and all() true, as RabbitMQ has it.
        present = (name in headers for name in self.present)
        equal = (name in headers and headers[name] == value for name, value in self.equal)
        if self.one_is_enough:
            return any(present) or any(equal)
        return all(present) and all(equal)


class HeadersExchange(ExchangeType):
    reads_headers = True

    def __init__(self) -> None:
        self._bindings: dict[Binding, _Wanted] = {}

    def validate_binding(self, exchange: Exchange, binding: Binding) -> None:
        given = binding.arguments.get(X_MATCH)
        if given is None:
            return
        if given.tag != "S":
            raise precondition_failed(
                f"Invalid x-match field type {type_name(given.tag)} (value {term(given)});"
                " expected longstr"
            )
        if given.value not in MODES:
            raise precondition_failed(
                f"Invalid x-match field value {term(given)};"
                " expected all, any, all-with-x, or any-with-x"
            )

    def add_binding(self, binding: Binding) -> None:
        self._bindings[binding] = _wanted(binding.arguments)

    def remove_binding(self, binding: Binding) -> None:
        del self._bindings[binding]

    def route(self, keys: Sequence[str], headers: Headers) -> Iterable[Resource]:
        if not self._bindings:
            return ()
        values = {name: comparable(field) for name, field in headers().items()}
        return [
            binding.destination
            for binding, wanted in self._bindings.items()
            if wanted.matches(values)
        ]


def _wanted(arguments: Table) -> _Wanted:
    given = arguments.get(X_MATCH)
    mode = "all" if given is None else given.value
    taking_part = {
        name: field
        for name, field in arguments.items()
        if name != X_MATCH and (mode in ("all-with-x", "any-with-x") or not name.startswith("x-"))
    }
    return _Wanted(
        one_is_enough=mode in ("any", "any-with-x"),
        present=tuple(name for name, field in taking_part.items() if field.tag == "V"),
        equal=tuple(
            (name, comparable(field)) for name, field in taking_part.items() if field.tag != "V"
        ),
    )
