"""What real clients do to messages through their channels, as the event log tells it."""

from __future__ import annotations

from typing import Any

import aio_pika
import aiormq.exceptions
import pytest
from aio_pika import DeliveryMode, ExchangeType, Message
from aio_pika.abc import AbstractIncomingMessage, AbstractQueue
from pamqp import commands

from leveret.broker.channel.consume import ConsumeMethods
from leveret.broker.clock import VirtualClock
from leveret.broker.config import Settings
from leveret.broker.event_log.messages import quoted
from leveret.broker.event_log.schema import Event
from leveret.broker.queues import commands as q
from leveret.protocol.codec import make, method_frame
from leveret.protocol.errors import not_found
from leveret.protocol.field_table import Field
from tests.broker.event_log.reading import only, read_events
from tests.broker.event_log.telling import Telling
from tests.support.held_queues import channels
from tests.support.raw_client import PERSISTENT, RawClient, publish
from tests.support.waiting import wait_until

WHO = ("/", 1, 1, "guest")


def who(event: Event) -> tuple[str, int, int, str]:
    return event.vhost, event.conn, event.ch, event.user


async def take(queue: AbstractQueue, **options: Any) -> AbstractIncomingMessage:
    taken = await queue.get(**options)
    assert taken is not None
    return taken


async def ignore(message: AbstractIncomingMessage) -> None:
    """Keeps it."""


async def test_from_publish_to_ack(settings: Settings) -> None:
    async with Telling(settings) as told, await aio_pika.connect(told.url) as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue("orders")
        message = Message(b"five!", delivery_mode=DeliveryMode.PERSISTENT)
        await channel.default_exchange.publish(message, "orders")
        acked: list[AbstractIncomingMessage] = []

        async def ack(incoming: AbstractIncomingMessage) -> None:
            await incoming.ack()
            acked.append(incoming)

        await queue.consume(ack, consumer_tag="c")
        await wait_until(lambda: acked)
    assert told.kinds() == ["publish", "confirm", "deliver", "ack"]
    published, confirmed, delivered, done = told.events
    assert all(who(event) == WHO for event in told.events)
    assert (published.exchange, published.rk, published.queue) == ("", "orders", "orders")
    assert (published.size, published.routed, published.persistent) == (5, 1, True)
    assert published.mandatory
    assert (confirmed.dtag, confirmed.n, confirmed.reason, confirmed.msg) == (1, 1, "", 0)
    assert confirmed.wait_us == confirmed.ts - published.ts
    assert (delivered.queue, delivered.ctag, delivered.dtag) == ("orders", "c", 1)
    assert (delivered.size, delivered.depth, delivered.redelivered) == (5, 0, False)
    assert (delivered.reason, delivered.delivery_count) == ("", 0)
    assert delivered.wait_us == delivered.ts - published.ts
    assert (done.queue, done.ctag, done.dtag) == ("orders", "c", 1)
    assert done.hold_us == done.ts - delivered.ts
    assert published.msg == delivered.msg == done.msg == told.only_msg()


async def test_fanout_is_told_by_queue(settings: Settings) -> None:
    async with Telling(settings) as told, await aio_pika.connect(told.url) as connection:
        channel = await connection.channel()
        exchange = await channel.declare_exchange("all", ExchangeType.FANOUT)
        for name in ("a", "b", "c"):
            await (await channel.declare_queue(name)).bind(exchange)
        await exchange.publish(Message(b"xx", delivery_mode=2), "key")
        await take(await channel.get_queue("b"), no_ack=True)
    published = told.only("publish")
    assert (published.queue, published.routed, published.exchange) == ("", 3, "all")
    enqueued = told.of("enqueue")
    assert sorted(event.queue for event in enqueued) == ["a", "b", "c"]
    for event in enqueued:
        assert (event.exchange, event.rk, event.size, event.persistent) == ("all", "key", 2, True)
        assert (event.vhost, event.conn, event.reason) == ("/", 0, "")
    taken = told.only("get")
    assert (taken.queue, taken.msg) == ("b", told.only_msg())


