"""A virtual host's topology: bindings, queues, and what goes with what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from leveret.broker.exchanges import register_builtins
from leveret.broker.exchanges.base import Binding, Exchange
from leveret.broker.registry import Registries
from leveret.broker.resource import Resource
from leveret.broker.vhost import Vhost, check_not_default
from leveret.protocol.errors import AmqpError, ChannelException, access_refused
from leveret.protocol.field_table import Field


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


# --- bindings ------------------------------------------------------------------------------------


def test_bind_source_missing_is_named_first(vhost: Host) -> None:
    for destination in (queue("nope"), exchange("nope")):
        result = refused(vhost.bind, "x", destination, "k")
        assert result == (ChannelException, 404, "no exchange 'x' in vhost '/'")


def test_bind_destination_missing(vhost: Host) -> None:
    result = refused(vhost.bind, "amq.direct", queue("q"), "k")
    assert result == (ChannelException, 404, "no queue 'q' in vhost '/'")
    result = refused(vhost.bind, "amq.direct", exchange("y"), "k")
    assert result == (ChannelException, 404, "no exchange 'y' in vhost '/'")


@pytest.mark.parametrize(
    ("source", "destination"),
    [("", queue("q")), ("", exchange("amq.fanout")), ("amq.fanout", exchange(""))],
)
def test_default_exchange_takes_no_bindings(
    vhost: Host, source: str, destination: Resource
) -> None:
    add_queue(vhost)
    assert refused(vhost.bind, source, destination, "k") == DEFAULT_REFUSED
    assert refused(vhost.unbind, source, destination, "k") == DEFAULT_REFUSED


def test_arguments_are_validated_once_both_ends_are_there(vhost: Host) -> None:
    arguments = {"x-match": Field("S", "some")}
    assert refused(vhost.bind, "amq.headers", queue("q"), "", arguments)[1] == 404
    add_queue(vhost)
    text = 'Invalid x-match field value <<"some">>; expected all, any, all-with-x, or any-with-x'
    result = refused(vhost.bind, "amq.headers", queue("q"), "", arguments)
    assert result == (ChannelException, 406, text)
    assert list(vhost.bindings()) == []
    vhost.unbind("amq.headers", queue("q"), "", arguments)


def test_same_binding_twice_is_one(vhost: Host) -> None:
    q = add_queue(vhost)
    first = vhost.bind("amq.direct", q, "k", {"a": Field("I", 1), "b": Field("I", 2)})
    second = vhost.bind("amq.direct", q, "k", {"b": Field("I", 2), "a": Field("I", 1)})
    assert first == second
    assert list(vhost.bindings()) == [first]
    vhost.unbind("amq.direct", q, "k", {"b": Field("I", 2), "a": Field("I", 1)})
    assert routed(vhost, "amq.direct", "k") == []


def test_bindings_that_differ_in_arguments_are_two(vhost: Host) -> None:
    q = add_queue(vhost)
    vhost.bind("amq.direct", q, "k")
    vhost.bind("amq.direct", q, "k", {"a": Field("I", 1)})
    vhost.unbind("amq.direct", q, "k")
    assert routed(vhost, "amq.direct", "k") == ["q"]


def test_unbind_what_is_not_there_is_fine(vhost: Host) -> None:
    q = add_queue(vhost)
    vhost.bind("amq.direct", q, "k")
    vhost.unbind("amq.direct", q, "never")
    vhost.unbind("nope", q, "k")
    vhost.unbind("amq.direct", queue("nope"), "k")
    vhost.unbind("amq.direct", exchange("nope"), "k")
    assert routed(vhost, "amq.direct", "k") == ["q"]


def test_bindings_are_found_by_either_end(vhost: Host) -> None:
    p, q = add_queue(vhost, "p"), add_queue(vhost, "q")
    first = vhost.bind("amq.direct", p, "a")
    second = vhost.bind("amq.direct", q, "b")
    third = vhost.bind("amq.topic", q, "c")
    assert vhost.bindings_from("amq.direct") == (first, second)
    assert vhost.bindings_to(q) == (second, third)
    assert list(vhost.bindings()) == [first, second, third]


def test_exclusive_queue_is_checked_last(vhost: Host) -> None:
    """A missing exchange comes first, and unbinding what is not bound asks nobody."""

    def locked(record: Record) -> None:
        raise access_refused(f"{record.name} is locked")

    q = add_queue(vhost)
    assert refused(vhost.bind, "x", q, "k", allow=locked)[1] == 404
    bad = {"x-match": Field("S", "some")}
    assert refused(vhost.bind, "amq.headers", q, "k", bad, allow=locked)[1] == 406
    assert refused(vhost.bind, "amq.direct", q, "k", allow=locked)[1] == 403
    assert list(vhost.bindings()) == []
    vhost.unbind("amq.direct", q, "k", allow=locked)
    vhost.bind("amq.direct", q, "k")
    assert refused(vhost.unbind, "amq.direct", q, "k", allow=locked)[1] == 403
    assert routed(vhost, "amq.direct", "k") == ["q"]


def test_durable_bindings_have_two_durable_ends(vhost: Host) -> None:
    vhost.declare_exchange("transient", "direct")
    vhost.declare_exchange("durable", "direct", durable=True)
    fleeting, lasting = add_queue(vhost, "p"), add_queue(vhost, "q", durable=True)
    vhost.bind("durable", fleeting, "k")
    vhost.bind("transient", lasting, "k")
    vhost.bind("durable", exchange("transient"), "k")
    kept = [
        vhost.bind("durable", lasting, "k"),
        vhost.bind("durable", exchange("amq.topic"), "k"),
    ]
    assert list(vhost.durable_bindings()) == kept


# --- queues --------------------------------------------------------------------------------------


def test_queue_by_name(vhost: Host) -> None:
    record = Record(queue("q"))
    vhost.add_queue(record)
    assert vhost.queue("q") is record
    result = refused(vhost.queue, "other")
    assert result == (ChannelException, 404, "no queue 'other' in vhost '/'")


def test_queue_name_must_be_free(vhost: Host) -> None:
    add_queue(vhost)
    with pytest.raises(ValueError, match="exists"):
        add_queue(vhost)


def test_removed_queue_takes_its_bindings(vhost: Host) -> None:
    p, q = add_queue(vhost, "p"), add_queue(vhost, "q")
    for to in (p, q):
        vhost.bind("amq.fanout", to, "")
    removed = vhost.remove_queue("q")
    assert removed is not None
    assert removed.name == q
    assert vhost.remove_queue("q") is None
    assert vhost.bindings_to(q) == ()
    add_queue(vhost, "q")
    assert routed(vhost, "amq.fanout", "") == ["p"]


# --- auto-delete ---------------------------------------------------------------------------------


def test_auto_delete_goes_with_the_last_binding_and_not_before(vhost: Host) -> None:
    vhost.declare_exchange("x", "direct", auto_delete=True)
    q = add_queue(vhost)
    vhost.bind("x", q, "a")
    vhost.bind("x", q, "b")
    vhost.unbind("x", q, "a")
    assert "x" in vhost.exchanges
    vhost.unbind("x", q, "b")
    assert "x" not in vhost.exchanges


def test_auto_delete_exchange_that_never_had_a_binding_stays(vhost: Host) -> None:
    vhost.declare_exchange("x", "direct", auto_delete=True)
    q = add_queue(vhost)
    vhost.bind("amq.direct", exchange("x"), "k")
    vhost.unbind("amq.direct", exchange("x"), "k")
    vhost.unbind("x", q, "k")
    vhost.remove_queue("q")
    assert "x" in vhost.exchanges


def test_removing_a_queue_deletes_along_a_chain(vhost: Host) -> None:
    """Long enough to show that the depth of a chain does not matter."""
    length = 3000
    for number in range(length):
        vhost.declare_exchange(str(number), "fanout", auto_delete=True)
    for number in range(length - 1):
        vhost.bind(str(number), exchange(str(number + 1)), "")
    vhost.bind(str(length - 1), add_queue(vhost), "")
    vhost.remove_queue("q")
    assert not any(str(number) in vhost.exchanges for number in range(length))
    assert list(vhost.bindings()) == []


def test_deleted_destination_exchange_takes_its_auto_delete_source(vhost: Host) -> None:
    vhost.declare_exchange("a", "fanout", auto_delete=True)
    vhost.declare_exchange("b", "fanout")
    vhost.bind("a", exchange("b"), "")
    vhost.delete_exchange("b")
    assert "a" not in vhost.exchanges


def test_exchange_bound_to_itself_keeps_itself(vhost: Host) -> None:
    vhost.declare_exchange("a", "fanout", auto_delete=True)
    q = add_queue(vhost)
    vhost.bind("a", exchange("a"), "")
    vhost.bind("a", q, "")
    vhost.unbind("a", q, "")
    assert "a" in vhost.exchanges
    vhost.unbind("a", exchange("a"), "")
    assert "a" not in vhost.exchanges


def test_cycle_of_auto_delete_exchanges_can_be_deleted(vhost: Host) -> None:
    for name in "ab":
        vhost.declare_exchange(name, "fanout", auto_delete=True)
    vhost.bind("a", exchange("b"), "")
    vhost.bind("b", exchange("a"), "")
    vhost.delete_exchange("a")
    assert not {"a", "b"} & set(vhost.exchanges)
    assert list(vhost.bindings()) == []


# --- observers -----------------------------------------------------------------------------------


def label(thing: object) -> str:
    if isinstance(thing, Binding):
        return f"{thing.source}->{thing.destination.name}"
    assert isinstance(thing, Exchange | Record)
    return thing.name.name


def test_observers_hear_what_comes_and_goes(vhost: Host) -> None:
    heard: list[tuple[str, str]] = []
    vhost.events.append(lambda event, thing: heard.append((event, label(thing))))
    vhost.declare_exchange("x", "fanout", auto_delete=True)
    vhost.declare_exchange("x", "fanout", auto_delete=True)
    q = add_queue(vhost)
    vhost.bind("x", q, "")
    vhost.bind("x", q, "")
    vhost.remove_queue("q")
    assert heard == [
        ("exchange.created", "x"),
        ("queue.created", "q"),
        ("binding.created", "x->q"),
        ("binding.deleted", "x->q"),
        ("exchange.deleted", "x"),
        ("queue.deleted", "q"),
    ]


def test_failing_observer_does_not_stop_the_change(
    vhost: Host, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(event: str, thing: object) -> None:
        raise RuntimeError("observer")

    vhost.events.append(failing)
    vhost.bind("amq.fanout", add_queue(vhost), "")
    vhost.remove_queue("q")
    assert list(vhost.bindings()) == []
    assert "an observer failed at binding.deleted" in caplog.text


def test_counters_of_an_exchange(vhost: Host) -> None:
    made = vhost.declare_exchange("x", "fanout")
    made.publish_in += 2
    made.publish_out += 6
    assert made.statistics() == {"publish_in": 2, "publish_out": 6}


def test_default_exchange_check_by_itself() -> None:
    check_not_default("x")
    assert refused(check_not_default, "") == DEFAULT_REFUSED
