"""Installed packages extend a broker: one package, one broker process, everything by socket.

The package is ``tests/support/sample_extension``; docs/extending.md explains it. What needs to
register and unregister while clients are connected runs in a broker of the test's own loop.
"""

from __future__ import annotations

import re
import time
import tomllib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aio_pika
import pika  # type: ignore[import-untyped]
import pytest
from aio_pika.abc import AbstractChannel, AbstractConnection
from aio_pika.exceptions import ChannelPreconditionFailed
from aiormq.exceptions import ConnectionInternalError
from pamqp import commands
from pamqp.base import Frame
from pika.adapters.blocking_connection import BlockingChannel  # type: ignore[import-untyped]
from pika.exceptions import (  # type: ignore[import-untyped]
    ChannelClosedByBroker,
    ProbableAuthenticationError,
)

from leveret.broker.clock import VirtualClock
from leveret.broker.config import Settings
from leveret.broker.interceptors.chain import Interceptor
from leveret.broker.queues.decorators import QueueDecorator
from leveret.broker.server import Broker
from leveret.protocol.codec import make, read_properties, write_properties
from leveret.protocol.errors import precondition_failed
from tests.support.broker_process import ROOT, BrokerProcess, running_broker
from tests.support.site_folder import SAMPLE, SiteFolder

if TYPE_CHECKING:
    from leveret.broker.channel.context import ConnectionContext
    from leveret.broker.queues.record import Queue
    from leveret.protocol.message import Message

pytestmark = pytest.mark.timeout(30)

DEADLINE_S = 10
TOKEN = "open sesame"
BROKEN = {
    "leveret.exchange_types": {"x-broken": "sample_broken:Nothing"},
    "leveret.interceptors": {"broken": "sample_broken:Nothing"},
}


