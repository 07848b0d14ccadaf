"""A channel without a connection: methods in, methods out, and queues that are only addresses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeVar

from pamqp import commands
from pamqp.base import Frame

from leveret.broker.auth.access import FullAccess
from leveret.broker.channel.channel import Channel
from leveret.broker.channel.context import ConnectionContext
from leveret.broker.clock import VirtualClock
from leveret.broker.config import Settings
from leveret.broker.exchanges import register_builtins
from leveret.broker.live_vhost import LiveVhost
from leveret.broker.mailbox import Mailbox
from leveret.broker.queues import commands as q
from leveret.broker.queues.arguments import QueueArguments
from leveret.broker.queues.record import Queue
from leveret.broker.registry import Registries
from leveret.broker.resource import Resource
from leveret.protocol.codec import decode_method
from leveret.protocol.framing import METHOD
from leveret.protocol.twin import AckRun, Message, PublishRun, RawFrame, cut
from leveret.storage.memory_queue import MemoryQueue

T = TypeVar("T")
F = TypeVar("F", bound=Frame)

NUMBER = 7
FRAME_MAX = 4096


class FakeWriter:
    """Keeps what is written; full when the test says so."""

    def __init__(self) -> None:
        self.written = b""
        self.is_paused = False
        self.is_stuck = False
        self.waiting: set[Mailbox] = set()

    def write(self, data: bytes) -> None:
        self.written += data

    async def wait_unstuck(self) -> None:
        raise AssertionError("never stuck")

    def call_when_writable(self, mailbox: Mailbox) -> None:
        self.waiting.add(mailbox)


class ChannelBench:
    """A running channel. Use as a context."""

    def __init__(self, clock: VirtualClock) -> None:
        self.settings = Settings(credit_flow_initial=40, credit_flow_more_after=20)
        registries = Registries()
        register_builtins(registries)
        self.vhost = LiveVhost(
            "/",
            registries,
            clock,
            self.settings,
            make_backing=lambda queue, wake, spend: MemoryQueue(wake),
        )
        self.writer = FakeWriter()
        self.reader = Mailbox("reader")
        self.connection = ConnectionContext(
            name="test",
            access=FullAccess("guest"),
            vhost=self.vhost,
            settings=self.settings,
            clock=clock,
            writer=self.writer,
            reader=self.reader,
            frame_max=FRAME_MAX,
            wants_cancel_notices=True,
            registries=registries,
        )
        self.channel = Channel(NUMBER, self.connection)
        self.task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> ChannelBench:
        self.task = asyncio.create_task(self.channel.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self.task is not None
        self.task.cancel()
        await asyncio.wait([self.task])

    def queue(self, name: str) -> Queue:
        """A queue that is known, and whose mailbox only the test reads."""
        resource = Resource("/", "queue", name)
        queue = Queue(resource, True, False, None, {}, QueueArguments())
        self.vhost.topology.add_queue(queue)
        return queue

    # --- what the client and queues say -----------------------------------------------------

    def put(self, item: object) -> None:
        assert self.channel.mailbox.put(item)

    def tell(self, item: object) -> None:
        """As a queue does."""
        assert self.channel.mailbox.put_urgent(item)

    def publish(
        self, queue: Queue | str, *bodies: bytes, exchange: str = "", mandatory: bool = False
    ) -> None:
        """A run; by default to a queue, through the default exchange."""
        key = queue if isinstance(queue, str) else queue.name.name
        envelope = b"".join(bytes((len(name),)) + name.encode() for name in (exchange, key))
        messages = [
            Message(envelope, exchange, key, b"\x00\x00", body, 0, False) for body in bodies
        ]
        sizes = [len(body) for body in bodies]
        run = PublishRun(
            NUMBER,
            envelope,
            exchange,
            key,
            int(mandatory),
            messages,
            len(bodies),
            sum(sizes),
            max(sizes),
            0,
            0,
        )
        self.put(run)

    def ack(self, *tags: int, multiple: bool = False) -> None:
        self.put(AckRun(NUMBER, 80, multiple, False, list(tags)))

    def nack(self, *tags: int, multiple: bool = False, requeue: bool = True) -> None:
        self.put(AckRun(NUMBER, 120, multiple, requeue, list(tags)))

    async def settle(self) -> None:
        """Return when the channel has handled what it can: all, unless it waits for an answer."""
        mailbox = self.channel.mailbox
        async with asyncio.timeout(10):
            # These are the turns that the channel needs.
            while mailbox.urgent or (  # noqa: ASYNC110
                mailbox.ordinary and not self.channel._is_held
            ):
                await asyncio.sleep(0)
            # One more turn, in which the task may end.
            await asyncio.sleep(0)

    # --- what it says -----------------------------------------------------------------------

    def sent(self) -> list[Frame]:
        """Methods written since the last time; content is skipped."""
        data, self.writer.written = self.writer.written, b""
        items: list[object] = []
        assert cut(data, 0, 0, 1 << 30, items) == len(data)  # type: ignore[arg-type]
        methods: list[Frame] = []
        for item in items:
            if isinstance(item, AckRun):
                kind = commands.Basic.Nack if item.method == 120 else commands.Basic.Ack
                methods += [_settled(kind, tag, item) for tag in item.tags]
            elif isinstance(item, RawFrame) and item.kind == METHOD:
                methods.append(decode_method(item.payload))
        return methods

    def sent_one(self, kind: type[F]) -> F:
        sent = self.sent()
        assert len(sent) == 1, [method.name for method in sent]
        assert isinstance(sent[0], kind), sent[0].name
        return sent[0]


def _settled(kind: type[Frame], tag: int, run: AckRun) -> Frame:
    method = kind.__new__(kind)
    method.delivery_tag = tag  # type: ignore[attr-defined]
    method.multiple = run.multiple  # type: ignore[attr-defined]
    return method


def taken(queue: Queue, kind: type[T]) -> list[T]:
    """Take all a queue was sent; what is of this kind, in order of its lane."""
    items = [*queue.mailbox.take_urgent(), *queue.mailbox.ordinary]
    queue.mailbox.ordinary.clear()
    return [item for item in items if isinstance(item, kind)]


def confirmed(queue: Queue, first: int, last: int) -> q.Confirmed:
    return q.Confirmed(queue.mailbox, first, last)


def settlements(methods: Sequence[Frame]) -> list[tuple[str, int, bool]]:
    """Acks and nacks as (name, tag, multiple)."""
    assert all(isinstance(each, commands.Basic.Ack | commands.Basic.Nack) for each in methods)
    return [
        (each.name.removeprefix("Basic."), each.delivery_tag, each.multiple)  # type: ignore[attr-defined]
        for each in methods
    ]
