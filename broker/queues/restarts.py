"""How long a queue that crashes waits before it starts again.

Upstream: ``supervisor.py``, which has one of these per queue. A first crash costs nobody anything:
the queue is back at once. One that crashes again and again, say because of what it finds on disk,
must not keep the broker busy with its restarts, nor fill the log with its tracebacks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leveret.broker.clock import Clock

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 30.0
# A queue that has lived for so long is not the one that crashes at every start.
FORGIVEN_AFTER_S = 60.0


class Restarts:
    __slots__ = ("_began", "_clock", "in_a_row")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = clock.monotonic()
        # Crashes since it last lived for long.
        self.in_a_row = 0

    def begin_life(self) -> None:
        self._began = self._clock.monotonic()

    def note_crash(self) -> float:
        """Another one; the pause that is due before the next life, in seconds."""
        if self._clock.monotonic() - self._began >= FORGIVEN_AFTER_S:
            self.in_a_row = 0
        self.in_a_row += 1
        if self.in_a_row == 1:
            return 0.0
        # The exponent is bounded: a queue may crash for weeks.
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self.in_a_row - 2, 16))
