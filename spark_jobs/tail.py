"""``leveret analytics tail``: the log as it grows, on the terminal, with alerts.

A streaming query over the segments that the broker seals. Each batch of it is summed up in Spark
and added to the windows here in the driver; windows that are complete are shown and judged, and
alerts go to an exchange of a broker. Nothing is written but Spark's own notes, to a folder that
goes with it: every start begins at ``--since``.

Upstream: ``commands.py``. Downstream: ``tail_summary.py`` (Spark), ``tail_windows.py``,
``alert_rules.py``, ``tail_screen.py``, ``alert_sender.py``. Batches come in a thread of Spark's,
one at a time; the thread that calls ``run`` sends.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from pyspark.sql import DataFrame, SparkSession

from leveret.spark_jobs.alert_rules import DEFAULT_RULES, Rule, Watch
from leveret.spark_jobs.alert_sender import AlertSender
from leveret.spark_jobs.ingest import read_segments
from leveret.spark_jobs.lake import Selection, segments_of
from leveret.spark_jobs.tail_screen import Screen
from leveret.spark_jobs.tail_summary import events_of, summaries, summarise
from leveret.spark_jobs.tail_windows import Windows

# Segments of a batch: a full one is 64 MB.
_FILES_PER_BATCH: Final = 16
_TURN_S: Final = 0.5
# How far into the future the log is followed.
_YEARS: Final = 5


@dataclass(frozen=True, slots=True)
class TailOptions:
    log: str
    selection: Selection
    window_s: int = 10
    interval_s: int = 5
    rules: Sequence[Rule] = DEFAULT_RULES


class Tail:
    def __init__(
        self, spark: SparkSession, options: TailOptions, screen: Screen, sender: AlertSender | None
    ) -> None:
        self._spark = spark
        self._options = options
        self._screen = screen
        self._sender = sender
        gap = max((rule.windows for rule in options.rules), default=1)
        self._windows = Windows(options.window_s, gap=gap)
        self._watch = Watch(options.rules)
        # By boot, the share of messages that it logs.
        self._samples: dict[str, float] = {}
        # No event, whose lock the thread that a signal interrupts may hold.
        self._is_stopped = False
        # Held while a batch is looked at.
        self._at_work = threading.Lock()

    def run(self) -> None:
        """Follow the log until ``stop`` is called.

        Raises LakeError if there is no log, LinkError if alerts cannot be sent from the start, and
        whatever ended the query.
        """
        segments = segments_of(self._spark, self._options.log)
        if self._sender is not None:
            self._sender.open()
        query = (
            read_segments(self._spark, _folders(segments, self._options), _FILES_PER_BATCH)
            .writeStream.foreachBatch(self._on_batch)
            .trigger(processingTime=f"{self._options.interval_s} seconds")
            .start()
        )
        try:
            while query.isActive and not self._is_stopped:
                self._send()
                time.sleep(_TURN_S)
            failure = query.exception()
            if failure is not None:
                raise failure
        finally:
            self._is_stopped = True
            # Spark takes a batch that is interrupted for a failure: the one that is being looked at
            # ends, and those after it end at once. The lock is not kept: Spark waits for its thread
            # to stop, which may be about to ask for it.
            with self._at_work:
                pass
            query.stop()
            if self._sender is not None:
                self._say(self._sender.finish())

    def stop(self) -> None:
        """May be called from any thread, and from a signal's handler."""
        self._is_stopped = True
        if self._sender is not None:
            self._sender.hurry()

    def _on_batch(self, lines: DataFrame, number: int) -> None:
        with self._at_work:
            if self._is_stopped:
                return
            events = events_of(lines, self._options.selection)
            rows = summarise(events, self._options.window_s).collect()
            self._windows.add(summaries(rows, self._samples))
            for readings in self._windows.close():
                for alert in self._watch.look(readings):
                    self._screen.show_alert(alert)
                    if self._sender is not None:
                        self._sender.add(alert)
                self._screen.show(readings, self._watch.active, self._windows.late)

    def _send(self) -> None:
        if self._sender is not None:
            self._say(self._sender.send())

    def _say(self, trouble: str | None) -> None:
        if trouble is not None:
            self._screen.say(trouble)


def run(spark: SparkSession, options: argparse.Namespace) -> int:
    """The command. Raises LakeError and LinkError."""
    sender = None if options.alert is None else AlertSender(options.alert, options.exchange)
    screen = Screen(sys.stdout, in_place=sys.stdout.isatty(), limit=options.limit)
    selection = Selection(options.since, None, options.vhost, options.queue)
    wanted = TailOptions(
        options.log, selection, options.window, options.interval, options.rules or DEFAULT_RULES
    )
    tail = Tail(spark, wanted, screen, sender)
    for signum in (signal.SIGINT, signal.SIGTERM):
        # An exception, as Spark's own handler raises it, would hit a call to the JVM halfway.
        signal.signal(signum, lambda *_: tail.stop())
    screen.say(f"following {options.log}; end with Ctrl-C")
    tail.run()
    return 0


def _folders(segments: str, options: TailOptions) -> str:
    """A pattern for the folders of the days that matter, those to come included."""
    since = options.selection.since
    if since is None:
        return segments
    # Segments are filed by the day they were opened on.
    first = datetime.fromtimestamp(since / 1_000_000, UTC).date() - timedelta(days=1)
    days = [f"{first:%Y-%m}-{day:02d}" for day in range(first.day, 32)]
    months = [f"{first.year}-{month:02d}-*" for month in range(first.month + 1, 13)]
    years = [f"{year}-*" for year in range(first.year + 1, first.year + _YEARS)]
    return f"{segments}/date={{{','.join([*days, *months, *years])}}}"
