"""Heartbeats both ways [19], on the broker's clock.

Sends a heartbeat frame every half interval in which nothing else was sent. Looks once per
interval whether anything was received; twice nothing, and the peer is taken for dead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from leveret.protocol.framing import HEARTBEAT, frame

if TYPE_CHECKING:
    from leveret.broker.clock import Clock, Timer
    from leveret.broker.connection.writer import SocketWriter

_FRAME = frame(HEARTBEAT, 0, b"")
_MISSED = 2


class Heartbeat:
    def __init__(
        self,
        clock: Clock,
        interval_s: int,
        writer: SocketWriter,
        received: Callable[[], int],
        on_dead: Callable[[], object],
    ) -> None:
        """``received`` counts up with whatever shows that the peer lives."""
        self._clock = clock
        self._interval_s = interval_s
        self._writer = writer
        self._received = received
        self._on_dead = on_dead
        self._last_writes = writer.writes
        self._last_received = received()
        self._silent = 0
        self._timers: list[Timer] = []
        if interval_s:
            self._timers = [
                clock.call_later(interval_s / 2, self._beat),
                clock.call_later(interval_s, self._listen),
            ]

    def stop(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers = []

    def _beat(self) -> None:
        if self._writer.writes == self._last_writes and not self._writer.is_paused:
            self._writer.write(_FRAME)
        self._last_writes = self._writer.writes
        self._timers[0] = self._clock.call_later(self._interval_s / 2, self._beat)

    def _listen(self) -> None:
        received = self._received()
        self._silent = self._silent + 1 if received == self._last_received else 0
        self._last_received = received
        if self._silent >= _MISSED:
            self._on_dead()
        else:
            self._timers[1] = self._clock.call_later(self._interval_s, self._listen)
