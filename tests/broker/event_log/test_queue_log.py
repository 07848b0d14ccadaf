"""What queues do to messages by themselves, as the event log tells it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aio_pika
import pytest
from aio_pika import ExchangeType, Message
from aio_pika.abc import AbstractChannel
from pamqp import commands

from leveret.broker.clock import VirtualClock
from leveret.broker.config import Settings
from leveret.broker.event_log.journal import Journal
from leveret.broker.event_log.messages import MessageLog
from leveret.broker.queues import commands as c
from leveret.protocol.codec import Properties, make, write_properties
from leveret.protocol.lines import ID_BITS
from leveret.protocol.twin import Message as ProtocolMessage
from tests.broker.event_log.reading import read_events
from tests.broker.event_log.telling import Telling
from tests.broker.queues.town import Town, letter
from tests.support.raw_client import RawClient, publish
from tests.support.waiting import wait_until

TTL_MS = 5_000
DEAD: dict[str, Any] = {"x-dead-letter-exchange": "dlx", "x-dead-letter-routing-key": "why"}


async def declare_graveyard(channel: AbstractChannel) -> None:
    exchange = await channel.declare_exchange("dlx", ExchangeType.FANOUT)
    for name in ("dead", "also-dead"):
        await (await channel.declare_queue(name)).bind(exchange)


def ready(told: Telling, queue: str) -> int:
    return int(statistics(told, queue)["messages_ready"])


def statistics(told: Telling, queue: str) -> Any:
    queues: Any = told.broker.vhosts["/"].statistics()["queues"]
    return queues[queue]


def assert_dead(told: Telling, reason: str, size: int) -> None:
    """One died of this and came into both queues of the graveyard under its own number."""
    dead = told.only("dead_letter")
    assert (dead.vhost, dead.queue, dead.exchange, dead.rk) == ("/", "q", "dlx", "why")
    assert (dead.reason, dead.routed, dead.size) == (reason, 2, size)
    buried = told.of("enqueue")
    assert sorted(event.queue for event in buried) == ["also-dead", "dead"]
    for event in buried:
        assert (event.msg, event.reason, event.size) == (dead.msg, "dead_letter", size)
        assert (event.exchange, event.rk) == ("dlx", "why")


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dead_letters", [False, True])
async def test_expiry(
    settings: Settings, clock: VirtualClock, dead_letters: bool, exact: bool
) -> None:
    arguments: dict[str, Any] = {"x-message-ttl": TTL_MS, **(DEAD if dead_letters else {})}
    if exact:
        arguments["x-message-ttl-exact"] = True
    async with Telling(settings, clock) as told, await aio_pika.connect(told.url) as connection:
        channel = await connection.channel()
        await declare_graveyard(channel)
        await channel.declare_queue("q", arguments=arguments)
        await channel.default_exchange.publish(Message(b"abc"), "q")
        clock.advance(TTL_MS / 1000)
        await wait_until(lambda: ready(told, "q") == 0)
        if dead_letters:
            await wait_until(lambda: ready(told, "dead") == 1)
    expired = told.only("expire")
    assert (expired.vhost, expired.queue, expired.size, expired.depth) == ("/", "q", 3, 0)
    assert expired.wait_us == TTL_MS * 1000
    assert expired.msg == told.only("publish").msg == told.only_msg()
    if dead_letters:
        assert_dead(told, "expired", 3)
        assert told.kinds("confirm")[:3] == ["publish", "expire", "dead_letter"]
    else:
        assert told.kinds("confirm") == ["publish", "expire"]


async def test_expiry_of_messages_that_are_on_disk(settings: Settings, clock: VirtualClock) -> None:
    """They are read so that they can be dead-lettered; from anywhere in the queue."""
    arguments: dict[str, Any] = {"x-queue-mode": "lazy", "x-message-ttl-exact": True, **DEAD}
    async with Telling(settings, clock) as told, await RawClient.open(told.broker.port) as client:
        connection = await aio_pika.connect(told.url)
        channel = await connection.channel()
        await declare_graveyard(channel)
        await channel.declare_queue("q", durable=True, arguments=arguments)
        mortal = write_properties(Properties(delivery_mode=2, expiration=str(TTL_MS)))
        await client.send((publish(1, "q", b"x" * 9, header=mortal) + publish(1, "q", b"")) * 30)
        await wait_until(lambda: ready(told, "q") == 60)
        await wait_until(lambda: statistics(told, "q")["backing_queue"]["messages_ready_ram"] == 0)
        clock.advance(TTL_MS / 1000)
        await wait_until(lambda: ready(told, "q") == 30)
        await wait_until(lambda: ready(told, "dead") == 30)
        await connection.close()
    mortals = [event.msg for event in told.of("publish") if event.size]
    expired = told.of("expire")
    assert [event.msg for event in expired] == mortals
    assert {(event.queue, event.size, event.wait_us) for event in expired} == {
        ("q", 9, TTL_MS * 1000)
    }
    assert [event.msg for event in told.of("dead_letter")] == mortals
    assert not told.of("drop")


async def test_a_dead_letter_that_is_tried_again_is_told_once(
    settings: Settings, clock: VirtualClock
) -> None:
    """One of its targets is gone before the commit: another unit is begun without it."""
    journal = Journal(replace(settings, event_log="all"), clock)
    await journal.start()
    async with Town(clock) as town:
        town.message_log = MessageLog(journal)
        town.add("q", message_ttl_ms=TTL_MS, dead_letter_exchange="amq.fanout")
        for name in ("gone", "there"):
            town.topology.bind("amq.fanout", town.add(name).name, "", {})
        told = letter(b"abc")
        told.log_id = journal.now_us() << ID_BITS
        await town.publish("q", told)
        town.is_holding = True
        await town.pass_time(TTL_MS)
        town.topology.queues["gone"].mailbox.put_urgent(c.DeleteNow())
        await town.rest()
        await town.commit_held()
        assert town.count("there") == 0
        await town.commit_held()
        (copy,) = await town.take_all("there")
    await journal.stop()
    events = read_events(settings.data / "events")[1:-1]
    assert [(event.ev, event.queue) for event in events] == [
        ("expire", "q"),
        ("dead_letter", "q"),
        ("enqueue", "there"),
    ]
    # Its life goes on under the same number.
    assert {event.msg for event in events} == {told.log_id} == {copy.log_id}
    assert copy.stamp_us


@asynccontextmanager
async def telling_town(settings: Settings, clock: VirtualClock) -> AsyncIterator[Town]:
    """The log is sealed behind it."""
    journal = Journal(replace(settings, event_log="all"), clock)
    await journal.start()
    async with Town(clock) as town:
        town.message_log = MessageLog(journal)
        yield town
    await journal.stop()


def told_letter(clock: VirtualClock, body: bytes) -> ProtocolMessage:
    message = letter(body)
    message.log_id = clock.now_us() << ID_BITS
    return message


@pytest.mark.parametrize("crashed", [False, True])
async def test_a_target_that_ends_before_it_has_taken_its_dead_letter(
    settings: Settings, clock: VirtualClock, crashed: bool
) -> None:
    async with telling_town(settings, clock) as town:
        town.add("q", message_ttl_ms=TTL_MS, dead_letter_exchange="amq.fanout")
        for name in ("ending", "there"):
            town.topology.bind("amq.fanout", town.add(name).name, "", {})
        await town.publish("q", told_letter(clock, b"abc"))
        # It waits for its store, with what it was sent.
        ending = town.actors["ending"]
        ending._parts_committing += 1
        await town.pass_time(TTL_MS)
        if crashed:
            ending.say_goodbye(crashed=True)
        else:
            town.topology.queues["ending"].mailbox.put_urgent(c.DeleteNow())
        await town.rest()
        assert town.count("there") == 1
    events = read_events(settings.data / "events")[1:-1]
    assert [(event.ev, event.queue, event.reason) for event in events] == [
        ("expire", "q", ""),
        ("dead_letter", "q", "expired"),
        ("enqueue", "ending", "dead_letter"),
        ("enqueue", "there", "dead_letter"),
        ("drop", "ending", "queue_crashed" if crashed else "queue_deleted"),
    ]
    assert len({event.msg for event in events}) == 1


async def test_a_target_that_is_deleted_during_the_commit(
    settings: Settings, clock: VirtualClock
) -> None:
    async with telling_town(settings, clock) as town:
        town.add("q", message_ttl_ms=TTL_MS, dead_letter_exchange="amq.fanout")
        for name in ("ending", "there"):
            town.topology.bind("amq.fanout", town.add(name).name, "", {})
        town.is_holding = True
        await town.publish("q", told_letter(clock, b"abc"))
        await town.pass_time(TTL_MS)
        batch = town.begin_held()
        town.topology.queues["ending"].mailbox.put_urgent(c.DeleteNow())
        await town.rest()
        for call in batch.after:
            call()
        await town.rest()
        assert town.count("there") == 1
    events = read_events(settings.data / "events")[1:-1]
    assert [(event.ev, event.queue) for event in events] == [
        ("expire", "q"),
        ("dead_letter", "q"),
        ("enqueue", "ending"),
        ("enqueue", "there"),
        ("drop", "ending"),
    ]


async def test_a_queue_that_goes_while_exact_times_end(
    settings: Settings, clock: VirtualClock
) -> None:
    """What had expired and waited to be sent on is told, as are the copies."""
    async with telling_town(settings, clock) as town:
        arguments: dict[str, Any] = {
            "message_ttl_ms": TTL_MS,
            "message_ttl_exact": True,
            "dead_letter_exchange": "amq.fanout",
        }
        town.add("q", **arguments)
        town.topology.bind("amq.fanout", town.add("dead").name, "", {})
        town.is_holding = True
        await town.publish("q", told_letter(clock, b"first"))
        await town.pass_time(TTL_MS)
        # Its unit is under way, so that this one must wait.
        await town.publish("q", told_letter(clock, b"other"))
        await town.pass_time(TTL_MS)
        town.topology.queues["q"].mailbox.put_urgent(c.DeleteNow())
        await town.rest()
        await town.commit_held()
        assert town.count("dead") == 2
    events = read_events(settings.data / "events")[1:-1]
    assert len({event.msg for event in events}) == 2
    for number in {event.msg for event in events}:
        life = [event.ev for event in events if event.msg == number]
        assert life == ["expire", "dead_letter", "enqueue"]


async def test_no_time_at_all(settings: Settings) -> None:
    """A TTL of 0 and nobody who takes it."""
    async with Telling(settings) as told, await aio_pika.connect(told.url) as connection:
        channel = await connection.channel()
        await channel.declare_queue("q", arguments={"x-message-ttl": 0})
        await channel.default_exchange.publish(Message(b"abc"), "q")
    assert sorted(told.kinds()) == ["confirm", "expire", "publish"]
    assert told.only("expire").msg == told.only("publish").msg


@pytest.mark.parametrize("dead_letters", [False, True])
async def test_too_many(settings: Settings, dead_letters: bool) -> None:
    arguments: dict[str, Any] = {"x-max-length": 2, **(DEAD if dead_letters else {})}
    async with Telling(settings) as told, await aio_pika.connect(told.url) as connection:
        channel = await connection.channel()
        await declare_graveyard(channel)
        await channel.declare_queue("q", arguments=arguments)
        for body in (b"1", b"22", b"333"):
            await channel.default_exchange.publish(Message(body), "q")
        if dead_letters:
            await wait_until(lambda: ready(told, "dead") == 1)
    first = told.of("publish")[0]
    if dead_letters:
        assert_dead(told, "maxlen", 1)
        assert told.only("dead_letter").msg == first.msg
        assert not told.of("drop")
    else:
        dropped = told.only("drop")
        assert (dropped.msg, dropped.queue, dropped.size) == (first.msg, "q", 1)
        assert (dropped.reason, dropped.depth, dropped.conn) == ("maxlen", 2, 0)


async def test_rejected(settings: Settings) -> None:
    async with Telling(settings) as told, await aio_pika.connect(told.url) as connection:
        channel = await connection.channel()
        await declare_graveyard(channel)
        queue = await channel.declare_queue("q", arguments=DEAD)
        await channel.default_exchange.publish(Message(b"abc"), "q")
        taken = await queue.get()
        assert taken is not None
        await taken.reject(requeue=False)
        await wait_until(lambda: ready(told, "dead") == 1)
        again = await (await channel.get_queue("dead")).get()
        assert again is not None
        await again.ack()
    assert_dead(told, "rejected", 3)
    # Its time in the next queue is counted anew.
    given = told.of("get")[1]
    assert given.wait_us == given.ts - told.only("dead_letter").ts
    assert told.only("ack").queue == "dead"
    assert told.only_msg()


@pytest.mark.parametrize("dead_letters", [False, True])
async def test_it_came_back_too_often(settings: Settings, dead_letters: bool) -> None:
    arguments: dict[str, Any] = {
        "x-queue-type": "quorum",
        "x-delivery-limit": 1,
        **(DEAD if dead_letters else {}),
    }
    async with Telling(settings) as told, await aio_pika.connect(told.url) as connection:
        channel = await connection.channel()
        await declare_graveyard(channel)
        queue = await channel.declare_queue("q", durable=True, arguments=arguments)
        await channel.default_exchange.publish(Message(b"abc"), "q")
        for _ in range(2):
            taken = await queue.get()
            assert taken is not None
            await taken.nack()
        assert await queue.get(fail=False) is None
        if dead_letters:
            await wait_until(lambda: ready(told, "dead") == 1)
    if dead_letters:
        assert_dead(told, "delivery_limit", 3)
        assert told.only("dead_letter").delivery_count == 2
    else:
        dropped = told.only("drop")
        assert (dropped.reason, dropped.queue, dropped.size) == ("delivery_limit", "q", 3)
    assert [event.delivery_count for event in told.of("requeue")] == [1, 2]
    assert told.only_msg()


async def test_a_dead_letter_exchange_that_is_not_there(settings: Settings) -> None:
    async with Telling(settings) as told, await aio_pika.connect(told.url) as connection:
        channel = await connection.channel()
        await channel.declare_queue("q", arguments={**DEAD, "x-max-length": 0})
        await channel.default_exchange.publish(Message(b"abc"), "q")
    dead = told.only("dead_letter")
    assert (dead.routed, dead.exchange, dead.reason) == (0, "dlx", "maxlen")


async def test_a_dead_letter_queue_that_is_full(settings: Settings) -> None:
    limit: dict[str, Any] = {"x-max-length": 1, "x-overflow": "reject-publish"}
    async with Telling(settings) as told, await aio_pika.connect(told.url) as connection:
        channel = await connection.channel()
        exchange = await channel.declare_exchange("dlx", ExchangeType.FANOUT)
        full = await channel.declare_queue("full", arguments=limit)
        await full.bind(exchange)
        queue = await channel.declare_queue("q", arguments=DEAD)
        for body in (b"1", b"22"):
            await channel.default_exchange.publish(Message(body), "q")
            taken = await queue.get()
            assert taken is not None
            await taken.reject()
        await wait_until(lambda: statistics(told, "q")["dead_letter"] == {"rejected": 2})
        await wait_until(lambda: statistics(told, "full")["refuse"])
    dropped = told.only("drop")
    assert (dropped.queue, dropped.reason, dropped.size) == ("full", "refused", 2)


async def test_purge(settings: Settings) -> None:
    async with Telling(settings) as told, await aio_pika.connect(told.url) as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue("q")
        for _ in range(3):
            await channel.default_exchange.publish(Message(b"abc"), "q")
        await queue.purge()
        # There is nothing to tell.
        await queue.purge()
    purged = told.only("purge")
    assert (purged.vhost, purged.queue, purged.n, purged.depth) == ("/", "q", 3, 0)
    assert (purged.user, purged.conn, purged.ch) == ("guest", 1, 1)


async def test_a_queue_that_is_deleted(settings: Settings) -> None:
    """What was ready is told by the queue; what was delivered, by its channel."""
    async with Telling(settings) as told, await aio_pika.connect(told.url) as connection:
        channel, other = await connection.channel(), await connection.channel()
        queue = await channel.declare_queue("q")
        for body in (b"1", b"22", b"333"):
            await channel.default_exchange.publish(Message(body), "q")
        assert await queue.get() is not None
        await (await other.get_queue("q")).delete(if_unused=False, if_empty=False)
        # A later one of this name has nothing to do with it.
        await channel.declare_queue("q")
        await channel.default_exchange.publish(Message(b"4444"), "q")
        assert await queue.get() is not None
        await channel.close()
    first, second, third, fourth = [event.msg for event in told.of("publish")]
    dropped = told.of("drop")
    assert {event.reason for event in dropped} == {"queue_deleted"}
    assert [event.msg for event in dropped] == [second, third, first]
    assert (dropped[0].queue, dropped[0].depth, dropped[-1].ch) == ("q", 0, 1)
    assert told.only("requeue").msg == fourth


async def test_memory_and_disk(settings: Settings) -> None:
    """Messages that leave memory keep their numbers, and it is known since when they wait."""
    async with Telling(settings) as told, await RawClient.open(told.broker.port) as client:
        await client.call(1, make(commands.Queue.Declare, queue="q"), commands.Queue.DeclareOk)
        await client.send(publish(1, "q", b"abc") * 50)
        await wait_until(lambda: ready(told, "q") == 50)
        await told.broker.policies.set("/", "lazy", "^q$", {"queue-mode": "lazy"})
        await wait_until(lambda: statistics(told, "q")["backing_queue"]["messages_ready_ram"] == 0)
        for tag in range(1, 51):
            await client.call(1, make(commands.Basic.Get, queue="q"), commands.Basic.GetOk)
            await client.tell(1, make(commands.Basic.Ack, delivery_tag=tag))
        await client.call(1, make(commands.Channel.Close), commands.Channel.CloseOk)
    out, back = told.of("paged_out"), told.of("paged_in")
    assert {(event.vhost, event.queue) for event in out + back} == {("/", "q")}
    assert sum(event.n for event in out) == sum(event.n for event in back) == 50
    assert all(event.size == 3 * event.n and event.depth is not None for event in out + back)
    published = {event.msg: event for event in told.of("publish")}
    assert [event.msg for event in told.of("get")] == list(published)
    assert [event.msg for event in told.of("ack")] == list(published)
    for event in told.of("get"):
        assert event.wait_us == event.ts - published[event.msg].ts
