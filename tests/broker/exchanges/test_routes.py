"""Routes of a virtual host: who may publish where, and what may be remembered of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from leveret.broker import vhost as vhost_module
from leveret.broker.exchanges import register_builtins
from leveret.broker.exchanges.router import Hop
from leveret.broker.registry import Registries
from leveret.broker.resource import Resource
from leveret.broker.vhost import Route, Vhost
from leveret.protocol.errors import AmqpError, ChannelException
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


def test_publish_to_a_missing_exchange(vhost: Host) -> None:
    expected = (ChannelException, 404, "no exchange 'x' in vhost '/'")
    assert refused(vhost.exchange_for_publish, "x") == expected
    assert refused(vhost.cached_route, b"e", "x", "k") == expected


def test_publish_to_an_internal_exchange(vhost: Host) -> None:
    internal = vhost.declare_exchange("x", "fanout", internal=True)
    vhost.bind("x", add_queue(vhost), "")
    expected = (ChannelException, 403, "cannot publish to internal exchange 'x' in vhost '/'")
    assert refused(vhost.exchange_for_publish, "x") == expected
    assert refused(vhost.cached_route, b"e", "x", "k") == expected
    # Dead letters and other exchanges may go there.
    assert [found.name.name for found in vhost.route(internal, "k", (), dict)] == ["q"]


def test_further_keys_are_routed_as_well(vhost: Host) -> None:
    for name in ("p", "q", "r"):
        add_queue(vhost, name)
    assert routed(vhost, "", "p", "q", "p") == ["p", "q"]


def test_policy_sets_the_alternate_unless_there_is_an_argument(vhost: Host) -> None:
    plain = vhost.declare_exchange("plain", "direct")
    given = vhost.declare_exchange("given", "direct", arguments=alternate("mine"))
    for made in (plain, given):
        vhost.policy_changed(made, alternate="theirs")
    assert (plain.alternate, given.alternate) == ("theirs", "mine")
    vhost.policy_changed(plain, alternate=None)
    assert plain.alternate is None


def cached(vhost: Host, name: str = "x", key: str = "k") -> list[str]:
    found = vhost.cached_route(f"{name} {key}".encode(), name, key)
    assert found is not None
    return [record.name.name for record in found.queues]


def test_route_is_cached(vhost: Host) -> None:
    made = vhost.declare_exchange("x", "direct")
    vhost.bind("x", add_queue(vhost), "k")
    found = vhost.cached_route(b"e", "x", "k")
    assert found == Route(made, (vhost.queue("q"),))
    assert vhost.cached_route(b"e", "x", "k") is found


def test_default_exchange_is_cached(vhost: Host) -> None:
    assert cached(vhost, "", "q") == []
    add_queue(vhost)
    assert cached(vhost, "", "q") == ["q"]
    vhost.remove_queue("q")
    assert cached(vhost, "", "q") == []


def test_no_route_outlives_a_change(vhost: Host) -> None:
    x = vhost.declare_exchange("x", "direct")
    assert cached(vhost) == []
    vhost.bind("x", add_queue(vhost), "k")
    assert cached(vhost) == ["q"]
    vhost.unbind("x", queue("q"), "k")
    assert cached(vhost) == []
    vhost.declare_exchange("rest", "fanout")
    vhost.bind("rest", queue("q"), "")
    vhost.policy_changed(x, alternate="rest")
    assert cached(vhost) == ["q"]
    vhost.delete_exchange("rest")
    assert cached(vhost) == []
    vhost.declare_exchange("rest", "fanout")
    vhost.bind("rest", queue("q"), "")
    assert cached(vhost) == ["q"]
    vhost.remove_queue("q")
    assert cached(vhost) == []
    vhost.delete_exchange("x")
    assert refused(vhost.cached_route, b"x k", "x", "k")[1] == 404


def test_cached_alternate_is_found_when_it_is_declared_later(vhost: Host) -> None:
    vhost.declare_exchange("x", "direct", arguments=alternate("amq.later"))
    add_queue(vhost)
    assert cached(vhost) == []
    vhost.create_exchange("amq.later", "fanout", durable=True)
    vhost.bind("amq.later", queue("q"), "")
    assert cached(vhost) == ["q"]


def test_observer_asking_for_a_route_does_not_leave_a_stale_one(vhost: Host) -> None:
    """The alternate is used as soon as the queue's binding is gone."""
    vhost.declare_exchange("x", "direct", arguments=alternate("amq.fanout"))
    vhost.bind("amq.fanout", add_queue(vhost, "rest"), "")
    vhost.bind("x", add_queue(vhost), "k")
    vhost.events.append(lambda event, thing: vhost.cached_route(b"x k", "x", "k"))
    vhost.remove_queue("q")
    assert cached(vhost) == ["rest"]


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(lambda v: v.bind("x", exchange("amq.headers"), "k"), id="bound"),
        pytest.param(
            lambda v: v.policy_changed(v.exchange("x"), alternate="amq.headers"), id="alternate"
        ),
    ],
)
def test_headers_exchange_on_the_way_is_never_cached(
    vhost: Host, way: Callable[[Host], object]
) -> None:
    x = vhost.declare_exchange("x", "direct")
    vhost.bind("amq.headers", add_queue(vhost), "", {"a": Field("I", 1)})
    assert vhost.cached_route(b"h", "amq.headers", "k") is None
    assert vhost.cached_route(b"e", "x", "k") is not None
    way(vhost)
    assert vhost.cached_route(b"e", "x", "k") is None
    assert vhost.cached_route(b"e", "x", "k") is None
    assert len(vhost.route(x, "k", (), lambda: {"a": Field("I", 1)})) == 1
    assert vhost.route(x, "k", (), dict) == []


def test_headers_exchange_that_appears_on_the_way_ends_caching(vhost: Host) -> None:
    vhost.declare_exchange("x", "direct", arguments=alternate("later"))
    assert cached(vhost) == []
    vhost.declare_exchange("later", "headers")
    assert vhost.cached_route(b"x k", "x", "k") is None


def test_headers_exchange_off_the_way_does_not_matter(vhost: Host) -> None:
    vhost.declare_exchange("x", "direct", arguments=alternate("amq.headers"))
    vhost.bind("x", exchange("amq.match"), "other")
    vhost.bind("x", add_queue(vhost), "k")
    assert cached(vhost) == ["q"]


def test_cache_is_bounded(vhost: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vhost_module, "ROUTES_CACHED", 3)
    routes = {key: vhost.cached_route(key.encode(), "", key) for key in "abcd"}
    assert vhost.cached_route(b"d", "", "d") is routes["d"]
    assert vhost.cached_route(b"a", "", "a") is not routes["a"]


def test_route_can_be_explained(vhost: Host) -> None:
    vhost.bind("amq.fanout", add_queue(vhost), "")
    hops: list[Hop] = []
    vhost.route(vhost.exchange("amq.fanout"), "k", (), dict, hops.append)
    assert [(hop.exchange.name.name, hop.matched) for hop in hops] == [("amq.fanout", [queue("q")])]
