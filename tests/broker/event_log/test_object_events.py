"""What a real broker and real clients leave in the log about everything but messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import aio_pika
import aiormq.exceptions
import pytest
from aio_pika import ExchangeType
from aio_pika.abc import AbstractIncomingMessage
from aio_pika.exceptions import ChannelNotFoundEntity
from pamqp import commands
from pamqp.common import FieldTable

from leveret.broker.clock import VirtualClock
from leveret.broker.config import Settings
from leveret.broker.event_log.schema import OBJECT_KINDS, Event
from leveret.broker.memory_monitor import Probes
from leveret.broker.server import Broker
from leveret.protocol.codec import make
from tests.broker.event_log.reading import assert_no_gaps, of_kind, only, read_events
from tests.support.flood import Flood
from tests.support.held_queues import HeldQueues, readers
from tests.support.raw_client import PERSISTENT, RawClient, handshake, publish
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(40)

LIMIT = 100_000_000


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Objects alone: messages have tests of their own."""
    return replace(settings, event_log="objects")


@pytest.fixture
def folder(settings: Settings) -> Path:
    return settings.data / "events"


@pytest.fixture
async def broker(settings: Settings) -> AsyncIterator[Broker]:
    """To be stopped by the test, which then reads the log."""
    running = Broker(settings)
    await running.start()
    yield running
    await running.stop()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldQueues]:
    held = HeldQueues(monkeypatch)
    yield held
    held.release()


async def ignore(message: AbstractIncomingMessage) -> None:
    """What consumers here do with what they are given."""


def end(broker_folder: Path) -> list[Event]:
    events = read_events(broker_folder)
    assert_no_gaps(events)
    assert (events[0].ev, events[-1].ev) == ("broker_start", "broker_stop")
    return events


async def test_connections_and_channels(broker: Broker, folder: Path) -> None:
    properties: FieldTable = {"connection_name": "billing"}
    url = broker.url
    async with await aio_pika.connect(url, client_properties=properties) as connection:
        async with connection.channel():
            pass
        failing = await connection.channel()
        with pytest.raises(ChannelNotFoundEntity):
            await failing.declare_queue("missing", passive=True)
        await connection.channel()
        port = next(iter(readers(broker))).facts.there[1]
    await broker.stop()
    events = end(folder)

    opened, closed = only(events, "connection_open"), only(events, "connection_close")
    assert (opened.vhost, opened.user, opened.conn) == ("/", "guest", 1)
    assert opened.peer == closed.peer == f"127.0.0.1:{port}"
    assert opened.attrs["connection_name"] == "billing"
    assert closed.reason == "closed by the client"
    assert closed.hold_us == closed.ts - opened.ts
    opens, closes = of_kind(events, "channel_open"), of_kind(events, "channel_close")
    assert {(event.conn, event.user, event.vhost) for event in opens} == {(1, "guest", "/")}
    assert sorted(event.ch for event in opens) == sorted(event.ch for event in closes)
    reasons = [event.reason for event in closes]
    assert reasons == [
        "",
        "NOT_FOUND - no queue 'missing' in vhost '/'",
        "connection_closed",
    ]
    assert all(event.hold_us is not None for event in closes)


async def test_channels_that_their_clients_did_not_close(broker: Broker, folder: Path) -> None:
    """Their virtual host is deleted, or one of them meets an error that ends the connection."""
    await broker.add_vhost("v")
    async with await RawClient.connect(broker.port) as client:
        for part, answer in zip(
            handshake(vhost="v"),
            (commands.Connection.Start, commands.Connection.Tune, commands.Connection.OpenOk),
            strict=True,
        ):
            await client.send(part)
            await client.expect(answer)
        await client.open_channel(1)
        await broker.delete_vhost("v")
        await client.expect(commands.Connection.Close)
    async with await RawClient.open(broker.port) as client:
        await client.call(1, make(commands.Channel.Flow, active=False), commands.Connection.Close)
    await broker.stop()
    closes = of_kind(end(folder), "channel_close")
    assert [(event.vhost, event.reason) for event in closes] == [
        ("v", "connection_closed"),
        ("/", "connection_closed"),
    ]


