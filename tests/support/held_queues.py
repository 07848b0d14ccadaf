"""Queues that do not take what they are sent, as one does that is busy or waits for a disk.

A queue's actor waits for its mailbox between two batches; here it can be made to wait for the
test as well. Everything else of the broker is as it always is.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from leveret.broker.channel.channel import Channel
from leveret.broker.connection.reader import Reader
from leveret.broker.mailbox import Mailbox
from leveret.broker.queues.commands import Delivery
from leveret.protocol.twin import PublishRun

if TYPE_CHECKING:
    import pytest

    from leveret.broker.server import Broker


class HeldQueues:
    """Install it before the queues are declared."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._held: dict[Mailbox, asyncio.Event] = {}
        take_turn = Mailbox.turn

        async def turn(mailbox: Mailbox, *, urgent_only: bool = False) -> None:
            await take_turn(mailbox, urgent_only=urgent_only)
            while mailbox in self._held:
                await self._held[mailbox].wait()

        monkeypatch.setattr(Mailbox, "turn", turn)

    def hold(self, broker: Broker, *names: str) -> None:
        for name in names:
            self._held[queue_mailbox(broker, name)] = asyncio.Event()

    def release(self) -> None:
        held, self._held = self._held, {}
        for event in held.values():
            event.set()


def queue_mailbox(broker: Broker, name: str) -> Mailbox:
    return broker.vhosts["/"].topology.queues[name].mailbox


def readers(broker: Broker) -> list[Reader]:
    return [reader for listener in broker.listeners for reader in listener.readers]


def channels(broker: Broker) -> list[Channel]:
    return [channel for reader in readers(broker) for channel in reader._channels.values()]


def cost_under_way(broker: Broker) -> int:
    """What all messages between readers and queues cost in credit; one for several counts once."""
    runs = [item for channel in channels(broker) for item in channel.mailbox.ordinary]
    waiting = [
        item
        for queue in broker.vhosts["/"].topology.queues.values()
        for item in queue.mailbox.ordinary
    ]
    deliveries = {id(item): item for item in waiting if isinstance(item, Delivery)}
    return sum(run.cost for run in runs if isinstance(run, PublishRun)) + sum(
        delivery.cost for delivery in deliveries.values()
    )


def uncut_bytes(broker: Broker) -> int:
    """What was read from sockets and not made into messages yet."""
    return sum(
        len(reader._data)
        - reader._at
        + sum(len(chunk) for chunk in reader.mailbox.ordinary if isinstance(chunk, bytes))
        for reader in readers(broker)
    )
