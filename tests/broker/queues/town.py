"""Several queues of one virtual host without sockets and channels: what they do to each other.

Topology, actors, backing queues and units are the broker's own; commits happen at once, or when
the test says so. Nothing waits for a disk or a real clock, so a town that has been given some turns
of the event loop and has empty mailboxes has come to rest.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from itertools import repeat
from typing import cast

from leveret.broker.clock import VirtualClock
from leveret.broker.event_log.messages import MessageLog
from leveret.broker.exchanges import register_builtins
from leveret.broker.flow import Witness
from leveret.broker.queues import commands as c
from leveret.broker.queues.actor import QueueActor
from leveret.broker.queues.arguments import QueueArguments
from leveret.broker.queues.effective import Definition, QueueOptions, effective
from leveret.broker.queues.record import Queue
from leveret.broker.registry import Registries
from leveret.broker.resource import Resource
from leveret.broker.vhost import Vhost
from leveret.protocol.codec import Properties, pick_headers, write_properties
from leveret.protocol.field_table import Field, Table
from leveret.protocol.hot import scan_properties
from leveret.protocol.twin import Message
from leveret.storage.backing_queue import BackingQueue
from leveret.storage.commit import Batch, Operation
from leveret.storage.memory_queue import MemoryQueue
from leveret.storage.priority_queue import PriorityQueue
from leveret.storage.unit import Unit, commit_in_memory
from tests.broker.queues.bench import SETTINGS, Port

# More turns of the event loop than any answer needs that is on its way between two tasks.
QUIET_TURNS = 12
TURNS_MAX = 20_000


def letter(
    body: bytes,
    *,
    expiration: str | None = None,
    priority: int | None = None,
    persistent: bool = False,
    key: str = "q",
    headers: Table | None = None,
) -> Message:
    """A message as the codec would make it."""
    properties = Properties(
        headers=headers,
        delivery_mode=2 if persistent else None,
        priority=priority,
        expiration=expiration,
    )
    header = write_properties(properties)
    raw = key.encode()
    envelope = b"\x00" + bytes((len(raw),)) + raw
    return Message(envelope, "", key, header, body, *scan_properties(header, 0, len(header)))


def deaths(message: Message) -> list[tuple[str, str, int]]:
    """(queue, reason, count) of each entry of x-death."""
    found = (pick_headers(message.header) or {}).get("x-death")
    if found is None:
        return []
    entries = cast("list[Field]", found.value)
    tables = [cast(Table, entry.value) for entry in entries]
    return [
        (
            cast(str, each["queue"].value),
            cast(str, each["reason"].value),
            cast(int, each["count"].value),
        )
        for each in tables
    ]


class Town:
    """Use as a context; it checks at the end that no queue has crashed."""

    def __init__(self, clock: VirtualClock, *, is_loading: bool = False) -> None:
        self.clock = clock
        # Backing queues answer LOADING now and then.
        self.is_loading = is_loading
        registries = Registries()
        register_builtins(registries)
        self.topology: Vhost[Queue] = Vhost("/", registries)
        self.actors: dict[str, QueueActor] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # Units are kept back until the test lets them begin and end.
        self.is_holding = False
        self.held: list[Operation] = []
        self.made_units = 0
        self.message_log: MessageLog | None = None
        self.credit_log: Witness | None = None

    # --- what a queue needs of its virtual host --------------------------------------------------

    def make_unit(self, ended: Callable[[bool], object]) -> Unit:
        self.made_units += 1
        return Unit(self._put, ended)

    def _put(self, operation: Operation) -> None:
        if self.is_holding:
            self.held.append(operation)
        else:
            commit_in_memory(operation)

    def begin_held(self) -> Batch:
        """The commit of what was held begins; run what is in ``after`` for its end."""
        held, self.held = self.held, []
        batch = Batch()
        for operation in held:
            operation.gather(batch)
        return batch

    async def commit_held(self) -> None:
        for call in self.begin_held().after:
            call()
        await self.rest()

    # --- queues ----------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        *,
        durable: bool = True,
        policy: Definition | None = None,
        make_backing: Callable[[Callable[[], None]], BackingQueue] | None = None,
        **arguments: object,
    ) -> Queue:
        """Declare a queue; ``arguments`` are those of QueueArguments."""
        options = QueueArguments(**arguments)  # type: ignore[arg-type]
        queue = Queue(Resource("/", "queue", name), durable, False, None, {}, options)
        queue.effective = effective(options, policy)
        self.topology.add_queue(queue)
        self.start(queue, make_backing)
        return queue

    def start(
        self,
        queue: Queue,
        make_backing: Callable[[Callable[[], None]], BackingQueue] | None = None,
    ) -> None:
        name = queue.name.name
        actor = QueueActor(
            queue,
            make_backing or (lambda wake: self._backing(queue.effective, wake)),
            self._on_deleted,
            self.clock,
            SETTINGS,
            (),
            self,
        )
        self.actors[name] = actor
        self._tasks[name] = asyncio.create_task(actor.run(), name=name)

    def _on_deleted(self, queue: Queue) -> None:
        self.topology.remove_queue(queue.name.name)

    def _backing(self, options: QueueOptions, wake: Callable[[], None]) -> BackingQueue:
        def make(priority: int) -> BackingQueue:
            return MemoryQueue(wake, random.Random(priority) if self.is_loading else None)

        if options.max_priority is None:
            return make(0)
        return PriorityQueue(options.max_priority, make)

    def change_policy(self, name: str, policy: Definition | None) -> None:
        queue = self.topology.queues[name]
        queue.effective = effective(queue.options, policy)
        queue.mailbox.put_urgent(c.PolicyChanged(queue.effective))

    def is_alive(self, name: str) -> bool:
        return not self._tasks[name].done()

    def statistics(self, name: str) -> dict[str, object]:
        return self.actors[name].statistics()

    def count(self, name: str, counter: str = "messages_ready") -> object:
        return self.statistics(name)[counter]

    # --- what tests do ---------------------------------------------------------------------------

    async def rest(self) -> None:
        """Return when nobody has anything to do."""
        quiet = 0
        for _ in range(TURNS_MAX):
            await asyncio.sleep(0)
            waiting = [
                len(actor.mailbox.urgent) or (len(actor.mailbox) and not actor._must_wait)
                for name, actor in self.actors.items()
                if self.is_alive(name)
            ]
            quiet = 0 if any(waiting) else quiet + 1
            if quiet == QUIET_TURNS:
                return
        raise AssertionError("it never comes to rest")

    async def pass_time(self, milliseconds: int) -> None:
        self.clock.advance(milliseconds / 1000)
        await self.rest()

    async def publish(self, name: str, *messages: Message, port: Port | None = None) -> Port:
        """As one run, from a channel that wants confirms."""
        sender = port or Port("publisher")
        delivery = sender.delivery(messages, confirm=True)
        for message in messages:
            delivery.needs |= message.needs
        sender.send(self.topology.queues[name], delivery)
        await self.rest()
        return sender

    async def get(self, name: str, port: Port, *, no_ack: bool = False) -> c.GetOk | None:
        self.topology.queues[name].mailbox.put(c.Get(port.mailbox, no_ack))
        await self.rest()
        answers = [item for item in port.take() if isinstance(item, (c.GetOk, c.GetEmpty))]
        [answer] = answers
        return answer if isinstance(answer, c.GetOk) else None

    async def take_all(self, name: str) -> list[Message]:
        """Everything a queue has, in order."""
        port = Port("reader")
        found: list[Message] = []
        while (answer := await self.get(name, port, no_ack=True)) is not None:
            found.append(answer.message)
        return found

    async def bodies(self, name: str) -> list[bytes]:
        return [message.body for message in await self.take_all(name)]

    async def __aenter__(self) -> Town:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.wait(self._tasks.values())
        crashes = [task.exception() for task in self._tasks.values() if not task.cancelled()]
        assert not any(crashes), crashes


def consume(queue: Queue, port: Port, *, prefetch: int = 0, no_ack: bool = False) -> None:
    port.consume(queue, prefetch=prefetch, no_ack=no_ack)


def outcome(port: Port) -> tuple[list[int], list[int]]:
    """Sequence numbers that were confirmed, and those that were refused."""
    confirmed: list[int] = []
    refused: list[int] = []
    for item in port.take():
        if isinstance(item, c.Confirmed):
            confirmed += range(item.first, item.last + 1)
        elif isinstance(item, c.Refused):
            refused += range(item.first, item.last + 1)
    return sorted(confirmed), sorted(refused)


def delivered(port: Port) -> list[tuple[Message, int | None]]:
    """Messages and ids of all deliveries since the last time."""
    return [
        pair
        for item in port.take()
        if isinstance(item, c.Deliver)
        for pair in zip(item.messages, item.seq_ids or repeat(None), strict=False)
    ]
