"""The live table: in place on a terminal, as lines anywhere else.

Upstream: ``tail.py`` gives it the readings of each window and the alerts. Nothing depends on it.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import Final, TextIO

from leveret.spark_jobs.alert_rules import Alert
from leveret.spark_jobs.table import for_people, printable, write_table
from leveret.spark_jobs.tail_windows import Reading

_COLUMNS: Final = (
    "vhost",
    "queue",
    "in/s",
    "out/s",
    "p99 wait ms",
    "depth",
    "depth/s",
    "lost/min",
    "",
)
_ALERTS_KEPT: Final = 8
_UP: Final = "\x1b[{}A\x1b[J"


class Screen:
    def __init__(self, out: TextIO, *, in_place: bool, limit: int) -> None:
        self._out = out
        self._in_place = in_place
        self._limit = limit
        # Lines of the table that stand on the terminal, to be drawn over.
        self._drawn = 0
        self._alerts: list[str] = []

    def say(self, text: str) -> None:
        """A line that stays."""
        self._erase()
        print(printable(text), file=self._out, flush=True)

    def show_alert(self, alert: Alert) -> None:
        text = f"{_time(alert.at)} {'!' if alert.begins else '-'} {alert.text}"
        if self._in_place:
            self._alerts = [*self._alerts, text][-_ALERTS_KEPT:]
        else:
            self.say(text)

    def show(
        self, readings: Sequence[Reading], alarmed: Collection[tuple[str, str, str]], late: int
    ) -> None:
        """The readings of one window; those with an alert first, then the busiest."""
        if not readings:
            return

        def is_alarmed(reading: Reading) -> bool:
            return (reading.vhost, reading.queue, reading.exchange) in alarmed

        def rank(reading: Reading) -> tuple[bool, float]:
            return not is_alarmed(reading), -(reading.came_per_s + reading.went_per_s)

        shown = sorted(readings, key=rank)
        if self._in_place:
            self._draw(shown, [is_alarmed(reading) for reading in shown], late)
            return
        for reading in shown[: self._limit]:
            if is_alarmed(reading) or reading.came_per_s or reading.went_per_s:
                print(printable(_line(reading)), file=self._out)
        self._out.flush()

    def _draw(self, readings: Sequence[Reading], alarms: Sequence[bool], late: int) -> None:
        text = io.StringIO()
        print(f"window from {_time(readings[0].window)} UTC", file=text)
        rows = [
            (
                reading.vhost,
                reading.queue or f"({reading.exchange or 'default exchange'})",
                reading.came_per_s if reading.queue else None,
                reading.went_per_s if reading.queue else None,
                reading.wait_p99_ms,
                reading.depth,
                reading.slope if reading.queue else None,
                None if reading.queue else reading.unroutable_per_minute,
                "!" if alarm else "",
            )
            for reading, alarm in zip(readings, alarms, strict=True)
        ]
        write_table(_COLUMNS, rows[: self._limit], text, limit=self._limit)
        if len(rows) > self._limit:
            print(f"  … and {len(rows) - self._limit} more queues", file=text)
        if late:
            print(f"  {late} messages came after their window was shown", file=text)
        for alert in self._alerts:
            print(printable(alert), file=text)
        self._erase()
        self._out.write(text.getvalue())
        self._out.flush()
        self._drawn = text.getvalue().count("\n")

    def _erase(self) -> None:
        if self._drawn:
            self._out.write(_UP.format(self._drawn))
            self._drawn = 0


def _line(reading: Reading) -> str:
    head = f"{_time(reading.window)} {reading.vhost} {reading.queue or reading.exchange}:"
    if not reading.queue:
        return f"{head} {for_people(reading.unroutable_per_minute)} unroutable a minute"
    text = f"{head} in {for_people(reading.came_per_s)}/s, out {for_people(reading.went_per_s)}/s"
    if reading.wait_p99_ms is not None:
        text += f", p99 wait {for_people(reading.wait_p99_ms)} ms"
    if reading.depth is not None:
        sign = "+" if reading.slope > 0 else ""
        text += f", depth {for_people(reading.depth)} ({sign}{for_people(reading.slope)}/s)"
    return text


def _time(ts: int) -> str:
    return datetime.fromtimestamp(ts / 1_000_000, UTC).strftime("%H:%M:%S")
