"""A queue decorator: writes down what happens to the consumers of queues."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from leveret.broker.queues.decorators import QueueDecorator

if TYPE_CHECKING:
    from leveret.broker.queues.record import Queue


class Journal(QueueDecorator):
    description = "one line per event of queues called journal.*, to the file SAMPLE_JOURNAL"

    def __init__(self) -> None:
        self._path = os.environ["SAMPLE_JOURNAL"]

    def active_for(self, queue: Queue) -> bool:
        return queue.name.name.startswith("journal.")

    def startup(self, queue: Queue) -> None:
        self._write(queue, "startup")

    def shutdown(self, queue: Queue) -> None:
        self._write(queue, "shutdown")

    def consumer_state_changed(
        self, queue: Queue, max_active_priority: int | None, is_empty: bool
    ) -> None:
        content = "empty" if is_empty else "messages"
        self._write(queue, f"priority {max_active_priority}, {content}")

    def _write(self, queue: Queue, event: str) -> None:
        # The queue waits meanwhile: a real decorator would hand this to somebody else.
        with open(self._path, "a", encoding="utf-8") as journal:
            journal.write(f"{queue.name.name}: {event}\n")
