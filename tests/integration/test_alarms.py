"""Alarms as clients see them: publishers wait, are told once, and go on; all others go on anyway.

The broker runs in the test's own loop, on memory and disk that the test decides.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sqlite3
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aio_pika
import pika  # type: ignore[import-untyped]
import pytest
from pamqp import commands

from leveret.broker.alarms import DISK, DISK_CHECK_S, MEMORY
from leveret.broker.clock import VirtualClock
from leveret.broker.config import Settings
from leveret.broker.memory_monitor import INTERVAL_S, Probes
from leveret.broker.server import Broker
from leveret.protocol.codec import make, method_frame
from leveret.protocol.field_table import table_from_python
from leveret.storage import database
from tests.support.broker_process import running_broker
from tests.support.raw_client import (
    FRAME_MAX,
    PERSISTENT,
    PROTOCOL_HEADER,
    Hangup,
    RawClient,
    publish,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(60)

LIMIT = 100_000_000


class Machine:
    """Memory and disk of a machine; what is used is what the test says."""

    def __init__(self) -> None:
        self.used = 0
        self.free = 100 * LIMIT

    @property
    def probes(self) -> Probes:
        return Probes(
            used_memory=lambda: self.used,
            total_memory=lambda: LIMIT,
            free_disk=lambda folder: self.free,
            release_memory=lambda: None,
        )


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
async def broker(
    settings: Settings, clock: VirtualClock, machine: Machine
) -> AsyncIterator[Broker]:
    """Its time is the test's."""
    settings = replace(settings, memory_high_watermark=1.0)
    async with Broker(settings, clock, probes=machine.probes) as running:
        yield running


async def open_client(
    port: int, *, wants_notices: bool = True, heartbeat: int = 0, channels: int = 1
) -> RawClient:
    client = await RawClient.connect(port)
    capabilities = {"connection.blocked": wants_notices}
    start_ok = make(
        commands.Connection.StartOk,
        client_properties=table_from_python({"capabilities": capabilities}),
        mechanism="PLAIN",
        response="\x00guest\x00guest",
        locale="en_US",
    )
    tune_ok = make(
        commands.Connection.TuneOk, channel_max=2047, frame_max=FRAME_MAX, heartbeat=heartbeat
    )
    opening = make(commands.Connection.Open, virtual_host="/")
    await client.send(PROTOCOL_HEADER)
    await client.expect(commands.Connection.Start)
    await client.send(method_frame(0, start_ok))
    await client.expect(commands.Connection.Tune)
    await client.send(method_frame(0, tune_ok) + method_frame(0, opening))
    await client.expect(commands.Connection.OpenOk)
    for number in range(1, channels + 1):
        await client.open_channel(number)
    return client


async def declare(client: RawClient, queue: str, *, durable: bool = False) -> None:
    declaration = make(commands.Queue.Declare, queue=queue, durable=durable, arguments={})
    await client.call(1, declaration, commands.Queue.DeclareOk)


def connection(broker: Broker, client: RawClient) -> dict[str, Any]:
    connections: Any = broker.statistics()["connections"]
    [found] = [known for known in connections if f":{client.port} ->" in known["name"]]
    return dict(found)


def state(broker: Broker, client: RawClient) -> str:
    return str(connection(broker, client)["state"])


def queue(broker: Broker, name: str) -> dict[str, Any]:
    vhosts: Any = broker.statistics()["vhosts"]
    return dict(vhosts[0]["queues"][name])


def ready(broker: Broker, name: str) -> int:
    return int(queue(broker, name)["messages_ready"])


async def turns() -> None:
    """Let everything happen that is going to: what must not, has not happened after it."""
    for _ in range(100):
        await asyncio.sleep(0)


# --- blocked and unblocked ---------------------------------------------------------------------


