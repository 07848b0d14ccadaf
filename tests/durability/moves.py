"""Transactions under load: each moves one message from a source queue into all of its targets.

Movers take what a feeder has published, publish it to every target and ack it, and commit; some
roll back half a move first. A move is one transaction, so after a kill each message is in the
source alone or in all targets, once each; a move whose commit was answered has happened. What has
arrived is then taken out, by one transaction over all targets, and must never be seen again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from pamqp import commands

from leveret.protocol.codec import make
from tests.durability.link import Link, Severed, publish_frames
from tests.durability.trial import Target

SOURCE = "moves.source"
# What comes after the id in a message's body: 4096 bytes and more have a row of their own.
TARGETS = {"moves.small": 20, "moves.large": 5_000, "moves.empty": 0}
MOVERS = 4
PREFETCH = 20
# The feeder is so far ahead of the movers.
LEAD = 500
ROLLED_BACK = "rolled back"
ROUND_S = 60.0


def body_of(queue: str, message_id: str) -> bytes:
    return message_id.encode() + bytes(TARGETS.get(queue, 0))


class Feeder:
    """Keeps ``LEAD`` messages on their way; numbers go on over all its connections."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._next = 1
        # The first number of this connection, and the first that may be unconfirmed.
        self._first = 1
        self._unconfirmed = 1
        self._link: Link | None = None

    async def open(self, port: int) -> Link:
        link = self._link = await Link.open(port)
        link.on_confirm = self._on_confirm
        link.on_resume = self.pump
        self._first = self._unconfirmed = self._next
        await link.call(make(commands.Confirm.Select), commands.Confirm.SelectOk)
        return link

    def pump(self) -> None:
        link = self._link
        while link is not None and not link.is_paused and not link.lost.done():
            if self._next - self._unconfirmed + self._book.waiting >= LEAD:
                return
            message_id = str(self._next)
            self._next += 1
            link.write(publish_frames("", SOURCE, message_id, body_of(SOURCE, message_id)))

    def _on_confirm(self, tag: int, multiple: bool, is_ack: bool) -> None:
        assert is_ack
        last = self._first + tag - 1
        self._book.fed.update(map(str, range(self._unconfirmed if multiple else last, last + 1)))
        # There is one queue: they come in order.
        self._unconfirmed = last + 1
        self.pump()


class Mover:
    """One transaction for each delivery; it does not wait for one to begin the next."""

    def __init__(self, book: Book, seed: str, on_progress: Callable[[], None]) -> None:
        self._book = book
        self._random = random.Random(seed)
        self._on_progress = on_progress
        # Commits that were sent and are not answered.
        self.unanswered = 0
        self._link: Link | None = None

    async def open(self, port: int) -> Link:
        link = self._link = await Link.open(port)
        self.unanswered = 0
        link.on_delivery = self._on_delivery
        await link.call(make(commands.Tx.Select), commands.Tx.SelectOk)
        await link.call(make(commands.Basic.Qos, prefetch_count=PREFETCH), commands.Basic.QosOk)
        await link.call(make(commands.Basic.Consume, queue=SOURCE), commands.Basic.ConsumeOk)
        return link

    def _on_delivery(self, tag: int, redelivered: bool, message_id: str, body: bytes) -> None:
        link = self._link
        assert link is not None
        queues = self._random.sample(list(TARGETS), len(TARGETS))
        if self._random.random() < 0.1:
            link.write(publish_frames("", queues[0], ROLLED_BACK, b""))
            link.ack(tag)
            link.after(make(commands.Tx.Rollback), lambda: None)
        is_acked_first = self._random.random() < 0.5
        if is_acked_first:
            link.ack(tag)
        for queue in queues:
            link.write(publish_frames("", queue, message_id, body_of(queue, message_id)))
        if not is_acked_first:
            link.ack(tag)
        link.after(make(commands.Tx.Commit), lambda: self._moved(message_id))
        self.unanswered += 1

    def _moved(self, message_id: str) -> None:
        self.unanswered -= 1
        self._book.moved.add(message_id)
        self._book.committed += 1
        self._on_progress()


