"""Policies set while clients are connected: what applies, at once and after a restart.

The broker runs in the test's own loop, so that ``broker.policies`` is at hand.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel, AbstractConnection
from aio_pika.exceptions import DeliveryError

from leveret.broker.config import Settings
from leveret.broker.exchanges.decorators import Activity, ExchangeDecorator
from leveret.broker.parameters import NoSuchParameter, ParameterError
from leveret.broker.queues.decorators import QueueDecorator
from leveret.broker.server import Broker
from leveret.storage.memory_queue import MemoryQueue
from leveret.storage.vhost_store import StoreError
from tests.support.broker_process import running_broker
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def connection(broker: Broker) -> AsyncIterator[AbstractConnection]:
    async with await aio_pika.connect(broker.url) as connection:
        yield connection


@pytest.fixture
async def channel(connection: AbstractConnection) -> AbstractChannel:
    return await connection.channel()


def facts(broker: Broker, kind: str, name: str) -> dict[str, Any]:
    [vhost] = broker.vhosts.values()
    statistics: Any = vhost.statistics()
    found: dict[str, Any] = statistics[kind][name]
    names = ("policy", "operator_policy", "effective_policy_definition")
    return {name: found[name] for name in names}


NOTHING: dict[str, Any] = {
    "policy": None,
    "operator_policy": None,
    "effective_policy_definition": {},
}


# --- what applies to queues ---------------------------------------------------------------------


async def test_a_policy_applies_to_what_is_there_and_to_what_comes(
    broker: Broker, channel: AbstractChannel
) -> None:
    await channel.declare_queue("orders.old")
    await channel.declare_queue("other")
    await broker.policies.set("/", "short", "^orders", {"max-length": 5})
    await channel.declare_queue("orders.new")
    applied = {"policy": "short", "effective_policy_definition": {"max-length": 5}}
    assert facts(broker, "queues", "orders.old") == {**NOTHING, **applied}
    assert facts(broker, "queues", "orders.new") == {**NOTHING, **applied}
    assert facts(broker, "queues", "other") == NOTHING


async def test_a_policy_that_is_cleared_leaves_nothing(
    broker: Broker, channel: AbstractChannel
) -> None:
    await channel.declare_queue("q")
    await broker.policies.set("/", "low", ".*", {"max-length": 5})
    await broker.policies.set("/", "high", ".*", {"message-ttl": 10}, priority=1)
    assert facts(broker, "queues", "q")["policy"] == "high"
    await broker.policies.delete("/", "high")
    assert facts(broker, "queues", "q")["effective_policy_definition"] == {"max-length": 5}
    await broker.policies.delete("/", "low")
    assert facts(broker, "queues", "q") == NOTHING


async def test_operator_policies_limit_policies(broker: Broker, channel: AbstractChannel) -> None:
    await channel.declare_queue("q", arguments={"x-message-ttl": 50})
    await broker.policies.set("/", "mine", ".*", {"max-length": 100, "overflow": "reject-publish"})
    await broker.operator_policies.set("/", "cap", ".*", {"max-length": 10, "message-ttl": 90})
    assert facts(broker, "queues", "q") == {
        "policy": "mine",
        "operator_policy": "cap",
        "effective_policy_definition": {
            "max-length": 10,
            "message-ttl": 90,
            "overflow": "reject-publish",
        },
    }
    options = broker.vhosts["/"].topology.queues["q"].effective
    assert (options.max_length, options.message_ttl_ms) == (10, 50)
    assert options.overflow == "reject-publish"


class Follower(QueueDecorator):
    """Notes what its queue was told."""

    def __init__(self, seen: list[object]) -> None:
        self._seen = seen

    def active_for(self, queue: Any) -> bool:
        return True

    def policy_changed(self, queue: Any) -> None:
        self._seen.append((queue.name.name, queue.effective.max_length))


async def test_a_queue_hears_of_a_change_and_of_nothing_else(
    broker: Broker, channel: AbstractChannel
) -> None:
    seen: list[object] = []
    broker.registries.queue_decorators.register("follower", lambda: Follower(seen))
    await channel.declare_queue("q")
    await broker.policies.set("/", "p", "^q$", {"max-length": 1})
    await wait_until(lambda: seen == [("q", 1)])
    await broker.policies.set("/", "p", "^q$", {"max-length": 1})
    await broker.policies.set("/", "elsewhere", "^x$", {"max-length": 9})
    await broker.policies.set("/", "p", "^q$", {"max-length": 2})
    await wait_until(lambda: len(seen) >= 2)
    assert seen == [("q", 1), ("q", 2)]


async def bodies(channel: AbstractChannel, name: str) -> list[bytes]:
    queue = await channel.get_queue(name)
    found = []
    while (message := await queue.get(no_ack=True, fail=False)) is not None:
        found.append(message.body)
    return found


async def test_a_limit_is_obeyed_at_once(broker: Broker, channel: AbstractChannel) -> None:
    """Also by messages that are there, and no longer when it is gone."""
    await channel.declare_queue("q")

    async def publish(*texts: bytes) -> None:
        for text in texts:
            await channel.default_exchange.publish(aio_pika.Message(text), "q")

    await publish(b"1", b"2", b"3", b"4")
    await broker.policies.set("/", "short", "^q$", {"max-length": 2})
    await publish(b"5")
    assert await bodies(channel, "q") == [b"4", b"5"]
    await broker.policies.set("/", "short", "^q$", {"max-length": 1, "overflow": "reject-publish"})
    await publish(b"6")
    with pytest.raises(DeliveryError):
        await publish(b"7")
    await broker.policies.delete("/", "short")
    await publish(b"8")
    assert await bodies(channel, "q") == [b"6", b"8"]


async def test_dead_letters_by_policy(broker: Broker, channel: AbstractChannel) -> None:
    queue = await channel.declare_queue("q")
    await channel.declare_queue("dead")
    definition = {"dead-letter-exchange": "", "dead-letter-routing-key": "dead"}
    await broker.policies.set("/", "dlx", "^q$", definition)
    await channel.default_exchange.publish(aio_pika.Message(b"poor"), "q")
    await (await queue.get()).reject(requeue=False)
    dead = await channel.get_queue("dead")
    found: list[bytes] = []
    async with asyncio.timeout(20):
        while not found:
            found = await bodies(channel, dead.name)
    assert found == [b"poor"]


async def test_many_changes_while_messages_flow(broker: Broker, channel: AbstractChannel) -> None:
    queue = await channel.declare_queue("busy")

    async def change() -> None:
        for length in range(1000, 1050):
            await broker.policies.set("/", "p", "busy", {"max-length": length})

    async def publish() -> None:
        for number in range(200):
            await channel.default_exchange.publish(aio_pika.Message(b"%d" % number), "busy")

    await asyncio.gather(change(), publish())
    for number in range(200):
        message = await queue.get(no_ack=True)
        assert message.body == b"%d" % number
    assert broker.vhosts["/"].topology.queues["busy"].effective.max_length == 1049


# --- exchanges ----------------------------------------------------------------------------------


async def unrouted(channel: AbstractChannel, exchange: str) -> None:
    source = await channel.get_exchange(exchange)
    await source.publish(aio_pika.Message(b"lost?"), "nowhere", mandatory=False)


async def test_an_alternate_exchange_comes_and_goes(
    broker: Broker, channel: AbstractChannel
) -> None:
    await channel.declare_exchange("src", aio_pika.ExchangeType.DIRECT)
    alternate = await channel.declare_exchange("ae", aio_pika.ExchangeType.FANOUT)
    queue = await channel.declare_queue("caught")
    await queue.bind(alternate)

    await unrouted(channel, "src")
    await broker.policies.set("/", "ae", "^src$", {"alternate-exchange": "ae"})
    await unrouted(channel, "src")
    await broker.policies.delete("/", "ae")
    await unrouted(channel, "src")
    assert (await queue.get(no_ack=True)).body == b"lost?"
    assert await queue.get(no_ack=True, fail=False) is None


async def test_an_exchange_made_later_has_its_policy(
    broker: Broker, channel: AbstractChannel
) -> None:
    alternate = await channel.declare_exchange("ae", aio_pika.ExchangeType.FANOUT)
    queue = await channel.declare_queue("caught")
    await queue.bind(alternate)
    await broker.policies.set("/", "ae", "^src$", {"alternate-exchange": "ae"})
    await channel.declare_exchange("src", aio_pika.ExchangeType.DIRECT)
    await unrouted(channel, "src")
    assert (await queue.get(no_ack=True)).body == b"lost?"
    assert facts(broker, "exchanges", "src")["policy"] == "ae"


async def test_the_argument_wins_over_the_policy(broker: Broker, channel: AbstractChannel) -> None:
    await broker.policies.set("/", "ae", "^src$", {"alternate-exchange": "amq.topic"})
    mine = await channel.declare_exchange("mine", aio_pika.ExchangeType.FANOUT)
    queue = await channel.declare_queue("caught")
    await queue.bind(mine)
    await channel.declare_exchange("src", arguments={"alternate-exchange": "mine"})
    await unrouted(channel, "src")
    assert (await queue.get(no_ack=True)).body == b"lost?"


async def test_a_policy_for_queues_leaves_exchanges_alone(
    broker: Broker, channel: AbstractChannel
) -> None:
    await channel.declare_exchange("x")
    await broker.policies.set("/", "p", ".*", {"max-length": 5}, apply_to="queues")
    assert facts(broker, "exchanges", "x") == NOTHING
    await broker.policies.set("/", "p", ".*", {"max-length": 5}, apply_to="exchanges")
    assert facts(broker, "exchanges", "x")["policy"] == "p"
    # Also those that were always there; nothing comes of it for the default exchange.
    assert facts(broker, "exchanges", "")["policy"] == "p"


async def test_an_extension_that_fails_keeps_no_policy_from_others(
    broker: Broker, channel: AbstractChannel, caplog: pytest.LogCaptureFixture
) -> None:
    followed: list[str] = []

    class Clumsy(ExchangeDecorator):
        def active_for(self, exchange: Any) -> Activity:
            return Activity.NO_ROUTE

        def create(self, exchange: Any) -> None:
            followed.append(exchange.name.name)

        def policy_changed(self, exchange: Any) -> None:
            raise ValueError("clumsy")

    await channel.declare_queue("q")
    broker.registries.exchange_decorators.register("clumsy", Clumsy)
    await broker.policies.set("/", "p", ".*", {"max-length": 5})
    assert facts(broker, "queues", "q")["policy"] == "p"
    assert "an extension failed at policy_changed" in caplog.text
    # No policy makes anything follow the default exchange.
    assert "amq.direct" in followed
    assert "" not in followed


# --- what is kept ---------------------------------------------------------------------------------


async def test_policies_are_there_after_a_restart(settings: Settings) -> None:
    async with Broker(settings) as broker:
        async with await aio_pika.connect(broker.url) as connection:
            channel = await connection.channel()
            await channel.declare_queue("q", durable=True)
            await channel.declare_exchange("x", durable=True)
        await broker.policies.set(
            "/", "kept", "^[qx]$", {"message-ttl": 99, "alternate-exchange": "amq.fanout"}, 3
        )
        await broker.policies.set("/", "cleared", ".*", {"max-length": 1}, 9)
        await broker.operator_policies.set("/", "cap", "^q$", {"max-length": 7}, 1, "queues")
        await broker.policies.delete("/", "cleared")
    async with Broker(settings) as broker:
        [kept] = broker.policies.list()
        assert kept.as_dict() == {
            "vhost": "/",
            "name": "kept",
            "pattern": "^[qx]$",
            "apply-to": "all",
            "definition": {"message-ttl": 99, "alternate-exchange": "amq.fanout"},
            "priority": 3,
        }
        assert broker.operator_policies.get("/", "cap") == broker.operator_policies.list("/")[0]
        topology = broker.vhosts["/"].topology
        options = topology.queues["q"].effective
        assert (options.message_ttl_ms, options.max_length) == (99, 7)
        assert topology.exchanges["x"].alternate == "amq.fanout"


def test_a_policy_that_was_set_survives_a_kill(tmp_path: Any) -> None:
    """The command returns when it is on disk."""
    from leveret.broker.cli.main import main

    flags = ["--data", str(tmp_path / "data")]
    with running_broker(tmp_path) as process:
        assert main(["policy", "set", "p", "^q", '{"max-length": 5}', *flags]) == 0
        process.kill()
    with running_broker(tmp_path):
        assert main(["policy", "clear", "p", *flags]) == 0


async def test_a_policy_that_cannot_be_read_keeps_nobody_from_starting(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    async with Broker(settings) as broker:
        await broker.policies.set("/", "good", ".*", {"max-length": 5})
        await broker.vhosts["/"].save_parameter("policy", "bad", '{"pattern": 1}')
        await broker.vhosts["/"].save_parameter("vhost-limits", "limits", "[]")
    async with Broker(settings) as broker:
        assert [policy.name for policy in broker.policies.list()] == ["good"]
    assert "policy 'bad' cannot be brought back" in caplog.text
    assert "vhost-limits 'limits' cannot be brought back" in caplog.text


async def test_a_store_that_is_gone_is_told(settings: Settings) -> None:
    """And not as a cancellation, which would be the caller's own."""
    async with Broker(settings) as broker:
        vhost = await broker.add_vhost("v")
        await broker.delete_vhost("v")
        with pytest.raises(StoreError, match="vhost 'v' has stopped"):
            await vhost.save_parameter("policy", "p", "{}")