def wait_until(condition: Callable[[], object]) -> None:
    """For what another process does; nothing tells us when."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


# --- from an installed package ----------------------------------------------------------------


class Extended:
    """A broker process beside which the sample package is installed, and a broken one."""

    def __init__(self, process: BrokerProcess, journal: Path) -> None:
        self.process = process
        self._journal = journal

    def connect(self, credentials: Any = None) -> pika.BlockingConnection:
        parameters = pika.URLParameters(self.process.url)
        if credentials is not None:
            parameters.credentials = credentials
        return pika.BlockingConnection(parameters)

    def journal_of(self, queue: str) -> list[str]:
        lines = self._journal.read_text().splitlines()
        return [line.removeprefix(f"{queue}: ") for line in lines if line.startswith(f"{queue}: ")]


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Extended]:
    folder = tmp_path_factory.mktemp("extended")
    site = SiteFolder(folder / "site")
    site.install_module("sample_broken", "import nothing_of_that_name", BROKEN)
    site.install_project(SAMPLE)
    journal = folder / "journal.txt"
    journal.touch()
    env = {
        "PYTHONPATH": str(site.folder),
        "SAMPLE_JOURNAL": str(journal),
        "SAMPLE_TOKEN": TOKEN,
    }
    with running_broker(folder, env=env) as process:
        yield Extended(process, journal)


@pytest.fixture
def channel(extended: Extended) -> Iterator[BlockingChannel]:
    connection = extended.connect()
    channel = connection.channel()
    channel.confirm_delivery()
    yield channel
    if connection.is_open:
        connection.close()


def drain(channel: BlockingChannel, queue: str) -> list[bytes]:
    bodies = []
    while (body := channel.basic_get(queue, auto_ack=True)[2]) is not None:
        bodies.append(body)
    return bodies


def test_the_documentation_shows_the_package_as_it_is() -> None:
    """What docs/extending.md prints is what the tests below install and drive."""
    text = (ROOT / "docs" / "extending.md").read_text()
    blocks = [block.removesuffix("```") for block in re.findall(r"^```(?s:.*?)^```", text, re.M)]
    shown = [block.removeprefix("```python\n") for block in blocks if "class " in block]
    sources = [path.read_text() for path in (SAMPLE / "leveret_sample").glob("*.py")]
    for block in shown:
        assert any(source.endswith(block) for source in sources), block
    assert len(shown) == len(sources) - 1, "something is not shown"
    [announced] = [block for block in blocks if block.startswith("```toml\n")]
    pyproject = tomllib.loads((SAMPLE / "pyproject.toml").read_text())
    assert tomllib.loads(announced.removeprefix("```toml\n"))["project"] == pyproject["project"]


def test_everything_that_was_loaded_is_in_the_log(extended: Extended) -> None:
    log = extended.process.read_log()
    for loaded in (
        "exchange type 'x-modulo'",
        "interceptor 'sample-house-rules'",
        "exchange decorator 'sample-audit'",
        "queue decorator 'sample-journal'",
        "auth mechanism 'X-TOKEN'",
    ):
        assert f"{loaded} loaded from package leveret-sample" in log


def test_a_broken_package_is_logged_and_skipped(
    extended: Extended, channel: BlockingChannel
) -> None:
    log = extended.process.read_log()
    for broken in ("exchange type 'x-broken'", "interceptor 'broken'"):
        assert f"{broken} of package sample_broken cannot be used: ModuleNotFoundError" in log
    # The broker serves all the same, without that type.
    with pytest.raises(pika.exceptions.ConnectionClosedByBroker) as refused:
        channel.exchange_declare("of-broken-type", "x-broken")
    assert refused.value.reply_code == 503


def test_exchange_type(channel: BlockingChannel) -> None:
    """Routes by its own rule, and hears of bindings that come and go."""
    channel.exchange_declare("spread", "x-modulo", auto_delete=True)
    queues = [channel.queue_declare("", exclusive=True).method.queue for _ in range(3)]
    for queue in queues:
        channel.queue_bind(queue, "spread")
    keys = [f"key-{number}" for number in range(30)]
    for key in keys * 2:
        channel.basic_publish("spread", key, key.encode())

    shares = [drain(channel, queue) for queue in queues]

    assert all(shares), "a destination got nothing"
    assert sorted(chain.from_iterable(shares)) == sorted(key.encode() for key in keys * 2)
    # The same key always met the same queue.
    assert sum(len(set(share)) for share in shares) == len(keys)
    for queue in queues[1:]:
        channel.queue_unbind(queue, "spread")
    for key in keys:
        channel.basic_publish("spread", key, b"")
    assert [len(drain(channel, queue)) for queue in queues] == [len(keys), 0, 0]


def test_exchange_type_between_exchanges(channel: BlockingChannel) -> None:
    """A type of a package is a source and a destination like any other."""
    channel.exchange_declare("modulo-middle", "x-modulo", auto_delete=True)
    channel.exchange_bind("modulo-middle", "amq.fanout")
    queue = channel.queue_declare("", exclusive=True).method.queue
    channel.queue_bind(queue, "modulo-middle")
    channel.basic_publish("amq.fanout", "any", b"through both")
    assert drain(channel, queue) == [b"through both"]


def test_interceptor_rewrites(channel: BlockingChannel) -> None:
    channel.queue_declare("old.orders", exclusive=True)
    channel.queue_declare("new.orders", exclusive=True)
    for key in ("old.orders", "new.orders"):
        channel.basic_publish("", key, key.encode(), mandatory=True)

    assert drain(channel, "old.orders") == []
    method, _, body = channel.basic_get("new.orders", auto_ack=True)
    # Receivers see the key the message was routed by.
    assert (method.routing_key, body) == ("new.orders", b"old.orders")
    assert drain(channel, "new.orders") == [b"new.orders"]


def test_interceptor_forbids(channel: BlockingChannel) -> None:
    """By a channel error, which leaves the connection and its other channels alone."""
    other = channel.connection.channel()
    with pytest.raises(ChannelClosedByBroker) as refused:
        channel.queue_declare("secret.plans")
    assert refused.value.reply_code == 403
    assert refused.value.reply_text == "ACCESS_REFUSED - queue 'secret.plans' is not for guest"
    assert other.queue_declare("", exclusive=True).method.queue
    with pytest.raises(ChannelClosedByBroker) as missing:
        other.queue_declare("public.plans", passive=True)
    assert missing.value.reply_code == 404


def test_exchange_decorator(channel: BlockingChannel) -> None:
    """Adds a destination, also where the type matches nothing, to the exchanges it follows."""
    channel.queue_declare("audit", exclusive=True)
    queue = channel.queue_declare("", exclusive=True).method.queue
    for exchange in ("audited.orders", "plain.orders"):
        channel.exchange_declare(exchange, "direct", auto_delete=True)
        channel.queue_bind(queue, exchange, "bound")
        channel.basic_publish(exchange, "bound", exchange.encode(), mandatory=True)

    assert drain(channel, queue) == [b"audited.orders", b"plain.orders"]
    assert drain(channel, "audit") == [b"audited.orders"]
    channel.basic_publish("audited.orders", "unbound", b"for the audit alone", mandatory=True)
    assert drain(channel, "audit") == [b"for the audit alone"]
    with pytest.raises(pika.exceptions.UnroutableError):
        channel.basic_publish("plain.orders", "unbound", b"", mandatory=True)


def test_queue_decorator(extended: Extended, channel: BlockingChannel) -> None:
    """Hears of the queue's life, of consumers that can take, and whether messages wait."""
    queue = "journal.events"
    channel.queue_declare(queue, exclusive=True)
    expected = ["startup"]

    def wait_journal(*events: str) -> None:
        expected.extend(events)
        wait_until(lambda: len(extended.journal_of(queue)) >= len(expected))
        assert extended.journal_of(queue) == expected

    wait_journal()
    channel.basic_publish("", queue, b"waits")
    wait_journal("priority None, messages")
    channel.basic_qos(prefetch_count=1)
    tags: list[int] = []

    def on_message(_: object, method: Any, *__: object) -> None:
        tags.append(method.delivery_tag)

    def ack() -> None:
        channel.connection.process_data_events(time_limit=DEADLINE_S)
        channel.basic_ack(tags.pop())

    consumer = channel.basic_consume(queue, on_message, arguments={"x-priority": 5})
    wait_journal("priority 5, empty")
    # With a prefetch of 1 it cannot take another.
    channel.basic_publish("", queue, b"waits, too")
    wait_journal("priority None, messages")
    ack()
    wait_journal("priority 5, empty")
    ack()
    channel.basic_cancel(consumer)
    wait_journal("priority None, empty")
    channel.queue_delete(queue)
    wait_journal("shutdown")
    channel.queue_declare("not-in-the-journal", exclusive=True)
    assert extended.journal_of("not-in-the-journal") == []


