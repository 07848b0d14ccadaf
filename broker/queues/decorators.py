"""Queue decorators: code that follows queues and hears of their consumers.

Upstream: registered by installed packages (group ``leveret.queue_decorators``). The supervisor
asks ``active_for`` when a queue starts; the queue's actor makes the other calls, between two
batches, so a decorator must not wait. All calls have empty defaults: override what matters.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from leveret.broker.queues.record import Queue


class QueueDecorator(Protocol):
    description: str = ""

    @abstractmethod
    def active_for(self, queue: Queue) -> bool:
        """Whether this queue is followed; asked each time it starts."""

    def startup(self, queue: Queue) -> None:
        """The queue's actor runs, for the first time or after a crash."""
        return

    def shutdown(self, queue: Queue) -> None:
        """The queue was deleted, or its actor crashed."""
        return

    def policy_changed(self, queue: Queue) -> None:
        """The policy that applies to the queue is another one, or says something else."""
        return

    def consumer_state_changed(
        self, queue: Queue, max_active_priority: int | None, is_empty: bool
    ) -> None:
        """The highest priority of a consumer that can take messages (None: no such consumer), or
        whether messages wait, is not what it was at the last call."""
        return