async def test_a_broker_without_files_has_policies_too(settings: Settings) -> None:
    async with Broker(settings, make_backing=MemoryQueue) as broker:
        await broker.policies.set("/", "p", ".*", {"max-length": 5})
        assert [policy.name for policy in broker.policies.list("/")] == ["p"]
        await broker.policies.delete("/", "p")
        assert broker.policies.list() == []


# --- what is refused ------------------------------------------------------------------------------


async def test_refused(broker: Broker) -> None:
    policies = broker.policies
    with pytest.raises(ParameterError, match="there is no vhost 'nowhere'"):
        await policies.set("nowhere", "p", ".*", {"max-length": 5})
    with pytest.raises(ParameterError, match="are not recognised policy settings"):
        await policies.set("/", "p", ".*", {"max-len": 5})
    with pytest.raises(NoSuchParameter, match="there is no policy 'p' in vhost '/'"):
        await policies.delete("/", "p")
    with pytest.raises(NoSuchParameter, match="there is no operator policy 'p' in vhost '/'"):
        await broker.operator_policies.delete("/", "p")
    assert policies.list() == []
    assert policies.get("/", "p") is None


async def test_keys_without_effect_are_noted(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    await broker.policies.set("/", "ha", ".*", {"ha-mode": "all", "max-length": 5})
    assert "policy 'ha' in vhost '/': without effect here: ha-mode" in caplog.text