class TokenCredentials:
    """What pika asks of credentials, for the mechanism of the package."""

    TYPE = "X-TOKEN"

    def __init__(self, user: str, token: str) -> None:
        self._response = f"{user}\0{token}".encode()

    def response_for(self, start: Any) -> tuple[str | None, bytes | None]:
        offered = start.mechanisms.split()
        return (self.TYPE, self._response) if self.TYPE.encode() in offered else (None, None)

    def erase_credentials(self) -> None:
        pass


@pytest.fixture
def _tokens_in_pika(monkeypatch: pytest.MonkeyPatch) -> None:
    types = [*pika.credentials.VALID_TYPES, TokenCredentials]
    monkeypatch.setattr(pika.credentials, "VALID_TYPES", types)


@pytest.mark.usefixtures("_tokens_in_pika")
def test_auth_mechanism(extended: Extended) -> None:
    connection = extended.connect(TokenCredentials("robot", TOKEN))
    channel = connection.channel()
    channel.confirm_delivery()
    queue = channel.queue_declare("", exclusive=True).method.queue
    # The user is the one the mechanism named: user_id must match it.
    properties = pika.BasicProperties(user_id="robot")
    channel.basic_publish("", queue, b"by a robot", properties)
    assert drain(channel, queue) == [b"by a robot"]
    connection.close()


@pytest.mark.usefixtures("_tokens_in_pika")
def test_auth_mechanism_refuses(extended: Extended) -> None:
    with pytest.raises(ProbableAuthenticationError, match="X-TOKEN"):
        extended.connect(TokenCredentials("robot", "open barley"))


# --- while clients are connected --------------------------------------------------------------


@pytest.fixture
async def connection(broker: Broker) -> AsyncIterator[AbstractConnection]:
    connection = await aio_pika.connect(broker.url)
    yield connection
    if not connection.is_closed:
        await connection.close()


