"""Load, a kill at a seeded instant, a restart, a look at what is left: again and again.

The instant is a number of confirms and some milliseconds after it, once at least
``LEAST_UNCONFIRMED`` publishes are unconfirmed. After the restart each queue is emptied into the
checker; some are then acked, the others get their messages back, so that messages have to outlive
many kills. Now and then the broker is killed while it starts, too.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tests.durability.ledger import Copy, Ledger
from tests.durability.link import Link, Severed
from tests.durability.load import Consumer, Publisher, Topology, take_all

LEAST_UNCONFIRMED = 1_000
PUBLISHERS = 4
WINDOW = 450
ROUND_S = 60.0
# More than this is not left in the queues, or each look would take longer than the last.
LARGEST_BACKLOG_BYTES = 40 << 20


class Target(Protocol):
    """A broker that can be killed."""

    def start(self) -> int:
        """Start it on what it has; the port it listens on."""

    def start_in_vain(self, after_s: float) -> None:
        """Start it and kill it so many seconds later, ready or not."""

    def kill(self) -> None:
        """End it now, as a crash does; it may still be dying when this returns."""

    def bury(self) -> None:
        """Wait until it is dead, and do to its files what the crash is to do to them."""

    def stop(self) -> None:
        """End it in order."""


@dataclass(frozen=True, slots=True)
class Round:
    """What one kill met with."""

    unconfirmed: int
    counts: Counter[str]

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {what}" for what, count in sorted(self.counts.items()))
        return f"{self.unconfirmed} unconfirmed at the kill; {counts}"


class Trial:
    def __init__(self, target: Target, seed: int, *, latest_kill_s: float = 0.02) -> None:
        """``latest_kill_s``: how long after a confirm the broker is killed, at most."""
        self.target = target
        self._latest_kill_s = latest_kill_s
        self.seed = seed
        self.topology = Topology()
        self.ledger = Ledger()
        self.rounds: list[Round] = []
        self._random = random.Random(f"{seed} kills")
        self.publishers = [
            Publisher(number, self.ledger, self.topology.routes, f"{seed} {number}", WINDOW)
            for number in range(1, PUBLISHERS + 1)
        ]
        self.consumers = [
            Consumer(queue, self.ledger, f"{seed} consumer {number}", held)
            for number, (queue, held) in enumerate(self.topology.consumed)
        ]
        self._port = 0

    async def run(self, kills: int, *, tell: Callable[[str], None] = print) -> None:
        """Stops early at the first round with a complaint."""
        try:
            await self.begin()
            for number in range(1, kills + 1):
                before = self.ledger.counts.copy()
                unconfirmed = await self.load_until_killed()
                await self.restart_and_check(in_vain=number % 3 == 0)
                self.rounds.append(Round(unconfirmed, self.ledger.counts - before))
                tell(f"kill {number}: {self.rounds[-1]}")
                if self.ledger.complaints:
                    break
        finally:
            self.target.stop()

    def assert_kept(self, kills: int) -> None:
        """Every promise was kept, and there were some."""
        assert not self.ledger.complaints, f"seed {self.seed}\n{self.ledger.report()}"
        assert len(self.rounds) == kills
        assert all(done.unconfirmed >= LEAST_UNCONFIRMED for done in self.rounds)
        for what in ("confirmed", "delivered", "settled", "kept"):
            assert self.ledger.counts[what] > 100 * kills, self.ledger.counts

    async def begin(self) -> None:
        self._port = self.target.start()
        await self.topology.declare(self._port)

    async def connect(self) -> None:
        for consumer in self.consumers:
            await consumer.open(self._port)
        for publisher in self.publishers:
            await publisher.open(self._port)

    @property
    def links(self) -> list[Link]:
        clients: list[Publisher | Consumer] = [*self.publishers, *self.consumers]
        return [client.link for client in clients]

    @property
    def unconfirmed(self) -> int:
        return sum(publisher.unconfirmed for publisher in self.publishers)

    async def load_until_killed(self) -> int:
        """How many publishes were unconfirmed when the broker was killed."""
        confirmed = self.ledger.counts["confirmed"] + self._random.choice(
            (0, self._random.randint(1, 1_000), self._random.randint(1_000, 6_000))
        )
        return await self.load_until(
            lambda: self.ledger.counts["confirmed"] >= confirmed,
            self._random.uniform(0, self._latest_kill_s),
        )

    async def load_until(self, reached: Callable[[], bool], delay_s: float) -> int:
        """Kill ``delay_s`` after ``reached``, or as soon after that as enough is unconfirmed."""
        await self.connect()
        loop = asyncio.get_running_loop()
        killed: asyncio.Future[int] = loop.create_future()
        is_due = False

        def look() -> None:
            nonlocal is_due
            if not is_due:
                if reached():
                    is_due = True
                    loop.call_later(delay_s, kill)
            elif self.unconfirmed >= LEAST_UNCONFIRMED:
                kill()

        def kill() -> None:
            unconfirmed = self.unconfirmed
            if unconfirmed >= LEAST_UNCONFIRMED and not killed.done():
                self.target.kill()
                killed.set_result(unconfirmed)

        for publisher in self.publishers:
            publisher.on_progress = look
            publisher.pump()
        look()
        async with asyncio.timeout(ROUND_S):
            ends = [killed, *(link.lost for link in self.links)]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not killed.done():
                reasons = {link.reason for link in self.links if link.reason}
                raise Severed(f"the broker closed a connection: {reasons or 'no reason given'}")
            # What it said before it died counts, also if nobody had listened yet.
            for link in self.links:
                await link.lost
        return killed.result()

    async def restart_and_check(self, *, in_vain: bool = False) -> None:
        self.target.bury()
        if in_vain:
            self.target.start_in_vain(self._random.uniform(0, 0.6))
            self.target.bury()
        self._port = self.target.start()
        await self.check()

    async def check(self) -> None:
        """Compare all queues, which nobody uses, with the ledger; empty some of them."""
        backlog = 0
        for queue in self.topology.queues:
            link = await Link.open(self._port)
            try:
                found = await take_all(link, queue)
            except Severed as error:
                self.ledger.complain("lost", queue, f"it cannot be read: {error}")
                await link.close()
                continue
            there = self.ledger.check(queue, found)
            backlog += sum(copy.letter.size for copy in there)
            if self._random.random() < 0.4 or backlog > LARGEST_BACKLOG_BYTES:
                await self._settle(link, there)
            else:
                self.ledger.returned(there)
            await link.close()

    async def _settle(self, link: Link, copies: list[Copy]) -> None:
        if copies:
            self.ledger.acked(copies)
            link.ack(0, multiple=True)
            await link.round_trip()
            self.ledger.settled(copies)
