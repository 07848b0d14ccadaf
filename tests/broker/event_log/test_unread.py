"""No message waits for the log: what leaves its queue unread is told as a number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import aio_pika
import pytest
from pamqp import commands

from leveret.broker.clock import VirtualClock
from leveret.broker.config import Settings
from leveret.broker.event_log.journal import Journal
from leveret.broker.event_log.messages import MessageLog
from leveret.broker.event_log.queue_log import UNREAD_S, QueueLog
from leveret.protocol.codec import Properties, make, write_properties
from tests.broker.event_log.reading import only, read_events
from tests.broker.event_log.telling import Telling
from tests.support.raw_client import RawClient, publish
from tests.support.waiting import wait_until

TTL_MS = 5_000


def statistics(told: Telling) -> Any:
    queues: Any = told.broker.vhosts["/"].statistics()["queues"]
    return queues["q"]


async def fill(told: Telling, client: RawClient, count: int, *, header: bytes = b"") -> None:
    frames = publish(1, "q", b"abc", header=header) if header else publish(1, "q", b"abc")
    await client.send(frames * count)
    await wait_until(lambda: statistics(told)["messages_ready"] == count)


async def page_out(told: Telling, **policy: object) -> None:
    """Nothing of the queue is left in memory."""
    await told.broker.policies.set("/", "p", "^q$", {"queue-mode": "lazy", **policy})
    await wait_until(lambda: statistics(told)["backing_queue"]["messages_ready_ram"] == 0)


async def test_too_many_on_disk_are_dropped_unread(settings: Settings) -> None:
    async with Telling(settings) as told, await RawClient.open(told.broker.port) as client:
        await client.call(1, make(commands.Queue.Declare, queue="q"), commands.Queue.DeclareOk)
        await fill(told, client, 50)
        await page_out(told)
        await told.broker.policies.set("/", "p", "^q$", {"queue-mode": "lazy", "max-length": 20})
        await wait_until(lambda: statistics(told)["messages_ready"] == 20)
        assert statistics(told)["drop"] == 30
        await client.call(1, make(commands.Channel.Close), commands.Channel.CloseOk)
    dropped = told.only("drop")
    assert (dropped.queue, dropped.reason, dropped.n) == ("q", "maxlen", 30)
    assert (dropped.msg, dropped.depth) == (0, 20)


async def test_what_is_in_memory_is_told_one_by_one(settings: Settings) -> None:
    async with Telling(settings) as told, await RawClient.open(told.broker.port) as client:
        await client.call(1, make(commands.Queue.Declare, queue="q"), commands.Queue.DeclareOk)
        await fill(told, client, 50)
        await told.broker.policies.set("/", "p", "^q$", {"max-length": 20})
        await wait_until(lambda: statistics(told)["messages_ready"] == 20)
        await client.call(1, make(commands.Channel.Close), commands.Channel.CloseOk)
    published = [event.msg for event in told.of("publish")]
    assert [event.msg for event in told.of("drop")] == published[:30]


async def test_numbers_are_told_a_few_times_a_second(
    settings: Settings, clock: VirtualClock
) -> None:
    """Or a full queue on disk would make a line of every message that comes."""
    journal = Journal(replace(settings, event_log="all"), clock)
    await journal.start()
    ready = 20
    told = QueueLog(MessageLog(journal), "/", "q", clock, lambda: ready)
    for count in (1, 2, 3):
        told.left("drop", "maxlen", count, ())
    told.left("expire", "", 5, ())
    ready = 10
    clock.advance(UNREAD_S)
    told.left("drop", "maxlen", 7, ())
    # The queue goes; there is nothing more then.
    told.tell_unread()
    told.tell_unread()
    clock.advance(UNREAD_S)
    await journal.stop()
    events = read_events(settings.data / "events")[1:-1]
    assert [(event.ev, event.reason, event.n, event.depth) for event in events] == [
        ("drop", "maxlen", 6, 10),
        ("expire", "", 5, 10),
        ("drop", "maxlen", 7, 10),
    ]


async def test_numbers_are_of_all_messages_where_a_sample_is_told(settings: Settings) -> None:
    sample: dict[str, Any] = {"event_log": "sampled", "event_log_sample": 0.000001}
    async with (
        Telling(settings, **sample) as told,
        await RawClient.open(told.broker.port) as client,
    ):
        await client.call(1, make(commands.Queue.Declare, queue="q"), commands.Queue.DeclareOk)
        await fill(told, client, 50)
        await page_out(told, **{"max-length": 20})
        await wait_until(lambda: statistics(told)["messages_ready"] == 20)
        await client.call(1, make(commands.Channel.Close), commands.Channel.CloseOk)
    # Those that were still in memory may have been chosen, or, here, not.
    assert sum(event.n for event in told.of("drop")) in range(1, 31)
    assert not told.of("publish")


async def test_expired_on_disk(settings: Settings, clock: VirtualClock) -> None:
    arguments: dict[str, Any] = {"x-queue-mode": "lazy", "x-message-ttl-exact": True}
    header = write_properties(Properties(delivery_mode=2, expiration=str(TTL_MS)))
    async with Telling(settings, clock) as told, await RawClient.open(told.broker.port) as client:
        connection = await aio_pika.connect(told.url)
        await (await connection.channel()).declare_queue("q", durable=True, arguments=arguments)
        await fill(told, client, 30, header=header)
        clock.advance(TTL_MS / 1000)
        await wait_until(lambda: statistics(told)["expire"] == 30)
        await connection.close()
    expired = told.of("expire")
    assert sum(event.n for event in expired) == 30
    assert {(event.queue, event.msg, event.wait_us) for event in expired} == {("q", 0, None)}
    assert expired[-1].depth == 0


@pytest.mark.parametrize("is_paged", [False, True])
async def test_a_large_queue_that_is_deleted(settings: Settings, is_paged: bool) -> None:
    """The loop does not wait for all of it, and nothing is read."""
    count = 600
    async with Telling(settings) as told, await RawClient.open(told.broker.port) as client:
        await client.call(1, make(commands.Queue.Declare, queue="q"), commands.Queue.DeclareOk)
        await fill(told, client, count)
        if is_paged:
            await page_out(told)
        deleted = await client.call(
            1, make(commands.Queue.Delete, queue="q"), commands.Queue.DeleteOk
        )
        assert deleted.message_count == count
        await client.call(1, make(commands.Channel.Close), commands.Channel.CloseOk)
    published = [event.msg for event in told.of("publish")]
    dropped = [event.msg for event in told.of("drop")]
    assert dropped == ([] if is_paged else published[:500])
    gone = only(read_events(settings.data / "events"), "queue_delete")
    assert gone.n == count
