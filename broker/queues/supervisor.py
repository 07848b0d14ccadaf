"""Keeps the queue tasks of a virtual host: starts them, notices their end, restarts a crashed one.

A crash takes down that queue only: publishers get their unconfirmed messages nacked [67],
consumers are cancelled, and the queue starts again under its name [12]: at once, but after a
growing pause where it crashes again and again (``restarts.py``). One that cannot even be built is
treated the same. What comes meanwhile waits in the new mailbox for the next life.

Invariants: a queue has one task, from its start until it is deleted or the broker stops, however
many lives that takes; whoever deletes it or stops it never waits for a pause, and is never let
down by a crash: a queue that cannot be run to its end is deleted from here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from leveret.broker.queues import commands as c
from leveret.broker.queues.actor import QueueActor
from leveret.broker.queues.dead_lettering import make_queue_log
from leveret.broker.queues.goodbye import deletion_in, refuse
from leveret.broker.queues.restarts import Restarts
from leveret.storage.priority_queue import PriorityQueue

if TYPE_CHECKING:
    from leveret.broker.clock import Clock
    from leveret.broker.config import Settings
    from leveret.broker.mailbox import Mailbox
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
        before_restart: Callable[[Queue], Awaitable[None]],
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
        # What crashed is here until it lives again; what could never be built is not.
        self.actors: dict[Queue, QueueActor] = {}
        self._tasks: dict[Queue, asyncio.Task[None]] = {}
        # Set once by stop(): whoever crashes from then on has lived for the last time.
        self._is_stopping = False

    def start(self, queue: Queue) -> None:
        actor: QueueActor | None = None
        failure: Exception | None = None
        try:
            actor = self._make_actor(queue)
        except Exception as error:
            failure = error
        self._tasks[queue] = asyncio.create_task(
            self._supervise(queue, actor, failure), name=str(queue.name)
        )

    def _make_actor(self, queue: Queue) -> QueueActor:
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
        return actor

    # --- the lives of a queue ---------------------------------------------------------------------

    async def _supervise(
        self, queue: Queue, actor: QueueActor | None, failure: Exception | None
    ) -> None:
        """Run the queue until its end. ``failure``: why there is no first actor."""
        restarts = Restarts(self._clock)
        while True:
            if actor is not None:
                failure = await _run(actor)
                if failure is None:
                    break
            assert failure is not None
            pause_s = restarts.note_crash()
            if self._bury(queue, actor, failure):
                break
            _tell(queue, failure, restarts.in_a_row, pause_s)
            # Nothing of the old life is needed; its traceback holds all of it.
            actor = failure = None
            await self._pause(queue.mailbox, pause_s)
            restarts.begin_life()
            try:
                await self._before_restart(queue)
                actor = self._make_actor(queue)
            except Exception as error:
                failure = error
        del self._tasks[queue]
        self.actors.pop(queue, None)
        if actor is not None:
            actor.fall_apart()

    def _bury(self, queue: Queue, actor: QueueActor | None, failure: Exception) -> bool:
        """Answer whoever waits for a queue that has crashed; True if it is not to live again."""
        mailbox = queue.mailbox
        if actor is None:
            left = mailbox.close()
            queue_log = make_queue_log(self._surroundings, queue, self._clock)
            for channel in refuse(left, mailbox, queue_log, crashed=True):
                channel.put_urgent(c.QueueDown(mailbox, crashed=True))
        elif mailbox.is_closed:
            left = []  # it broke after its goodbye
        else:
            left = actor.say_goodbye(crashed=True)
        deletion = deletion_in(left)
        is_ending = actor is not None and actor.is_ending
        if is_ending or deletion is not None or self._is_stopping:
            log.error("%s crashed at its end", queue.name, exc_info=failure)
            if deletion is not None and not is_ending:
                if isinstance(deletion, c.Delete):
                    queue.deleted_by = deletion.user
                    queue.deleted_through = deletion.actor
                elif queue.exclusive:
                    queue.delete_reason = "exclusive"
                self._on_deleted(queue)
            return True
        queue.mailbox = queue.make_mailbox()
        return False

    async def _pause(self, mailbox: Mailbox, seconds: float) -> None:
        """Until the time is up, or somebody wants the queue to end."""
        if seconds <= 0:
            return
        timer = self._clock.call_later(seconds, mailbox.wake)
        urgent = ordinary = 0  # looked at
        try:
            while timer.is_waiting:
                more = [*mailbox.urgent[urgent:], *islice(mailbox.ordinary, ordinary, None)]
                if any(isinstance(each, (c.Delete, c.DeleteNow, c.Terminate)) for each in more):
                    return
                urgent, ordinary = len(mailbox.urgent), len(mailbox.ordinary)
                await mailbox.wait_more()
        finally:
            timer.cancel()

    # --- all of them ------------------------------------------------------------------------------

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

    async def stop(self, patience_s: float | None = None) -> None:
        """End all tasks, after what was put before; queues are not deleted."""
        self._is_stopping = True
        tasks = list(self._tasks.values())
        for queue in self._tasks:
            queue.mailbox.put(c.Terminate())
        if tasks:
            timeout = STOP_S if patience_s is None else patience_s
            _, late = await asyncio.wait(tasks, timeout=timeout)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        self._tasks.clear()
        self.actors.clear()


async def _run(actor: QueueActor) -> Exception | None:
    """Why it has crashed; None if it has come to its end."""
    try:
        await actor.run()
    except Exception as error:
        return error
    return None


def _tell(queue: Queue, failure: Exception, in_a_row: int, pause_s: float) -> None:
    if in_a_row == 1:
        log.error("%s crashed; it is restarted", queue.name, exc_info=failure)
        return
    log.error(
        "%s crashed again, %d times in a row (%s: %s); it is restarted in %g s",
        queue.name,
        in_a_row,
        type(failure).__name__,
        failure,
        pause_s,
    )


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
