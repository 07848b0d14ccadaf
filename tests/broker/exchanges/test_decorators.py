"""Exchange decorators: whom they follow, what they are told, what they add."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest

from leveret.broker.exchanges import register_builtins
from leveret.broker.exchanges.base import Binding, Exchange, Headers
from leveret.broker.exchanges.decorators import Activity, ExchangeDecorator
from leveret.broker.registry import Registries
from leveret.broker.resource import Resource
from leveret.broker.vhost import Vhost


@dataclass
class Record:
    name: Resource
    durable: bool = False


class Copier(ExchangeDecorator):
    """Follows exchanges whose names begin as it was told, and copies messages to a queue."""

    def __init__(self, activity: Activity = Activity.ALL, prefix: str = "watched") -> None:
        self.activity = activity
        self.prefix = prefix
        self.calls: list[tuple[str, str]] = []

    def active_for(self, exchange: Exchange) -> Activity:
        return self.activity if exchange.name.name.startswith(self.prefix) else Activity.NONE

    def create(self, exchange: Exchange) -> None:
        self.calls.append(("create", exchange.name.name))

    def delete(self, exchange: Exchange) -> None:
        self.calls.append(("delete", exchange.name.name))

    def policy_changed(self, exchange: Exchange) -> None:
        self.calls.append(("policy_changed", exchange.name.name))

    def add_binding(self, exchange: Exchange, binding: Binding) -> None:
        self.calls.append(("add_binding", binding.key))

    def remove_binding(self, exchange: Exchange, binding: Binding) -> None:
        self.calls.append(("remove_binding", binding.key))

    def route(
        self, exchange: Exchange, keys: Sequence[str], headers: Headers
    ) -> Iterable[Resource]:
        return [queue("copies")]


def queue(name: str) -> Resource:
    return Resource("/", "queue", name)


@pytest.fixture
def registries() -> Registries:
    made = Registries()
    register_builtins(made)
    return made


@pytest.fixture
def vhost(registries: Registries) -> Vhost[Record]:
    made: Vhost[Record] = Vhost("/", registries)
    for name in ("q", "copies", "rest"):
        made.add_queue(Record(queue(name)))
    return made


def routed(vhost: Vhost[Record], exchange: str, key: str = "k") -> list[str]:
    return [found.name.name for found in vhost.route(vhost.exchange(exchange), key, (), dict)]


def test_route_decorator_adds_destinations(registries: Registries, vhost: Vhost[Record]) -> None:
    registries.exchange_decorators.register("copier", Copier)
    vhost.declare_exchange("watched", "direct")
    vhost.declare_exchange("other", "direct")
    for source in ("watched", "other"):
        vhost.bind(source, queue("q"), "k")
    assert routed(vhost, "watched") == ["q", "copies"]
    assert routed(vhost, "other") == ["q"]


def test_decorator_does_not_keep_the_alternate_from_being_used(
    registries: Registries, vhost: Vhost[Record]
) -> None:
    """The alternate is for what the *type* did not match."""
    registries.exchange_decorators.register("copier", Copier)
    vhost.declare_exchange("rest", "fanout")
    vhost.bind("rest", queue("rest"), "")
    watched = vhost.declare_exchange("watched", "direct")
    vhost.policy_changed(watched, alternate="rest")
    assert sorted(routed(vhost, "watched")) == ["copies", "rest"]


def test_noroute_decorator_is_told_but_not_asked(
    registries: Registries, vhost: Vhost[Record]
) -> None:
    copier = Copier(Activity.NO_ROUTE)
    registries.exchange_decorators.register("copier", lambda: copier)
    vhost.declare_exchange("watched", "direct")
    vhost.bind("watched", queue("q"), "k")
    assert routed(vhost, "watched") == ["q"]
    assert vhost.cached_route(b"e", "watched", "k") is not None
    assert copier.calls == [("create", "watched"), ("add_binding", "k")]


def test_decorator_hears_of_a_whole_life(registries: Registries, vhost: Vhost[Record]) -> None:
    copier = Copier()
    registries.exchange_decorators.register("copier", lambda: copier)
    vhost.declare_exchange("watched", "direct")
    vhost.bind("watched", queue("q"), "a")
    vhost.bind("watched", queue("q"), "b")
    vhost.bind("watched", queue("q"), "b")
    vhost.unbind("watched", queue("q"), "a")
    vhost.delete_exchange("watched")
    assert copier.calls == [
        ("create", "watched"),
        ("add_binding", "a"),
        ("add_binding", "b"),
        ("remove_binding", "a"),
        ("remove_binding", "b"),
        ("delete", "watched"),
    ]


def test_late_decorator_sees_what_an_early_one_saw(
    registries: Registries, vhost: Vhost[Record]
) -> None:
    vhost.declare_exchange("watched", "direct")
    vhost.bind("watched", queue("q"), "k")
    cached = vhost.cached_route(b"e", "watched", "k")
    copier = Copier()
    registries.exchange_decorators.register("copier", lambda: copier)
    assert copier.calls == [("create", "watched"), ("add_binding", "k")]
    assert cached is not None
    assert vhost.cached_route(b"e", "watched", "k") is None


def test_unregistered_decorator_lets_go(registries: Registries, vhost: Vhost[Record]) -> None:
    copier = Copier()
    registries.exchange_decorators.register("copier", lambda: copier)
    vhost.declare_exchange("watched", "direct")
    vhost.bind("watched", queue("q"), "k")
    registries.exchange_decorators.unregister("copier")
    assert copier.calls[-1] == ("delete", "watched")
    assert routed(vhost, "watched") == ["q"]


def test_one_instance_lives_through_changes_of_the_registry(
    registries: Registries, vhost: Vhost[Record]
) -> None:
    made: list[Copier] = []

    def factory() -> Copier:
        made.append(Copier())
        return made[-1]

    registries.exchange_decorators.register("first", factory)
    vhost.declare_exchange("watched", "direct")
    registries.exchange_decorators.register("second", lambda: Copier(Activity.NONE))
    assert len(made) == 1
    assert made[0].calls == [("create", "watched")]


def test_policy_change_asks_decorators_anew(registries: Registries, vhost: Vhost[Record]) -> None:
    copier = Copier(Activity.NONE)
    registries.exchange_decorators.register("copier", lambda: copier)
    watched = vhost.declare_exchange("watched", "direct")
    copier.activity = Activity.ALL
    vhost.policy_changed(watched, alternate=None)
    vhost.policy_changed(watched, alternate=None)
    copier.activity = Activity.NONE
    vhost.policy_changed(watched, alternate=None)
    assert copier.calls == [
        ("create", "watched"),
        ("policy_changed", "watched"),
        ("delete", "watched"),
    ]


def test_default_exchange_is_not_decorated(registries: Registries, vhost: Vhost[Record]) -> None:
    registries.exchange_decorators.register("copier", lambda: Copier(prefix=""))
    fresh: Vhost[Record] = Vhost("fresh", registries)
    assert routed(vhost, "", "q") == ["q"]
    assert (vhost.exchange("").decorators, fresh.exchange("").decorators) == ((), ())
    assert vhost.exchange("amq.direct").decorators != ()


def test_decorator_that_cannot_be_made_is_left_out(
    registries: Registries, vhost: Vhost[Record], caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> ExchangeDecorator:
        raise RuntimeError("no")

    registries.exchange_decorators.register("broken", broken)
    registries.exchange_decorators.register("copier", Copier)
    vhost.declare_exchange("watched", "direct")
    assert routed(vhost, "watched") == ["copies"]
    assert "'broken'" in caplog.text


def test_closed_vhost_no_longer_listens(registries: Registries, vhost: Vhost[Record]) -> None:
    vhost.declare_exchange("watched", "direct")
    vhost.close()
    registries.exchange_decorators.register("copier", Copier)
    assert vhost.exchange("watched").decorators == ()
