"""Counters of broker, connection, channel, exchange and queue after traffic that is known."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from pamqp import commands

from leveret.broker.clock import VirtualClock
from leveret.broker.config import Settings
from leveret.broker.server import Broker
from leveret.protocol.codec import Properties, make, method_frame, write_properties
from leveret.protocol.field_table import Field
from tests.support.raw_client import RawClient, publish
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(20)

# Channels of the one client.
PUBLISHER, CONSUMER, TRANSACTION = 1, 2, 3

NO_QUEUE_COUNTS = {
    "publish": 0,
    "deliver": 0,
    "deliver_no_ack": 0,
    "get": 0,
    "get_no_ack": 0,
    "get_empty": 0,
    "redeliver": 0,
    "ack": 0,
    "reject": 0,
    "requeue": 0,
    "drop": 0,
    "expire": 0,
    "refuse": 0,
    "dead_letter": {},
}
NO_CHANNEL_COUNTS = {
    "publish_count": 0,
    "confirm_count": 0,
    "return_unroutable_count": 0,
    "drop_unroutable_count": 0,
    "deliver_count": 0,
    "deliver_no_ack_count": 0,
    "get_count": 0,
    "get_no_ack_count": 0,
    "get_empty_count": 0,
    "redeliver_count": 0,
    "ack_count": 0,
    "ack_timeout_count": 0,
}
NO_CHANNEL_STATE = {
    "user": "guest",
    "vhost": "/",
    "confirm": False,
    "transactional": False,
    "consumer_count": 0,
    "messages_unacknowledged": 0,
    "messages_unconfirmed": 0,
    "global_prefetch_count": 0,
    "is_blocked": False,
    "mailbox": 0,
}


class Watched:
    """A broker's statistics, by the names of what is looked for."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker

    def all(self) -> dict[str, Any]:
        return dict(self.broker.statistics())

    def connection(self) -> dict[str, Any]:
        [connection] = self.all()["connections"]
        return dict(connection)

    def channel(self, number: int) -> dict[str, Any]:
        return dict(self.connection()["channels"][number])

    def exchange(self, name: str) -> dict[str, Any]:
        """Its counters: what policies add is shown in test_policies.py."""
        exchange = dict(self.all()["vhosts"][0]["exchanges"][name])
        return {key: value for key, value in exchange.items() if "policy" not in key}

    def queue(self, name: str) -> dict[str, Any]:
        return dict(self.all()["vhosts"][0]["queues"][name])

    def queue_counts(self, name: str) -> dict[str, Any]:
        queue = self.queue(name)
        return {counter: queue[counter] for counter in NO_QUEUE_COUNTS}

    def channel_counts(self, number: int) -> dict[str, Any]:
        channel = self.channel(number)
        return {counter: channel[counter] for counter in NO_CHANNEL_COUNTS}


@pytest.fixture
def watched(broker: Broker) -> Watched:
    return Watched(broker)


@pytest.fixture
async def client(broker: Broker) -> AsyncIterator[RawClient]:
    async with await RawClient.open(broker.port, channels=3) as client:
        yield client


async def declare(client: RawClient, queue: str) -> None:
    declaration = make(commands.Queue.Declare, queue=queue, arguments={})
    await client.call(CONSUMER, declaration, commands.Queue.DeclareOk)


async def consume(
    client: RawClient, queue: str, *, no_ack: bool = False, prefetch: int = 0
) -> None:
    qos = make(commands.Basic.Qos, prefetch_count=prefetch)
    await client.call(CONSUMER, qos, commands.Basic.QosOk)
    consume = make(
        commands.Basic.Consume, queue=queue, consumer_tag=queue, no_ack=no_ack, arguments={}
    )
    await client.call(CONSUMER, consume, commands.Basic.ConsumeOk)


async def deliveries(client: RawClient, count: int) -> list[commands.Basic.Deliver]:
    return [await client.expect(commands.Basic.Deliver) for _ in range(count)]


async def get(client: RawClient, queue: str, answer: Any, *, no_ack: bool = False) -> None:
    await client.call(CONSUMER, make(commands.Basic.Get, queue=queue, no_ack=no_ack), answer)


