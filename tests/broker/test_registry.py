"""Registries, and packages that extend the broker through entry points."""

from __future__ import annotations

from pathlib import Path

import pytest

from leveret.broker.exchanges import register_builtins
from leveret.broker.registry import Registries, Registry, RegistryError
from leveret.broker.resource import Resource
from leveret.broker.vhost import Vhost


def test_register_and_find() -> None:
    registry: Registry[int] = Registry("number")
    registry.register("one", 1)
    registry.register("two", 2)
    assert registry.get("one") == 1
    assert registry.get("three") is None
    assert registry.names() == ["one", "two"]
    assert list(registry) == ["one", "two"]
    assert "two" in registry
    assert len(registry) == 2


def test_taken_name_is_refused() -> None:
    registry: Registry[int] = Registry("number")
    registry.register("one", 1)
    with pytest.raises(RegistryError, match="number 'one' is registered already"):
        registry.register("one", 2)
    assert registry.get("one") == 1


def test_unregistered_name_is_free_again() -> None:
    registry: Registry[int] = Registry("number")
    registry.register("one", 1)
    registry.unregister("one")
    registry.unregister("never")
    registry.register("one", 2)
    assert registry.get("one") == 2


def test_watchers_hear_of_every_change() -> None:
    registry: Registry[int] = Registry("number")
    seen: list[list[str]] = []
    registry.watchers.append(lambda: seen.append(registry.names()))
    registry.register("one", 1)
    registry.unregister("one")
    registry.unregister("one")
    assert seen == [["one"], []]


def test_registries_of_two_brokers_are_apart() -> None:
    first, second = Registries(), Registries()
    register_builtins(first)
    assert first.exchange_types.names() == ["direct", "fanout", "topic", "headers"]
    assert second.exchange_types.names() == []


class Site:
    """A folder on the import path into which packages can be put."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, package: str, code: str, entry_points: str) -> None:
        (self.folder / f"{package}.py").write_text(code)
        info = self.folder / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(entry_points)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.syspath_prepend(tmp_path)
    return Site(tmp_path)


EXCHANGE_TYPE = """
import zlib
from leveret.broker.exchanges.base import ExchangeType


class HashExchange(ExchangeType):
    '''Spreads messages over its destinations by routing key.'''

    def __init__(self):
        self.destinations = []

    def add_binding(self, binding):
        self.destinations.append(binding.destination)

    def remove_binding(self, binding):
        self.destinations.remove(binding.destination)

    def route(self, keys, headers):
        if not self.destinations:
            return []
        return [self.destinations[zlib.crc32(keys[0].encode()) % len(self.destinations)]]
"""


def test_installed_exchange_type_can_be_declared_and_routes(site: Site) -> None:
    site.install(
        "leveret_test_hash",
        EXCHANGE_TYPE,
        "[leveret.exchange_types]\nx-hash = leveret_test_hash:HashExchange\n",
    )
    registries = Registries()
    register_builtins(registries)
    registries.load_entry_points()

    class Record:
        def __init__(self, name: str) -> None:
            self.name = Resource("/", "queue", name)
            self.durable = False

    vhost: Vhost[Record] = Vhost("/", registries)
    exchange = vhost.declare_exchange("spread", "x-hash")
    assert vhost.route(exchange, "k", (), dict) == []
    for name in ("p", "q"):
        vhost.add_queue(Record(name))
        vhost.bind("spread", Resource("/", "queue", name), "")
    routes = {vhost.route(exchange, str(number), (), dict)[0].name.name for number in range(20)}
    assert routes == {"p", "q"}


@pytest.mark.parametrize(
    "group",
    [
        "exchange_types",
        "interceptors",
        "exchange_decorators",
        "queue_decorators",
        "auth_mechanisms",
    ],
)
def test_every_group_is_loaded(site: Site, group: str) -> None:
    package = f"leveret_test_{group}"
    site.install(
        package, "def make():\n    return 'made'\n", f"[leveret.{group}]\nmine = {package}:make\n"
    )
    registries = Registries()
    registries.load_entry_points()
    assert getattr(registries, group).get("mine")() == "made"


@pytest.mark.parametrize(
    ("package", "code", "reason"),
    [
        pytest.param("broken_raises", "raise RuntimeError('boom')", "boom", id="raises"),
        pytest.param("broken_import", "import nothing_of_that_name", "nothing_of", id="import"),
        pytest.param("broken_attribute", "", "make", id="attribute-missing"),
        pytest.param("broken_value", "make = 3", "not callable", id="not-callable"),
        pytest.param("broken_exit", "raise SystemExit(3)", "SystemExit", id="exits"),
    ],
)
def test_broken_package_is_named_and_skipped(
    site: Site, caplog: pytest.LogCaptureFixture, package: str, code: str, reason: str
) -> None:
    site.install(package, code, f"[leveret.exchange_types]\nx-broken = {package}:make\n")
    sound = f"sound_beside_{package}"
    site.install(sound, "def make(): ...", f"[leveret.exchange_types]\nx-sound = {sound}:make\n")
    registries = Registries()
    registries.load_entry_points()
    assert registries.exchange_types.names() == ["x-sound"]
    assert f"exchange type 'x-broken' of package {package} cannot be used" in caplog.text
    assert reason in caplog.text


def test_package_cannot_replace_a_builtin(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.install(
        "leveret_test_usurper",
        "def make(): ...",
        "[leveret.exchange_types]\ndirect = leveret_test_usurper:make\n",
    )
    registries = Registries()
    register_builtins(registries)
    before = registries.exchange_types.get("direct")
    registries.load_entry_points()
    assert registries.exchange_types.get("direct") is before
    assert "leveret_test_usurper" in caplog.text
