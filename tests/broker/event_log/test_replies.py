"""Direct replies: the log tells them as a queue of their own, which every requester reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pamqp import commands

from leveret.broker.channel.channel import Channel
from leveret.broker.channel.context import ReplyPort
from leveret.broker.config import Settings
from leveret.broker.queues import commands as q
from leveret.protocol.codec import Properties, make, write_properties
from leveret.protocol.errors import not_found
from leveret.protocol.field_table import Field
from tests.broker.channel.bench import FakeWriter
from tests.broker.event_log.lives import Lives
from tests.broker.event_log.telling import Telling
from tests.support.held_queues import channels
from tests.support.raw_client import RawClient, publish
from tests.support.waiting import wait_until

REPLY_TO = "amq.rabbitmq.reply-to"
# The requester has the first channel, whoever answers the second.
ASKS, ANSWERS = 1, 2


async def await_replies(told: Telling, client: RawClient) -> str:
    """Begin to, and open the other channel; the name that answers go to."""
    consume = make(commands.Basic.Consume, queue=REPLY_TO, no_ack=True)
    await client.call(ASKS, consume, commands.Basic.ConsumeOk)
    await client.open_channel(ANSWERS)
    (name,) = told.broker.vhosts["/"].reply_consumers
    return name


@pytest.mark.parametrize("mandatory", [False, True])
async def test_a_reply_is_published_and_delivered(settings: Settings, *, mandatory: bool) -> None:
    """A mandatory one comes back as well, as in RabbitMQ; that is not told, as it is not lost."""
    async with Telling(settings) as told, await RawClient.open(told.broker.port) as client:
        name = await await_replies(told, client)
        await client.call(ANSWERS, make(commands.Confirm.Select), commands.Confirm.SelectOk)
        await client.send(publish(ANSWERS, name, b"answer", mandatory=mandatory))
        got = {(await client.receive()).method.name for _ in range(2 + mandatory)}
        assert got == {"Basic.Deliver", "Basic.Ack", *["Basic.Return"] * mandatory}
    assert told.kinds("confirm") == ["publish", "deliver"]
    published, delivered = told.only("publish"), told.only("deliver")
    assert (published.queue, published.routed, published.rk) == (REPLY_TO, 1, name)
    assert (published.ch, published.mandatory) == (ANSWERS, mandatory)
    assert (delivered.queue, delivered.ch, delivered.reason) == (REPLY_TO, ASKS, "auto_ack")
    assert (delivered.dtag, delivered.size, delivered.msg) == (1, 6, published.msg)
    # There is neither a queue nor a consumer that anything could be said of.
    assert (delivered.depth, delivered.ctag) == (None, "")
    assert told.only("confirm").n == 1
    Lives().check(told.events)


async def test_replies_in_one_go(settings: Settings) -> None:
    async with Telling(settings) as told, await RawClient.open(told.broker.port) as client:
        name = await await_replies(told, client)
        await client.send(publish(ANSWERS, name, b"answer") * 3)
        for _ in range(3):
            assert (await client.expect(commands.Basic.Deliver)).delivery_tag == 1
    assert [event.dtag for event in told.of("deliver")] == [1, 1, 1]
    assert told.kinds() == ["publish"] * 3 + ["deliver"] * 3
    Lives().check(told.events)


async def test_a_reply_that_a_queue_gets_as_well(settings: Settings) -> None:
    headers = {"CC": Field("A", [Field("S", "copies")])}
    header = write_properties(Properties(headers=headers))
    async with Telling(settings) as told, await RawClient.open(told.broker.port) as client:
        await client.call(1, make(commands.Queue.Declare, queue="copies"), commands.Queue.DeclareOk)
        name = await await_replies(told, client)
        await client.send(publish(ANSWERS, name, b"answer", header=header))
        await client.expect(commands.Basic.Deliver)
        await client.call(1, make(commands.Basic.Get, queue="copies"), commands.Basic.GetOk)
    assert told.only("publish").routed == 2
    assert [event.queue for event in told.of("enqueue")] == ["copies", REPLY_TO]
    assert told.only("deliver").queue == REPLY_TO
    Lives().check([event for event in told.events if event.queue != "copies"])


async def test_in_a_transaction_replies_go_at_once(settings: Settings) -> None:
    """Whatever becomes of it: each is told once."""
    async with Telling(settings) as told, await RawClient.open(told.broker.port) as client:
        name = await await_replies(told, client)
        await client.call(ANSWERS, make(commands.Tx.Select), commands.Tx.SelectOk)
        await client.send(publish(ANSWERS, name, b"1"))
        await client.expect(commands.Basic.Deliver)
        await client.call(ANSWERS, make(commands.Tx.Rollback), commands.Tx.RollbackOk)
        await client.send(publish(ANSWERS, name, b"22", mandatory=True))
        await client.expect(commands.Basic.Deliver)
        await client.tell(ANSWERS, make(commands.Tx.Commit))
        await client.expect(commands.Basic.Return)
        await client.expect(commands.Tx.CommitOk)
    assert told.kinds() == ["publish", "deliver"] * 2
    assert [event.size for event in told.of("deliver")] == [1, 2]
    assert {event.queue for event in told.events} == {REPLY_TO}
    Lives().check(told.events)


def fail(requester: Channel) -> None:
    requester.mailbox.put_urgent(q.Failed(not_found("what it asked for")))


def cancel(requester: Channel) -> None:
    requester.replies.cancel()


@pytest.mark.parametrize("end", [fail, cancel])
async def test_a_requester_that_ends_before_it_is_told(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, end: Callable[[Channel], None]
) -> None:
    async with Telling(settings) as told, await RawClient.open(told.broker.port) as client:
        name = await await_replies(told, client)
        requester = channels(told.broker)[0]
        put = ReplyPort.put

        def end_first(port: ReplyPort, reply: object) -> bool:
            end(requester)
            return put(port, reply)

        monkeypatch.setattr(ReplyPort, "put", end_first)
        await client.send(publish(ANSWERS, name, b"answer"))
        await wait_until(lambda: channels(told.broker)[-1].counters.publish)
        await wait_until(lambda: not requester.mailbox.urgent)
    assert told.kinds() == ["publish", "drop"]
    dropped = told.only("drop")
    assert (dropped.queue, dropped.reason, dropped.size) == (REPLY_TO, "channel_closed", 6)
    assert (dropped.ch, dropped.ctag) == (ASKS, "")
    Lives().check(told.events)


async def test_a_requester_that_does_not_read(settings: Settings) -> None:
    """Nobody takes the reply: it is as lost as any that no queue takes."""
    async with Telling(settings) as told, await RawClient.open(told.broker.port) as client:
        name = await await_replies(told, client)
        stuck = FakeWriter()
        stuck.is_stuck = True
        told.broker.vhosts["/"].reply_consumers[name] = ReplyPort(
            channels(told.broker)[0].mailbox, stuck
        )
        await client.send(publish(ANSWERS, name, b"answer"))
        await wait_until(lambda: channels(told.broker)[-1].counters.drop_unroutable)
    assert told.kinds() == ["publish", "drop"]
    assert (told.only("publish").routed, told.only("drop").reason) == (0, "unroutable")
