"""Dead letters under load: from several queues, for several reasons, each into two targets.

A publisher feeds queues whose messages die: the oldest of a short queue, all of one with a TTL of
some milliseconds, and what a consumer rejects. A dead letter and its removal are one unit, so after
a kill each message is in its source alone or in both targets, once each, and what was confirmed is
somewhere. What has arrived is then taken out, by one transaction, and must never be seen again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from pamqp import commands

from leveret.protocol.codec import make
from leveret.protocol.field_table import Field
from tests.durability.link import Link, Severed, publish_frames
from tests.durability.moves import take
from tests.durability.trial import Target

EXCHANGE = "burials.dead"
TARGETS = ("burials.target.1", "burials.target.2")
TTL_MS = 15
SOURCES: dict[str, dict[str, int]] = {
    "burials.short": {"x-max-length": 40},
    "burials.brief": {"x-message-ttl": TTL_MS},
    "burials.rejected": {},
}
# Bodies, besides their id: 4096 bytes and more have a row of their own.
SIZES = (0, 30, 30, 30, 300, 5_000)
WINDOW = 300
ROUND_S = 60.0


def source_of(number: int) -> str:
    return list(SOURCES)[number // 7 % len(SOURCES)]


def body_of(number: int) -> bytes:
    return b"%d" % number + bytes(SIZES[number % len(SIZES)])


class Publisher:
    """Keeps ``WINDOW`` messages unconfirmed; numbers go on over all its connections."""

    def __init__(self, book: Book, on_progress: Callable[[], None]) -> None:
        self._book = book
        self._on_progress = on_progress
        self._next = 1
        # By number of this connection.
        self._waiting: dict[int, int] = {}
        self._tag = 0
        self._link: Link | None = None

    async def open(self, port: int) -> Link:
        link = self._link = await Link.open(port)
        link.on_confirm = self._on_confirm
        link.on_resume = self.pump
        self._waiting, self._tag = {}, 0
        await link.call(make(commands.Confirm.Select), commands.Confirm.SelectOk)
        return link

    @property
    def unconfirmed(self) -> int:
        return len(self._waiting)

    def pump(self) -> None:
        link = self._link
        while link is not None and not link.is_paused and not link.lost.done():
            if len(self._waiting) >= WINDOW:
                return
            number = self._next
            self._next += 1
            self._tag += 1
            self._waiting[self._tag] = number
            link.write(publish_frames("", source_of(number), str(number), body_of(number)))

    def _on_confirm(self, tag: int, multiple: bool, is_ack: bool) -> None:
        assert is_ack
        tags = [each for each in self._waiting if each <= tag] if multiple else [tag]
        for each in tags:
            self._book.confirmed.add(str(self._waiting.pop(each)))
        self._book.total += len(tags)
        self._on_progress()
        self.pump()


class Book:
    """What the publisher was told, and what is wrong with what is found."""

    def __init__(self) -> None:
        # Confirmed, and not taken out yet.
        self.confirmed: set[str] = set()
        # Taken out for ever.
        self.done: set[str] = set()
        # How many were confirmed, and how many were found in the targets, by source.
        self.total = 0
        self.buried: dict[str, int] = dict.fromkeys(SOURCES, 0)
        self.complaints: list[str] = []

    def check(self, found: dict[str, list[tuple[str, bytes]]]) -> None:
        """``found``: for each queue ids and bodies."""
        places: dict[str, set[str]] = {}
        for queue, messages in found.items():
            for message_id, body in messages:
                if queue in places.setdefault(message_id, set()):
                    self._complain(message_id, f"is twice in {queue}")
                places[message_id].add(queue)
                if body != body_of(int(message_id)):
                    self._complain(message_id, f"has another body in {queue}")
        for message_id, queues in places.items():
            source = source_of(int(message_id))
            if message_id in self.done:
                self._complain(message_id, f"is in {sorted(queues)} again")
            elif queues == set(TARGETS):
                self.buried[source] += 1
            elif queues != {source}:
                self._complain(message_id, f"is in {sorted(queues)} only")
        for message_id in self.confirmed - places.keys():
            self._complain(message_id, "was confirmed, and is lost")
        self.done |= places.keys()
        self.confirmed.clear()

    def _complain(self, message_id: str, what: str) -> None:
        self.complaints.append(f"{message_id}: {what}")


class BurialTrial:
    """Load, a kill at a seeded instant, a restart, a look into all queues: again and again."""

    def __init__(self, target: Target, seed: int) -> None:
        self._target = target
        self._random = random.Random(seed)
        self.book = Book()
        self._publisher = Publisher(self.book, self._look)
        self._due = 0
        self._is_reached = asyncio.Event()
        # Unconfirmed when the broker died, over all rounds.
        self.unconfirmed = 0

    async def run(self, kills: int) -> None:
        """Stops early at the first complaint."""
        try:
            port = self._target.start()
            await self._declare(port)
            for _ in range(kills):
                await self._load_until_killed(port)
                self._target.bury()
                port = self._target.start()
                await self._check(port)
                if self.book.complaints:
                    break
        finally:
            self._target.stop()

    async def _declare(self, port: int) -> None:
        link = await Link.open(port)
        exchange = make(
            commands.Exchange.Declare, exchange=EXCHANGE, exchange_type="fanout", durable=True
        )
        await link.call(exchange, commands.Exchange.DeclareOk)
        for queue in TARGETS:
            await link.call(
                make(commands.Queue.Declare, queue=queue, durable=True), commands.Queue.DeclareOk
            )
            bind = make(commands.Queue.Bind, queue=queue, exchange=EXCHANGE)
            await link.call(bind, commands.Queue.BindOk)
        for queue, arguments in SOURCES.items():
            declare = make(
                commands.Queue.Declare,
                queue=queue,
                durable=True,
                arguments={
                    "x-dead-letter-exchange": Field("S", EXCHANGE),
                    **{name: Field("I", value) for name, value in arguments.items()},
                },
            )
            await link.call(declare, commands.Queue.DeclareOk)
        await link.close()

    def _look(self) -> None:
        if self.book.total >= self._due:
            self._is_reached.set()

    async def _load_until_killed(self, port: int) -> None:
        self._due = self.book.total + self._random.randint(500, 3_000)
        self._is_reached.clear()
        links = [await self._publisher.open(port), await self._open_rejecter(port)]
        self._publisher.pump()
        async with asyncio.timeout(ROUND_S):
            reached = asyncio.create_task(self._is_reached.wait())
            ends = [reached, *(link.lost for link in links)]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not reached.done():
                reached.cancel()
                raise Severed(f"the broker closed a connection: {[link.reason for link in links]}")
            # The instant is the point of the test, not something to wait for.
            await asyncio.sleep(self._random.uniform(0, 0.03))
            self._target.kill()
            # What it said before it died counts, also if nobody had listened yet.
            for link in links:
                await link.lost
        self.unconfirmed += self._publisher.unconfirmed

    async def _open_rejecter(self, port: int) -> Link:
        link = await Link.open(port)
        link.on_delivery = lambda tag, *_: link.reject(tag)
        await link.call(make(commands.Basic.Qos, prefetch_count=50), commands.Basic.QosOk)
        consume = make(commands.Basic.Consume, queue="burials.rejected")
        await link.call(consume, commands.Basic.ConsumeOk)
        return link

    async def _check(self, port: int) -> None:
        link = await Link.open(port)
        link.takes_dead_letters = True
        await self._wait_expired(link)
        await link.call(make(commands.Tx.Select), commands.Tx.SelectOk)
        self.book.check({queue: await take(link, queue) for queue in (*SOURCES, *TARGETS)})
        link.ack(0, multiple=True)
        await link.call(make(commands.Tx.Commit), commands.Tx.CommitOk)
        await link.close()

    async def _wait_expired(self, link: Link) -> None:
        """What was still to expire has done so, and has arrived."""
        quiet, last = 0, [-1]
        async with asyncio.timeout(ROUND_S):
            # What left the one is under way to the others, and there a commit or two later.
            while quiet < 5:
                counts = [await count_ready(link, queue) for queue in ("burials.brief", *TARGETS)]
                quiet = quiet + 1 if counts == last and not counts[0] else 0
                last = counts
                await asyncio.sleep(0.03)


async def count_ready(link: Link, queue: str) -> int:
    question = make(commands.Queue.Declare, queue=queue, passive=True)
    return (await link.call(question, commands.Queue.DeclareOk)).message_count or 0