async def test_a_publisher_is_blocked_at_its_first_publish(broker: Broker) -> None:
    """[22]: until then it is only about to be."""
    async with await open_client(broker.port) as client:
        await declare(client, "q")
        assert state(broker, client) == "running"
        broker.alarms.set("test", MEMORY)
        assert state(broker, client) == "blocking"
        # Whatever is no publish is served.
        await client.call(1, make(commands.Queue.Purge, queue="q"), commands.Queue.PurgeOk)

        await client.send(publish(1, "q", b"one"))
        blocked = await client.expect(commands.Connection.Blocked)
        assert blocked.reason == "low on memory"
        assert state(broker, client) == "blocked"
        await wait_until(lambda: ready(broker, "q") == 1)

        received = connection(broker, client)["recv_oct"]
        await client.send(publish(1, "q", b"two") * 10)
        await turns()
        assert connection(broker, client)["recv_oct"] == received
        assert ready(broker, "q") == 1

        broker.alarms.clear("test")
        await client.expect(commands.Connection.Unblocked)
        await wait_until(lambda: ready(broker, "q") == 11)
        assert state(broker, client) == "running"
        await client.say_goodbye()


async def test_one_notice_each_whatever_the_number_of_alarms(broker: Broker) -> None:
    """[23]"""
    async with await open_client(broker.port) as client:
        await declare(client, "q")
        broker.alarms.set("first", DISK)
        await client.send(publish(1, "q", b""))
        assert (await client.expect(commands.Connection.Blocked)).reason == "low on disk"
        broker.alarms.set("second", MEMORY)
        broker.alarms.clear("first")
        await turns()
        assert state(broker, client) == "blocked"
        broker.alarms.clear("second")
        # Set and cleared before the reader comes to it: all the same to the client.
        broker.alarms.set("third", MEMORY)
        await turns()
        assert state(broker, client) == "blocked"
        broker.alarms.clear("third")
        await client.expect(commands.Connection.Unblocked)

        broker.alarms.set("again", MEMORY)
        await client.send(publish(1, "q", b""))
        await client.expect(commands.Connection.Blocked)
        broker.alarms.clear("again")
        await client.expect(commands.Connection.Unblocked)
        await client.say_goodbye()


async def test_a_client_without_the_capability_is_told_nothing(broker: Broker) -> None:
    async with await open_client(broker.port, wants_notices=False) as client:
        await declare(client, "q")
        broker.alarms.set("test", MEMORY)
        await client.send(publish(1, "q", b"") * 2)
        await wait_until(lambda: state(broker, client) == "blocked")
        broker.alarms.clear("test")
        await wait_until(lambda: ready(broker, "q") == 2)
        # The answer is the next thing it hears.
        await client.call(1, make(commands.Queue.Purge, queue="q"), commands.Queue.PurgeOk)


async def test_consumers_drain_meanwhile(broker: Broker) -> None:
    """Also on a connection that was opened under the alarm."""
    async with await open_client(broker.port) as publisher:
        await declare(publisher, "q")
        await publisher.send(publish(1, "q", b"..") * 500)
        await wait_until(lambda: ready(broker, "q") == 500)
        broker.alarms.set("test", MEMORY)
        await publisher.send(publish(1, "q", b".."))
        await publisher.expect(commands.Connection.Blocked)
        async with await open_client(broker.port) as consumer:
            qos = make(commands.Basic.Qos, prefetch_count=10)
            await consumer.call(1, qos, commands.Basic.QosOk)
            consume = make(commands.Basic.Consume, queue="q", arguments={})
            await consumer.call(1, consume, commands.Basic.ConsumeOk)
            for _ in range(501):
                delivered = await consumer.expect(commands.Basic.Deliver)
                ack = make(commands.Basic.Ack, delivery_tag=delivered.delivery_tag)
                await consumer.tell(1, ack)
            assert state(broker, consumer) == "blocking"
            await wait_until(lambda: queue(broker, "q")["messages"] == 0)
        assert state(broker, publisher) == "blocked"


async def test_confirms_and_deliveries_reach_a_blocked_connection(broker: Broker) -> None:
    async with (
        await open_client(broker.port, channels=2) as client,
        await open_client(broker.port) as other,
    ):
        await declare(client, "q", durable=True)
        await client.call(1, make(commands.Confirm.Select), commands.Confirm.SelectOk)
        consume = make(commands.Basic.Consume, queue="q", no_ack=True, arguments={})
        await client.call(2, consume, commands.Basic.ConsumeOk)
        broker.alarms.set("test", MEMORY)
        await client.send(publish(1, "q", b"mine", header=PERSISTENT))
        await client.expect(commands.Connection.Blocked)
        names = {(await client.receive()).method.name for _ in range(2)}
        assert names == {"Basic.Deliver", "Basic.Ack"}
        await other.send(publish(1, "q", b"another's"))
        await client.expect(commands.Basic.Deliver)


