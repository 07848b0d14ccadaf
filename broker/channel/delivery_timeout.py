"""How long a delivery may stay unacknowledged: RabbitMQ's ``consumer_timeout``.

One per channel, beside its ledger. Deliveries are not stamped: every now and then (a tenth of the
timeout, at most a minute) the ledger's next tag is noted with the time, and a tag below a mark that
is as old as the timeout has timed out. The channel hears of it through its own mailbox and decides
what becomes of it (``acks.py``). So a timeout is noticed up to one tick late, never early.

The timer runs only while something is unacknowledged: an idle channel has none.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from leveret.broker.channel.acks import UnackedLedger
    from leveret.broker.clock import Clock, Timer
    from leveret.broker.mailbox import Mailbox

TICKS_PER_TIMEOUT = 10
# RabbitMQ's channels look once a minute.
LONGEST_TICK_S = 60.0


class DeliveriesTimedOut(NamedTuple):
    """Whatever is still outstanding with a tag below this one has waited too long."""

    below: int


class DeliveryTimeout:
    def __init__(
        self, ledger: UnackedLedger, clock: Clock, channel: Mailbox, timeout_ms: int
    ) -> None:
        """A timeout of 0 never comes."""
        self._ledger = ledger
        self._clock = clock
        self._channel = channel
        self._timeout_s = timeout_ms / 1000
        self._tick_s = min(self._timeout_s / TICKS_PER_TIMEOUT, LONGEST_TICK_S)
        # False: who adds to the ledger must call begin. Never so where there is no timeout.
        self.is_watching = not timeout_ms
        # When, and which tag came next then; oldest first.
        self._marks: deque[tuple[float, int]] = deque()
        # The latest mark that is old enough.
        self._due_below = 0
        self._timer: Timer | None = None

    def begin(self) -> None:
        """Something is unacknowledged."""
        self.is_watching = True
        self._marks.append((self._clock.monotonic(), self._ledger.next_tag))
        self._timer = self._clock.call_later(self._tick_s, self._tick)

    def stop(self) -> None:
        """The channel has ended."""
        self.is_watching = True
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        ledger, marks = self._ledger, self._marks
        if not len(ledger):
            self._timer = None
            marks.clear()
            self.is_watching = False
            return
        now = self._clock.monotonic()
        while marks and marks[0][0] <= now - self._timeout_s:
            self._due_below = marks.popleft()[1]
        if not marks or marks[-1][1] != ledger.next_tag:
            marks.append((now, ledger.next_tag))
        if ledger.has_below(self._due_below):
            self._channel.put_urgent(DeliveriesTimedOut(self._due_below))
        self._timer = self._clock.call_later(self._tick_s, self._tick)
