"""A queue's actor without sockets and channels: commands in, what it sends back out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from leveret.broker.clock import Clock
from leveret.broker.config import Settings
from leveret.broker.flow import Bump, CreditFlow
from leveret.broker.mailbox import Mailbox
from leveret.broker.queues import commands as c
from leveret.broker.queues.actor import QueueActor
from leveret.broker.queues.arguments import QueueArguments
from leveret.broker.queues.limiter import Limiter
from leveret.broker.queues.record import Queue
from leveret.broker.resource import Resource
from leveret.protocol.message import Message
from leveret.storage.backing_queue import BackingQueue
from leveret.storage.memory_queue import MemoryQueue

T = TypeVar("T")

SETTINGS = Settings(
    data=Path("unused"), credit_flow_initial=40, credit_flow_more_after=20, delivery_window=10
)


def make_queue(
    name: str = "q",
    *,
    durable: bool = True,
    auto_delete: bool = False,
    single_active: bool = False,
) -> Queue:
    options = QueueArguments(single_active_consumer=single_active)
    return Queue(Resource("/", "queue", name), durable, auto_delete, None, {}, options)


def message(body: bytes, *, persistent: bool = False) -> Message:
    return Message(b"\x00\x01q", "", "q", b"\x00\x00", body, 0, persistent)


class Port:
    """A channel as queues know it: an address, a shared limit, credit for each queue."""

    def __init__(self, name: str) -> None:
        self.mailbox = Mailbox(name)
        self.limiter = Limiter(self.mailbox)
        self.flow = CreditFlow(
            self.mailbox, SETTINGS.credit_flow_initial, SETTINGS.credit_flow_more_after
        )
        self.next_seq = 1

    def delivery(
        self, messages: Sequence[Message], *, confirm: bool = False, mandatory: bool = False
    ) -> c.Delivery:
        sizes = [len(each.body) for each in messages]
        first = 0
        if confirm:
            first = self.next_seq
            self.next_seq += len(messages)
        delivery = c.Delivery(
            messages,
            self.mailbox,
            first,
            len(messages) + sum(size >> 14 for size in sizes),
            sum(sizes),
            max(sizes),
            sum(each.persistent for each in messages),
            is_mandatory=mandatory,
        )
        delivery.targets = 1
        return delivery

    def publish(
        self,
        queue: Queue,
        *bodies: bytes,
        confirm: bool = False,
        persistent: bool = False,
        mandatory: bool = False,
    ) -> c.Delivery:
        messages = [message(body, persistent=persistent) for body in bodies]
        delivery = self.delivery(messages, confirm=confirm, mandatory=mandatory)
        self.send(queue, delivery)
        return delivery

    def send(self, queue: Queue, delivery: c.Delivery) -> None:
        """As the delegate does."""
        assert queue.mailbox.put(delivery)
        self.flow.send(queue.mailbox, delivery.cost)

    def consume(
        self,
        queue: Queue,
        tag: str = "tag",
        *,
        no_ack: bool = False,
        exclusive: bool = False,
        prefetch: int = 0,
        priority: int = 0,
    ) -> None:
        queue.mailbox.put_urgent(
            c.Consume(self.mailbox, self.limiter, tag, no_ack, exclusive, prefetch, priority)
        )

    def take(self) -> list[object]:
        """What queues have sent since the last time; grants go where they belong."""
        taken = self.mailbox.take_urgent()
        for item in taken:
            if isinstance(item, Bump):
                self.flow.handle_bump(item)
        return [item for item in taken if not isinstance(item, Bump)]

    def take_one(self, kind: type[T]) -> T:
        """The only thing that came, which must be of this kind."""
        taken = self.take()
        assert len(taken) == 1, taken
        assert isinstance(taken[0], kind), taken
        return taken[0]


def bodies(items: Sequence[object]) -> list[bytes]:
    """The bodies of all deliveries among ``items``."""
    return [each.body for item in items if isinstance(item, c.Deliver) for each in item.messages]


class Scheduled(list[Callable[[], None]]):
    """Wakes of a backing queue that the test lets happen when it likes."""

    def run(self) -> None:
        due = list(self)
        self.clear()
        for callback in due:
            callback()


def memory_queue(wake: Callable[[], None]) -> BackingQueue:
    return MemoryQueue(wake)


async def settle(mailbox: Mailbox) -> None:
    """Return when the owner has taken all there is: a batch is handled in one go, so it is done."""
    async with asyncio.timeout(10):
        while len(mailbox):  # noqa: ASYNC110 - these are the turns that the owner needs
            await asyncio.sleep(0)


class ActorBench:
    """A running actor. Use as a context; the task is cancelled at the end."""

    def __init__(
        self,
        clock: Clock,
        queue: Queue | None = None,
        make_backing: Callable[[Callable[[], None]], BackingQueue] = memory_queue,
    ) -> None:
        self.queue = make_queue() if queue is None else queue
        self.deleted: list[Queue] = []
        self.actor = QueueActor(self.queue, make_backing, self.deleted.append, clock, SETTINGS)
        self.task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> ActorBench:
        self.task = asyncio.create_task(self.actor.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self.task is not None
        self.task.cancel()
        await asyncio.wait([self.task])
        if not self.task.cancelled():
            # The actor has ended by itself: because it was deleted, not because it crashed.
            assert self.task.exception() is None

    def put(self, command: object) -> None:
        self.queue.mailbox.put(command)

    def put_urgent(self, command: object) -> None:
        self.queue.mailbox.put_urgent(command)

    async def settle(self) -> None:
        await settle(self.queue.mailbox)

    def count(self, name: str) -> object:
        return self.actor.statistics()[name]
