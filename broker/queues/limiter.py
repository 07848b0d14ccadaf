"""The prefetch limit that all consumers of a channel share (``basic.qos`` with global).

Its own owner, as RabbitMQ's limiter is its own process: queues ask it before they deliver,
the channel tells it of acks. A queue that was refused is told (``Resume``) when there is room.
"""

from __future__ import annotations

from leveret.broker.mailbox import Mailbox
from leveret.broker.queues.commands import Resume


class Limiter:
    __slots__ = ("_channel", "_suspended", "_volume", "limit")

    def __init__(self, channel: Mailbox) -> None:
        self._channel = channel
        # 0: no limit, nothing is counted.
        self.limit = 0
        # Delivered and not yet acked, as far as it counts against the limit.
        self._volume = 0
        # Queues that were refused and wait to be told.
        self._suspended: set[Mailbox] = set()

    def set_limit(self, limit: int, outstanding: int) -> None:
        """``outstanding``: unacknowledged messages the channel holds when a limit begins."""
        if limit and not self.limit:
            self._volume = outstanding
        self.limit = limit
        self._resume()

    def take(self, queue: Mailbox, wanted: int) -> int:
        """How many of ``wanted`` messages may be delivered now; they count from here on."""
        if not self.limit:
            return wanted
        granted = min(wanted, max(0, self.limit - self._volume))
        self._volume += granted
        if not granted:
            self._suspended.add(queue)
        return granted

    def give_back(self, count: int) -> None:
        """Acked, requeued, or taken and not used."""
        if self.limit:
            self._volume = max(0, self._volume - count)
            self._resume()

    def forget(self, queue: Mailbox) -> None:
        self._suspended.discard(queue)

    def _resume(self) -> None:
        if self._suspended and (not self.limit or self._volume < self.limit):
            suspended, self._suspended = self._suspended, set()
            for queue in suspended:
                queue.put_urgent(Resume(self._channel))