class Book:
    """What clients were told, and what is wrong with what they find."""

    def __init__(self) -> None:
        # Confirmed, and not taken out yet.
        self.fed: set[str] = set()
        # Their move was committed; not taken out yet.
        self.moved: set[str] = set()
        # Taken out of all targets, for ever.
        self.done: set[str] = set()
        self.committed = 0
        # Moves whose commit was sent and not answered when the broker died, over all rounds.
        self.unanswered = 0
        self.complaints: list[str] = []

    @property
    def waiting(self) -> int:
        """About so many are in the source."""
        return len(self.fed) - len(self.moved)

    def check(self, found: dict[str, list[tuple[str, bytes]]]) -> None:
        """``found``: for each queue ids and bodies."""
        places: dict[str, set[str]] = {}
        for queue, messages in found.items():
            for message_id, body in messages:
                if queue in places.setdefault(message_id, set()):
                    self.complain(message_id, f"twice in {queue}")
                places[message_id].add(queue)
                if body != body_of(queue, message_id):
                    self.complain(message_id, f"has another body in {queue}")
        for message_id, queues in places.items():
            if message_id == ROLLED_BACK or message_id in self.done:
                self.complain(message_id, f"is in {sorted(queues)} again")
            elif queues not in ({SOURCE}, set(TARGETS)):
                self.complain(message_id, f"is in {sorted(queues)} only")
        for message_id in self.moved:
            if places.get(message_id) != set(TARGETS):
                self.complain(message_id, "its commit was answered, and it has not happened")
        for message_id in self.fed - places.keys():
            self.complain(message_id, "was confirmed, and is lost")
        arrived = {message_id for message_id, queues in places.items() if SOURCE not in queues}
        self.done |= arrived
        self.fed -= arrived
        self.moved.clear()

    def complain(self, message_id: str, what: str) -> None:
        self.complaints.append(f"{message_id}: {what}")


class MoveTrial:
    """Load, a kill at a seeded instant, a restart, a look into all queues: again and again."""

    def __init__(self, target: Target, seed: int) -> None:
        self._target = target
        self._random = random.Random(seed)
        self.book = Book()
        self._feeder = Feeder(self.book)
        self._movers = [Mover(self.book, f"{seed} {n}", self._look) for n in range(MOVERS)]
        # How many commits are to be answered before the kill.
        self._due = 0
        self._is_reached = asyncio.Event()

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
        for queue in (SOURCE, *TARGETS):
            declare = make(commands.Queue.Declare, queue=queue, durable=True)
            await link.call(declare, commands.Queue.DeclareOk)
        await link.close()

    def _look(self) -> None:
        self._feeder.pump()
        if self.book.committed >= self._due:
            self._is_reached.set()

    async def _load_until_killed(self, port: int) -> None:
        self._due = self.book.committed + self._random.randint(1, 300)
        self._is_reached.clear()
        links = [await self._feeder.open(port)]
        links += [await mover.open(port) for mover in self._movers]
        self._feeder.pump()
        async with asyncio.timeout(ROUND_S):
            reached = asyncio.create_task(self._is_reached.wait())
            ends = [reached, *(link.lost for link in links)]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not reached.done():
                reached.cancel()
                raise Severed(f"the broker closed a connection: {[link.reason for link in links]}")
            # The instant is the point of the test, not something to wait for.
            await asyncio.sleep(self._random.uniform(0, 0.01))
            self._target.kill()
            # What it said before it died counts, also if nobody had listened yet.
            for link in links:
                await link.lost
        self.book.unanswered += sum(mover.unanswered for mover in self._movers)

    async def _check(self, port: int) -> None:
        # On a connection of its own: what is in the source goes back there.
        link = await Link.open(port)
        found = {SOURCE: await take(link, SOURCE)}
        await link.close()
        link = await Link.open(port)
        await link.call(make(commands.Tx.Select), commands.Tx.SelectOk)
        for queue in TARGETS:
            found[queue] = await take(link, queue)
        self.book.check(found)
        link.ack(0, multiple=True)
        await link.call(make(commands.Tx.Commit), commands.Tx.CommitOk)
        await link.close()


async def take(link: Link, queue: str) -> list[tuple[str, bytes]]:
    """All it has, unacked; nobody else may use it."""
    found: list[tuple[str, bytes]] = []
    is_all = asyncio.Event()
    question = make(commands.Queue.Declare, queue=queue, passive=True)
    ready = (await link.call(question, commands.Queue.DeclareOk)).message_count

    def on_delivery(tag: int, redelivered: bool, message_id: str, body: bytes) -> None:
        found.append((message_id, body))
        if len(found) == ready:
            is_all.set()

    link.on_delivery = on_delivery
    consume = make(commands.Basic.Consume, queue=queue, consumer_tag=queue)
    await link.call(consume, commands.Basic.ConsumeOk)
    if ready:
        async with asyncio.timeout(ROUND_S):
            await is_all.wait()
    cancel = make(commands.Basic.Cancel, consumer_tag=queue)
    await link.call(cancel, commands.Basic.CancelOk)
    if len(found) != ready:
        raise Severed(f"{queue} counted {ready} and delivered {len(found)}")
    return found
