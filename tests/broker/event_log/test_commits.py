"""Commits whose channel ends before it hears of them: the log tells what became of each message."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pamqp import commands

from leveret.broker.channel.delivery_timeout import DeliveriesTimedOut
from leveret.broker.config import Settings
from leveret.broker.event_log.schema import Event
from leveret.protocol.codec import make
from leveret.protocol.field_table import Field
from tests.broker.event_log.lives import Lives
from tests.broker.event_log.telling import Telling
from tests.support.commit_gate import Gate, commit_gate
from tests.support.held_queues import HeldQueues, channels, queue_mailbox
from tests.support.raw_client import PERSISTENT, RawClient, publish
from tests.support.waiting import wait_until


@pytest.fixture
def gate() -> Iterator[Gate]:
    with commit_gate() as gate:
        yield gate


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldQueues]:
    held = HeldQueues(monkeypatch)
    yield held
    held.release()


async def declare(client: RawClient, *names: str) -> None:
    for name in names:
        declaration = make(commands.Queue.Declare, queue=name, durable=True)
        await client.call(1, declaration, commands.Queue.DeclareOk)


async def begin(client: RawClient) -> None:
    """Two are published; of four deliveries two are acked, out of order, and one is rejected."""
    await declare(client, "in", "out")
    await client.call(1, make(commands.Tx.Select), commands.Tx.SelectOk)
    await client.send(publish(1, "in", b"i", header=PERSISTENT) * 4)
    await client.call(1, make(commands.Tx.Commit), commands.Tx.CommitOk)
    for _ in range(4):
        await client.call(1, make(commands.Basic.Get, queue="in"), commands.Basic.GetOk)
    for tag in (4, 2):
        await client.tell(1, make(commands.Basic.Ack, delivery_tag=tag))
    await client.tell(1, make(commands.Basic.Reject, delivery_tag=3, requeue=False))
    await client.send(publish(1, "out", b"oo", header=PERSISTENT) * 2)


async def time_out(told: Telling, client: RawClient) -> None:
    """The delivery that is left ends the channel."""
    channels(told.broker)[0].mailbox.put_urgent(DeliveriesTimedOut(100))
    await client.expect(commands.Channel.Close)


def ready(told: Telling) -> dict[str, int]:
    queues = told.broker.vhosts["/"].statistics()["queues"]
    assert isinstance(queues, dict)
    return {name: each["messages_ready"] for name, each in queues.items()}


def whole(told: Telling) -> Lives:
    lives = Lives()
    lives.check(told.events)
    return lives


def numbers(events: list[Event]) -> list[int]:
    return [event.msg for event in events]


async def test_a_commit_that_has_begun_acks(settings: Settings, gate: Gate) -> None:
    """Once it is on disk, and not before; all else that the channel held goes back at once."""
    async with Telling(settings) as told, await RawClient.open(told.broker.port) as client:
        await begin(client)
        before = len(gate.commits)
        gate.shut()
        await client.tell(1, make(commands.Tx.Commit))
        await wait_until(lambda: len(gate.commits) > before)
        await time_out(told, client)
        await wait_until(lambda: ready(told) == {"in": 2, "out": 0})
        assert told.broker.event_log is not None
        lines = told.broker.event_log.events
        gate.open()
        await wait_until(lambda: ready(told) == {"in": 2, "out": 2})
        assert told.broker.event_log.events == lines + 2
    got = {event.dtag: event for event in told.of("get")}
    acked, back = told.of("ack"), told.of("requeue")
    assert {event.dtag: event.msg for event in acked} == {tag: got[tag].msg for tag in (2, 4)}
    assert all(event.hold_us == event.ts - got[event.dtag].ts for event in acked)
    assert numbers(back) == [got[1].msg, got[3].msg]
    assert {event.reason for event in back} == {"channel_closed"}
    assert not told.of("drop")
    lives = whole(told)
    assert (lives.ready("in"), lives.ready("out")) == (2, 2)


async def test_a_commit_that_has_not_begun_is_withdrawn(
    settings: Settings, held: HeldQueues
) -> None:
    """What it published is dropped, what it acked goes back, also to others."""
    async with Telling(settings) as told, await RawClient.open(told.broker.port) as client:
        await begin(client)
        held.hold(told.broker, "out")
        await client.tell(1, make(commands.Tx.Commit))
        await wait_until(lambda: queue_mailbox(told.broker, "out").ordinary)
        await time_out(told, client)
        await client.open_channel(2)
        held.release()
        for _ in range(4):
            await wait_until(lambda: ready(told)["in"])
            get = make(commands.Basic.Get, queue="in", no_ack=True)
            await client.call(2, get, commands.Basic.GetOk)
        assert ready(told) == {"in": 0, "out": 0}
    published = [event for event in told.of("publish") if event.queue == "out"]
    dropped = told.of("drop")
    assert numbers(dropped) == numbers(published)
    assert {(event.queue, event.rk, event.reason) for event in dropped} == {
        ("out", "out", "channel_closed")
    }
    assert numbers(told.of("requeue")) == numbers(told.of("get")[:4])
    assert not told.of("ack")
    whole(told)


async def test_what_comes_back_is_told_before_others_get_it(
    settings: Settings, held: HeldQueues
) -> None:
    """A queue that has not answered yet gives its messages back before the commit has ended."""
    async with Telling(settings) as told, await RawClient.open(told.broker.port) as client:
        await begin(client)
        held.hold(told.broker, "out")
        # It handles what is urgent alone, as while it waits for its store.
        actors = told.broker.vhosts["/"]._supervisor.actors
        inbox = next(actor for queue, actor in actors.items() if queue.name.name == "in")
        inbox._parts_committing += 1
        await client.open_channel(2)
        consume = make(commands.Basic.Consume, queue="in", no_ack=True)
        await client.call(2, consume, commands.Basic.ConsumeOk)
        await client.tell(1, make(commands.Tx.Commit))
        await wait_until(lambda: inbox.mailbox.ordinary)
        await time_out(told, client)
        for _ in range(4):
            await client.expect(commands.Basic.Deliver)
        inbox._parts_committing -= 1
        inbox.mailbox.wake()
        held.release()
        await wait_until(lambda: not inbox.mailbox.ordinary)
    assert len(told.of("deliver")) == 4
    whole(told)


@pytest.mark.parametrize("is_committed", [True, False])
async def test_an_end_that_the_channel_does_not_read(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, *, is_committed: bool
) -> None:
    """The channel fails with something that came just before."""
    arguments = {"x-max-length": Field("l", 1), "x-overflow": Field("S", "reject-publish")}
    async with Telling(settings) as told, await RawClient.open(told.broker.port) as client:
        await begin(client)
        if not is_committed:
            declare = make(commands.Queue.Declare, queue="full", arguments=arguments)
            await client.call(1, declare, commands.Queue.DeclareOk)
            await client.send(publish(1, "full", b"f") * 2)
        channel = channels(told.broker)[0]
        transaction = channel.transaction
        assert transaction is not None
        ended = transaction._on_unit_ended

        def fail_first(is_committed: bool) -> None:
            channel.mailbox.put_urgent(DeliveriesTimedOut(100))
            ended(is_committed)

        monkeypatch.setattr(transaction, "_on_unit_ended", fail_first)
        await client.call(1, make(commands.Tx.Commit), commands.Channel.Close)
        left = {"in": 2, "out": 2} if is_committed else {"in": 4, "out": 0, "full": 0}
        await wait_until(lambda: ready(told) == left)
    reasons = [event.reason for event in told.of("drop")]
    assert reasons == ([] if is_committed else ["refused"] * 4)
    assert len(told.of("ack")) == (2 if is_committed else 0)
    assert len(told.of("requeue")) == (2 if is_committed else 4)
    lives = whole(told)
    assert {name: lives.ready(name) for name in left} == left


async def test_a_queue_deleted_before_a_commit_that_fails(settings: Settings) -> None:
    """Its part of the messages was never told: nothing of it is dropped."""
    arguments = {"x-max-length": Field("l", 1), "x-overflow": Field("S", "reject-publish")}
    async with Telling(settings) as told, await RawClient.open(told.broker.port) as client:
        await declare(client, "stays", "goes")
        full = make(commands.Queue.Declare, queue="full", arguments=arguments)
        await client.call(1, full, commands.Queue.DeclareOk)
        for name in ("stays", "goes"):
            bind = make(commands.Queue.Bind, queue=name, exchange="amq.fanout")
            await client.call(1, bind, commands.Queue.BindOk)
        await client.call(1, make(commands.Tx.Select), commands.Tx.SelectOk)
        await client.send(publish(1, "", b"1", exchange="amq.fanout") + publish(1, "goes", b"22"))
        await client.send(publish(1, "full", b"333") * 2)
        await client.open_channel(2)
        delete = make(commands.Queue.Delete, queue="goes")
        await client.call(2, delete, commands.Queue.DeleteOk)
        await client.call(1, make(commands.Tx.Commit), commands.Channel.Close)
    assert [(event.queue, event.reason) for event in told.of("drop")] == [
        ("", "unroutable"),
        ("stays", "refused"),
        ("full", "refused"),
        ("full", "refused"),
    ]
    whole(told)