async def test_connections_have_numbers_of_their_own(broker: Broker, folder: Path) -> None:
    for _ in range(3):
        async with await aio_pika.connect(broker.url):
            pass
    await broker.stop()
    events = end(folder)
    assert [event.conn for event in of_kind(events, "connection_open")] == [1, 2, 3]
    assert [event.conn for event in of_kind(events, "connection_close")] == [1, 2, 3]


async def test_a_refused_login(broker: Broker, folder: Path) -> None:
    url = broker.url.replace("guest:guest", "mallory:guess")
    with pytest.raises(aiormq.exceptions.ProbableAuthenticationError):
        await aio_pika.connect(url)
    await broker.stop()
    events = end(folder)
    refused = only(events, "auth_fail")
    assert (refused.user, refused.conn) == ("mallory", 1)
    assert refused.reason == "user 'mallory' - invalid credentials"
    assert refused.peer.startswith("127.0.0.1:")
    assert not of_kind(events, "connection_open")
    assert not of_kind(events, "connection_close")


async def test_a_shutdown_ends_connections_before_the_last_line(
    broker: Broker, folder: Path
) -> None:
    client = await RawClient.open(broker.port)
    await broker.stop()
    client.close()
    closed = only(end(folder), "connection_close")
    assert closed.reason.startswith("CONNECTION_FORCED - broker forced connection closure")


async def test_topology_and_consumers(broker: Broker, folder: Path) -> None:
    async with await aio_pika.connect(broker.url) as connection:
        channel = await connection.channel()
        exchange = await channel.declare_exchange("news", ExchangeType.TOPIC, durable=True)
        inner = await channel.declare_exchange("inner", ExchangeType.FANOUT)
        queue = await channel.declare_queue("q", durable=True, arguments={"x-max-length": 10})
        # The same again is nothing new.
        await channel.declare_queue("q", durable=True, arguments={"x-max-length": 10})
        await queue.bind(exchange, "a.*")
        await inner.bind(exchange, "#")
        tag = await queue.consume(ignore, no_ack=True)
        await queue.cancel(tag)
        await queue.unbind(exchange, "a.*")
        await queue.delete()
        await exchange.delete()
    await broker.stop()
    events = end(folder)

    declared = {event.exchange: event for event in of_kind(events, "exchange_declare")}
    assert declared["news"].attrs == {"type": "topic", "durable": "true"}
    assert declared["inner"].attrs == {"type": "fanout"}
    made = only(events, "queue_declare")
    assert (made.queue, made.conn, made.ch, made.user) == ("q", 1, 1, "guest")
    assert made.attrs == {"durable": "true", "x-max-length": "10"}
    to_queue, to_exchange = of_kind(events, "bind")
    assert (to_queue.exchange, to_queue.rk, to_queue.queue) == ("news", "a.*", "q")
    assert (to_exchange.exchange, to_exchange.queue) == ("news", "")
    assert to_exchange.attrs == {"destination": "inner"}
    assert [event.rk for event in of_kind(events, "unbind")] == ["a.*", "#"]
    consume, cancel = only(events, "consume"), only(events, "cancel")
    assert (consume.queue, consume.ctag, consume.ch) == ("q", tag, 1)
    assert consume.attrs == {"ack_required": "false", "exclusive": "false", "prefetch_count": "0"}
    assert (cancel.queue, cancel.ctag, cancel.reason) == ("q", tag, "")
    deleted = only(events, "queue_delete")
    assert (deleted.queue, deleted.user, deleted.reason) == ("q", "guest", "")
    gone = only(events, "exchange_delete")
    assert (gone.exchange, gone.conn, gone.ch) == ("news", 1, 1)
    order = [event.ev for event in events if event.ev in ("bind", "consume", "cancel", "unbind")]
    assert order == ["bind", "bind", "consume", "cancel", "unbind", "unbind"]


