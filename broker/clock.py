"""Every timer and every "now" of the broker.

Owns the timers: a heap by due time, with the event loop woken for the earliest alone. TTLs,
heartbeats and expiries may be many thousands; the loop sees one. Everybody else in the broker gets
a ``Clock`` and calls neither ``time``, ``loop.call_later`` nor ``asyncio.sleep``, so that a test
(or a program that embeds the broker) can hand in a ``VirtualClock`` and move time by hand.

Invariants: callbacks run in order of due time, equal ones in the order they were asked for; a
cancelled timer never runs; a callback that raises is logged and takes nobody with it.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import count
from typing import TypeVarTuple

from leveret.protocol.twin import now_us

logger = logging.getLogger(__name__)

Ts = TypeVarTuple("Ts")

# Event loops refuse times too far away; a longer wait is made of several.
_LONGEST_S = 86_400.0


class Timer:
    """A callback that waits for its time."""

    __slots__ = ("_args", "_callback", "_clock", "due")

    def __init__(
        self, clock: Clock, due: float, callback: Callable[..., object], args: tuple[object, ...]
    ) -> None:
        self.due = due  # monotonic seconds
        self._clock = clock
        # Both are let go once it has run or was cancelled: what they hold may be large.
        self._callback: Callable[..., object] | None = callback
        self._args = args

    @property
    def is_waiting(self) -> bool:
        return self._callback is not None

    def cancel(self) -> None:
        """It will not run. Does nothing if it has run already."""
        if self._callback is not None:
            self._forget()
            self._clock._timer_cancelled()

    def _forget(self) -> None:
        self._callback = None
        self._args = ()

    def _fire(self) -> None:
        callback, args = self._callback, self._args
        self._forget()
        assert callback is not None
        try:
            callback(*args)
        except Exception:
            logger.exception("a timer's callback failed: %r", callback)


class Clock(ABC):
    """What the broker asks of time. Not thread-safe: it belongs to one event loop."""

    def __init__(self) -> None:
        # Tuples compare in C; the count keeps equal times in order and timers uncompared.
        self._heap: list[tuple[float, int, Timer]] = []
        self._order = count()
        # Cancelled timers still in the heap: taking one out of the middle would cost more.
        self._cancelled = 0
        self._sleepers: set[asyncio.Future[None]] = set()
        self._is_closed = False
        # Called before timers of this machine's time run: there is going to be work.
        self.before_round: Callable[[], object] = lambda: None

    @abstractmethod
    def now(self) -> float:
        """Wall-clock seconds since the epoch; may jump."""

    def now_us(self) -> int:
        """The same in whole microseconds."""
        return int(self.now() * 1_000_000)

    @abstractmethod
    def monotonic(self) -> float:
        """Seconds since some moment; never goes back."""

    @abstractmethod
    def _earliest_changed(self) -> None:
        """The head of the heap may be another one now."""

    def call_later(self, delay_s: float, callback: Callable[[*Ts], object], *args: *Ts) -> Timer:
        """Run ``callback(*args)`` after ``delay_s``, never before this call returns."""
        return self.call_at(self.monotonic() + delay_s, callback, *args)

    def call_at(self, due: float, callback: Callable[[*Ts], object], *args: *Ts) -> Timer:
        """Run ``callback(*args)`` at a ``monotonic()`` time. On a closed clock it never runs."""
        if math.isnan(due):
            raise ValueError("a timer cannot be due at NaN")
        timer = Timer(self, due, callback, args)
        if self._is_closed:
            timer._forget()
            return timer
        heapq.heappush(self._heap, (due, next(self._order), timer))
        if self._heap[0][2] is timer:
            self._earliest_changed()
        return timer

    async def sleep(self, seconds: float) -> None:
        """Wait. When the clock is closed meanwhile the sleeper is cancelled, not forgotten."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._is_closed:
            future.cancel()
        self._sleepers.add(future)
        timer = self.call_later(seconds, _wake, future)
        try:
            await future
        finally:
            timer.cancel()
            self._sleepers.discard(future)

    def close(self) -> None:
        """Cancel everything; nothing runs afterwards."""
        self._is_closed = True
        for _, _, timer in self._heap:
            timer._forget()
        self._heap.clear()
        self._cancelled = 0
        for future in self._sleepers:
            future.cancel()
        self._earliest_changed()

    def statistics(self) -> dict[str, int]:
        return {"timers": len(self._heap) - self._cancelled, "cancelled": self._cancelled}

    def _timer_cancelled(self) -> None:
        self._cancelled += 1
        if self._cancelled * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].is_waiting]
            heapq.heapify(self._heap)
            self._cancelled = 0
            self._earliest_changed()

    def _next_due(self) -> float | None:
        """When the earliest timer that still waits is due; drops cancelled ones before it."""
        heap = self._heap
        while heap:
            due, _, timer = heap[0]
            if timer.is_waiting:
                return due
            heapq.heappop(heap)
            self._cancelled -= 1
        return None

    def _run_next(self) -> None:
        """Run the earliest timer; only after ``_next_due`` said that there is one."""
        heapq.heappop(self._heap)[2]._fire()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class RealClock(Clock):
    """The time of this machine. Timers need a running event loop."""

    def __init__(self) -> None:
        super().__init__()
        # The loop's only timer of ours, and the due time it was set for.
        self._handle: asyncio.TimerHandle | None = None
        self._armed_for = math.inf
        # While callbacks run, arming is left to the end of the round.
        self._is_running = False

    def now(self) -> float:
        return time.time()

    # As it is: the event log asks for every run of messages.
    now_us = staticmethod(now_us)

    def monotonic(self) -> float:
        return time.monotonic()

    def _earliest_changed(self) -> None:
        if not self._is_running:
            self._arm()

    def _arm(self) -> None:
        due = self._next_due()
        if self._handle is not None:
            # Too early is harmless: that round finds nothing due and arms again.
            if due is not None and self._armed_for <= due:
                return
            self._handle.cancel()
            self._handle = None
        if due is None:
            return
        delay_s = min(max(0.0, due - time.monotonic()), _LONGEST_S)
        # uvloop counts whole milliseconds: rounded down, the loop would spin until it is due.
        delay_s = math.ceil(delay_s * 1000) / 1000
        self._armed_for = due
        self._handle = asyncio.get_running_loop().call_later(delay_s, self._run_due)

    def _run_due(self) -> None:
        self.before_round()
        self._handle = None
        # One reading for the whole round: a callback that asks for "at once" again and again
        # gets its turn in the next one, and the loop its own in between.
        until = time.monotonic()
        self._is_running = True
        try:
            while (due := self._next_due()) is not None and due <= until:
                self._run_next()
        finally:
            self._is_running = False
            self._arm()


class VirtualClock(Clock):
    """Time that stands still until ``advance`` moves it. Starts at wall time ``start``."""

    def __init__(self, start: float = 1_700_000_000.0) -> None:
        super().__init__()
        self._start = start
        self._elapsed = 0.0  # only advance() changes it
        self._is_advancing = False

    def now(self) -> float:
        return self._start + self._elapsed

    def monotonic(self) -> float:
        return self._elapsed

    def _earliest_changed(self) -> None:
        """Nobody is waiting to be woken."""

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass, running what becomes due, each at its own time.

        Callbacks may ask for more within the span. Tasks in ``sleep`` are woken but run only when
        the caller lets the loop run.
        """
        if not seconds >= 0:
            raise ValueError(f"time cannot move by {seconds}")
        if self._is_advancing:
            raise RuntimeError("a timer's callback cannot advance the clock")
        until = self._elapsed + seconds
        self._is_advancing = True
        try:
            while (due := self._next_due()) is not None and due <= until:
                # What was due in the past runs now: time never goes back.
                self._elapsed = max(self._elapsed, due)
                self._run_next()
            self._elapsed = until
        finally:
            self._is_advancing = False