async def test_heartbeats_while_blocked(broker: Broker, clock: VirtualClock) -> None:
    """[23]: ours are sent; the client's are not missed until it is read again."""
    async with await open_client(broker.port, heartbeat=2) as client:
        await declare(client, "q")
        broker.alarms.set("test", MEMORY)
        await client.send(publish(1, "q", b""))
        await client.expect(commands.Connection.Blocked)
        for _ in range(100):
            clock.advance(1)
        await turns()
        assert state(broker, client) == "blocked"

        broker.alarms.clear("test")
        await client.expect(commands.Connection.Unblocked)
        assert client.heartbeats >= 99
        # From here on silence counts.
        for _ in range(8):
            clock.advance(1)
        with pytest.raises(Hangup):
            await client.receive()


async def test_a_blocked_client_whose_socket_is_lost_is_forgotten(
    broker: Broker, clock: VirtualClock
) -> None:
    """Nobody reads it: a heartbeat that cannot be sent tells."""
    async with await open_client(broker.port, heartbeat=2) as client:
        await declare(client, "q")
        broker.alarms.set("test", MEMORY)
        await client.send(publish(1, "q", b""))
        await client.expect(commands.Connection.Blocked)
        client.reset()
        async with asyncio.timeout(10):
            while broker.statistics()["connections"]:
                clock.advance(1)
                await asyncio.sleep(0.005)
    assert not broker.alarms._waiting


async def test_a_broker_with_blocked_publishers_can_be_stopped(
    settings: Settings, machine: Machine
) -> None:
    async with Broker(settings, probes=machine.probes) as broker:
        client = await open_client(broker.port)
        await declare(client, "q")
        broker.alarms.set("test", MEMORY)
        await client.send(publish(1, "q", b""))
        await client.expect(commands.Connection.Blocked)

        async def agree() -> None:
            closed = await client.expect(commands.Connection.Close)
            assert closed.reply_code == 320
            await client.tell(0, make(commands.Connection.CloseOk))

        async with asyncio.TaskGroup() as both:
            both.create_task(agree())
            both.create_task(broker.stop())
        client.close()


async def test_flow_is_reported_for_a_second(broker: Broker, clock: VirtualClock) -> None:
    """[24]; an alarm counts for more."""
    async with await open_client(broker.port) as client:
        await declare(client, "q")
        await client.send(publish(1, "q", b"." * 100) * 2000)
        await wait_until(lambda: ready(broker, "q") == 2000)
        # Credit came back while the clock stood still.
        assert state(broker, client) == "flow"
        broker.alarms.set("test", MEMORY)
        assert state(broker, client) == "blocking"
        broker.alarms.clear("test")
        clock.advance(0.9)
        assert state(broker, client) == "flow"
        clock.advance(0.1)
        assert state(broker, client) == "running"
        # Nobody was told.
        await client.call(1, make(commands.Queue.Purge, queue="q"), commands.Queue.PurgeOk)


# --- what sets them off ------------------------------------------------------------------------


async def test_memory_and_disk_that_are_short(
    broker: Broker, clock: VirtualClock, machine: Machine
) -> None:
    async with await open_client(broker.port) as client:
        await declare(client, "q")
        machine.used, machine.free = LIMIT + 1, 1
        clock.advance(max(INTERVAL_S, DISK_CHECK_S))
        statistics: dict[str, Any] = broker.statistics()
        assert {alarm["resource"] for alarm in statistics["alarms"]} == {"memory", "disk"}
        assert (statistics["memory"]["used"], statistics["memory"]["limit"]) == (LIMIT + 1, LIMIT)
        assert statistics["disk"] == {"free": 1, "limit": 50_000_000}
        await client.send(publish(1, "q", b""))
        blocked = await client.expect(commands.Connection.Blocked)
        assert blocked.reason == "low on memory & disk"
        machine.used, machine.free = 0, 100 * LIMIT
        clock.advance(max(INTERVAL_S, DISK_CHECK_S))
        await client.expect(commands.Connection.Unblocked)
        assert broker.statistics()["alarms"] == []