class Prefixed(Interceptor):
    """Puts a letter before every body, so that its place in the order can be seen."""

    letter = b"a"

    def __init__(self, connection: ConnectionContext) -> None:
        pass

    def applies_to(self) -> Iterable[str]:
        return ("Basic.Publish",)

    def intercept(self, method: Frame, message: Message | None) -> tuple[Frame, Message | None]:
        assert message is not None
        message.body = self.letter + message.body
        return method, message


class LaterPrefixed(Prefixed):
    letter = b"b"
    priority = 1


class ForbidsGets(Prefixed):
    def applies_to(self) -> Iterable[str]:
        return ("Basic.Get",)

    def intercept(self, method: Frame, message: Message | None) -> tuple[Frame, Message | None]:
        assert isinstance(method, commands.Basic.Get)
        raise precondition_failed("gets are out of fashion")


async def sent_by(channel: AbstractChannel, body: bytes = b".") -> bytes:
    """What becomes of a body that is published on the channel."""
    queue = await channel.declare_queue(exclusive=True)
    await channel.default_exchange.publish(aio_pika.Message(body), queue.name)
    message = await queue.get(no_ack=True)
    await queue.delete()
    return message.body


async def test_an_interceptor_serves_channels_opened_after_it(
    broker: Broker, connection: AbstractConnection
) -> None:
    interceptors = broker.registries.interceptors
    before = await connection.channel()
    interceptors.register("prefix", Prefixed)
    during = await connection.channel()
    interceptors.unregister("prefix")
    after = await connection.channel()
    sent = [await sent_by(channel) for channel in (before, during, after)]
    assert sent == [b".", b"a.", b"."]


async def test_interceptors_run_in_order_of_priority(
    broker: Broker, connection: AbstractConnection
) -> None:
    broker.registries.interceptors.register("later", LaterPrefixed)
    broker.registries.interceptors.register("sooner", Prefixed)
    assert await sent_by(await connection.channel()) == b"ba."


async def test_two_interceptors_of_one_priority_are_an_internal_error(
    broker: Broker, connection: AbstractConnection, caplog: pytest.LogCaptureFixture
) -> None:
    """For channels opened from then on; those that are open know nothing of it."""
    interceptors = broker.registries.interceptors
    before = await connection.channel()
    interceptors.register("one", Prefixed)
    interceptors.register("two", Prefixed)
    doomed = await aio_pika.connect(broker.url)
    with pytest.raises(ConnectionInternalError):
        await doomed.channel()
    assert "two interceptors with priority 0 for Basic.Publish" in caplog.text
    assert await sent_by(before) == b"."
    interceptors.unregister("two")
    assert await sent_by(await connection.channel()) == b"a."


async def test_interceptors_of_one_priority_for_different_methods(
    broker: Broker, connection: AbstractConnection
) -> None:
    broker.registries.interceptors.register("publish", Prefixed)
    broker.registries.interceptors.register("get", ForbidsGets)
    channel = await connection.channel()
    with pytest.raises(ChannelPreconditionFailed, match="gets are out of fashion"):
        await sent_by(channel)


class ChangesItsMind(Prefixed):
    """What was acked is requeued instead; what is rejected stays rejected."""

    def applies_to(self) -> Iterable[str]:
        return ("Basic.Ack", "Basic.Reject", "Basic.Nack")

    def intercept(self, method: Frame, message: Message | None) -> tuple[Frame, Message | None]:
        assert message is None
        if isinstance(method, commands.Basic.Ack):
            tag, multiple = method.delivery_tag, method.multiple
            method = make(commands.Basic.Nack, delivery_tag=tag, multiple=multiple, requeue=True)
        return method, message


async def test_acks_can_be_intercepted(broker: Broker, connection: AbstractConnection) -> None:
    broker.registries.interceptors.register("changes-its-mind", ChangesItsMind)
    channel = await connection.channel()
    queue = await channel.declare_queue(exclusive=True)
    for body in (b"one", b"two", b"three"):
        await channel.default_exchange.publish(aio_pika.Message(body), queue.name)
    taken = [await queue.get() for _ in range(3)]
    await taken[0].reject(requeue=False)
    await taken[2].ack(multiple=True)
    again = [await queue.get() for _ in range(2)]
    assert [(each.body, each.redelivered) for each in again] == [(b"two", True), (b"three", True)]
    await again[1].nack(multiple=True, requeue=False)
    assert await queue.get(fail=False) is None


