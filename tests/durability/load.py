"""Publishers with confirms and consumers with acks that keep a ledger of what they were told.

All of it is seeded: what is published where, in runs of what length, how large, and what
consumers do with it. Bodies are slices of one block of random bytes, so that each can be checked
byte by byte without being kept.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pamqp import commands

from leveret.protocol.codec import make
from tests.durability.ledger import Copy, Found, Ledger, Letter, Name, QueueBook
from tests.durability.link import Link, Severed, publish_frames

MIB = 1 << 20
# Share of messages, smallest and largest body. 4096 is where bodies get a row of their own.
SIZES = (
    (0.08, 0, 0),
    (0.60, 1, 300),
    (0.20, 301, 4095),
    (0.11, 4096, 20_000),
    (0.009, 20_001, 300_000),
    (0.001, MIB, MIB),
)
LONGEST_RUN = 40
# Among persistent messages: who is told what of a run that holds both kinds?
TRANSIENT_SHARE = 0.1
EXCHANGE = "durability.fan"

_SHARES = [share for share, _, _ in SIZES]
_BLOCK = random.Random(0).randbytes(2 * MIB)


def body_of(name: Name, size: int) -> bytes:
    """What this message carries; two messages differ from the first bytes on."""
    start = (name.number * 7919 + name.publisher * 104_729) % MIB
    return _BLOCK[start : start + size]


@dataclass(frozen=True, slots=True)
class Route:
    exchange: str
    key: str
    queues: Sequence[QueueBook]


class Topology:
    """Three queues by name and three behind a fanout exchange, each with its own kind of use."""

    def __init__(self) -> None:
        self.shared = QueueBook("durability.shared", is_shared=True)
        self.quick = QueueBook("durability.quick")
        self.untouched = QueueBook("durability.untouched")
        self.fan = [QueueBook(f"durability.fan.{use}") for use in ("quick", "slow", "untouched")]
        self.queues = [self.shared, self.quick, self.untouched, *self.fan]
        # Queues with the number of messages their consumers hold before they ack some, one
        # entry for each consumer.
        self.consumed = [
            (self.quick, 60),
            (self.shared, 40),
            (self.shared, 80),
            (self.fan[0], 60),
            (self.fan[1], 400),
        ]
        self.routes = [
            *(Route("", queue.name, [queue]) for queue in self.queues[:3]),
            Route(EXCHANGE, "", self.fan),
        ]

    async def declare(self, port: int) -> None:
        link = await Link.open(port)
        exchange = make(
            commands.Exchange.Declare, exchange=EXCHANGE, exchange_type="fanout", durable=True
        )
        await link.call(exchange, commands.Exchange.DeclareOk)
        for queue in self.queues:
            declare = make(commands.Queue.Declare, queue=queue.name, durable=True)
            await link.call(declare, commands.Queue.DeclareOk)
        for queue in self.fan:
            bind = make(commands.Queue.Bind, queue=queue.name, exchange=EXCHANGE)
            await link.call(bind, commands.Queue.BindOk)
        await link.close()


class Publisher:
    """Keeps ``window`` messages unconfirmed. Numbers go on over all its connections."""

    def __init__(
        self, number: int, ledger: Ledger, routes: Sequence[Route], seed: str, window: int
    ) -> None:
        self.number = number
        self.window = window
        self._ledger = ledger
        self._routes = routes
        self._random = random.Random(seed)
        self._sizes = random.Random(f"{seed} sizes")
        self._next = 1
        # Called after each confirm.
        self.on_progress: Callable[[], None] = lambda: None
        self._link: Link | None = None
        # By delivery tag; what is confirmed is taken out.
        self._waiting: dict[int, Letter] = {}
        self._next_tag = 1
        # How many of the newest may not have left this process.
        self._last_run = 0
        self.refused = 0

    async def open(self, port: int) -> None:
        link = await Link.open(port)
        self._waiting, self._next_tag, self._last_run = {}, 1, 0
        link.on_confirm = self._on_confirm
        link.on_resume = self.pump
        await link.call(make(commands.Confirm.Select), commands.Confirm.SelectOk)
        self._link = link

    @property
    def unconfirmed(self) -> int:
        """How many the kernel has taken, at least, that were not confirmed."""
        if self._link is None:
            return 0
        here = self._last_run if self._link.is_paused else 0
        return max(0, len(self._waiting) - here)

    def pump(self) -> None:
        """Publish until the window is full or the broker takes no more."""
        link = self._link
        while link is not None and not link.is_paused and not link.lost.done():
            room = self.window - len(self._waiting)
            if room <= 0:
                return
            self._publish(link, min(room, self._random.randint(1, LONGEST_RUN)))

    def _publish(self, link: Link, count: int) -> None:
        route = self._random.choice(self._routes)
        frames = []
        for _ in range(count):
            name = Name(self.number, self._next)
            self._next += 1
            size = self._size()
            is_persistent = self._sizes.random() >= TRANSIENT_SHARE
            self._waiting[self._next_tag] = self._ledger.sent(
                name, size, route.queues, is_persistent=is_persistent
            )
            self._next_tag += 1
            body = body_of(name, size)
            frames.append(
                publish_frames(
                    route.exchange, route.key, str(name), body, is_persistent=is_persistent
                )
            )
        self._last_run = count
        link.write(b"".join(frames))

    def _size(self) -> int:
        _, smallest, largest = self._sizes.choices(SIZES, _SHARES)[0]
        return self._sizes.randint(smallest, largest)

    def _on_confirm(self, tag: int, multiple: bool, is_ack: bool) -> None:
        waiting = self._waiting
        if multiple:
            tags = []
            for waiting_tag in waiting:  # in the order in which they were sent
                if waiting_tag > tag:
                    break
                tags.append(waiting_tag)
        else:
            tags = [tag]
        for one in tags:
            letter = waiting.pop(one)
            if is_ack:
                self._ledger.confirmed(letter)
            else:
                self.refused += 1
        self.on_progress()
        self.pump()

    @property
    def link(self) -> Link:
        assert self._link is not None
        return self._link


class Consumer:
    """Acks in ways that differ, returns some, and asks for an answer after each of its acks."""

    def __init__(self, queue: QueueBook, ledger: Ledger, seed: str, held: int) -> None:
        self.queue = queue
        self._ledger = ledger
        self._random = random.Random(seed)
        self._most_held = held
        self._held: deque[tuple[int, Copy]] = deque()
        self._link: Link | None = None

    async def open(self, port: int) -> None:
        link = self._link = await Link.open(port)
        self._held.clear()
        link.on_delivery = self._on_delivery
        # More than is ever held, or nothing would come any more.
        qos = make(commands.Basic.Qos, prefetch_count=2 * self._most_held + 100)
        await link.call(qos, commands.Basic.QosOk)
        consume = make(commands.Basic.Consume, queue=self.queue.name)
        await link.call(consume, commands.Basic.ConsumeOk)

    @property
    def link(self) -> Link:
        assert self._link is not None
        return self._link

    def _on_delivery(self, tag: int, redelivered: bool, message_id: str, body: bytes) -> None:
        copy = self._ledger.delivered(self.queue, read(redelivered, message_id, body, self.queue))
        if copy is None:
            return
        self._held.append((tag, copy))
        if len(self._held) >= self._most_held:
            self._settle_some()

    def _settle_some(self) -> None:
        link, held = self.link, self._held
        count = self._random.randint(1, len(held))
        taken = [held.popleft() for _ in range(count)]
        chance = self._random.random()
        if chance < 0.1:
            # All but the last of them; that one goes back to where it was.
            tag, copy = taken.pop()
            self._ledger.returned([copy])
            link.requeue(tag)
        copies = [copy for _, copy in taken]
        if not copies:
            return
        self._ledger.acked(copies)
        if chance < 0.7:
            link.ack(taken[-1][0], multiple=True)
        else:
            self._random.shuffle(taken)
            for tag, _ in taken:
                link.ack(tag)
        # Any answer does: it shows that the channel had come past the acks.
        question = make(commands.Basic.Qos, prefetch_count=2 * self._most_held + 100)
        link.after(question, lambda: self._ledger.settled(copies))


def read(redelivered: bool, message_id: str, body: bytes, queue: QueueBook) -> Found:
    publisher, _, number = message_id.partition(".")
    name = Name(int(publisher), int(number))
    copy = queue.copies.get(name)
    size = len(body) if copy is None else copy.letter.size
    return Found(name, redelivered, body == body_of(name, size))


async def take_all(link: Link, queue: QueueBook) -> list[Found]:
    """Everything a queue says it has, delivered and not acked. Nobody else may use the queue."""
    found: list[Found] = []
    wanted = await count_ready(link, queue)
    enough = _Enough(link, wanted)

    def on_delivery(tag: int, redelivered: bool, message_id: str, body: bytes) -> None:
        found.append(read(redelivered, message_id, body, queue))
        enough.count()

    link.on_delivery = on_delivery
    consume = make(commands.Basic.Consume, queue=queue.name, consumer_tag=queue.name)
    await link.call(consume, commands.Basic.ConsumeOk)
    try:
        await enough.wait()
    except TimeoutError:
        raise Severed(f"{queue.name} counts {wanted} and delivered {len(found)}") from None
    cancel = make(commands.Basic.Cancel, consumer_tag=queue.name)
    await link.call(cancel, commands.Basic.CancelOk)
    # More may have come than was counted; and nothing may be left behind.
    left = await count_ready(link, queue)
    if left or len(found) != wanted:
        raise Severed(f"{queue.name} counted {wanted}, delivered {len(found)}, has {left} left")
    return found


async def count_ready(link: Link, queue: QueueBook) -> int:
    question = make(commands.Queue.Declare, queue=queue.name, passive=True)
    answer = await link.call(question, commands.Queue.DeclareOk)
    assert answer.message_count is not None
    return answer.message_count


class _Enough:
    """Waits for a number of deliveries; as long as some come there is time."""

    IDLE_S = 20.0

    def __init__(self, link: Link, wanted: int) -> None:
        self._link = link
        self._left = wanted
        self._event = asyncio.Event()

    def count(self) -> None:
        self._left -= 1
        self._event.set()

    async def wait(self) -> None:
        while self._left > 0:
            if self._link.lost.done():
                raise Severed(self._link.reason or "the connection was lost")
            self._event.clear()
            async with asyncio.timeout(self.IDLE_S):
                await self._event.wait()
