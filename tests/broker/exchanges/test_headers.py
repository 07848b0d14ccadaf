"""Headers exchange: x-match, and what RabbitMQ calls equal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leveret.broker.exchanges.base import Binding, Exchange
from leveret.broker.exchanges.headers import HeadersExchange
from leveret.broker.resource import Resource
from leveret.protocol.errors import ChannelException
from leveret.protocol.field_table import Field, Table, table_from_python

QUEUE = Resource("/", "queue", "q")


def binding(arguments: Table) -> Binding:
    return Binding.of("x", QUEUE, "", arguments)


def is_match(arguments: Table, headers: Table) -> bool:
    exchange = HeadersExchange()
    exchange.add_binding(binding(arguments))
    return list(exchange.route(["ignored"], lambda: headers)) == [QUEUE]


def refusal(arguments: Table) -> str:
    matcher = HeadersExchange()
    exchange = Exchange(Resource("/", "exchange", "x"), "headers", matcher)
    with pytest.raises(ChannelException) as raised:
        matcher.validate_binding(exchange, binding(arguments))
    assert raised.value.code == 406
    return raised.value.text


@pytest.mark.parametrize(
    ("arguments", "headers", "matching"),
    [
        pytest.param(
            {"x-match": "all", "a": 1, "b": "two"},
            [
                {"a": 1, "b": "two"},
                {"a": 1},
                {"a": 1, "b": "two", "c": 3},
                {"a": 2, "b": "two"},
                {},
            ],
            [0, 2],
            id="all",
        ),
        pytest.param(
            {"x-match": "any", "a": 1, "b": "two"},
            [{"a": 1, "b": "two"}, {"a": 1}, {"a": 2, "b": "two"}, {"a": 2}, {"c": 1}],
            [0, 1, 2],
            id="any",
        ),
        pytest.param({"a": 1, "b": 2}, [{"a": 1, "b": 2}, {"a": 1}], [0], id="default-is-all"),
        pytest.param(
            {"x-match": "all", "a": 1, "x-b": 2},
            [{"a": 1}, {"a": 1, "x-b": 2}, {"a": 1, "x-b": 3}],
            [0, 1, 2],
            id="all-ignores-x",
        ),
        pytest.param(
            {"x-match": "all-with-x", "a": 1, "x-b": 2},
            [{"a": 1}, {"a": 1, "x-b": 2}, {"a": 1, "x-b": 3}],
            [1],
            id="all-with-x",
        ),
        pytest.param(
            {"x-match": "any-with-x", "a": 1, "x-b": 2},
            [{"a": 1}, {"x-b": 2}, {"x-b": 3}, {}],
            [0, 1],
            id="any-with-x",
        ),
        pytest.param(
            {"x-match": "any", "x-a": 1}, [{"x-a": 1}, {}], [], id="any-of-nothing-is-no-match"
        ),
        pytest.param({"x-match": "all"}, [{}, {"a": 1}], [0, 1], id="all-of-nothing-matches"),
        pytest.param(
            {"x-match": "all", "a": None},
            [{"a": 1}, {"a": "x"}, {"b": 1}, {"a": None}],
            [0, 1, 3],
            id="void-asks-for-presence",
        ),
        pytest.param(
            {"x-match": "any", "a": None, "b": 1},
            [{"a": 5}, {"b": 1}, {"b": 2}],
            [0, 1],
            id="void-with-any",
        ),
    ],
)
def test_x_match(
    arguments: dict[str, object], headers: list[dict[str, object]], matching: list[int]
) -> None:
    table = table_from_python(arguments)
    found = [i for i, h in enumerate(headers) if is_match(table, table_from_python(h))]
    assert found == matching


EQUAL = [
    pytest.param(Field("I", 1), Field("l", 1), id="widths"),
    pytest.param(Field("I", 1), Field("b", 1), id="widths-byte"),
    pytest.param(Field("I", 1), Field("d", 1.0), id="double"),
    pytest.param(Field("I", 5), Field("f", 5.0), id="float"),
    pytest.param(Field("I", 5), Field("T", 5), id="timestamp"),
    pytest.param(Field("S", "abc"), Field("x", b"abc"), id="byte-array"),
    pytest.param(Field("S", "\udcff"), Field("x", b"\xff"), id="bytes-that-are-not-utf-8"),
    pytest.param(Field("A", []), Field("F", {}), id="empty-array-and-table"),
    pytest.param(Field("A", [Field("I", 1)]), Field("A", [Field("I", 1)]), id="array"),
    pytest.param(
        Field("F", {"k": Field("S", "v")}), Field("F", {"k": Field("S", "v")}), id="table"
    ),
    pytest.param(
        Field("A", [Field("l", 1)]), Field("A", [Field("L", 1)]), id="both-longs-within-an-array"
    ),
]
DIFFERENT = [
    pytest.param(Field("I", 1), Field("S", "1"), id="string"),
    pytest.param(Field("I", 1), Field("t", True), id="bool"),
    pytest.param(Field("I", 5), Field("D", (0, 5)), id="decimal"),
    pytest.param(Field("t", True), Field("V", None), id="void-in-the-message"),
    pytest.param(Field("S", ""), Field("A", []), id="empty-string-and-array"),
    pytest.param(Field("A", [Field("I", 1)]), Field("A", [Field("l", 1)]), id="widths-in-arrays"),
    pytest.param(
        Field("A", [Field("I", 1), Field("I", 2)]),
        Field("A", [Field("I", 2), Field("I", 1)]),
        id="order-in-arrays",
    ),
    pytest.param(
        Field("F", {"x": Field("I", 1), "y": Field("I", 2)}),
        Field("F", {"y": Field("I", 2), "x": Field("I", 1)}),
        id="order-in-tables",
    ),
]


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_equal_values(one: Field, other: Field) -> None:
    assert is_match({"a": one}, {"a": other})
    assert is_match({"a": other}, {"a": one})


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_different_values(one: Field, other: Field) -> None:
    assert not is_match({"a": one}, {"a": other})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        pytest.param(
            Field("S", "some"),
            'field value <<"some">>; expected all, any, all-with-x, or any-with-x',
            id="unknown",
        ),
        pytest.param(
            Field("S", ""),
            "field value <<>>; expected all, any, all-with-x, or any-with-x",
            id="empty",
        ),
        pytest.param(
            Field("S", 's"oé'),
            'field value <<"s\\"oé">>; expected all, any, all-with-x, or any-with-x',
            id="quoted",
        ),
        pytest.param(
            Field("S", "a\x01b"),
            "field value <<97,1,98>>; expected all, any, all-with-x, or any-with-x",
            id="unprintable",
        ),
        pytest.param(
            Field("I", 1), "field type signedint (value 1); expected longstr", id="number"
        ),
        pytest.param(
            Field("x", b"all"), 'field type binary (value <<"all">>); expected longstr', id="bytes"
        ),
        pytest.param(
            Field("V", None), "field type void (value undefined); expected longstr", id="void"
        ),
        pytest.param(Field("t", True), "field type bool (value true); expected longstr", id="bool"),
        pytest.param(
            Field("F", {"a": Field("I", 1)}),
            'field type table (value [{<<"a">>,signedint,1}]); expected longstr',
            id="table",
        ),
    ],
)
def test_invalid_x_match_is_refused(value: Field, text: str) -> None:
    assert refusal({"x-match": value, "a": Field("I", 1)}) == f"Invalid x-match {text}"


@pytest.mark.parametrize("mode", ["all", "any", "all-with-x", "any-with-x"])
def test_known_modes_are_accepted(mode: str) -> None:
    matcher = HeadersExchange()
    exchange = Exchange(Resource("/", "exchange", "x"), "headers", matcher)
    matcher.validate_binding(exchange, binding({"x-match": Field("S", mode)}))
    matcher.validate_binding(exchange, binding({}))


def test_headers_are_decoded_only_for_bindings() -> None:
    def headers() -> Table:
        raise AssertionError("nobody needs them")

    assert list(HeadersExchange().route(["k"], headers)) == []


def test_removed_binding_no_longer_matches() -> None:
    exchange = HeadersExchange()
    kept, removed = binding({"a": Field("I", 1)}), binding({"b": Field("I", 1)})
    exchange.add_binding(kept)
    exchange.add_binding(removed)
    exchange.remove_binding(removed)
    assert list(exchange.route([""], lambda: {"b": Field("I", 1)})) == []
    assert list(exchange.route([""], lambda: {"a": Field("I", 1)})) == [QUEUE]


values_st = st.sampled_from(
    [Field("I", 1), Field("d", 1.0), Field("S", "1"), Field("t", True), Field("V", None)]
)
tables_st = st.dictionaries(st.sampled_from(["a", "b", "x-c", "x-d"]), values_st, max_size=4)


@given(tables_st, tables_st, st.sampled_from([None, "all", "any", "all-with-x", "any-with-x"]))
def test_agrees_with_a_naive_matcher(arguments: Table, headers: Table, mode: str | None) -> None:
    def naive_equal(wanted: Field, field: Field | None) -> bool:
        if field is None:
            return False
        numbers = ("I", "d")
        return (
            wanted.tag == "V" or wanted == field or (wanted.tag in numbers and field.tag in numbers)
        )

    with_x = mode in ("all-with-x", "any-with-x")
    results = [
        naive_equal(wanted, headers.get(name))
        for name, wanted in arguments.items()
        if with_x or not name.startswith("x-")
    ]
    expected = any(results) if mode in ("any", "any-with-x") else all(results)
    given_mode: Table = {} if mode is None else {"x-match": Field("S", mode)}
    assert is_match({**given_mode, **arguments}, headers) is expected
