"""How long the longest turn of the event loop was: in CPU time of its thread, and by the clock.

Everything the broker decides is decided in turns of one loop. While one goes on nobody else is
served, so its length is what a confirm, a heartbeat or a consumer may have to wait at worst.

While there is work, a timer is asked for every few milliseconds. Turns that fall between two of
its ticks took together what the thread used meanwhile, so none of them took more: that is what is
recorded. It is an upper bound, and too high by no more than ``TICK_S``: a tick is late only by
the turn that holds it up. CPU time is what the broker did; time by the clock also counts waiting
for the machine and, in Python, for other threads.

A loop at rest is left alone. Whoever brings work in calls ``note_work`` (bytes from a socket,
timers that are due), and once the thread has had next to nothing to do for a while the ticks end.

Not on the broker's clock: what is measured is this thread on this machine, also where somebody
moves the broker's time by hand.
"""

from __future__ import annotations

import asyncio
import time

# Between two ticks.
TICK_S = 0.005
# A tick that finds less CPU time used than this found the loop at rest.
_AT_REST_S = 0.001
# Ticks go on for so long after the last that found work: disks answer later than that rarely.
_LINGER_S = 0.25


class LoopMonitor:
    def __init__(self) -> None:
        # The longest turns since the start, or since they were forgotten.
        self.longest_cpu_s = 0.0
        self.longest_wall_s = 0.0
        # When, in seconds since the epoch; None: there was no turn worth mentioning.
        self.longest_cpu_at: float | None = None
        self.longest_wall_at: float | None = None
        # Ticks come: who brings work need not say so.
        self.is_ticking = False
        self._handle: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # At the last tick.
        self._cpu_s = 0.0
        self._wall_s = 0.0
        self._linger_until = 0.0

    def start(self) -> None:
        """From within the loop that is to be watched."""
        self._loop = asyncio.get_running_loop()
        self.note_work()

    def stop(self) -> None:
        self._loop = None
        self.is_ticking = False
        if self._handle is not None:
            self._handle.cancel()

    def note_work(self) -> None:
        """Something came in: watch the loop from this turn on. Cheap if it is watched already."""
        if self.is_ticking or self._loop is None:
            return
        self.is_ticking = True
        self._cpu_s = time.thread_time()
        self._wall_s = time.monotonic()
        self._linger_until = 0.0
        self._handle = self._loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        assert self._loop is not None
        cpu_s, wall_s = time.thread_time(), time.monotonic()
        used_s, passed_s = cpu_s - self._cpu_s, wall_s - self._wall_s
        self._cpu_s, self._wall_s = cpu_s, wall_s
        if used_s > self.longest_cpu_s:
            self.longest_cpu_s, self.longest_cpu_at = used_s, time.time()
        if passed_s > self.longest_wall_s:
            self.longest_wall_s, self.longest_wall_at = passed_s, time.time()
        if used_s >= _AT_REST_S:
            self._linger_until = wall_s + _LINGER_S
        elif wall_s >= self._linger_until:
            self.is_ticking = False
            return
        self._handle = self._loop.call_later(TICK_S, self._tick)

    def forget(self) -> None:
        """Begin anew: the longest from here on."""
        self.longest_cpu_s = self.longest_wall_s = 0.0
        self.longest_cpu_at = self.longest_wall_at = None

    def statistics(self) -> dict[str, object]:
        return {
            "longest_turn_cpu_s": self.longest_cpu_s,
            "longest_turn_cpu_at": self.longest_cpu_at,
            "longest_turn_wall_s": self.longest_wall_s,
            "longest_turn_wall_at": self.longest_wall_at,
        }
