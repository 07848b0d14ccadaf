"""Declaring and deleting exchanges: what RabbitMQ allows and refuses, with which words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from leveret.broker.exchanges import register_builtins
from leveret.broker.registry import Registries
from leveret.broker.resource import Resource
from leveret.broker.vhost import Vhost
from leveret.protocol.errors import AmqpError, ChannelException, ConnectionException
from leveret.protocol.field_table import Field, Table


@dataclass(eq=False)
class Record:
    name: Resource
    durable: bool = False


Host = Vhost[Record]


@pytest.fixture
def vhost() -> Host:
    registries = Registries()
    register_builtins(registries)
    return Vhost("/", registries)


def queue(name: str) -> Resource:
    return Resource("/", "queue", name)


def exchange(name: str) -> Resource:
    return Resource("/", "exchange", name)


def add_queue(vhost: Host, name: str = "q", *, durable: bool = False) -> Resource:
    vhost.add_queue(Record(queue(name), durable))
    return queue(name)


def alternate(value: object, tag: str = "S") -> Table:
    return {"alternate-exchange": Field(tag, value)}


def refused(
    call: Callable[..., object], *given: object, **named: object
) -> tuple[type[AmqpError], int, str]:
    with pytest.raises(AmqpError) as raised:
        call(*given, **named)
    return type(raised.value), raised.value.code, raised.value.text


def routed(vhost: Host, name: str, key: str, *extra: str) -> list[str]:
    found = vhost.route(vhost.exchange(name), key, extra, dict)
    return sorted(record.name.name for record in found)


DEFAULT_REFUSED = (ChannelException, 403, "operation not permitted on the default exchange")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("amq.direct", "direct"),
        ("amq.fanout", "fanout"),
        ("amq.topic", "topic"),
        ("amq.headers", "headers"),
        ("amq.match", "headers"),
    ],
)
def test_predeclared_exchanges_may_be_declared_as_they_are(
    vhost: Host, name: str, kind: str
) -> None:
    before = vhost.exchange(name)
    assert vhost.declare_exchange(name, kind, durable=True) is before


def test_declare_makes_what_was_asked_for(vhost: Host) -> None:
    made = vhost.declare_exchange(
        "x", "topic", durable=True, auto_delete=True, internal=True, arguments=alternate("rest")
    )
    assert (made.name, made.type) == (exchange("x"), "topic")
    assert (made.durable, made.auto_delete, made.internal) == (True, True, True)
    assert made.alternate == "rest"
    assert vhost.exchange("x") is made


def test_declare_again_is_the_same_exchange(vhost: Host) -> None:
    made = vhost.declare_exchange("x", "topic", durable=True)
    assert vhost.declare_exchange("x", "topic", durable=True) is made


def test_unknown_type_ends_the_connection(vhost: Host) -> None:
    expected = (ConnectionException, 503, "unknown exchange type 'sideways'")
    assert refused(vhost.declare_exchange, "x", "sideways") == expected
    assert refused(vhost.declare_exchange, "", "sideways") == expected


@pytest.mark.parametrize(
    ("kind", "flags", "text"),
    [
        pytest.param(
            "fanout", {}, "'type' {}: received 'fanout' but current is 'direct'", id="type"
        ),
        pytest.param(
            "direct",
            {"durable": True},
            "'durable' {}: received 'true' but current is 'false'",
            id="durable",
        ),
        pytest.param(
            "direct",
            {"auto_delete": True},
            "'auto_delete' {}: received 'true' but current is 'false'",
            id="auto-delete",
        ),
        pytest.param(
            "direct",
            {"internal": True},
            "'internal' {}: received 'true' but current is 'false'",
            id="internal",
        ),
    ],
)
def test_declare_again_different(vhost: Host, kind: str, flags: dict[str, bool], text: str) -> None:
    vhost.declare_exchange("x", "direct")
    expected = "inequivalent arg " + text.format("for exchange 'x' in vhost '/'")
    result = refused(vhost.declare_exchange, "x", kind, **flags)
    assert result == (ChannelException, 406, expected)


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        pytest.param(
            alternate("one"), alternate("two"), "received 'two' but current is 'one'", id="other"
        ),
        pytest.param(
            alternate("one"),
            {},
            "received none but current is the value 'one' of type 'longstr'",
            id="dropped",
        ),
        pytest.param(
            {},
            alternate("one"),
            "received the value 'one' of type 'longstr' but current is none",
            id="added",
        ),
        pytest.param(
            {},
            alternate(5, "I"),
            "received the value '5' of type 'signedint' but current is none",
            id="added-number",
        ),
        pytest.param(
            {},
            alternate(None, "V"),
            "received the value 'undefined' of type 'void' but current is none",
            id="added-void",
        ),
        pytest.param(
            {},
            alternate({"b": Field("S", "c")}, "F"),
            "received the value '[{<<\"b\">>,longstr,<<\"c\">>}]' of type 'table'"
            " but current is none",
            id="added-table",
        ),
        pytest.param(
            alternate("a"), alternate(True, "t"), "received 'true' but current is 'a'", id="bool"
        ),
        pytest.param(
            alternate("a"),
            alternate([Field("I", 1), Field("S", "b")], "A"),
            "received '[{signedint,1},{longstr,<<\"b\">>}]' but current is 'a'",
            id="array",
        ),
    ],
)
def test_declare_again_with_another_alternate(
    vhost: Host, before: Table, after: Table, text: str
) -> None:
    vhost.declare_exchange("x", "direct", arguments=before)
    expected = f"inequivalent arg 'alternate-exchange' for exchange 'x' in vhost '/': {text}"
    result = refused(vhost.declare_exchange, "x", "direct", arguments=after)
    assert result == (ChannelException, 406, expected)


def test_alternate_of_the_same_bytes_is_the_same(vhost: Host) -> None:
    made = vhost.declare_exchange("x", "direct", arguments=alternate("a"))
    assert vhost.declare_exchange("x", "direct", arguments=alternate(b"a", "x")) is made


def test_other_arguments_are_stored_and_not_compared(vhost: Host) -> None:
    made = vhost.declare_exchange("x", "direct", arguments={"x-whatever": Field("I", 1)})
    assert vhost.declare_exchange("x", "direct", arguments={"x-whatever": Field("I", 2)}) is made
    assert vhost.declare_exchange("x", "direct") is made
    assert made.arguments == {"x-whatever": Field("I", 1)}


@pytest.mark.parametrize(
    ("arguments", "type_name"),
    [
        pytest.param(alternate(5, "I"), "signedint", id="number"),
        pytest.param(alternate(b"abc", "x"), "binary", id="byte-array"),
        pytest.param(alternate(None, "V"), "void", id="void"),
        pytest.param(alternate({}, "F"), "table", id="table"),
    ],
)
def test_alternate_must_be_a_string(vhost: Host, arguments: Table, type_name: str) -> None:
    text = f"invalid type '{type_name}' for arg 'alternate-exchange' in exchange 'x' in vhost '/'"
    result = refused(vhost.declare_exchange, "x", "direct", arguments=arguments)
    assert result == (ChannelException, 406, text)
    assert "x" not in vhost.exchanges


def test_passive_missing(vhost: Host) -> None:
    result = refused(vhost.declare_exchange, "x", "", passive=True)
    assert result == (ChannelException, 404, "no exchange 'x' in vhost '/'")


def test_passive_looks_at_the_name_only(vhost: Host) -> None:
    made = vhost.declare_exchange("x", "fanout")
    again = vhost.declare_exchange(
        "x", "sideways", passive=True, durable=True, internal=True, arguments=alternate(5, "I")
    )
    assert again is made


@pytest.mark.parametrize("arguments", [{}, alternate(5, "I")])
def test_reserved_prefix(vhost: Host, arguments: Table) -> None:
    text = "exchange name 'amq.mine' contains reserved prefix 'amq.*'"
    result = refused(vhost.declare_exchange, "amq.mine", "direct", arguments=arguments)
    assert result == (ChannelException, 403, text)


def test_broker_itself_may_use_reserved_names(vhost: Host) -> None:
    made = vhost.create_exchange("amq.own", "topic", durable=True, internal=True)
    assert vhost.exchange("amq.own") is made


def test_predeclared_exchange_declared_differently(vhost: Host) -> None:
    text = (
        "inequivalent arg 'durable' for exchange 'amq.topic' in vhost '/':"
        " received 'false' but current is 'true'"
    )
    result = refused(vhost.declare_exchange, "amq.topic", "topic")
    assert result == (ChannelException, 406, text)


@pytest.mark.parametrize("passive", [True, False])
def test_default_exchange_cannot_be_declared(vhost: Host, passive: bool) -> None:
    result = refused(vhost.declare_exchange, "", "direct", passive=passive, durable=True)
    assert result == DEFAULT_REFUSED


def test_names_may_be_any_bytes(vhost: Host) -> None:
    name = "\udcff" * 255
    vhost.declare_exchange(name, "fanout")
    vhost.bind(name, add_queue(vhost), "\udcfe")
    assert routed(vhost, name, "") == ["q"]


# --- deleting exchanges --------------------------------------------------------------------------


def test_delete_missing_is_fine(vhost: Host) -> None:
    vhost.delete_exchange("x")
    vhost.delete_exchange("x", if_unused=True)


def test_default_exchange_cannot_be_deleted(vhost: Host) -> None:
    assert refused(vhost.delete_exchange, "") == DEFAULT_REFUSED


@pytest.mark.parametrize("name", ["amq.direct", "amq.nope"])
def test_reserved_names_cannot_be_deleted(vhost: Host, name: str) -> None:
    text = f"deletion of system exchange '{name}' in vhost '/' not allowed"
    assert refused(vhost.delete_exchange, name) == (ChannelException, 403, text)


def test_delete_if_unused(vhost: Host) -> None:
    vhost.declare_exchange("x", "direct")
    q = add_queue(vhost)
    vhost.bind("x", q, "k")
    result = refused(vhost.delete_exchange, "x", if_unused=True)
    assert result == (ChannelException, 406, "exchange 'x' in vhost '/' in use")
    vhost.unbind("x", q, "k")
    vhost.delete_exchange("x", if_unused=True)
    assert "x" not in vhost.exchanges


def test_bindings_to_an_exchange_do_not_make_it_used(vhost: Host) -> None:
    vhost.declare_exchange("x", "direct")
    vhost.bind("amq.direct", exchange("x"), "k")
    vhost.delete_exchange("x", if_unused=True)
    assert list(vhost.bindings()) == []


def test_delete_takes_the_bindings_of_both_directions(vhost: Host) -> None:
    vhost.declare_exchange("x", "direct")
    q = add_queue(vhost)
    vhost.bind("x", q, "k")
    vhost.bind("amq.direct", exchange("x"), "k")
    vhost.bind("amq.direct", q, "k")
    vhost.delete_exchange("x")
    assert [binding.source for binding in vhost.bindings()] == ["amq.direct"]
    assert routed(vhost, "amq.direct", "k") == ["q"]
    vhost.declare_exchange("x", "direct")
    assert routed(vhost, "x", "k") == []