async def test_a_broker_that_nobody_used(watched: Watched) -> None:
    broker, statistics = watched.broker, watched.all()
    assert statistics["listeners"] == [
        {
            "protocol": "amqp",
            "ip_address": "127.0.0.1",
            "port": broker.port,
            "state": "listening",
            "connections": 0,
        }
    ]
    assert statistics["connections"] == []
    [vhost] = statistics["vhosts"]
    assert (vhost["name"], vhost["queues"]) == ("/", {})
    predeclared = {"", "amq.direct", "amq.fanout", "amq.topic", "amq.headers", "amq.match"}
    predeclared |= {"amq.rabbitmq.trace", "amq.rabbitmq.event"}
    assert set(vhost["exchanges"]) == predeclared
    for name in predeclared:
        assert watched.exchange(name) == {"publish_in": 0, "publish_out": 0}
    assert statistics["timers"] == broker.clock.statistics()


async def test_what_is_new_starts_at_nothing(client: RawClient, watched: Watched) -> None:
    await declare(client, "q")
    assert watched.all()["listeners"][0]["connections"] == 1
    for number in (PUBLISHER, CONSUMER, TRANSACTION):
        expected = {"number": number, **NO_CHANNEL_STATE, **NO_CHANNEL_COUNTS}
        assert watched.channel(number) == expected
    queue = watched.queue("q")
    assert queue.pop("backing_queue") is not None
    assert queue == {
        "messages_ready": 0,
        "messages_unacknowledged": 0,
        "messages": 0,
        "message_bytes_ready": 0,
        "consumers": 0,
        "mailbox": 0,
        **NO_QUEUE_COUNTS,
        "consumer_utilisation": 0.0,
        "policy": None,
        "operator_policy": None,
        "effective_policy_definition": {},
    }


async def test_publishes_confirms_and_returns(client: RawClient, watched: Watched) -> None:
    exchange = make(commands.Exchange.Declare, exchange="x", exchange_type="direct", arguments={})
    await client.call(PUBLISHER, exchange, commands.Exchange.DeclareOk)
    for name in ("q", "p"):
        await declare(client, name)
        bind = make(commands.Queue.Bind, queue=name, exchange="x", routing_key="both", arguments={})
        await client.call(PUBLISHER, bind, commands.Queue.BindOk)
    await client.call(PUBLISHER, make(commands.Confirm.Select), commands.Confirm.SelectOk)

    await client.send(
        b"".join(
            [
                publish(PUBLISHER, "both", b"abc", exchange="x") * 3,
                publish(PUBLISHER, "none", b"dropped", exchange="x") * 2,
                publish(PUBLISHER, "none", b"returned", exchange="x", mandatory=True),
                publish(PUBLISHER, "q", b"to q alone") * 4,
            ]
        )
    )
    await wait_until(lambda: watched.channel(PUBLISHER)["confirm_count"] == 10)

    assert watched.channel(PUBLISHER) == {
        "number": PUBLISHER,
        **NO_CHANNEL_STATE,
        **NO_CHANNEL_COUNTS,
        "confirm": True,
        "publish_count": 10,
        "confirm_count": 10,
        "drop_unroutable_count": 2,
        "return_unroutable_count": 1,
    }
    # Messages that came, and copies that went to queues.
    assert watched.exchange("x") == {"publish_in": 6, "publish_out": 6}
    assert watched.exchange("") == {"publish_in": 4, "publish_out": 4}
    assert watched.exchange("amq.direct") == {"publish_in": 0, "publish_out": 0}
    assert watched.queue_counts("p") == {**NO_QUEUE_COUNTS, "publish": 3}
    queue = watched.queue("q")
    assert watched.queue_counts("q") == {**NO_QUEUE_COUNTS, "publish": 7}
    assert (queue["messages"], queue["messages_ready"]) == (7, 7)
    assert queue["message_bytes_ready"] == 3 * len(b"abc") + 4 * len(b"to q alone")


