"""A virtual host that runs: its topology, its queue tasks, its reply consumers.

``vhost.py`` knows what is bound to what, ``queues/supervisor.py`` keeps the tasks; here the two
meet: a queue is known from the moment it is declared until its actor says it is deleted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from leveret.broker.queues.record import Queue
from leveret.broker.queues.supervisor import BackingFactory, QueueSupervisor
from leveret.broker.vhost import Vhost

if TYPE_CHECKING:
    from leveret.broker.clock import Clock
    from leveret.broker.config import Settings
    from leveret.broker.mailbox import Mailbox
    from leveret.broker.queues.decorators import QueueDecorator
    from leveret.broker.registry import Registries

log = logging.getLogger(__name__)


class LiveVhost:
    def __init__(
        self,
        name: str,
        registries: Registries,
        make_backing: BackingFactory,
        clock: Clock,
        settings: Settings,
    ) -> None:
        self.name = name
        self.topology: Vhost[Queue] = Vhost(name, registries)
        # Direct reply-to: the name a requester's replies are sent to -> its channel.
        self.reply_consumers: dict[str, Mailbox] = {}
        # By name and factory: a name registered anew is another decorator.
        decorators: dict[tuple[str, Callable[[], QueueDecorator]], QueueDecorator] = {}

        def current_decorators() -> Iterable[QueueDecorator]:
            registry = registries.queue_decorators
            for known in registry.names():
                factory = registry.get(known)
                if factory is None:
                    continue
                try:
                    if (known, factory) not in decorators:
                        decorators[known, factory] = factory()
                except Exception:
                    # Foreign code: queues must start without it.
                    log.exception("queue decorator '%s' cannot be used", known)
                    continue
                yield decorators[known, factory]

        self._supervisor = QueueSupervisor(
            make_backing, self._on_deleted, clock, settings, current_decorators
        )

    def start_queue(self, queue: Queue) -> None:
        """Make a declared queue known and start its task."""
        self.topology.add_queue(queue)
        self._supervisor.start(queue)

    async def delete_queues(self, queues: Iterable[Queue]) -> None:
        """Delete whatever they hold; returns when they are gone."""
        await self._supervisor.wait_deleted(queues)

    def _on_deleted(self, queue: Queue) -> None:
        if self.topology.queues.get(queue.name.name) is queue:
            self.topology.remove_queue(queue.name.name)

    async def stop(self) -> None:
        await self._supervisor.stop()
        self.topology.close()

    def statistics(self) -> dict[str, object]:
        return {
            "name": self.name,
            "exchanges": {
                name: exchange.statistics() for name, exchange in self.topology.exchanges.items()
            },
            "queues": {
                queue.name.name: actor.statistics()
                for queue, actor in self._supervisor.actors.items()
            },
        }

    @property
    def tasks(self) -> Iterable[asyncio.Task[None]]:
        return self._supervisor.tasks