async def test_why_queues_and_consumers_went(broker: Broker, folder: Path) -> None:
    async with await aio_pika.connect(broker.url) as connection:
        channel, other = await connection.channel(), await connection.channel()
        await channel.declare_queue("mine", exclusive=True)
        temporary = await channel.declare_queue("temporary", auto_delete=True)
        await temporary.consume(ignore, consumer_tag="t")
        doomed = await channel.declare_queue("doomed")
        await doomed.consume(ignore, consumer_tag="d")
        await (await other.get_queue("doomed")).delete(if_unused=False)
    await broker.stop()
    events = end(folder)
    assert {event.queue: event.reason for event in of_kind(events, "queue_delete")} == {
        "mine": "exclusive",
        "temporary": "auto_delete",
        "doomed": "",
    }
    assert {event.ctag: event.reason for event in of_kind(events, "cancel")} == {
        "d": "queue_gone",
        "t": "channel_closed",
    }


async def test_what_a_start_finds_is_told(settings: Settings, folder: Path) -> None:
    async with Broker(settings) as broker, await aio_pika.connect(broker.url) as connection:
        channel = await connection.channel()
        exchange = await channel.declare_exchange("news", durable=True)
        queue = await channel.declare_queue("q", durable=True)
        await queue.bind(exchange, "key")
        await channel.declare_queue("gone")
    first = read_events(folder)[0].boot
    async with Broker(settings):
        pass
    events = [event for event in read_events(folder) if event.boot != first]
    assert_no_gaps(events)
    assert [(event.ev, event.reason) for event in events] == [
        ("broker_start", ""),
        ("exchange_declare", "recovered"),
        ("queue_declare", "recovered"),
        ("bind", "recovered"),
        ("broker_stop", ""),
    ]
    assert events[1].exchange == events[3].exchange == "news"
    assert events[2].queue == events[3].queue == "q"


async def test_alarms_block_and_unblock(
    settings: Settings, clock: VirtualClock, folder: Path
) -> None:
    used = 0
    probes = Probes(lambda: used, lambda: LIMIT, lambda folder: 1 << 40, lambda: None)
    broker = Broker(replace(settings, memory_high_watermark=1.0), clock, probes=probes)
    await broker.start()
    client = await RawClient.open(broker.port)
    broker.alarms.set("the test says so", "memory")
    await client.send(publish(1, "nowhere", b""))
    await wait_until(lambda: readers(broker)[0]._blocking.is_blocked)
    clock.advance(3)
    broker.alarms.clear("the test says so")
    await wait_until(lambda: not readers(broker)[0]._blocking.is_blocked)
    await client.say_goodbye()
    await wait_until(lambda: not readers(broker))
    client.close()
    await broker.stop()
    events = end(folder)
    blocked, unblocked = only(events, "blocked"), only(events, "unblocked")
    assert (blocked.conn, blocked.user, blocked.reason) == (1, "guest", "low on memory")
    assert blocked.peer == unblocked.peer != ""
    assert unblocked.hold_us == 3_000_000
    alarms = [event for event in of_kind(events, "audit") if event.reason.startswith("alarm")]
    assert [(event.reason, event.attrs["source"]) for event in alarms] == [
        ("alarm.set", "memory"),
        ("alarm.cleared", "memory"),
    ]


async def declare_slow_queue(client: RawClient) -> None:
    declaration = make(commands.Queue.Declare, queue="slow", arguments={})
    await client.call(1, declaration, commands.Queue.DeclareOk)