async def test_a_run_with_one_confirm_and_mixed_persistence(settings: Settings) -> None:
    async with Telling(settings) as told, await RawClient.open(told.broker.port) as client:
        await client.call(1, make(commands.Queue.Declare, queue="q"), commands.Queue.DeclareOk)
        await client.call(1, make(commands.Confirm.Select), commands.Confirm.SelectOk)
        await client.send(
            publish(1, "q", b"1")
            + publish(1, "q", b"22", header=PERSISTENT)
            + publish(1, "q", b"333", header=PERSISTENT)
            + publish(1, "q", b"")
        )
        confirmed = 0
        while confirmed < 4:
            confirmed = (await client.expect(commands.Basic.Ack)).delivery_tag
    sizes = [(event.size, event.persistent) for event in told.of("publish")]
    assert sizes == [(1, False), (2, True), (3, True), (0, False)]
    numbers = [event.msg for event in told.of("publish")]
    assert len(set(numbers)) == 4
    assert numbers == sorted(numbers)
    confirms = told.of("confirm")
    assert sum(event.n for event in confirms) == 4
    assert confirms[-1].dtag == 4
    assert len(confirms) < 4


async def test_unroutable_is_dropped_or_returned(settings: Settings) -> None:
    async with Telling(settings) as told, await aio_pika.connect(told.url) as connection:
        channel = await connection.channel()
        await channel.default_exchange.publish(Message(b"abc"), "nowhere", mandatory=False)
        await channel.default_exchange.publish(Message(b"abcd"), "nowhere")
    assert told.kinds("confirm") == ["publish", "drop", "publish", "return"]
    first, dropped, second, returned = [event for event in told.events if event.ev != "confirm"]
    assert (first.routed, first.mandatory, second.mandatory) == (0, False, True)
    assert (dropped.msg, dropped.size, dropped.reason) == (first.msg, 3, "unroutable")
    assert (dropped.rk, dropped.queue, who(dropped)) == ("nowhere", "", WHO)
    assert (returned.msg, returned.size, returned.reason) == (second.msg, 4, "NO_ROUTE")
    assert (returned.rk, who(returned)) == ("nowhere", WHO)
    assert len(told.of("confirm")) == 2


async def test_get_and_automatic_acks(settings: Settings) -> None:
    async with Telling(settings) as told, await aio_pika.connect(told.url) as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue("q")
        for body in (b"1", b"22", b"333"):
            await channel.default_exchange.publish(Message(body), "q")
        await (await take(queue)).ack()
        await take(queue, no_ack=True)
        assert await queue.get(no_ack=True)
        assert await queue.get(fail=False) is None
        await queue.consume(ignore, no_ack=True, consumer_tag="c")
        await channel.default_exchange.publish(Message(b"4444"), "q")
        await wait_until(lambda: channels(told.broker)[0].counters.deliver_no_ack)
    got = [(event.size, event.depth, event.reason, event.ctag) for event in told.of("get")]
    assert got == [(1, 2, "", ""), (2, 1, "auto_ack", ""), (3, 0, "auto_ack", "")]
    delivered = told.only("deliver")
    assert (delivered.size, delivered.reason, delivered.ctag) == (4, "auto_ack", "c")
    assert told.only("ack").msg == told.of("get")[0].msg
    # Nothing is held of what needs no answer.
    assert not told.of("requeue")


async def test_one_ack_for_many(settings: Settings) -> None:
    async with Telling(settings) as told, await aio_pika.connect(told.url) as connection:
        channel = await connection.channel()
        first, second = await channel.declare_queue("a"), await channel.declare_queue("b")
        for name in ("a", "b", "a", "b"):
            await channel.default_exchange.publish(Message(b""), name)
        for queue in (first, second, first):
            last = await take(queue)
        kept = await take(second)
        await last.ack(multiple=True)
        await kept.nack(requeue=False)
    acked = told.of("ack")
    assert [(event.dtag, event.queue) for event in acked] == [(1, "a"), (2, "b"), (3, "a")]
    got = {event.dtag: event for event in told.of("get")}
    assert [event.msg for event in acked] == [got[tag].msg for tag in (1, 2, 3)]
    assert all(event.hold_us == event.ts - got[event.dtag].ts for event in acked)
    assert told.only("nack").msg == got[4].msg


