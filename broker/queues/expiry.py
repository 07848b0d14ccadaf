"""When messages expire, and when a queue does [81, 83, 84, 89].

Owned by the queue's actor, which drops or dead-letters what is due; here is when that is, and the
two timers that wake it. An expiry is wall-clock milliseconds, so that it survives a restart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING

from leveret.protocol.codec import pick_expiration
from leveret.protocol.message import NEEDS_EXPIRATION, Message

if TYPE_CHECKING:
    from leveret.broker.clock import Clock, Timer
    from leveret.storage.backing_queue import Run


# Times are sums of floats, and seconds since 1970 are large ones: 99.9999 ms are 100.
_ROUNDING_MS = 0.01


@lru_cache(maxsize=4096)
def expiration_ms(header: bytes) -> int | None:
    """The expiration property; publishers mostly send the same header again and again."""
    text = pick_expiration(header)
    return None if text is None else int(text)


class MessageExpiry:
    __slots__ = ("_clock", "_due_ms", "_timer", "_wake", "ttl_ms")

    def __init__(self, clock: Clock, wake: Callable[[], object], ttl_ms: int | None) -> None:
        """``wake`` is called when the message the timer was set for is due."""
        self._clock = clock
        self._wake = wake
        # The queue's own, for each message.
        self.ttl_ms = ttl_ms
        self._timer: Timer | None = None
        self._due_ms: int | None = None

    def now_ms(self) -> int:
        return int(self._clock.now() * 1000 + _ROUNDING_MS)

    def is_due(self, expires_at_ms: int | None) -> bool:
        return expires_at_ms is not None and expires_at_ms <= self.now_ms()

    def runs(self, messages: Sequence[Message]) -> list[Run]:
        """The same messages in runs of equal expiry, if they are published now."""
        now_ms = self.now_ms()
        runs: list[Run] = []
        for ttl, run in groupby(messages, self._ttl_of):
            runs.append((list(run), None if ttl is None else now_ms + ttl))
        return runs

    def _ttl_of(self, message: Message) -> int | None:
        ttl = self.ttl_ms
        if message.needs & NEEDS_EXPIRATION:
            own = expiration_ms(message.header)
            if own is not None and (ttl is None or own < ttl):
                return own
        return ttl

    def arm(self, due_ms: int | None) -> None:
        """Wake the queue then; None: there is nothing to wait for."""
        if due_ms == self._due_ms and (due_ms is None or self._timer is not None):
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due_ms = due_ms
        if due_ms is not None:
            left_ms = max(0.0, due_ms - self._clock.now() * 1000 - _ROUNDING_MS)
            # Rounded up to a millisecond: too early would find nothing due.
            delay_ms = math.ceil(left_ms) - _ROUNDING_MS / 2
            self._timer = self._clock.call_later(max(0.0, delay_ms) / 1000, self._fire)

    def _fire(self) -> None:
        self._timer = self._due_ms = None
        self._wake()


class QueueExpiry:
    """x-expires: a queue goes when nobody has used it for so long."""

    __slots__ = ("_clock", "_timer", "_wake", "expires_ms")

    def __init__(self, clock: Clock, wake: Callable[[], object], expires_ms: int | None) -> None:
        self._clock = clock
        self._wake = wake
        self.expires_ms = expires_ms
        self._timer: Timer | None = None

    def used(self) -> None:
        """It was declared again, asked for a message, or its last consumer left: begin anew."""
        self.stop()
        if self.expires_ms is not None:
            self._timer = self._clock.call_later(self.expires_ms / 1000, self._wake)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