async def test_gets_deliveries_and_what_becomes_of_them(
    client: RawClient, watched: Watched
) -> None:
    for name in ("q", "p"):
        await declare(client, name)
    await client.send(publish(PUBLISHER, "q", b"..") * 3 + publish(PUBLISHER, "p", b"..") * 5)
    await wait_until(lambda: watched.queue("p")["publish"] == 5)
    await wait_until(lambda: watched.queue("q")["publish"] == 3)

    await get(client, "q", commands.Basic.GetOk)
    await get(client, "q", commands.Basic.GetOk, no_ack=True)
    assert watched.queue("q")["messages_unacknowledged"] == 1
    await client.tell(
        CONSUMER, make(commands.Basic.Nack, delivery_tag=1, multiple=False, requeue=True)
    )
    await wait_until(lambda: watched.queue("q")["messages_ready"] == 2)
    await consume(client, "q")
    await deliveries(client, 2)
    # Tags 3 and 4: one is acked, one rejected for good.
    assert watched.channel(CONSUMER)["messages_unacknowledged"] == 2
    assert watched.channel(CONSUMER)["consumer_count"] == 1
    await client.tell(CONSUMER, make(commands.Basic.Ack, delivery_tag=3, multiple=False))
    await client.tell(CONSUMER, make(commands.Basic.Reject, delivery_tag=4, requeue=False))
    await get(client, "q", commands.Basic.GetEmpty)
    await consume(client, "p", no_ack=True)
    await deliveries(client, 5)

    assert watched.queue_counts("q") == {
        **NO_QUEUE_COUNTS,
        "publish": 3,
        "get": 1,
        "get_no_ack": 1,
        "get_empty": 1,
        "requeue": 1,
        "deliver": 2,
        "redeliver": 1,
        "ack": 1,
        "reject": 1,
    }
    assert watched.queue_counts("p") == {**NO_QUEUE_COUNTS, "publish": 5, "deliver_no_ack": 5}
    assert watched.channel(CONSUMER) == {
        "number": CONSUMER,
        **NO_CHANNEL_STATE,
        **NO_CHANNEL_COUNTS,
        "consumer_count": 2,
        "get_count": 1,
        "get_no_ack_count": 1,
        "get_empty_count": 1,
        "deliver_count": 2,
        "deliver_no_ack_count": 5,
        "redeliver_count": 1,
        "ack_count": 1,
    }
    for name in ("q", "p"):
        queue = watched.queue(name)
        assert (queue["messages"], queue["consumers"], queue["mailbox"]) == (0, 1, 0)


async def test_what_a_channel_held_is_requeued_when_it_closes(
    client: RawClient, watched: Watched
) -> None:
    await declare(client, "q")
    await client.send(publish(PUBLISHER, "q", b"..") * 3)
    await consume(client, "q")
    await deliveries(client, 3)
    close = make(commands.Channel.Close, reply_code=200, reply_text="")
    await client.call(CONSUMER, close, commands.Channel.CloseOk)
    await wait_until(lambda: watched.queue("q")["messages_ready"] == 3)
    assert watched.queue_counts("q") == {
        **NO_QUEUE_COUNTS,
        "publish": 3,
        "deliver": 3,
        "requeue": 3,
    }
    await wait_until(lambda: [*watched.connection()["channels"]] == [PUBLISHER, TRANSACTION])


async def test_a_transaction_counts_when_it_is_committed(
    client: RawClient, watched: Watched
) -> None:
    await declare(client, "q")
    await client.call(TRANSACTION, make(commands.Tx.Select), commands.Tx.SelectOk)
    await client.send(publish(TRANSACTION, "q", b"..") * 2)
    await client.call(TRANSACTION, make(commands.Tx.Rollback), commands.Tx.RollbackOk)
    assert watched.channel_counts(TRANSACTION) == NO_CHANNEL_COUNTS
    assert watched.exchange("") == {"publish_in": 0, "publish_out": 0}

    await client.send(publish(TRANSACTION, "q", b"..") * 3 + publish(TRANSACTION, "none", b".."))
    await client.call(TRANSACTION, make(commands.Tx.Commit), commands.Tx.CommitOk)
    assert watched.channel(TRANSACTION) == {
        "number": TRANSACTION,
        **NO_CHANNEL_STATE,
        **NO_CHANNEL_COUNTS,
        "transactional": True,
        "publish_count": 4,
        "drop_unroutable_count": 1,
    }
    assert watched.exchange("") == {"publish_in": 4, "publish_out": 3}
    assert watched.queue_counts("q") == {**NO_QUEUE_COUNTS, "publish": 3}


async def test_bytes_of_a_connection(client: RawClient, watched: Watched) -> None:
    await declare(client, "q")
    before = watched.connection()
    assert before["name"].endswith(f" -> 127.0.0.1:{watched.broker.port}")
    assert (before["state"], before["send_pend"], before["mailbox"]) == ("running", 0, 0)

    purge = make(commands.Queue.Purge, queue="q")
    await client.call(CONSUMER, purge, commands.Queue.PurgeOk)

    after = watched.connection()
    purge_ok = make(commands.Queue.PurgeOk, message_count=0)
    assert after["recv_oct"] - before["recv_oct"] == len(method_frame(CONSUMER, purge))
    assert after["send_oct"] - before["send_oct"] == len(method_frame(CONSUMER, purge_ok))