@pytest.mark.parametrize("method", ["nack", "reject"])
async def test_refusals(settings: Settings, method: str) -> None:
    async with Telling(settings) as told, await aio_pika.connect(told.url) as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue("q")
        await channel.default_exchange.publish(Message(b"xyz"), "q")
        for requeue in (True, True, False):
            await getattr(await take(queue), method)(requeue=requeue)
    assert told.kinds("publish", "confirm") == [
        *("get", method, "requeue"),
        *("get", method, "requeue"),
        *("get", method),
    ]
    assert [event.reason for event in told.of(method)] == ["requeue", "requeue", "discard"]
    back = told.of("requeue")
    assert [event.reason for event in back] == [method, method]
    assert [event.delivery_count for event in back] == [1, 2]
    got = told.of("get")
    assert [event.delivery_count for event in got] == [0, 1, 2]
    assert [event.redelivered for event in got] == [False, True, True]
    for given, answer, returned in zip(got, told.of(method), back, strict=False):
        assert returned.hold_us == answer.hold_us == answer.ts - given.ts
    assert told.only_msg()


async def test_recover_and_the_end_of_a_channel(settings: Settings) -> None:
    async with Telling(settings) as told, await RawClient.open(told.broker.port) as client:
        await client.call(1, make(commands.Queue.Declare, queue="q"), commands.Queue.DeclareOk)
        await client.send(publish(1, "q", b"1"))
        get = make(commands.Basic.Get, queue="q")
        await client.call(1, get, commands.Basic.GetOk)
        await client.call(1, make(commands.Basic.Recover, requeue=True), commands.Basic.RecoverOk)
        await client.call(1, get, commands.Basic.GetOk)
        await client.call(1, make(commands.Channel.Close), commands.Channel.CloseOk)
        await client.open_channel(1)
        await client.call(1, get, commands.Basic.GetOk)
    back = told.of("requeue")
    assert [event.reason for event in back] == ["recover", "channel_closed", "channel_closed"]
    assert [event.delivery_count for event in back] == [1, 2, 3]
    assert all(who(event) == WHO and event.queue == "q" for event in back)
    assert [event.delivery_count for event in told.of("get")] == [0, 1, 2]


async def test_deliveries_that_nobody_answers(settings: Settings, clock: VirtualClock) -> None:
    """With consumer_timeout_action=requeue they go back one by one."""
    limits = {"consumer_timeout": 10_000, "consumer_timeout_action": "requeue"}
    async with (
        Telling(settings, clock, **limits) as told,
        await RawClient.open(told.broker.port) as client,
    ):
        await client.call(1, make(commands.Queue.Declare, queue="q"), commands.Queue.DeclareOk)
        await client.send(publish(1, "q", b"1"))
        await client.call(1, make(commands.Basic.Get, queue="q"), commands.Basic.GetOk)
        for _ in range(30):
            clock.advance(1)
        await wait_until(lambda: channels(told.broker)[0].counters.ack_timeout)
        # It comes too late, and does no harm.
        await client.tell(1, make(commands.Basic.Ack, delivery_tag=1))
        await client.call(1, make(commands.Basic.Get, queue="q"), commands.Basic.GetOk)
        await client.call(1, make(commands.Channel.Close), commands.Channel.CloseOk)
    assert told.kinds() == ["publish", "get", "requeue", "get", "requeue"]
    assert [event.reason for event in told.of("requeue")] == ["consumer_timeout", "channel_closed"]


async def test_what_comes_before_an_unknown_tag_counts(settings: Settings) -> None:
    """And nothing else of its run: a tag twice, and those behind it."""
    async with Telling(settings) as told, await RawClient.open(told.broker.port) as client:
        await client.call(1, make(commands.Queue.Declare, queue="q"), commands.Queue.DeclareOk)
        for _ in range(3):
            await client.send(publish(1, "q", b"1"))
            await client.call(1, make(commands.Basic.Get, queue="q"), commands.Basic.GetOk)
        acks = [make(commands.Basic.Ack, delivery_tag=tag) for tag in (1, 1, 2, 3)]
        await client.send(b"".join(method_frame(1, ack) for ack in acks))
        closed = await client.expect(commands.Channel.Close)
        assert closed.reply_code == 406
    assert [event.dtag for event in told.of("ack")] == [1]
    got = {event.dtag: event.msg for event in told.of("get")}
    assert [event.msg for event in told.of("requeue")] == [got[2], got[3]]


async def test_a_tag_beyond_all_numbers(settings: Settings) -> None:
    async with Telling(settings) as told, await RawClient.open(told.broker.port) as client:
        await client.call(1, make(commands.Queue.Declare, queue="q"), commands.Queue.DeclareOk)
        await client.send(publish(1, "q", b"1"))
        await client.call(1, make(commands.Basic.Get, queue="q"), commands.Basic.GetOk)
        await client.send(method_frame(1, make(commands.Basic.Ack, delivery_tag=2**64 - 1)))
        assert (await client.expect(commands.Channel.Close)).reply_code == 406
    assert told.kinds() == ["publish", "get", "requeue"]


