"""Every field that the schema promises for a kind of event is told by a real broker."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path
from typing import Any

import aio_pika
import msgspec
from aio_pika import ExchangeType, Message
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractIncomingMessage

from leveret.broker.config import Settings
from leveret.broker.event_log.schema import KINDS, REQUIRED
from leveret.broker.events import ACTING_USER
from leveret.broker.server import Broker
from tests.broker.event_log.reading import read, sealed
from tests.broker.event_log.telling import Telling
from tests.support.waiting import wait_until

# Alarms, credit, refused logins, gaps and stops have tests of their own.
ELSEWHERE = {
    *("auth_fail", "blocked", "unblocked", "credit_blocked", "credit_unblocked"),
    *("log_gap", "broker_stop"),
}


def given_fields(folder: Path) -> dict[str, set[str]]:
    """By kind, whatever any line had."""
    given: dict[str, set[str]] = defaultdict(set)
    for path in sealed(folder):
        for line in read(path).splitlines():
            event: dict[str, Any] = msgspec.json.decode(line)
            given[event["ev"]] |= event.keys() - set(REQUIRED)
    return given


class Workload:
    """Whatever clients do that leaves a trace."""

    def __init__(self, broker: Broker, connection: AbstractConnection) -> None:
        self._broker = broker
        self._connection = connection
        self.channel: AbstractChannel

    async def run(self) -> None:
        self.channel = await self._connection.channel()
        await self._publish_everywhere()
        await self._die()
        await self._consume_and_refuse()
        await self._get()
        await self._delete()

    async def _publish_everywhere(self) -> None:
        channel = self.channel
        topic = await channel.declare_exchange("topic", ExchangeType.TOPIC, durable=True)
        for name in ("a", "b"):
            queue = await channel.declare_queue(name, durable=True)
            await queue.bind(topic, "both.#")
        await (await channel.declare_queue("one", durable=True)).bind(topic, "one")
        fanout = await channel.declare_exchange("fanout", ExchangeType.FANOUT, durable=True)
        await fanout.bind(topic, "on")
        await fanout.unbind(topic, "on")
        for key in ("both.x", "one"):
            await topic.publish(Message(b"abc", delivery_mode=2), key)
        for mandatory in (False, True):
            await topic.publish(Message(b"abc"), "nowhere", mandatory=mandatory)
        bound = await channel.declare_queue("short-lived", auto_delete=True)
        await bound.bind(topic, "x", arguments={"why": "not"})
        await bound.unbind(topic, "x", arguments={"why": "not"})

    async def _die(self) -> None:
        channel = self.channel
        full = await channel.declare_queue(
            "full", arguments={"x-max-length": 1, "x-overflow": "reject-publish"}
        )
        for _ in range(2):
            publish = channel.default_exchange.publish(Message(b"abc"), "full")
            await asyncio.gather(publish, return_exceptions=True)
        await full.purge()
        await channel.declare_queue("short", arguments={"x-max-length": 1})
        for _ in range(2):
            await channel.default_exchange.publish(Message(b"abc"), "short")
        dead: dict[str, Any] = {
            "x-dead-letter-exchange": "topic",
            "x-dead-letter-routing-key": "one",
            "x-queue-type": "quorum",
            "x-delivery-limit": 1,
        }
        limited = await channel.declare_queue("limited", durable=True, arguments=dead)
        await channel.default_exchange.publish(Message(b"abc", delivery_mode=2), "limited")
        for _ in range(2):
            taken = await limited.get()
            assert taken is not None
            await taken.nack()
        await channel.declare_queue("brief", arguments={"x-message-ttl": 0})
        await channel.default_exchange.publish(Message(b"abc"), "brief")
        lazy = await channel.declare_queue("lazy")
        await channel.default_exchange.publish(Message(b"abc"), "lazy")
        await self._broker.policies.set("/", "lazy", "^lazy$", {"queue-mode": "lazy"})
        await wait_until(lambda: not self._in_memory("lazy"))
        assert await lazy.get(no_ack=True)
        await self._die_unread()

    async def _die_unread(self) -> None:
        channel = self.channel
        arguments: dict[str, Any] = {"x-queue-mode": "lazy", "x-message-ttl-exact": True}
        await channel.declare_queue("unread-brief", arguments=arguments)
        message = Message(b"abc", expiration=0.01)
        await channel.default_exchange.publish(message, "unread-brief")
        await channel.declare_queue("unread")
        await channel.default_exchange.publish(Message(b"abc"), "unread")
        policy: dict[str, object] = {"queue-mode": "lazy"}
        await self._broker.policies.set("/", "unread", "^unread$", policy)
        await wait_until(lambda: not self._in_memory("unread"))
        await self._broker.policies.set("/", "unread", "^unread$", {**policy, "max-length": 0})
        names = ("unread", "unread-brief")
        await wait_until(lambda: not any(self._statistics(n)["messages_ready"] for n in names))

    def _statistics(self, queue: str) -> Any:
        queues: Any = self._broker.vhosts["/"].statistics()["queues"]
        return queues[queue]

    def _in_memory(self, queue: str) -> Any:
        return self._statistics(queue)["backing_queue"]["messages_ready_ram"]

    async def _consume_and_refuse(self) -> None:
        """In turn: nack, reject, ack; then without acks."""
        channel = self.channel
        queue = await channel.declare_queue("work")
        seen: list[AbstractIncomingMessage] = []
        tag = await queue.consume(collect(seen))
        await channel.default_exchange.publish(Message(b"abc"), "work")
        await wait_until(lambda: len(seen) == 1)
        await seen[0].nack()
        await wait_until(lambda: len(seen) == 2)
        await seen[1].reject(requeue=True)
        await wait_until(lambda: len(seen) == 3)
        await seen[2].ack()
        await channel.default_exchange.publish(Message(b"abc"), "work")
        await wait_until(lambda: len(seen) == 4)
        # It stays delivered until its queue is gone.
        other = await self._connection.channel()
        await (await other.get_queue("work")).delete(if_unused=False, if_empty=False)
        await channel.close()
        self.channel = await self._connection.channel()
        again = await self.channel.declare_queue("auto")
        tag = await again.consume(collect(seen), no_ack=True)
        await self.channel.default_exchange.publish(Message(b"abc"), "auto")
        await wait_until(lambda: len(seen) == 5)
        await again.cancel(tag)

    async def _get(self) -> None:
        queue = await self.channel.get_queue("one")
        taken = await queue.get()
        assert taken is not None
        await taken.nack()
        taken = await queue.get()
        assert taken is not None
        await taken.ack()

    async def _delete(self) -> None:
        channel = self.channel
        await (await channel.get_queue("a")).delete(if_unused=False, if_empty=False)
        await channel.exchange_delete("fanout")
        gone = await channel.declare_exchange("gone", ExchangeType.FANOUT, auto_delete=True)
        queue = await channel.declare_queue("leaving", exclusive=True)
        await queue.bind(gone)
        await queue.consume(collect([]))


def collect(seen: list[AbstractIncomingMessage]) -> Any:
    async def take(message: AbstractIncomingMessage) -> None:
        seen.append(message)

    return take


async def test_every_field_of_every_kind(settings: Settings) -> None:
    for attempt in range(2):
        async with Telling(settings) as told:
            if attempt:
                ACTING_USER.set("admin")
                await told.broker.policies.set("/", "cap", "^x", {"max-length": 5})
            else:
                connection = await aio_pika.connect(
                    told.url, client_properties={"connection_name": "all of it"}
                )
                await Workload(told.broker, connection).run()
                await connection.close()
    given = given_fields(told.settings.data / "events")
    missing = {
        name: sorted(set(kind.fields) - given[name])
        for name, kind in KINDS.items()
        if name not in ELSEWHERE and not set(kind.fields) <= given[name]
    }
    assert missing == {}
