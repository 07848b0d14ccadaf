"""Which messages are told in the event log, and by which number.

A number is the time of the publish in microseconds, with a few bits to tell messages of one time
apart: unique across restarts, also if the clock was set back (numbers begin behind the newest
event that is on disk), and the age of a message can be read off it. Whether a message is told is
decided here, once, when it is published: all that happens to it later follows from its having a
number.
"""

from __future__ import annotations

import math
import random

from leveret.protocol.lines import ID_BITS

# So many neighbours are told together, where they come in one run.
CLUMP = 16


class Numbering:
    def __init__(self, share: float, newest_us: int = 0) -> None:
        """``share`` of all messages is told: 0 to 1. Earlier boots gave no number later than
        ``newest_us``."""
        self._share = share
        self.is_all = share >= 1
        self._last = (newest_us + 1) << ID_BITS
        self._random = random.Random()
        self._scale = 1 / math.log(1 - share) if 0 < share < 1 else 0.0
        # Messages that are passed over before the next one that is told.
        self._gap = self._next_gap()

    def choose(self, count: int, now_us: int) -> tuple[int, list[int] | None] | None:
        """Of a run of so many, those that are told: the first number, and their places in the run.

        Numbers are consecutive, in the order of places; for None, all are. None if none is told.
        """
        if self.is_all:
            first = now_us << ID_BITS
            if first <= self._last:
                first = self._last + 1
            self._last = first + count - 1
            return first, None
        if self.passes_over(count):
            return None
        places: list[int] = []
        while self._gap < count:
            # Neighbours in a run cost little more than one of them alone; the share is the same.
            some = min(CLUMP, count - self._gap)
            places += range(self._gap, self._gap + some)
            self._gap += some + sum([self._next_gap() for _ in range(some)])
        self._gap -= count
        first = max(now_us << ID_BITS, self._last + 1)
        self._last = first + len(places) - 1
        return first, places

    def passes_over(self, count: int) -> bool:
        """None of so many is told: they are done with."""
        if self._gap < count:
            return False
        self._gap -= count
        return True

    def _next_gap(self) -> int:
        """Random, so that what comes at regular intervals is not always, or never, told."""
        if not self._scale:
            return 0 if self._share else 1 << 62
        return int(math.log(1 - self._random.random()) * self._scale)