async def test_a_refused_confirm(settings: Settings) -> None:
    arguments: dict[str, Any] = {"x-max-length": 1, "x-overflow": "reject-publish"}
    async with Telling(settings) as told, await aio_pika.connect(told.url) as connection:
        channel = await connection.channel()
        await channel.declare_queue("q", arguments=arguments)
        await channel.default_exchange.publish(Message(b"1"), "q")
        with pytest.raises(aiormq.exceptions.DeliveryError):
            await channel.default_exchange.publish(Message(b"22"), "q")
    assert [event.reason for event in told.of("confirm")] == ["", "nack"]
    assert [event.dtag for event in told.of("confirm")] == [1, 2]
    dropped = told.only("drop")
    assert (dropped.msg, dropped.queue) == (told.of("publish")[1].msg, "q")
    assert (dropped.size, dropped.reason, dropped.depth) == (2, "refused", 1)


async def test_confirms_that_come_in_parts(settings: Settings) -> None:
    """Some of a run are refused: both answers are told, each with its number."""
    arguments = {"x-max-length": Field("l", 2), "x-overflow": Field("S", "reject-publish")}
    async with Telling(settings) as told, await RawClient.open(told.broker.port) as client:
        declare = make(commands.Queue.Declare, queue="q", arguments=arguments)
        await client.call(1, declare, commands.Queue.DeclareOk)
        await client.call(1, make(commands.Confirm.Select), commands.Confirm.SelectOk)
        await client.send(publish(1, "q", b"") * 5)
        last: dict[type, int | None] = {}
        while last != {commands.Basic.Ack: 2, commands.Basic.Nack: 5}:
            answer = (await client.receive()).method
            assert isinstance(answer, commands.Basic.Ack | commands.Basic.Nack)
            last[type(answer)] = answer.delivery_tag
        await client.call(1, make(commands.Channel.Close), commands.Channel.CloseOk)
    told_of = sorted((event.reason, event.n, event.dtag) for event in told.of("confirm"))
    assert told_of == [("", 2, 2), ("nack", 3, 5)]


async def test_a_transaction(settings: Settings) -> None:
    async with Telling(settings) as told, await RawClient.open(told.broker.port) as client:
        await client.call(1, make(commands.Queue.Declare, queue="q"), commands.Queue.DeclareOk)
        await client.call(1, make(commands.Tx.Select), commands.Tx.SelectOk)
        await client.send(publish(1, "q", b"never"))
        await client.call(1, make(commands.Tx.Rollback), commands.Tx.RollbackOk)
        await client.send(publish(1, "q", b"1") + publish(1, "nowhere", b"22"))
        await client.call(1, make(commands.Tx.Commit), commands.Tx.CommitOk)
        await client.call(1, make(commands.Basic.Get, queue="q"), commands.Basic.GetOk)
        await client.tell(1, make(commands.Basic.Ack, delivery_tag=1))
        await client.call(1, make(commands.Tx.Rollback), commands.Tx.RollbackOk)
        await client.tell(1, make(commands.Basic.Nack, delivery_tag=1, requeue=True))
        await client.call(1, make(commands.Tx.Commit), commands.Tx.CommitOk)
        await client.call(1, make(commands.Basic.Get, queue="q"), commands.Basic.GetOk)
        await client.tell(1, make(commands.Basic.Ack, delivery_tag=2))
        await client.call(1, make(commands.Tx.Commit), commands.Tx.CommitOk)
    assert told.kinds() == [
        *("publish", "publish", "drop"),
        *("get", "nack", "requeue"),
        *("get", "ack"),
    ]
    assert [event.size for event in told.of("publish")] == [1, 2]
    assert told.only("ack").msg == told.of("publish")[0].msg