@pytest.mark.parametrize("ends", [False, True], ids=["goes on", "connection ends"])
async def test_who_throttled_whom(
    held: HeldQueues, settings: Settings, clock: VirtualClock, folder: Path, *, ends: bool
) -> None:
    broker = Broker(settings, clock)
    await broker.start()
    async with await RawClient.open(broker.port) as client:
        await declare_slow_queue(client)
        held.hold(broker, "slow")
        await Flood(client, "slow", size=100).until_blocked()
        reader = readers(broker)[0]
        await wait_until(lambda: reader._flow.is_blocked)
        clock.advance(5)
        if ends:
            # Nothing takes what it has sent, now or later.
            broker.listeners[0].evict("the test says so", lambda each: True)
            client.reset()
            await wait_until(lambda: not readers(broker))
        held.release()
        await wait_until(lambda: not reader._flow.is_blocked)
        await broker.stop()
    events = end(folder)
    chain = [("channel:1/1", "queue://slow"), ("reader:1", "channel:1/1")]
    blocked = of_kind(events, "credit_blocked")
    assert sorted((event.attrs["who"], event.attrs["by"]) for event in blocked) == chain
    assert {event.vhost for event in blocked} == {"/"}
    # Each goes on, at the latest when its connection ends.
    for event in blocked:
        ended = next(
            later
            for later in of_kind(events, "credit_unblocked")
            if later.attrs == event.attrs and later.seq > event.seq
        )
        assert ended.hold_us is not None
        assert ended.hold_us >= 5_000_000
        assert ended.hold_us >= ended.ts - event.ts
        assert ended.n == 1


async def test_short_blocks_are_told_together(
    settings: Settings, clock: VirtualClock, folder: Path
) -> None:
    """Time stands still here: none of them lasts, and what is left is told at the end."""
    broker = Broker(settings, clock)
    await broker.start()
    async with await RawClient.open(broker.port) as client:
        await declare_slow_queue(client)
        for _ in range(200):
            await client.send(publish(1, "slow", b"") * 500)
        declaration = make(commands.Queue.Declare, queue="slow", passive=True, arguments={})
        ok = await client.call(1, declaration, commands.Queue.DeclareOk)
        assert ok.message_count == 100_000
    await broker.stop()
    told = of_kind(end(folder), "credit_unblocked")
    # Each time means 400 messages at most.
    reader = next(event for event in told if event.attrs["who"] == "reader:1")
    assert reader.n > 100
    pairs = [tuple(event.attrs.values()) for event in told]
    assert len(pairs) == len(set(pairs))


async def test_a_queue_waits_for_its_store(settings: Settings, folder: Path) -> None:
    async with Broker(replace(settings, store_credit=100)) as broker:
        async with await RawClient.open(broker.port) as client:
            declaration = make(commands.Queue.Declare, queue="q", durable=True, arguments={})
            await client.call(1, declaration, commands.Queue.DeclareOk)
            for _ in range(20):
                await client.send(publish(1, "q", b"", header=PERSISTENT) * 100)
            await client.call(1, declaration, commands.Queue.DeclareOk)
            await client.say_goodbye()
    told = of_kind(end(folder), "credit_unblocked")
    assert {"who": "queue://q", "by": "store:/"} in [event.attrs for event in told]


async def test_administration_is_audited(broker: Broker, folder: Path) -> None:
    await broker.users.add("ann", "secret-word", ["monitoring"])
    await broker.add_vhost("shop")
    await broker.policies.set("shop", "cap", "^q", {"max-length": 5})
    await broker.delete_vhost("shop")
    await broker.users.delete("ann")
    await broker.stop()
    audits = of_kind(end(folder), "audit")
    told = [(event.reason, event.vhost, event.attrs.get("name", "")) for event in audits]
    assert ("user.created", "", "ann") in told
    assert ("vhost.created", "", "shop") in told
    assert ("policy.set", "shop", "cap") in told
    assert ("vhost.deleted", "", "shop") in told
    assert ("user.deleted", "", "ann") in told
    policy = next(event for event in audits if event.reason == "policy.set")
    assert policy.attrs["definition"] == '{"max-length":5}'
    assert not any("secret-word" in str(event) for event in audits)


