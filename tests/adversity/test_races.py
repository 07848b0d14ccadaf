"""Things that happen at the same time: the loser gets an answer, no message is lost."""

from __future__ import annotations

import asyncio
import random
from functools import partial

import pytest
from pamqp import commands

from leveret.broker.server import Broker
from leveret.protocol.codec import make, method_frame
from tests.adversity.census import take_census, wait_same, wait_until
from tests.adversity.steps import (
    confirmed,
    connections_are,
    consume,
    drain,
    make_queue,
    queue_statistics,
    ready_is,
    select_confirms,
)
from tests.support.raw_client import NO_PROPERTIES, PERSISTENT, RawClient, publish


async def test_consumer_dies_with_deliveries(broker: Broker) -> None:
    """They go to the next consumer, in order, marked."""
    async with (
        await RawClient.open(broker.port) as publisher,
        await RawClient.open(broker.port) as second,
    ):
        await make_queue(publisher, "q")
        first = await RawClient.open(broker.port)
        await consume(first, "q")
        await select_confirms(publisher)
        bodies = [str(number).encode() for number in range(500)]
        await publisher.send(b"".join(publish(1, "q", body) for body in bodies))
        await confirmed(publisher, len(bodies))
        for body in bodies[:10]:
            assert (await first.receive()).body == body
        await first.tell(1, make(commands.Basic.Ack, delivery_tag=5, multiple=True))
        await consume(second, "q")
        first.close()
        for body in bodies[5:]:
            got = await second.receive()
            assert isinstance(got.method, commands.Basic.Deliver)
            assert (got.body, got.method.redelivered) == (body, True)


@pytest.mark.parametrize("how", ["close", "reset", "goodbye", "error"])
async def test_owner_of_an_exclusive_queue_dies(broker: Broker, how: str) -> None:
    """The name is free again, bindings are gone, a publisher to it is confirmed all the same."""
    async with await RawClient.open(broker.port) as other:
        await select_confirms(other)
        before = take_census(broker)
        owner = await RawClient.open(broker.port, channels=2)
        await make_queue(owner, "own", exclusive=True)
        bind = make(commands.Queue.Bind, queue="own", exchange="amq.fanout")
        await owner.call(1, bind, commands.Queue.BindOk)
        await consume(owner, "own")
        await other.send(publish(1, "own", b"x") * 10)
        await confirmed(other, 10)
        if how == "goodbye":
            await owner.say_goodbye()
        elif how == "error":
            await owner.tell(2, make(commands.Basic.Qos, prefetch_size=1))
            while not isinstance((await owner.receive()).method, commands.Connection.Close):
                pass
            owner.close()
        else:
            getattr(owner, how)()
        await other.send(publish(1, "own", b"x") * 10 + publish(1, "", b"x", exchange="amq.fanout"))
        await confirmed(other, 21)
        await wait_until(partial(connections_are, broker, 1), "it is forgotten")
        await wait_same(broker, before)
        await make_queue(other, "own", exclusive=True)
        assert ready_is(broker, "own", 0)


