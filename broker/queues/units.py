"""A queue's part in a unit: what its actor has reserved for it, and how it hears of its end.

Upstream: ``actor.py`` makes one for each Prepare. Downstream: ``storage/unit.py`` calls it when
the commit begins and ends; it only passes that on, to the backing queue and into the mailbox, so
that the actor stays the sole owner of its state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from leveret.broker.queues import commands as c

if TYPE_CHECKING:
    from leveret.broker.mailbox import Mailbox
    from leveret.broker.queues.consumers import Consumer
    from leveret.storage.backing_queue import Prepared
    from leveret.storage.commit import Batch


class QueuePart:
    __slots__ = ("_mailbox", "_stall", "channel", "count", "prepared", "settled", "size")

    def __init__(
        self,
        mailbox: Mailbox,
        stall: Callable[[], None],
        prepared: Prepared,
        channel: Mailbox,
        settled: dict[int, Consumer | None],
        count: int,
        size: int = 0,
    ) -> None:
        """``stall`` is called when the queue must take no publishes until the part has ended."""
        self._mailbox = mailbox
        self._stall = stall
        self.prepared = prepared
        # Whose deliveries are settled, taken off its account; who was given them.
        self.channel = channel
        self.settled = settled
        # How many messages it publishes, and their bytes.
        self.count = count
        self.size = size

    @property
    def is_void(self) -> bool:
        return self._mailbox.is_closed

    def gather(self, batch: Batch) -> None:
        if self.count:
            self._stall()
        self.prepared.gather(batch)

    def committed(self) -> None:
        self._mailbox.put_urgent(c.PartCommitted(self))

    def voided(self) -> None:
        self._mailbox.put_urgent(c.PartVoided(self))