class Hurried(Prefixed):
    """Sets an expiration that is none."""

    def intercept(self, method: Frame, message: Message | None) -> tuple[Frame, Message | None]:
        assert message is not None
        properties = read_properties(message.header)
        properties.expiration = "soon"
        message.header = write_properties(properties)
        return method, message


async def test_properties_an_interceptor_sets_are_checked_as_a_clients(
    broker: Broker, connection: AbstractConnection
) -> None:
    broker.registries.interceptors.register("hurried", Hurried)
    with pytest.raises(ChannelPreconditionFailed, match="invalid expiration 'soon'"):
        await sent_by(await connection.channel())


async def test_the_size_limit_holds_with_interceptors(settings: Settings) -> None:
    async with Broker(replace(settings, max_message_size=1000)) as broker:
        broker.registries.interceptors.register("prefix", Prefixed)
        async with await aio_pika.connect(broker.url) as connection:
            assert len(await sent_by(await connection.channel(), bytes(999))) == 1000
            with pytest.raises(ChannelPreconditionFailed, match="message size 1001 is larger"):
                await sent_by(await connection.channel(), bytes(1000))
            # In several frames: too large to be kept at all.
            with pytest.raises(ChannelPreconditionFailed, match="message size 300000 is larger"):
                await sent_by(await connection.channel(), bytes(300_000))


@pytest.mark.parametrize("clumsy", ["active_for", "startup", "consumer_state_changed", "shutdown"])
async def test_a_queue_decorator_that_fails_harms_no_queue(
    broker: Broker, connection: AbstractConnection, caplog: pytest.LogCaptureFixture, clumsy: str
) -> None:
    class Clumsy(QueueDecorator):
        def active_for(self, queue: Queue) -> bool:
            return True

    def fail(*_: object) -> None:
        raise ValueError("clumsy")

    setattr(Clumsy, clumsy, fail)
    broker.registries.queue_decorators.register("clumsy", Clumsy)
    assert await sent_by(await connection.channel()) == b"."
    assert "clumsy" in caplog.text
    assert "crashed" not in caplog.text


async def test_a_queue_decorator_that_cannot_be_made_is_left_out(
    broker: Broker, connection: AbstractConnection, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> QueueDecorator:
        raise ValueError("not today")

    broker.registries.queue_decorators.register("moody", fail)
    assert await sent_by(await connection.channel()) == b"."
    assert "queue decorator 'moody' cannot be used" in caplog.text


async def test_a_queue_decorator_registered_anew_is_another_one(
    broker: Broker, connection: AbstractConnection
) -> None:
    started: list[str] = []

    def decorator(name: str) -> Callable[[], QueueDecorator]:
        class Named(QueueDecorator):
            def active_for(self, queue: Queue) -> bool:
                return True

            def startup(self, queue: Queue) -> None:
                started.append(name)

        return Named

    channel = await connection.channel()
    registry = broker.registries.queue_decorators
    for name in ("first", "second"):
        registry.register("same", decorator(name))
        await sent_by(channel)
        registry.unregister("same")
    await sent_by(channel)
    assert started == ["first", "second"]


# --- the built-in interceptor -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "given", "received"),
    [
        pytest.param("off", None, None, id="off"),
        pytest.param("off", 5, 5, id="off-keeps"),
        pytest.param("stamp", None, 1_000, id="stamp"),
        pytest.param("stamp", 5, 5, id="stamp-keeps"),
        pytest.param("overwrite", None, 1_000, id="overwrite"),
        pytest.param("overwrite", 5, 1_000, id="overwrite-replaces"),
    ],
)
async def test_message_timestamp(
    settings: Settings, mode: str, given: int | None, received: int | None
) -> None:
    clock = VirtualClock(1_000.9)
    async with Broker(replace(settings, message_timestamp=mode), clock) as broker:
        async with await aio_pika.connect(broker.url) as connection:
            channel = await connection.channel()
            queue = await channel.declare_queue(exclusive=True)
            sent = aio_pika.Message(b"body", timestamp=given, content_type="text/plain")
            await channel.default_exchange.publish(sent, queue.name)
            message = await queue.get(no_ack=True)
    assert (message.body, message.content_type) == (b"body", "text/plain")
    stamped = message.timestamp
    assert (None if stamped is None else stamped.timestamp()) == received
