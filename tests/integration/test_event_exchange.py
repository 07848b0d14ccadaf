"""amq.rabbitmq.event: what consumers of RabbitMQ's event exchange see, frame by frame.

Headers, their types and their order are those of RabbitMQ 3.10.8 with rabbitmq_event_exchange,
which was asked the same. The broker runs in the test's own loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import aio_pika
import pytest
from pamqp import commands
from pamqp.base import Frame

from leveret.broker import event_exchange
from leveret.broker.clock import VirtualClock
from leveret.broker.config import Settings
from leveret.broker.event_exchange import EVENT_EXCHANGE
from leveret.broker.events import Event
from leveret.broker.node import NODE_NAME
from leveret.broker.server import Broker
from leveret.protocol import access
from leveret.protocol.codec import make, read_properties
from leveret.protocol.field_table import Field, Table, table_from_python
from tests.support.raw_client import RawClient, handshake, publish
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(60)

NONE = Field("A", [])
GUEST, INTERNAL = Field("S", "guest"), Field("S", "rmq-internal")


class Told(NamedTuple):
    kind: str
    headers: Table
    header: bytes
    body: bytes

    @property
    def plain(self) -> dict[str, object]:
        """Without types, and without when."""
        return {k: f.value for k, f in self.headers.items() if k != "timestamp_in_ms"}


class Watcher:
    """A client that consumes events."""

    def __init__(self, client: RawClient) -> None:
        self._client = client

    async def next(self) -> Told:
        received = await self._client.receive()
        method = received.method
        assert isinstance(method, commands.Basic.Deliver), method
        assert method.exchange == EVENT_EXCHANGE
        headers = read_properties(received.header).headers
        assert headers is not None
        return Told(method.routing_key or "", headers, received.header, received.body)

    async def until(self, kind: str) -> Told:
        while (told := await self.next()).kind != kind:
            pass
        return told


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(port=0, data=tmp_path, heartbeat=0, event_log="off")


@pytest.fixture
async def broker(settings: Settings) -> AsyncIterator[Broker]:
    async with Broker(settings, VirtualClock(1_700_000_000.5)) as broker:
        yield broker


async def watch(client: RawClient, pattern: str) -> Watcher:
    queue = make(commands.Queue.Declare, queue="events", durable=True, arguments={})
    await client.call(1, queue, commands.Queue.DeclareOk)
    bind = make(commands.Queue.Bind, queue="events", exchange=EVENT_EXCHANGE, routing_key=pattern)
    await client.call(1, bind, commands.Queue.BindOk)
    consume = make(commands.Basic.Consume, queue="events", consumer_tag="watch", no_ack=True)
    await client.call(1, consume, commands.Basic.ConsumeOk)
    return Watcher(client)


@pytest.fixture
async def watching(broker: Broker) -> AsyncIterator[RawClient]:
    async with await RawClient.open(broker.port) as client:
        yield client


@pytest.fixture
async def client(broker: Broker) -> AsyncIterator[RawClient]:
    async with await RawClient.open(broker.port) as client:
        yield client


async def test_the_message_is_rabbitmqs(watching: RawClient, client: RawClient) -> None:
    events = await watch(watching, "queue.*")
    arguments = table_from_python({"x-max-length": 10, "x-overflow": "drop-head"})
    declare = make(commands.Queue.Declare, queue="q", durable=True, arguments=arguments)
    await client.call(1, declare, commands.Queue.DeclareOk)
    told = await events.next()
    assert (told.kind, told.body) == ("queue.created", b"")
    terms = [
        Field("S", f'{{<<"x-max-length">>,{_integer(arguments)},10}}'),
        Field("S", '{<<"x-overflow">>,longstr,<<"drop-head">>}'),
    ]
    assert list(told.headers.items()) == [
        ("user_who_performed_action", GUEST),
        ("exclusive", Field("t", False)),
        ("owner_pid", Field("S", "")),
        ("arguments", Field("A", terms)),
        ("auto_delete", Field("t", False)),
        ("durable", Field("t", True)),
        ("name", Field("S", "q")),
        ("vhost", Field("S", "/")),
        ("timestamp_in_ms", Field("l", 1_700_000_000_500)),
    ]
    properties = read_properties(told.header)
    assert (properties.delivery_mode, properties.timestamp) == (2, 1_700_000_000)
    assert properties.content_type is None
    delete = make(commands.Queue.Delete, queue="q")
    await client.call(1, delete, commands.Queue.DeleteOk)
    told = await events.next()
    assert (told.kind, list(told.headers)) == (
        "queue.deleted",
        ["user_who_performed_action", "name", "vhost", "timestamp_in_ms"],
    )
    assert told.headers["user_who_performed_action"] == GUEST


def _integer(arguments: Table) -> str:
    return {"I": "signedint", "l": "long", "b": "byte", "s": "short"}[arguments["x-max-length"].tag]


async def test_exchanges_and_bindings(watching: RawClient, client: RawClient) -> None:
    events = await watch(watching, "#")
    # The watcher's own binding is the first thing it hears of.
    told = await events.until("binding.created")
    assert told.plain["source_name"] == EVENT_EXCHANGE
    await events.until("consumer.created")
    declare = make(
        commands.Exchange.Declare, exchange="x", exchange_type="direct", auto_delete=True
    )
    await client.call(1, declare, commands.Exchange.DeclareOk)
    told = await events.next()
    assert told.kind == "exchange.created"
    assert told.plain == {
        "user_who_performed_action": "guest",
        "policy": "",
        "arguments": [],
        "internal": False,
        "auto_delete": True,
        "durable": False,
        "type": "direct",
        "name": "x",
        "vhost": "/",
    }
    bind = make(commands.Queue.Bind, queue="events", exchange="x", routing_key="k")
    await client.call(1, bind, commands.Queue.BindOk)
    made = await events.next()
    assert made.kind == "binding.created"
    assert made.headers["arguments"] == NONE
    assert made.plain == {
        "user_who_performed_action": "guest",
        "vhost": "/",
        "arguments": [],
        "routing_key": "k",
        "destination_kind": "queue",
        "destination_name": "events",
        "source_kind": "exchange",
        "source_name": "x",
    }
    unbind = make(commands.Queue.Unbind, queue="events", exchange="x", routing_key="k")
    await client.call(1, unbind, commands.Queue.UnbindOk)
    assert await events.next() == made._replace(kind="binding.deleted")
    # It lived by that binding.
    told = await events.next()
    assert (told.kind, told.plain["name"]) == ("exchange.deleted", "x")


async def test_the_life_of_a_connection(watching: RawClient, broker: Broker) -> None:
    events = await watch(watching, "#")
    await events.until("consumer.created")
    async with await RawClient.open(broker.port) as client:
        ends = f"127.0.0.1:{client.port} -> 127.0.0.1:{broker.port}"
        login = await events.next()
        assert (login.kind, login.headers["peer_host"]) == (
            "user.authentication.success",
            Field("S", "{127,0,0,1}"),
        )
        assert (login.plain["name"], login.plain["connection_name"]) == ("guest", ends)
        opened = await events.next()
        assert opened.kind == "connection.created"
        assert opened.plain["name"] == ends
        assert opened.plain["protocol"] == "{0,9,1}"
        assert opened.headers["client_properties"] == NONE
        assert opened.headers["connected_at"] == Field("l", 1_700_000_000_500)
        assert (opened.plain["node"], opened.plain["vhost"]) == (NODE_NAME, "/")
        channel = await events.next()
        assert (channel.kind, channel.plain["name"]) == ("channel.created", f"{ends} (1)")
        assert channel.plain["connection"] == opened.plain["pid"]
        declare = make(commands.Queue.Declare, queue="mine", exclusive=True, arguments={})
        await client.call(1, declare, commands.Queue.DeclareOk)
        queue = await events.next()
        assert (queue.plain["owner_pid"], queue.plain["exclusive"]) == (opened.plain["pid"], True)
        consume = make(commands.Basic.Consume, queue="mine", consumer_tag="c", arguments={})
        await client.call(1, consume, commands.Basic.ConsumeOk)
        consumer = await events.next()
        assert (consumer.kind, consumer.plain) == (
            "consumer.created",
            {
                "user_who_performed_action": "guest",
                "arguments": [],
                "prefetch_count": 0,
                "queue": "mine",
                "vhost": "/",
                "channel": channel.plain["pid"],
                "ack_required": True,
                "exclusive": False,
                "consumer_tag": "c",
            },
        )
        await client.say_goodbye()
    ends_with = [await events.next() for _ in range(4)]
    assert [told.kind for told in ends_with] == [
        "consumer.deleted",
        "channel.closed",
        "queue.deleted",
        "connection.closed",
    ]
    assert ends_with[1].plain["pid"] == channel.plain["pid"]
    # Nobody asked for its end.
    assert ends_with[2].headers["user_who_performed_action"] == INTERNAL
    assert ends_with[3].plain["pid"] == opened.plain["pid"]


async def test_a_login_that_is_refused(watching: RawClient, broker: Broker) -> None:
    events = await watch(watching, "user.authentication.*")
    async with await RawClient.connect(broker.port) as client:
        header, start_ok, _ = handshake()
        await client.send(header)
        await client.expect(commands.Connection.Start)
        await client.send(start_ok.replace(b"guest\x00guest", b"guest\x00wrong"))
        told = await events.next()
    assert (told.kind, told.plain["name"]) == ("user.authentication.failure", "guest")
    error = told.headers["error"].value
    assert isinstance(error, list)
    assert bytes(code.value for code in error) == b"user 'guest' - invalid credentials"


async def test_administration(watching: RawClient, broker: Broker) -> None:
    events = await watch(watching, "#")
    await events.until("consumer.created")
    await broker.users.add("joe", "x", ["management"])
    await broker.users.change_password("joe", "y")
    await broker.policies.set("/", "p", "^q$", {"max-length": 5}, priority=3)
    await broker.policies.delete("/", "p")
    await broker.operator_policies.set("/", "o", "^q$", {"max-length": 5})
    await broker.operator_policies.delete("/", "o")
    await broker.add_vhost("v")
    await broker.limits.set_vhost("v", {"max-queues": 3})
    await broker.limits.clear_vhost("v")
    await broker.limits.set_user("joe", {"max-channels": 2})
    await broker.limits.clear_user("joe")
    await broker.delete_vhost("v")
    await broker.users.delete("joe")
    broker.alarms.set("a disk", "disk")
    broker.alarms.set("another disk", "disk")
    broker.alarms.clear("a disk")
    broker.alarms.clear("another disk")
    told: dict[str, Told] = {}
    for kind in (
        "user.created",
        "user.tags.set",
        "user.password.changed",
        "policy.set",
        "policy.cleared",
        "parameter.set",
        "policy.set",
        "parameter.cleared",
        "operator.policy.cleared",
        "vhost.created",
        "parameter.set",
        "vhost.limits.set",
        "parameter.cleared",
        "vhost.limits.cleared",
        "user.limits.set",
        "user.limits.cleared",
        "vhost.deleted",
        "user.deleted",
        "alarm.set",
        "alarm.cleared",
    ):
        event = await events.next()
        assert event.kind == kind
        told.setdefault(kind, event)
    assert list(told["policy.set"].headers.items())[:-1] == [
        ("apply-to", Field("S", "all")),
        ("priority", Field("l", 3)),
        ("definition", Field("F", {"max-length": Field("l", 5)})),
        ("pattern", Field("S", "^q$")),
        ("user_who_performed_action", INTERNAL),
        ("vhost", Field("S", "/")),
        ("name", Field("S", "p")),
    ]
    assert told["user.tags.set"].headers["tags"] == Field("A", [Field("S", "management")])
    assert told["parameter.set"].plain["component"] == "operator_policy"
    assert told["vhost.limits.set"].headers["max-queues"] == Field("l", 3)
    assert told["user.limits.set"].plain["username"] == "joe"
    assert told["alarm.set"].plain == {"source": "disk", "node": NODE_NAME}


async def test_nobody_bound_nobody_listens(broker: Broker, watching: RawClient) -> None:
    assert not broker.events.is_heard
    await watch(watching, "queue.*")
    assert broker.events.is_heard
    unbind = make(
        commands.Queue.Unbind, queue="events", exchange=EVENT_EXCHANGE, routing_key="queue.*"
    )
    await watching.call(1, unbind, commands.Queue.UnbindOk)
    assert not broker.events.is_heard


async def test_bindings_and_events_survive_a_restart(settings: Settings) -> None:
    async with Broker(settings) as broker, await aio_pika.connect(broker.url) as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue("events", durable=True)
        await queue.bind(EVENT_EXCHANGE, "vhost.*")
        await broker.add_vhost("first")
    async with Broker(settings) as broker:
        assert broker.events.is_heard
        await broker.add_vhost("second")
        async with await aio_pika.connect(broker.url) as connection:
            queue = await (await connection.channel()).get_queue("events")
            messages = [await queue.get(no_ack=True) for _ in range(2)]
        assert [message and message.headers["name"] for message in messages] == ["first", "second"]


async def test_clients_may_not_publish_to_it(client: RawClient) -> None:
    await client.send(publish(1, "queue.created", b"lie", exchange=EVENT_EXCHANGE))
    closed = await client.expect(commands.Channel.Close)
    assert (closed.reply_code, closed.method_id) == (403, 40)


async def test_it_can_be_elsewhere_or_nowhere(settings: Settings) -> None:
    async with Broker(replace(settings, event_exchange_vhost="ops")) as broker:
        ops = await broker.add_vhost("ops")
        assert EVENT_EXCHANGE in ops.topology.exchanges
        assert EVENT_EXCHANGE not in broker.vhosts["/"].topology.exchanges
    async with Broker(replace(settings, event_exchange="off")) as broker:
        assert EVENT_EXCHANGE not in broker.vhosts["/"].topology.exchanges


async def test_events_that_come_too_fast_are_dropped_and_counted(
    watching: RawClient, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_exchange, "BACKLOG", 3)
    events = await watch(watching, "test.*")
    for number in range(5):
        broker.events.notify("test.event", {"number": number})
    assert [(await events.next()).plain for _ in range(3)] == [{"number": n} for n in range(3)]
    exchange = broker.vhosts["/"].event_exchange
    assert exchange is not None
    assert exchange.dropped == 2
    # There is room again.
    broker.events.notify("test.event", {"number": 5.5})
    assert (await events.next()).headers["number"] == Field("f", 5.5)


async def test_a_listener_that_fails_keeps_nobody(broker: Broker) -> None:
    heard: list[Event] = []

    def fail(event: object) -> None:
        raise RuntimeError

    broker.events.subscribe(fail)
    broker.events.subscribe(heard.append)
    broker.events.notify("test.event", {})
    broker.events.unsubscribe(fail)
    await wait_until(lambda: [event.kind for event in heard] == ["test.event"])


async def test_an_access_ticket_is_given_to_whoever_asks(client: RawClient) -> None:
    request: Frame = make(access.Request, realm="/data", active=True, read=True)
    ticket = await client.call(1, request, access.RequestOk)
    assert dict(ticket) == {"ticket": 1}
    await client.tell(1, make(access.RequestOk, ticket=1))
    closed = await client.expect(commands.Connection.Close)
    assert (closed.reply_code, closed.class_id, closed.method_id) == (503, 30, 11)
