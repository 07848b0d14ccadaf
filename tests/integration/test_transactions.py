"""Transactions over several queues of a whole broker: all of one happens, or nothing.

The broker runs in the test's own loop, so that its commits can be held up and its queues made to
crash; clients are real, and so are the files.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator, Iterator

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage, AbstractQueue
from pamqp.common import FieldValue

from leveret.broker.config import Settings
from leveret.broker.server import Broker
from tests.support.commit_gate import Gate, commit_gate
from tests.support.held_queues import HeldQueues, queue_mailbox
from tests.support.waiting import wait_until

INBOX = "inbox"
TARGETS = ("first", "second", "third")


@pytest.fixture
def gate() -> Iterator[Gate]:
    with commit_gate() as gate:
        yield gate


@pytest.fixture
def held_queues(monkeypatch: pytest.MonkeyPatch) -> HeldQueues:
    return HeldQueues(monkeypatch)


@pytest.fixture
async def channel(held_queues: HeldQueues, broker: Broker) -> AsyncIterator[AbstractChannel]:
    """Of a connection beside the one that is transactional; it has declared the queues."""
    async with await aio_pika.connect(broker.url) as connection:
        channel = await connection.channel()
        for name in (INBOX, *TARGETS):
            await channel.declare_queue(name, durable=True)
        for number in (b"1", b"2"):
            await publish(channel, INBOX, number)
        yield channel


async def publish(channel: AbstractChannel, queue: str, body: bytes) -> None:
    message = aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
    await channel.default_exchange.publish(message, routing_key=queue)


class Work:
    """Takes a message from the inbox and publishes to all targets, in one transaction."""

    def __init__(self, channel: AbstractChannel) -> None:
        self.channel = channel
        self._transaction = channel.transaction()

    async def select(self) -> None:
        await self._transaction.select()

    async def begin(self) -> None:
        await self.select()
        inbox = await self.channel.get_queue(INBOX, ensure=False)
        taken = await inbox.get(timeout=10)
        for name in TARGETS:
            await publish(self.channel, name, b"from " + taken.body)
        await taken.ack()

    async def commit(self) -> None:
        await self._transaction.commit()


@pytest.fixture
async def work(broker: Broker, channel: AbstractChannel) -> AsyncIterator[Work]:
    async with await aio_pika.connect(broker.url) as connection:
        work = Work(await connection.channel(publisher_confirms=False))
        await work.begin()
        yield work


def on_disk(settings: Settings) -> dict[str, int]:
    """Messages by queue, as another process would find them."""
    connection = sqlite3.connect(settings.data / "vhosts" / "%2F.db")
    try:
        return dict(
            connection.execute(
                "SELECT q.name, count(m.key) FROM queue q LEFT JOIN message m ON m.key >> 40 = q.id"
                " GROUP BY q.id"
            ).fetchall()
        )
    finally:
        connection.close()


def counts(inbox: int, *targets: int) -> dict[str, int]:
    return dict(zip((INBOX, *TARGETS), (inbox, *targets), strict=True))


async def drain(channel: AbstractChannel, name: str) -> list[tuple[bytes, bool]]:
    queue = await channel.get_queue(name, ensure=False)
    found = []
    while (message := await queue.get(fail=False, no_ack=True, timeout=10)) is not None:
        found.append((message.body, bool(message.redelivered)))
    return found


async def expect_failure(commit: asyncio.Future[None]) -> None:
    with pytest.raises(aio_pika.exceptions.ChannelPreconditionFailed) as caught:
        await asyncio.wait_for(commit, 10)
    assert "partial tx completion" in str(caught.value)


async def assert_nothing_happened(channel: AbstractChannel, *targets: str) -> None:
    """What was taken from the inbox is there again."""
    for name in targets:
        assert await drain(channel, name) == [], name
    assert await drain(channel, INBOX) == [(b"1", True), (b"2", False)]


def crash(broker: Broker, name: str) -> None:
    queue_mailbox(broker, name).put_urgent("nothing that a queue understands")


async def wait_restarted(broker: Broker, name: str) -> None:
    """A queue that has crashed is there again, and answers."""
    vhost = broker.vhosts["/"]
    queue = vhost.topology.queues[name]
    await wait_until(lambda: vhost._supervisor.actors[queue].mailbox is queue.mailbox)


@pytest.fixture
def crashes_are_meant(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "leveret.broker.queues.supervisor")


# --- all of it -----------------------------------------------------------------------------------


async def test_others_see_all_of_a_transaction_or_nothing(
    broker: Broker, settings: Settings, channel: AbstractChannel, work: Work, gate: Gate
) -> None:
    seen: list[str] = []

    async def consume(queue: AbstractQueue) -> None:
        async def on_message(message: AbstractIncomingMessage) -> None:
            seen.append(queue.name)

        await queue.consume(on_message, no_ack=True)

    for name in TARGETS:
        await consume(await channel.get_queue(name, ensure=False))
    gate.shut()
    commit = asyncio.ensure_future(work.commit())
    await wait_until(lambda: gate.commits)
    # Whatever a queue had for its consumers has been sent: this goes the same way, later.
    await channel.set_qos(prefetch_count=10)
    assert seen == []
    assert not commit.done()
    assert on_disk(settings) == counts(2, 0, 0, 0)
    gate.open()
    await commit
    assert on_disk(settings)[INBOX] == 1
    await wait_until(lambda: len(seen) == len(TARGETS))
    assert sorted(seen) == sorted(TARGETS)
    assert await drain(channel, INBOX) == [(b"2", False)]


async def test_commit_ok_means_that_it_is_on_disk(
    settings: Settings, channel: AbstractChannel, work: Work
) -> None:
    assert on_disk(settings) == counts(2, 0, 0, 0)
    await work.commit()
    assert on_disk(settings) == counts(1, 1, 1, 1)


async def test_what_a_transaction_brought_is_new_after_a_stop_in_order(
    settings: Settings,
) -> None:
    """And what it settled is gone."""
    async with Broker(settings) as broker, await aio_pika.connect(broker.url) as connection:
        channel = await connection.channel()
        for name in (INBOX, *TARGETS):
            mode = "lazy" if name == "third" else "default"
            await channel.declare_queue(name, durable=True, arguments={"x-queue-mode": mode})
        for number in (b"1", b"2"):
            await publish(channel, INBOX, number)
        work = Work(await connection.channel(publisher_confirms=False))
        await work.begin()
        await work.commit()
    async with Broker(settings) as broker, await aio_pika.connect(broker.url) as connection:
        channel = await connection.channel()
        for name in TARGETS:
            assert await drain(channel, name) == [(b"from 1", False)], name
        assert await drain(channel, INBOX) == [(b"2", False)]


async def test_publishers_of_a_queue_wait_for_a_commit_and_no_longer(
    broker: Broker, channel: AbstractChannel, work: Work, gate: Gate
) -> None:
    gate.shut()
    commit = asyncio.ensure_future(work.commit())
    await wait_until(lambda: gate.commits)
    behind = asyncio.ensure_future(publish(channel, "first", b"behind"))
    await wait_until(lambda: queue_mailbox(broker, "first").ordinary)
    gate.open()
    await asyncio.gather(commit, behind)
    assert await drain(channel, "first") == [(b"from 1", False), (b"behind", False)]


# --- nothing of it -------------------------------------------------------------------------------


async def test_a_queue_that_is_deleted_in_the_middle(
    broker: Broker, channel: AbstractChannel, work: Work, held_queues: HeldQueues
) -> None:
    held_queues.hold(broker, "second")
    commit = asyncio.ensure_future(work.commit())
    await wait_until(lambda: queue_mailbox(broker, "second").ordinary)
    vhost = broker.vhosts["/"]
    delete = asyncio.ensure_future(vhost.delete_queues([vhost.topology.queues["second"]]))
    await wait_until(lambda: queue_mailbox(broker, "second").urgent)
    held_queues.release()
    await delete
    await expect_failure(commit)
    await assert_nothing_happened(channel, "first", "third")


@pytest.mark.usefixtures("crashes_are_meant")
@pytest.mark.parametrize("culprit", ["second", INBOX])
async def test_a_queue_that_crashes_before_it_has_answered(
    broker: Broker, channel: AbstractChannel, work: Work, held_queues: HeldQueues, culprit: str
) -> None:
    held_queues.hold(broker, culprit)
    commit = asyncio.ensure_future(work.commit())
    await wait_until(lambda: queue_mailbox(broker, culprit).ordinary)
    crash(broker, culprit)
    held_queues.release()
    await expect_failure(commit)
    await wait_restarted(broker, culprit)
    for name in TARGETS:
        assert await drain(channel, name) == [], name
    assert [body for body, _ in await drain(channel, INBOX)] == [b"1", b"2"]


@pytest.mark.usefixtures("crashes_are_meant")
async def test_a_queue_that_crashes_when_it_has_joined(
    broker: Broker, channel: AbstractChannel, work: Work, held_queues: HeldQueues
) -> None:
    """The commit has not begun: another queue has not answered yet."""
    held_queues.hold(broker, "second")
    commit = asyncio.ensure_future(work.commit())
    await wait_until(lambda: queue_mailbox(broker, "second").ordinary)
    await wait_until(lambda: not len(queue_mailbox(broker, "first")))
    before = queue_mailbox(broker, "first")
    crash(broker, "first")
    await wait_until(lambda: queue_mailbox(broker, "first") is not before)
    held_queues.release()
    await expect_failure(commit)
    await wait_restarted(broker, "first")
    await assert_nothing_happened(channel, *TARGETS)


@pytest.mark.usefixtures("crashes_are_meant")
async def test_a_queue_whose_delivery_was_acked_has_crashed_since(
    broker: Broker, channel: AbstractChannel, work: Work
) -> None:
    """It delivers the message again: publishing what was made of it would do it twice."""
    crash(broker, INBOX)
    before = queue_mailbox(broker, INBOX)
    await wait_until(lambda: queue_mailbox(broker, INBOX) is not before)
    await expect_failure(asyncio.ensure_future(work.commit()))
    await wait_restarted(broker, INBOX)
    for name in TARGETS:
        assert await drain(channel, name) == [], name
    assert [body for body, _ in await drain(channel, INBOX)] == [b"1", b"2"]


async def test_a_queue_that_is_full(broker: Broker, channel: AbstractChannel) -> None:
    """x-overflow: reject-publish; the others have room, and get nothing either."""
    full = await channel.declare_queue(
        "full", durable=True, arguments={"x-max-length": 1, "x-overflow": "reject-publish"}
    )
    await publish(channel, "full", b"0")
    async with await aio_pika.connect(broker.url) as connection:
        work = Work(await connection.channel(publisher_confirms=False))
        await work.begin()
        await publish(work.channel, "full", b"too much")
        await expect_failure(asyncio.ensure_future(work.commit()))
        await assert_nothing_happened(channel, *TARGETS)
    assert await drain(channel, full.name) == [(b"0", False)]


async def test_a_place_that_was_not_taken_is_free_again(
    broker: Broker, channel: AbstractChannel
) -> None:
    arguments: dict[str, FieldValue] = {"x-max-length": 1, "x-overflow": "reject-publish"}
    for name in ("full", "roomy"):
        await channel.declare_queue(name, durable=True, arguments=arguments)
    await publish(channel, "full", b"0")
    async with await aio_pika.connect(broker.url) as connection:
        work = Work(await connection.channel(publisher_confirms=False))
        await work.select()
        for name in ("roomy", "full"):
            await publish(work.channel, name, b"in a transaction")
        await expect_failure(asyncio.ensure_future(work.commit()))
    await publish(channel, "roomy", b"1")
    assert await drain(channel, "roomy") == [(b"1", False)]


async def test_one_place_is_given_once(
    broker: Broker, channel: AbstractChannel, held_queues: HeldQueues
) -> None:
    """To several transactions that are committed at the same time, and a publisher beside them."""
    arguments: dict[str, FieldValue] = {"x-max-length": 1, "x-overflow": "reject-publish"}
    await channel.declare_queue("full", durable=True, arguments=arguments)
    async with await aio_pika.connect(broker.url) as connection:
        works = [Work(await connection.channel(publisher_confirms=False)) for _ in range(3)]
        for work in works:
            await work.select()
            await publish(work.channel, "full", b"too much for two of them")
        held_queues.hold(broker, "full")
        commits = [asyncio.ensure_future(work.commit()) for work in works]
        mailbox = queue_mailbox(broker, "full")
        await wait_until(lambda: len(mailbox.ordinary) == len(works))
        plain = asyncio.ensure_future(publish(channel, "full", b"too much"))
        await wait_until(lambda: len(mailbox.ordinary) > len(works))
        held_queues.release()
        ends = await asyncio.gather(*commits, plain, return_exceptions=True)
    assert [end is None for end in ends] == [True, False, False, False]
    assert len(await drain(channel, "full")) == 1


# --- too late ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("crashes_are_meant")
@pytest.mark.parametrize("culprit", ["first", INBOX])
async def test_a_queue_that_crashes_while_it_is_committed(
    broker: Broker,
    settings: Settings,
    channel: AbstractChannel,
    work: Work,
    gate: Gate,
    culprit: str,
) -> None:
    """It may be on disk already, so it happens: the queue finds it there when it is back."""
    gate.shut()
    commit = asyncio.ensure_future(work.commit())
    await wait_until(lambda: gate.commits)
    before = queue_mailbox(broker, culprit)
    crash(broker, culprit)
    await wait_until(lambda: queue_mailbox(broker, culprit) is not before)
    gate.open()
    await asyncio.wait_for(commit, 10)
    await wait_restarted(broker, culprit)
    assert on_disk(settings) == counts(1, 1, 1, 1)
    for name in TARGETS:
        assert [body for body, _ in await drain(channel, name)] == [b"from 1"], name
    assert [body for body, _ in await drain(channel, INBOX)] == [b"2"]


async def test_a_client_that_hangs_up_while_it_is_committed(
    broker: Broker, settings: Settings, channel: AbstractChannel, gate: Gate
) -> None:
    connection = await aio_pika.connect(broker.url)
    work = Work(await connection.channel(publisher_confirms=False))
    await work.begin()
    gate.shut()
    commit = asyncio.ensure_future(work.commit())
    await wait_until(lambda: gate.commits)
    await connection.transport.connection.close(ConnectionError("cut"))  # type: ignore[union-attr]
    await asyncio.wait([commit])
    assert commit.cancelled() or commit.exception() is not None
    gate.open()
    await wait_until(lambda: on_disk(settings) == counts(1, 1, 1, 1))
    assert await drain(channel, INBOX) == [(b"2", False)]
