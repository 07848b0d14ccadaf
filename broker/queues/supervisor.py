"""Keeps the queue tasks of a virtual host: starts them, notices their end, restarts a crashed one.

A crash takes down that queue only: publishers get their unconfirmed messages nacked [67],
consumers are cancelled, and the queue starts again under its name [12].
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from leveret.broker.queues import commands as c
from leveret.broker.queues.actor import QueueActor
from leveret.storage.priority_queue import PriorityQueue

if TYPE_CHECKING:
    from leveret.broker.clock import Clock
    from leveret.broker.config import Settings
    from leveret.broker.queues.dead_lettering import Surroundings
    from leveret.broker.queues.decorators import QueueDecorator
    from leveret.broker.queues.record import Queue
    from leveret.storage.backing_queue import BackingQueue

log = logging.getLogger(__name__)

# How long queues may take to finish what they were given before a shutdown.
STOP_S = 10.0

# Makes what keeps a queue's messages; the callables are its actor's wake and spend.
BackingFactory = Callable[["Queue", Callable[[], None], Callable[[int], None]], "BackingQueue"]


class QueueSupervisor:
    def __init__(
        self,
        make_backing: BackingFactory,
        on_deleted: Callable[[Queue], None],
        clock: Clock,
        settings: Settings,
        decorators: Callable[[], Iterable[QueueDecorator]],
        before_restart: Callable[[], Awaitable[None]],
        surroundings: Surroundings | None = None,
    ) -> None:
        self._make_backing = make_backing
        self._on_deleted = on_deleted
        self._clock = clock
        self._settings = settings
        self._decorators = decorators
        # What a crashed queue had handed over must be on disk before it is read again.
        self._before_restart = before_restart
        self._surroundings = surroundings
        self.actors: dict[Queue, QueueActor] = {}
        self._tasks: dict[Queue, asyncio.Task[None]] = {}

    def start(self, queue: Queue) -> None:
        active: Sequence[QueueDecorator] = [
            decorator for decorator in self._decorators() if _follows(decorator, queue)
        ]
        actor = QueueActor(
            queue,
            lambda wake: self._make_backing(queue, wake, lambda cost: actor.spend(cost)),
            self._on_deleted,
            self._clock,
            self._settings,
            active,
            self._surroundings,
        )
        self.actors[queue] = actor
        self._tasks[queue] = asyncio.create_task(self._supervise(actor), name=str(queue.name))

    async def _supervise(self, actor: QueueActor) -> None:
        queue = actor.queue
        try:
            await actor.run()
        except Exception:
            log.exception("%s crashed; it is restarted", queue.name)
            actor.say_goodbye(crashed=True)
            queue.mailbox = queue.make_mailbox()
            await self._before_restart()
            self.start(queue)
        else:
            del self._tasks[queue], self.actors[queue]
            actor.fall_apart()

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        return list(self._tasks.values())

    async def wait_deleted(self, queues: Iterable[Queue]) -> None:
        """Delete them, whatever they hold, and return when their tasks have ended."""
        tasks = []
        for queue in queues:
            task = self._tasks.get(queue)
            if task is not None:
                queue.mailbox.put_urgent(c.DeleteNow())
                tasks.append(task)
        if tasks:
            await asyncio.wait(tasks)

    async def stop(self, patience_s: float = STOP_S) -> None:
        """End all tasks, after what was put before; queues are not deleted."""
        tasks = list(self._tasks.values())
        for queue in self._tasks:
            queue.mailbox.put(c.Terminate())
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=patience_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        self._tasks.clear()
        self.actors.clear()


def with_priorities(make_backing: BackingFactory) -> BackingFactory:
    """The same, but for a queue with priorities: one for each of them."""

    def make(queue: Queue, wake: Callable[[], None], spend: Callable[[int], None]) -> BackingQueue:
        if not queue.options.max_priority:
            return make_backing(queue, wake, spend)
        return PriorityQueue(
            queue.options.max_priority, lambda priority: make_backing(queue, wake, spend)
        )

    return make


def _follows(decorator: QueueDecorator, queue: Queue) -> bool:
    try:
        return decorator.active_for(queue)
    except Exception:
        # Foreign code: the queue must start all the same.
        log.exception("%s: a decorator failed at active_for", queue.name)
        return False
