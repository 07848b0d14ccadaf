"""Which messages the event log tells of, and that a message keeps its number."""

from __future__ import annotations

import os
from collections import Counter
from functools import partial

import aio_pika
import pytest
from aio_pika import DeliveryMode, ExchangeType, Message
from pamqp import commands

from leveret.broker.clock import VirtualClock
from leveret.broker.config import Settings
from leveret.broker.event_log.numbering import Numbering
from leveret.protocol.codec import make, method_frame
from leveret.protocol.lines import ID_BITS
from tests.broker.event_log.disk import Disk
from tests.broker.event_log.reading import read_events
from tests.broker.event_log.telling import Telling
from tests.support.raw_client import RawClient, publish
from tests.support.waiting import wait_until

MANY = 20_000


@pytest.mark.parametrize("share", [0.01, 0.3, 0.9])
@pytest.mark.parametrize("run", [1, 7, 1_000])
def test_the_share_of_messages_is_about_right(share: float, run: int) -> None:
    """However they come: five standard deviations either way."""
    numbering = Numbering(share)
    chosen = 0
    for _ in range(MANY // run):
        found = numbering.choose(run, 1)
        if found is not None:
            _, places = found
            assert places is not None
            assert places == sorted(set(places))
            assert 0 <= places[0] <= places[-1] < run
            chosen += len(places)
    count = MANY // run * run
    assert abs(chosen - count * share) < 5 * (count * share * (1 - share)) ** 0.5


def test_none_and_all() -> None:
    assert Numbering(0).choose(1 << 40, 1) is None
    assert Numbering(1).choose(3, 5) == (5 << ID_BITS, None)


def test_numbers_are_never_given_twice() -> None:
    """Nor when more come in a microsecond than it has numbers, nor if the clock stands or goes
    back."""
    numbering = Numbering(1)
    last = 0
    for count, now_us in ((5_000, 100), (5_000, 100), (1, 101), (10, 50), (1, 1_000)):
        found = numbering.choose(count, now_us)
        assert found is not None
        assert found[0] > last
        last = found[0] + count - 1
    assert last >> ID_BITS == 1_000


async def test_waiting_is_told_rightly_after_the_clock_was_set_back(
    settings: Settings, clock: VirtualClock
) -> None:
    """Numbers then go on behind the newest event, and no longer tell when their message came."""
    day = settings.data / "events" / "date=2099-01-01"
    day.mkdir(parents=True)
    line = '{"ts":1,"seq":1,"boot":"x","ev":"broker_stop"}\n'
    (day / "x-000001.jsonl").write_text(line)
    later = int(clock.now()) + 70 * 365 * 86_400
    os.utime(day / "x-000001.jsonl", (later, later))
    async with (
        Telling(settings, event_log="all", clock=clock) as told,
        await RawClient.open(told.broker.port) as client,
    ):
        await client.call(1, make(commands.Queue.Declare, queue="q"), commands.Queue.DeclareOk)
        await client.call(1, make(commands.Confirm.Select), commands.Confirm.SelectOk)
        await client.send(publish(1, "q", b"x"))
        await client.expect(commands.Basic.Ack)
        clock.advance(2)
        await client.send(method_frame(1, make(commands.Basic.Get, queue="q", no_ack=True)))
        await client.expect(commands.Basic.GetOk)
    (got,) = told.of("get")
    assert got.msg >> ID_BITS > later * 1_000_000
    assert got.wait_us == 2_000_000


def all_seen(seen: Counter[bool]) -> bool:
    return seen[True] == 500


async def test_a_sampled_message_is_told_from_beginning_to_end(settings: Settings) -> None:
    """And of others there is nothing; in runs, with fanout and requeues."""
    async with (
        Telling(settings, event_log="sampled", event_log_sample=0.2) as told,
        await aio_pika.connect(told.url) as connection,
        await RawClient.open(told.broker.port) as client,
    ):
        channel = await connection.channel()
        exchange = await channel.declare_exchange("all", ExchangeType.FANOUT)
        for name in ("a", "b"):
            await (await channel.declare_queue(name)).bind(exchange)
        await client.call(1, make(commands.Confirm.Select), commands.Confirm.SelectOk)
        await client.send(publish(1, "", b"x", exchange="all") * 500)
        tag = 0
        while tag < 500:
            tag = (await client.expect(commands.Basic.Ack)).delivery_tag
        for name in ("a", "b"):
            queue, seen = await channel.get_queue(name), Counter[bool]()

            async def answer(
                message: aio_pika.abc.AbstractIncomingMessage, seen: Counter[bool] = seen
            ) -> None:
                if message.redelivered:
                    await message.ack()
                else:
                    await message.nack()
                # Behind the answer, or the connection may be closed before it.
                seen[bool(message.redelivered)] += 1

            await queue.consume(answer)
            await wait_until(partial(all_seen, seen))
    numbers = {event.msg for event in told.of("publish")}
    # Chosen at random, many neighbours at a time: five hundred of them make no average.
    assert 0 < len(numbers) < 500
    lives = {(msg, queue): [] for msg in numbers for queue in "ab"}  # type: ignore[var-annotated]
    for event in told.events:
        if event.ev in ("publish", "confirm"):
            continue
        lives[event.msg, event.queue].append(event.ev)
    whole = ["enqueue", "deliver", "nack", "requeue", "deliver", "ack"]
    assert all(life == whole for life in lives.values())
    # A confirm is told if it is for a message that is.
    confirmed = told.of("confirm")
    assert 0 < len(confirmed) <= len(numbers)
    assert sum(event.n for event in confirmed) == len(numbers)


async def test_numbers_last_over_a_restart(settings: Settings, clock: VirtualClock) -> None:
    """Those of persistent messages, and since when they wait."""
    async with Telling(settings, clock) as before, await aio_pika.connect(before.url) as connection:
        channel = await connection.channel()
        await channel.declare_queue("q", durable=True)
        for size in (10, 10_000):
            message = Message(b"x" * size, delivery_mode=DeliveryMode.PERSISTENT)
            await channel.default_exchange.publish(message, "q")
        clock.advance(2)
    clock.advance(60)
    async with Telling(settings, clock) as after, await aio_pika.connect(after.url) as connection:
        channel = await connection.channel()
        queue = await channel.get_queue("q")
        await channel.default_exchange.publish(Message(b""), "q")
        for _ in range(3):
            taken = await queue.get()
            assert taken is not None
            await taken.ack()
    old = [event.msg for event in before.of("publish")]
    new = after.only("publish").msg
    assert new not in old
    assert [event.msg for event in after.of("get")] == [*old, new]
    assert [event.msg for event in after.of("ack")] == [*old, new]
    assert [event.wait_us for event in after.of("get")] == [62_000_000, 62_000_000, 0]
    boots = {event.boot for event in before.events}, {event.boot for event in after.events}
    assert boots[0].isdisjoint(boots[1])


async def test_a_clock_that_was_set_back_between_two_starts(settings: Settings) -> None:
    numbers = []
    for clock in (VirtualClock(start=2_000_000_000.0), VirtualClock(start=1_900_000_000.0)):
        async with Telling(settings, clock) as told, await aio_pika.connect(told.url) as connection:
            channel = await connection.channel()
            await channel.declare_queue("q")
            for _ in range(3):
                await channel.default_exchange.publish(Message(b""), "q")
        numbers += [event.msg for event in told.of("publish")]
    assert numbers == sorted(set(numbers))
    assert len(numbers) == 6


async def test_what_was_not_told_stays_untold(settings: Settings) -> None:
    """Messages of a time without a log have no number, and get none later."""
    async with (
        Telling(settings, event_log="objects") as silent,
        await aio_pika.connect(silent.url) as connection,
    ):
        channel = await connection.channel()
        await channel.declare_queue("q", durable=True)
        await channel.default_exchange.publish(Message(b"", delivery_mode=2), "q")
    async with Telling(settings) as told, await aio_pika.connect(told.url) as connection:
        queue = await (await connection.channel()).get_queue("q")
        taken = await queue.get()
        assert taken is not None
        await taken.ack()
    assert not silent.events
    assert told.kinds("paged_in") == []


async def test_shed_events_are_counted(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages go on while the disk does not; what is published then is not told later either."""
    disk = Disk(monkeypatch)
    telling = Telling(settings, event_log_buffer=1024)
    async with telling as told, await RawClient.open(told.broker.port) as client:
        journal = told.broker.event_log
        assert journal is not None
        await client.call(1, make(commands.Queue.Declare, queue="q"), commands.Queue.DeclareOk)
        get = make(commands.Basic.Get, queue="q", no_ack=True)
        disk.hold()
        await client.send(publish(1, "q", b"1") * 10)
        await client.call(1, get, commands.Basic.GetOk)
        await wait_until(lambda: journal.buffer.is_shut)
        before = journal.statistics()
        await client.send(publish(1, "q", b"22") * 3)
        for _ in range(4):
            await client.call(1, get, commands.Basic.GetOk)
        shed = journal.statistics()
        disk.release()
        await wait_until(lambda: not journal.buffer.is_shut)
        for _ in range(8):
            await client.call(1, get, commands.Basic.GetOk)
        await client.send(publish(1, "q", b"333"))
        await client.call(1, get, commands.Basic.GetOk)
    # Three publishes, and four gets.
    assert shed["shed"] == 7
    assert before["shed"] == 0
    every = read_events(telling.settings.data / "events")
    gaps = [event.n for event in every if event.ev == "log_gap"]
    assert gaps == [7]
    assert [event.size for event in told.of("publish")] == [*[1] * 10, 3]
    assert [event.size for event in told.of("get")] == [*[1] * 6, 3]
