"""A virtual host with its store, without sockets: what a test can stop, crash and page out.

Everything is the broker's own (``LiveVhost``, ``VhostStore``, variable queues), but for threads:
what they would do is done in the event loop, so that a test takes the same course each time.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

from leveret.broker.clock import VirtualClock
from leveret.broker.exchanges import register_builtins
from leveret.broker.live_vhost import LiveVhost
from leveret.broker.policies.policy import Policy
from leveret.broker.queues import commands as c
from leveret.broker.queues.actor import QueueActor
from leveret.broker.queues.arguments import QueueArguments
from leveret.broker.queues.record import Queue
from leveret.broker.registry import Registries
from leveret.broker.resource import Resource
from leveret.protocol.field_table import Table
from leveret.protocol.message import Message
from leveret.storage.priority_queue import PriorityQueue
from leveret.storage.variable_queue import VariableQueue
from leveret.storage.vhost_store import StoreSettings, VhostStore
from tests.broker.queues.bench import SETTINGS, Port
from tests.storage.stage import inline_threads

T = TypeVar("T")

# Small, so that a few messages are several segments, and some bodies are kept apart.
SEGMENT_SIZE = 4
EMBED_BELOW = 40
QUIET_TURNS = 12
TURNS_MAX = 20_000


class House:
    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp(prefix="leveret-"))
        self.clock = VirtualClock()
        self._patches = inline_threads()
        self._patches.__enter__()
        self._policy: dict[str, object] | None = None
        self._open()

    def _open(self) -> None:
        registries = Registries()
        register_builtins(registries)
        self.store = VhostStore(
            self.folder,
            "/",
            StoreSettings("off", EMBED_BELOW),
            now=self.clock.monotonic,
            sleep=self.clock.sleep,
            on_trouble=lambda error: None,
        )
        self.vhost = LiveVhost("/", registries, self.clock, SETTINGS, store=self.store)
        self.run(self.vhost.start())
        self._apply_policy()
        self.rest()

    # --- life --------------------------------------------------------------------------------

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(coroutine)

    def restart(self) -> None:
        """As a broker that is stopped in order."""
        self.run(self.vhost.stop())
        self._open()

    def crash(self) -> None:
        """All that was asked for is on disk; nobody says goodbye."""
        self.rest()
        self.run(self.vhost.abandon())
        self._open()

    def close(self) -> None:
        self.run(self.vhost.abandon())
        self.clock.close()
        self.run(asyncio.sleep(0))
        self.loop.close()
        self._patches.__exit__(None, None, None)
        shutil.rmtree(self.folder)

    def rest(self) -> None:
        self.run(self._rest())

    async def _rest(self) -> None:
        """Return when nobody has anything to do, and all that was put is on disk."""
        quiet = 0
        for _ in range(TURNS_MAX):
            await asyncio.sleep(0)
            if self._is_busy():
                quiet = 0
                continue
            quiet += 1
            if quiet == QUIET_TURNS:
                if not self.store.database.pending_operations:
                    return
                quiet = 0
                await self.store.database.wait_committed()
        raise AssertionError("it never comes to rest")

    def _is_busy(self) -> bool:
        if self.store.database.is_busy or self.store._transient.is_busy:
            return True
        if any(len(actor.mailbox) for actor in self.actors):
            return True
        return any(part._read or part._pending_read for part in self.parts())

    def pass_time(self, milliseconds: int) -> None:
        self.clock.advance(milliseconds / 1000)
        self.rest()

    # --- queues ------------------------------------------------------------------------------

    @property
    def actors(self) -> list[QueueActor]:
        return list(self.vhost._supervisor.actors.values())

    def actor(self, name: str) -> QueueActor:
        return self.vhost._supervisor.actors[self.queue(name)]

    def queue(self, name: str) -> Queue:
        return self.vhost.topology.queues[name]

    def declare(self, name: str, arguments: Table) -> None:
        options = QueueArguments.of(arguments)
        record = Queue(Resource("/", "queue", name), True, False, None, arguments, options)

        async def start() -> None:
            self.vhost.start_queue(record)

        self.run(start())
        self.rest()

    def set_policy(self, definition: dict[str, object] | None) -> None:
        """For the queue "q"."""
        self._policy = definition
        self._apply_policy()
        self.rest()

    def _apply_policy(self) -> None:
        if self._policy:
            self.vhost.policies.set([Policy("/", "p", "^q$", self._policy)])
        elif self.vhost.policies.get("policy", "p") is not None:
            self.vhost.policies.clear("policy", "p")

    def parts(self) -> Iterator[VariableQueue]:
        for actor in self.actors:
            backing = actor._backing
            queues = backing._queues.values() if isinstance(backing, PriorityQueue) else [backing]
            for part in cast("list[VariableQueue]", list(queues)):
                part._segment_size = SEGMENT_SIZE
                yield part

    def page_out(self, q1: int, q4: int, betas: int, acks: int) -> None:
        async def push() -> None:
            for part in self.parts():
                part.push_q1(q1)
                part.push_q4(q4)
                part.push_betas_to_deltas(betas)
                part._limit_ram_acks(acks)

        self.run(push())
        self.check()

    def check(self) -> None:
        for part in self.parts():
            part.check_invariants()
            assert not part.lost

    # --- clients -----------------------------------------------------------------------------

    def publish(self, name: str, messages: list[Message]) -> Port:
        sender = Port("publisher")
        delivery = sender.delivery(messages, confirm=True)
        for message in messages:
            delivery.needs |= message.needs
        sender.send(self.queue(name), delivery)
        self.rest()
        return sender

    def get(self, name: str, port: Port, *, no_ack: bool = False) -> c.GetOk | None:
        self.queue(name).mailbox.put(c.Get(port.mailbox, no_ack))
        self.rest()
        [answer] = [item for item in port.take() if isinstance(item, (c.GetOk, c.GetEmpty))]
        return answer if isinstance(answer, c.GetOk) else None

    def tell(self, name: str, command: object) -> None:
        self.queue(name).mailbox.put_urgent(command)
        self.rest()