async def test_what_is_gone_is_not_listed(client: RawClient, watched: Watched) -> None:
    await declare(client, "q")
    delete = make(commands.Queue.Delete, queue="q")
    await client.call(CONSUMER, delete, commands.Queue.DeleteOk)
    await wait_until(lambda: watched.all()["vhosts"][0]["queues"] == {})
    await client.say_goodbye()
    await wait_until(lambda: watched.all()["connections"] == [])
    assert watched.all()["listeners"][0]["connections"] == 0


async def test_the_shared_prefetch_is_listed(client: RawClient, watched: Watched) -> None:
    qos = make(commands.Basic.Qos, prefetch_count=7, global_=True)
    await client.call(CONSUMER, qos, commands.Basic.QosOk)
    assert watched.channel(CONSUMER)["global_prefetch_count"] == 7


async def test_consumer_utilisation(settings: Settings, clock: VirtualClock) -> None:
    """The share of time with a consumer that could take; what is a second ago counts half."""
    async with (
        Broker(settings, clock) as broker,
        await RawClient.open(broker.port, channels=2) as client,
    ):
        watched = Watched(broker)

        def utilisation() -> float:
            share = watched.queue("q")["consumer_utilisation"]
            assert isinstance(share, float)
            return share

        await declare(client, "q")
        clock.advance(10)
        assert utilisation() == 0
        await consume(client, "q", prefetch=1)
        clock.advance(1)
        assert utilisation() == pytest.approx(1 / 2)
        clock.advance(1)
        assert utilisation() == pytest.approx(3 / 4)
        # Its prefetch is used up and another message waits: it cannot take for a while.
        await client.send(publish(PUBLISHER, "q", b"") * 2)
        [first] = await deliveries(client, 1)
        await wait_until(lambda: watched.queue("q")["messages_ready"] == 1)
        clock.advance(2)
        assert utilisation() == pytest.approx(3 / 16)
        ack = make(commands.Basic.Ack, delivery_tag=first.delivery_tag)
        await client.tell(CONSUMER, ack)
        await deliveries(client, 1)
        clock.advance(60)
        assert utilisation() == pytest.approx(1)


async def test_what_became_of_messages_that_were_not_consumed(
    client: RawClient, watched: Watched
) -> None:
    """Too many, too old, turned away, returned, rejected; and how many of those died of what."""
    await declare(client, "dead")
    arguments = {
        "x-max-length": Field("I", 2),
        "x-dead-letter-exchange": Field("S", ""),
        "x-dead-letter-routing-key": Field("S", "dead"),
    }
    declaration = make(commands.Queue.Declare, queue="q", arguments=arguments)
    await client.call(CONSUMER, declaration, commands.Queue.DeclareOk)
    strict = {"x-max-length": Field("I", 1), "x-overflow": Field("S", "reject-publish")}
    declaration = make(commands.Queue.Declare, queue="strict", arguments=strict)
    await client.call(CONSUMER, declaration, commands.Queue.DeclareOk)

    await client.send(publish(PUBLISHER, "strict", b"") * 3)
    await client.send(publish(PUBLISHER, "q", b"") * 3)
    await wait_until(lambda: watched.queue("dead")["publish"] == 1)
    await get(client, "q", commands.Basic.GetOk)
    await get(client, "q", commands.Basic.GetOk)
    await client.tell(CONSUMER, make(commands.Basic.Reject, delivery_tag=1, requeue=False))
    await client.tell(CONSUMER, make(commands.Basic.Reject, delivery_tag=2, requeue=True))
    at_once = write_properties(Properties(expiration="0"))
    await client.send(publish(PUBLISHER, "dead", b"", header=at_once))
    await wait_until(lambda: watched.queue("dead")["publish"] == 3)
    await wait_until(lambda: watched.queue("q")["requeue"] == 1)

    assert watched.queue_counts("q") == {
        **NO_QUEUE_COUNTS,
        "publish": 3,
        "get": 2,
        "drop": 1,
        "reject": 1,
        "requeue": 1,
        "dead_letter": {"maxlen": 1, "rejected": 1},
    }
    await wait_until(lambda: watched.queue("strict")["refuse"] == 2)
    assert watched.queue_counts("strict") == {**NO_QUEUE_COUNTS, "publish": 1, "refuse": 2}
    # What stands at the head of this one does not expire.
    assert watched.queue("dead")["expire"] == 0
    purge = make(commands.Queue.Purge, queue="dead")
    await client.call(CONSUMER, purge, commands.Queue.PurgeOk)
    await client.send(publish(PUBLISHER, "dead", b"", header=at_once))
    await wait_until(lambda: watched.queue("dead")["expire"] == 1)