async def test_what_goes_with_a_virtual_host(broker: Broker, folder: Path) -> None:
    await broker.add_vhost("shop")
    async with await aio_pika.connect(broker.url[:-3] + "shop") as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue("orders", durable=True)
        exchange = await channel.declare_exchange("all", ExchangeType.FANOUT)
        await queue.bind(exchange, "key")
        for _ in range(3):
            await exchange.publish(aio_pika.Message(b""), "")
        await broker.delete_vhost("shop")
    await broker.stop()
    events = [event for event in end(folder) if event.vhost == "shop"]
    deleted = only(events, "queue_delete")
    assert (deleted.queue, deleted.n, deleted.reason) == ("orders", 3, "vhost_deleted")
    assert only(events, "exchange_delete").exchange == "all"
    assert only(events, "unbind").queue == "orders"


async def test_who_deleted_a_queue_and_what_was_in_it(broker: Broker, folder: Path) -> None:
    async with await aio_pika.connect(broker.url) as connection:
        await connection.channel()
        channel = await connection.channel()
        queue = await channel.declare_queue("q")
        for _ in range(2):
            await channel.default_exchange.publish(aio_pika.Message(b""), "q")
        await queue.delete(if_unused=False, if_empty=False)
        await (await channel.declare_queue("empty")).delete()
    await broker.stop()
    deleted = of_kind(end(folder), "queue_delete")
    assert [(event.queue, event.n, event.reason) for event in deleted] == [
        ("q", 2, ""),
        ("empty", 0, ""),
    ]
    assert {(event.user, event.conn, event.ch) for event in deleted} == {("guest", 1, 2)}


async def test_what_a_start_brings_back(settings: Settings, folder: Path) -> None:
    """Durable queues with what is on disk of them."""
    async with Broker(settings) as first, await aio_pika.connect(first.url) as connection:
        channel = await connection.channel()
        priorities: FieldTable = {"x-max-priority": 3}
        await channel.declare_queue("kept", durable=True)
        await channel.declare_queue("sorted", durable=True, arguments=priorities)
        await channel.declare_queue("gone")
        for name in ("kept", "sorted", "gone"):
            for mode in (1, 2, 2):
                message = aio_pika.Message(b"", delivery_mode=mode, priority=mode)
                await channel.default_exchange.publish(message, name)
    async with Broker(settings) as second:
        assert second.event_log is not None
        boot = second.event_log.boot
    events = [event for event in read_events(folder) if event.boot == boot]
    declared = {event.queue: event for event in of_kind(events, "queue_declare")}
    assert {name: event.depth for name, event in declared.items()} == {"kept": 2, "sorted": 2}
    assert {event.reason for event in declared.values()} == {"recovered"}


async def test_names_that_are_no_utf8(broker: Broker, folder: Path) -> None:
    async with await RawClient.open(broker.port) as client:
        # As bytes on the wire: the codec would refuse to write such a name.
        name = b"\xff\xfe"
        arguments = b"\x00\x00" + bytes([len(name)]) + name + b"\x00" + b"\x00\x00\x00\x00"
        payload = b"\x00\x32\x00\x0a" + arguments
        frame = b"\x01\x00\x01" + len(payload).to_bytes(4) + payload + b"\xce"
        await client.send(frame)
        await client.expect(commands.Queue.DeclareOk)
        await client.say_goodbye()
    await broker.stop()
    assert only(end(folder), "queue_declare").queue == "\ufffd\ufffd"


async def test_status_shows_the_log(broker: Broker) -> None:
    statistics = broker.statistics()["event_log"]
    assert isinstance(statistics, dict)
    assert statistics["level"] == "objects"
    assert statistics["events"] == 1


def test_every_kind_of_object_event_has_a_test() -> None:
    """The names are looked for in this file and in those beside it."""
    source = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert [kind.name for kind in OBJECT_KINDS if f'"{kind.name}"' not in source] == []