async def test_a_transaction_that_a_queue_refuses(settings: Settings) -> None:
    arguments = {"x-max-length": Field("l", 1), "x-overflow": Field("S", "reject-publish")}
    async with Telling(settings) as told, await RawClient.open(told.broker.port) as client:
        declare = make(commands.Queue.Declare, queue="full", arguments=arguments)
        await client.call(1, declare, commands.Queue.DeclareOk)
        await client.call(1, make(commands.Queue.Declare, queue="q"), commands.Queue.DeclareOk)
        await client.call(1, make(commands.Tx.Select), commands.Tx.SelectOk)
        await client.send(publish(1, "q", b"1") + publish(1, "full", b"22") * 2)
        await client.call(1, make(commands.Tx.Commit), commands.Channel.Close)
    published = {event.msg: event.queue for event in told.of("publish")}
    assert len(published) == 3
    assert {event.msg: event.queue for event in told.of("drop")} == published
    assert {event.reason for event in told.of("drop")} == {"refused"}


@pytest.mark.parametrize(
    "name",
    ['"quoted"', "back\\slash", "\ttab\x00\x1f\x7f", "100%d%s", "żółw 🐢", "\udcff\udc80bytes"],
)
async def test_names_of_any_bytes(settings: Settings, name: str) -> None:
    """Every line is JSON; what is no UTF-8 is shown as replacement characters."""
    shown = name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    async with Telling(settings) as told, await RawClient.open(told.broker.port) as client:
        declare = make(commands.Queue.Declare, queue=name)
        await client.call(1, declare, commands.Queue.DeclareOk)
        await client.send(publish(1, name, b"1") + publish(1, "\n" + name, b""))
        consume = make(commands.Basic.Consume, queue=name, consumer_tag=name)
        await client.call(1, consume, commands.Basic.ConsumeOk)
        await client.expect(commands.Basic.Deliver)
        await client.tell(1, make(commands.Basic.Ack, delivery_tag=1))
        await client.call(1, make(commands.Channel.Close), commands.Channel.CloseOk)
    assert told.kinds() == ["publish", "publish", "drop", "deliver", "ack"]
    published, _, dropped, delivered, acked = told.events
    assert published.queue == published.rk == delivered.queue == acked.queue == shown
    assert delivered.ctag == acked.ctag == shown
    assert dropped.rk == "\n" + shown


async def test_what_a_channel_does_not_live_to_send(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of one delivery may have come by any exchange and key: none is named."""
    on_deliver = ConsumeMethods._on_deliver

    def fail_once(consuming: ConsumeMethods, deliver: q.Deliver) -> None:
        channel = consuming._channel
        monkeypatch.setattr(ConsumeMethods, "_on_deliver", on_deliver)
        # It comes before this one, which is put back.
        channel.mailbox.put_urgent(q.Failed(not_found("what it asked for")))
        channel.mailbox.put_urgent(deliver)

    monkeypatch.setattr(ConsumeMethods, "_on_deliver", fail_once)
    async with Telling(settings) as told, await RawClient.open(told.broker.port) as client:
        await client.call(1, make(commands.Queue.Declare, queue="q"), commands.Queue.DeclareOk)
        for key in ("red", "blue"):
            bind = make(commands.Queue.Bind, queue="q", exchange="amq.direct", routing_key=key)
            await client.call(1, bind, commands.Queue.BindOk)
            await client.send(publish(1, key, b"1", exchange="amq.direct"))
        consume = make(commands.Basic.Consume, queue="q", no_ack=True)
        await client.call(1, consume, commands.Basic.ConsumeOk)
        await client.expect(commands.Channel.Close)
    assert [event.rk for event in told.of("publish")] == ["red", "blue"]
    dropped = told.of("drop")
    assert [event.msg for event in dropped] == [event.msg for event in told.of("publish")]
    assert {(event.queue, event.reason) for event in dropped} == {("q", "channel_closed")}
    assert {(event.exchange, event.rk, event.ctag) for event in dropped} == {("", "", "")}


def test_any_text_can_be_told() -> None:
    """Names that did not come from a client may hold what no name on the wire can."""
    assert quoted("\ud800") == '"\ufffd"'.encode()
    assert quoted("żółw 🐢") == '"żółw 🐢"'.encode()


async def test_events_of_all_kinds_show_a_name_alike(settings: Settings) -> None:
    """One that is cut off in the middle of a character, say."""
    name = "\udce2\udc82"
    async with Telling(settings) as told, await RawClient.open(told.broker.port) as client:
        await client.call(1, make(commands.Queue.Declare, queue=name), commands.Queue.DeclareOk)
        await client.send(publish(1, name, b"1"))
        await client.call(1, make(commands.Basic.Get, queue=name), commands.Basic.GetOk)
    declared = only(read_events(settings.data / "events"), "queue_declare")
    assert declared.queue == told.only("publish").queue == told.only("get").queue