@pytest.mark.parametrize("mandatory", [False, True])
async def test_publishing_to_a_queue_that_comes_and_goes(broker: Broker, mandatory: bool) -> None:
    """Each publish is confirmed once; a mandatory one was in the queue, or is returned."""
    count = 3_000
    async with (
        await RawClient.open(broker.port) as publisher,
        await RawClient.open(broker.port) as other,
    ):
        await select_confirms(publisher)
        before = take_census(broker)
        settled: set[int] = set()
        returned = 0

        async def read_answers() -> None:
            nonlocal returned
            while len(settled) < count:
                method = (await publisher.receive()).method
                if isinstance(method, commands.Basic.Return):
                    returned += 1
                    continue
                assert isinstance(method, commands.Basic.Ack), dict(method)
                tag = method.delivery_tag
                low = min(set(range(1, tag + 1)) - settled) if method.multiple else tag
                new = set(range(low, tag + 1)) - settled if method.multiple else {tag}
                assert new, "confirmed twice"
                assert not new & settled
                settled.update(new)

        deleted = 0

        async def come_and_go() -> None:
            nonlocal deleted
            while len(settled) < count:
                await make_queue(other, "q")
                answer = await other.call(
                    1, make(commands.Queue.Delete, queue="q"), commands.Queue.DeleteOk
                )
                deleted += answer.message_count or 0

        async def publish_all() -> None:
            for number in range(count // 10):
                await publisher.send(publish(1, "q", b"x", mandatory=mandatory) * 10)
                if number % 10 == 0:
                    await asyncio.sleep(0)

        await asyncio.gather(publish_all(), read_answers(), come_and_go())
        if mandatory:
            assert returned + deleted == count
        else:
            assert returned == 0
        await wait_same(broker, before)


async def test_publish_behind_a_delete(broker: Broker) -> None:
    """Accepted by the channel, never taken by the queue: returned if mandatory, and confirmed."""
    returned = 0
    async with (
        await RawClient.open(broker.port) as publisher,
        await RawClient.open(broker.port) as other,
    ):
        await select_confirms(publisher)
        before = take_census(broker)
        for number in range(1, 51):
            await make_queue(other, "q")
            # Both are sent before the broker runs, and meet in the queue's mailbox.
            await other.tell(1, make(commands.Queue.Delete, queue="q"))
            await publisher.send(publish(1, "q", b"x", mandatory=True))
            deleted = await other.expect(commands.Queue.DeleteOk)
            got = await publisher.receive()
            if isinstance(got.method, commands.Basic.Return):
                assert deleted.message_count == 0
                returned += 1
                got = await publisher.receive()
            else:
                assert deleted.message_count == 1
            assert isinstance(got.method, commands.Basic.Ack)
            assert got.method.delivery_tag == number
        assert returned > 0
        await wait_same(broker, before)


async def test_questions_to_a_queue_that_comes_and_goes(broker: Broker) -> None:
    """Whoever comes too late is told 404; nobody waits for ever."""
    questions = [
        make(commands.Basic.Get, queue="q"),
        make(commands.Basic.Consume, queue="q", consumer_tag="c"),
        make(commands.Queue.Purge, queue="q"),
        make(commands.Queue.Declare, queue="q", passive=True),
        make(commands.Queue.Bind, queue="q", exchange="amq.direct", routing_key="k"),
        make(commands.Queue.Delete, queue="q"),
    ]
    refused = 0
    async with await RawClient.open(broker.port) as other:
        before = take_census(broker)
        async with await RawClient.open(broker.port) as client:
            for number in range(120):
                await make_queue(other, "q")
                # Both are sent before the broker runs, and meet in the queue's mailbox.
                await other.send(
                    publish(1, "q", b"x") * (number % 4)
                    + method_frame(1, make(commands.Queue.Delete, queue="q"))
                )
                await client.send(method_frame(1, questions[number % len(questions)]))
                await other.expect(commands.Queue.DeleteOk)
                method = (await client.receive()).method
                if isinstance(method, commands.Channel.Close):
                    assert method.reply_code == 404
                    refused += 1
                    await client.tell(1, make(commands.Channel.CloseOk))
                    await client.open_channel(1)
                elif isinstance(method, commands.Basic.ConsumeOk):
                    await client.tell(1, make(commands.Basic.Cancel, consumer_tag="c"))
                    # Deliveries and the queue's own cancel may come before.
                    while not isinstance((await client.receive()).method, commands.Basic.CancelOk):
                        pass
        assert refused > 0
        await wait_same(broker, before)


@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
async def test_cancel_and_ack_cross_deliveries(broker: Broker, seed: int) -> None:
    """Consumers come and go while messages are under way: each message is settled once."""
    chance = random.Random(seed)
    count = 2_000
    async with (
        await RawClient.open(broker.port) as publisher,
        await RawClient.open(broker.port) as client,
    ):
        await make_queue(publisher, "q")
        await select_confirms(publisher)
        before = take_census(broker)
        seen: dict[bytes, int] = {}
        acked: set[bytes] = set()
        held: list[tuple[int, bytes]] = []
        rounds = sent = 0

        async def settle(how_many: int) -> None:
            for _ in range(min(how_many, len(held))):
                tag, body = held.pop(chance.randrange(len(held)))
                if chance.random() < 0.8:
                    await client.tell(1, make(commands.Basic.Ack, delivery_tag=tag))
                    assert body not in acked
                    acked.add(body)
                else:
                    await client.tell(1, make(commands.Basic.Nack, delivery_tag=tag, requeue=True))

        while len(acked) < count:
            rounds += 1
            tag = f"c{rounds}"
            if chance.random() < 0.3:
                qos = make(commands.Basic.Qos, prefetch_count=chance.randrange(0, 20))
                await client.tell(1, qos)
            await client.tell(
                1, make(commands.Basic.Consume, queue="q", consumer_tag=tag, nowait=True)
            )
            if sent < count:
                burst = min(chance.randrange(100), count - sent)
                await publisher.send(
                    b"".join(publish(1, "q", n.to_bytes(4)) for n in range(sent, sent + burst))
                )
                sent += burst
            await settle(chance.randrange(50))
            await client.tell(1, make(commands.Basic.Cancel, consumer_tag=tag))
            while not isinstance(
                method := (got := await client.receive()).method, commands.Basic.CancelOk
            ):
                if isinstance(method, commands.Basic.Deliver):
                    assert got.body not in acked
                    # Only what was seen, and given back, may come again, and is marked.
                    assert method.redelivered == (got.body in seen)
                    assert got.body not in [body for _, body in held]
                    seen[got.body] = seen.get(got.body, 0) + 1
                    held.append((method.delivery_tag or 0, got.body))
                else:
                    assert isinstance(method, commands.Basic.QosOk), dict(method)
            if sent == count:
                await settle(len(held))
        await wait_until(lambda: queue_statistics(broker, "q")["messages"] == 0, "all settled")
        await wait_same(broker, before)


class Model:
    """What must hold of every message, whoever saw it."""

    def __init__(self) -> None:
        self.confirmed: set[bytes] = set()
        self.sent: set[bytes] = set()
        self.delivered: set[bytes] = set()
        # Acked, and the broker has answered something that came after the ack.
        self.settled: set[bytes] = set()

    def on_delivery(self, body: bytes, *, redelivered: bool) -> None:
        assert body in self.sent, "made up"
        assert body not in self.settled, "delivered after it was settled"
        assert redelivered or body not in self.delivered, "doubled and not marked"
        self.delivered.add(body)


async def publish_to(
    broker: Broker, model: Model, name: str, header: bytes, chance: random.Random
) -> None:
    """A publisher that confirms, and may lose its connection; it never publishes a body twice."""
    number = 0
    while number < 1_500:
        client = await RawClient.open(broker.port)
        await select_confirms(client)
        bodies: list[bytes] = []
        dies = chance.random() < 0.3
        for _ in range(chance.randrange(1, 8)):
            burst = [f"{name}-{number + n}".encode() for n in range(chance.randrange(1, 60))]
            number += len(burst)
            model.sent.update(burst)
            bodies += burst
            data = b"".join(publish(1, "q", body, header=header) for body in burst)
            if dies:
                await client.send(data[: chance.randrange(len(data))])
                break
            await client.send(data)
            await confirmed(client, len(bodies))
            model.confirmed.update(bodies)
        (client.reset if chance.random() < 0.5 else client.close)()


async def consume_from(
    broker: Broker, model: Model, chance: random.Random, done: asyncio.Event
) -> None:
    """A consumer that settles some of what it gets, then dies one way or another."""
    while not done.is_set():
        client = await RawClient.open(broker.port)
        if chance.random() < 0.7:
            await client.call(
                1,
                make(
                    commands.Basic.Qos,
                    prefetch_count=chance.randrange(1, 30),
                    global_=chance.random() < 0.3,
                ),
                commands.Basic.QosOk,
            )
        await consume(client, "q")
        held: list[tuple[int, bytes]] = []
        acked: list[bytes] = []
        try:
            for _ in range(chance.randrange(1, 120)):
                got = await client.receive(deadline_s=0.05)
                method = got.method
                assert isinstance(method, commands.Basic.Deliver)
                model.on_delivery(got.body, redelivered=bool(method.redelivered))
                held.append((method.delivery_tag or 0, got.body))
                if chance.random() < 0.5:
                    tag, body = held.pop(0)
                    if chance.random() < 0.7:
                        await client.tell(1, make(commands.Basic.Ack, delivery_tag=tag))
                        acked.append(body)
                    else:
                        nack = make(commands.Basic.Nack, delivery_tag=tag, requeue=True)
                        await client.tell(1, nack)
        except TimeoutError:
            # Nothing comes: what is there is held by others, or by us.
            pass
        if held and chance.random() < 0.6:
            tag = held[-1][0]
            await client.tell(1, make(commands.Basic.Ack, delivery_tag=tag, multiple=True))
            acked += [body for _, body in held]
        if chance.random() < 0.5:
            # An answer to what came after the acks: they have been handled.
            await client.tell(1, make(commands.Channel.Flow, active=True))
            await client.tell(0, make(commands.Connection.Close))
            async with asyncio.timeout(10):
                while not isinstance(
                    method := (got := await client.receive()).method, commands.Connection.CloseOk
                ):
                    if isinstance(method, commands.Basic.Deliver):
                        model.on_delivery(got.body, redelivered=bool(method.redelivered))
            model.settled.update(acked)
        (client.reset if chance.random() < 0.5 else client.close)()


@pytest.mark.parametrize("durable", [False, True], ids=["transient", "durable"])
@pytest.mark.parametrize("seed", range(3))
async def test_nothing_lost_nothing_doubled(broker: Broker, seed: int, durable: bool) -> None:
    """Consumers and publishers die at random: what was confirmed is delivered."""
    chance = random.Random(seed)
    model = Model()
    header = PERSISTENT if durable else NO_PROPERTIES
    async with await RawClient.open(broker.port) as other:
        await make_queue(other, "q", durable=durable)
        before = take_census(broker)
        done = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(consume_from(broker, model, random.Random(chance.random()), done))
            async with asyncio.TaskGroup() as publishers:
                for number in range(3):
                    publishers.create_task(
                        publish_to(
                            broker, model, f"p{number}", header, random.Random(chance.random())
                        )
                    )
            done.set()
        await wait_until(partial(connections_are, broker, 1), "all have gone")
        for got in await drain(other, "q"):
            method = got.method
            assert isinstance(method, commands.Basic.GetOk)
            model.on_delivery(got.body, redelivered=bool(method.redelivered))
        assert model.confirmed - model.delivered == set()
        assert len(model.settled) > 100
        await wait_same(broker, before)