async def test_writes_that_fail_stop_confirms_and_publishers(
    broker: Broker, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And when they work again nothing is missing."""
    fails = threading.Event()
    commit = database.commit

    def failing(*arguments: Any) -> Any:
        if fails.is_set():
            raise sqlite3.OperationalError("database or disk is full")
        return commit(*arguments)

    monkeypatch.setattr(database, "commit", failing)
    async with await open_client(broker.port) as client:
        await declare(client, "q", durable=True)
        await client.call(1, make(commands.Confirm.Select), commands.Confirm.SelectOk)
        fails.set()
        await client.send(publish(1, "q", b"1", header=PERSISTENT))
        await wait_until(lambda: broker.alarms.active)
        await client.send(publish(1, "q", b"2", header=PERSISTENT))
        assert (await client.expect(commands.Connection.Blocked)).reason == "low on disk"
        await client.send(publish(1, "q", b"3", header=PERSISTENT))
        clock.advance(10)
        await turns()
        assert broker.alarms.active
        fails.clear()
        async with asyncio.timeout(10):
            # It tries again after a while, of the broker's time.
            while broker.alarms.active:
                clock.advance(1)
                await asyncio.sleep(0.005)
        # What the client hears: that it may go on, and confirms of all three.
        unblocked, confirmed = 0, 0
        while confirmed < 3:
            method = (await client.receive()).method
            if isinstance(method, commands.Connection.Unblocked):
                unblocked += 1
            else:
                assert isinstance(method, commands.Basic.Ack)
                confirmed = method.delivery_tag or 0
        assert unblocked == 1
        assert ready(broker, "q") == 3


# --- real clients ------------------------------------------------------------------------------


async def test_aio_pika_waits_and_goes_on(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="aiormq")

    def said(text: str) -> int:
        return sum(text in record.getMessage() for record in caplog.records)

    async with await aio_pika.connect(broker.url) as publisher:
        channel = await publisher.channel()
        declared = await channel.declare_queue("q", durable=True)

        async def send(number: int) -> None:
            message = aio_pika.Message(
                b"%d" % number, delivery_mode=aio_pika.DeliveryMode.PERSISTENT
            )
            await channel.default_exchange.publish(message, routing_key="q")

        await send(0)
        broker.alarms.set("test", MEMORY)
        await send(1)
        await wait_until(lambda: said("was blocked by: 'low on memory'"))
        waiting = [asyncio.create_task(send(number)) for number in range(2, 10)]
        async with await aio_pika.connect(broker.url) as consumer:
            other = await (await consumer.channel()).get_queue(declared.name)
            bodies = []
            async with other.iterator() as messages:
                async for message in messages:
                    await message.ack()
                    bodies.append(message.body)
                    if len(bodies) == 2:
                        assert not any(task.done() for task in waiting)
                        broker.alarms.clear("test")
                    if len(bodies) == 10:
                        break
        await asyncio.gather(*waiting)
        assert sorted(bodies) == [b"%d" % number for number in range(10)]
        assert (said("was blocked by"), said("was unblocked")) == (1, 1)


def publish_blocked(url: str, until_blocked: threading.Event) -> list[str]:
    """In a thread of its own: pika's blocking connection. Returns what its callbacks heard."""
    heard: list[str] = []

    def on_blocked(_: Any, frame: Any) -> None:
        heard.append(f"blocked: {frame.method.reason}")
        until_blocked.set()

    connection = pika.BlockingConnection(pika.URLParameters(url))
    try:
        connection.add_on_connection_blocked_callback(on_blocked)
        connection.add_on_connection_unblocked_callback(lambda *_: heard.append("unblocked"))
        channel = connection.channel()
        channel.queue_declare("q")
        channel.confirm_delivery()
        channel.basic_publish("", "q", b"0")
        while not heard:
            connection.process_data_events(time_limit=0.1)
        # Waits for its confirm, through the whole alarm.
        channel.basic_publish("", "q", b"1")
        channel.basic_publish("", "q", b"2")
        # Its callbacks run here and nowhere else.
        while "unblocked" not in heard:
            connection.process_data_events(time_limit=0.1)
    finally:
        connection.close()
    return heard


async def test_pika_hears_of_it_and_goes_on(broker: Broker) -> None:
    broker.alarms.set("test", DISK)
    until_blocked = threading.Event()
    thread = asyncio.create_task(asyncio.to_thread(publish_blocked, broker.url, until_blocked))
    await wait_until(until_blocked.is_set)
    assert ready(broker, "q") == 1
    broker.alarms.clear("test")
    assert await thread == ["blocked: low on disk", "unblocked"]
    assert ready(broker, "q") == 3


# --- paging ------------------------------------------------------------------------------------


async def consume_numbers(client: RawClient, name: str, count: int) -> list[int]:
    consume = make(commands.Basic.Consume, queue=name, no_ack=True, arguments={})
    await client.call(1, consume, commands.Basic.ConsumeOk)
    return [int((await client.receive()).body[:8]) for _ in range(count)]


@pytest.mark.parametrize("durable", [True, False], ids=["durable", "transient"])
async def test_a_backlog_is_paged_out_and_drains_in_order(
    broker: Broker, clock: VirtualClock, machine: Machine, durable: bool
) -> None:
    count, size = 20_000, 200
    header = PERSISTENT if durable else b"\x00\x00"

    def in_memory() -> int:
        kept: Any = queue(broker, "q")["backing_queue"]
        return int(kept["messages_ready_ram"])

    async with await open_client(broker.port) as client:
        await declare(client, "q", durable=durable)
        for first in range(0, count, 1000):
            numbers = range(first, first + 1000)
            await client.send(
                b"".join(
                    publish(1, "q", b"%08d".ljust(size, b".") % number, header=header)
                    for number in numbers
                )
            )
            # A second for each thousand, or there would be no rates.
            clock.advance(1)
        await wait_until(lambda: ready(broker, "q") == count)
        assert in_memory() == count

        machine.used = LIMIT * 99 // 100
        kept = [count]
        while kept[-1] > count // 10:
            clock.advance(INTERVAL_S)
            await turns()
            await wait_until(lambda: not broker.vhosts["/"].has_unsaved)
            kept.append(in_memory())
            assert len(kept) < 40, kept
        # A bit at a time, as the rates of a queue at rest sink.
        assert kept == sorted(kept, reverse=True)
        assert not broker.alarms.active

        machine.used = 0
        assert await consume_numbers(client, "q", count) == list(range(count))
        for _ in range(4):
            clock.advance(INTERVAL_S)
            await turns()
        target = queue(broker, "q")["backing_queue"]["target_ram_count"]
        assert target == math.inf


@pytest.mark.slow
async def test_a_small_machine_takes_a_backlog_larger_than_its_memory(tmp_path: Path) -> None:
    """The process itself, and its own memory: what does not fit is paged out, nothing is lost."""
    count, size = 200_000, 1000
    with running_broker(tmp_path, "--memory-high-watermark", "120MiB") as process:
        statm = Path(f"/proc/{process.pid}/statm")
        highest = 0

        def resident_bytes() -> int:
            return int(statm.read_text().split()[1]) * 4096

        async def watch() -> None:
            nonlocal highest
            while True:
                highest = max(highest, resident_bytes())
                await asyncio.sleep(0.1)

        watching = asyncio.create_task(watch())
        async with await open_client(process.port) as client:
            await declare(client, "q")
            frames = b""
            for number in range(count):
                frames += publish(1, "q", b"%08d".ljust(size, b".") % number)
                if len(frames) < 200_000 and number < count - 1:
                    continue
                rest, frames = frames, b""
                while rest:
                    taken = client.send_some(rest)
                    rest = rest[taken:]
                    await asyncio.sleep(0 if taken else 0.01)
            while True:
                method = make(commands.Queue.Declare, queue="q", passive=True, arguments={})
                await client.tell(1, method)
                answer = (await client.receive(60)).method
                while isinstance(
                    answer, commands.Connection.Blocked | commands.Connection.Unblocked
                ):
                    answer = (await client.receive(60)).method
                assert isinstance(answer, commands.Queue.DeclareOk)
                if answer.message_count == count:
                    break
            assert await consume_numbers(client, "q", count) == list(range(count))
        watching.cancel()
        # What comes between two looks is not known before the second.
        assert highest < 140 << 20
        assert "bug" not in process.read_log()
