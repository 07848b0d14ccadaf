"""``leveret analytics tail``: the log as it grows, on the terminal, with alerts.

A streaming query over the segments that the broker seals. Each batch of it is summed up in Spark
and added to the windows here in the driver; windows that are complete are shown and judged, and
alerts go to an exchange of a broker. Nothing is written but Spark's own notes, to a folder that
goes with it: every start begins at ``--since``.

Upstream: ``commands.py``. Downstream: ``tail_summary.py`` (Spark), ``tail_windows.py``,
``alert_rules.py``, ``tail_screen.py``, ``alert_sender.py``. Batches come in a thread of Spark's, one
at a time; the thread that calls ``run`` sends.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

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
# How many days of the log's folders are looked into from the first on.
_DAYS: Final = 400


@dataclass(frozen=True, slots=True)
class TailOptions:
    log: str
    window_s: int = 10
    interval_s: int = 5
    selection: Selection = Selection()
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
        self._query: StreamingQuery | None = None

    def run(self) -> None:
        """Follow the log until ``stop`` is called or Ctrl-C is pressed.

        Raises LakeError if there is no log, LinkError if alerts cannot be sent from the start.
        """
        segments = segments_of(self._spark, self._options.log)
        if self._sender is not None:
            self._sender.open()
        self._query = query = (
            read_segments(self._spark, _folders(segments, self._options), _FILES_PER_BATCH)
            .writeStream.foreachBatch(self._on_batch)
            .trigger(processingTime=f"{self._options.interval_s} seconds")
            .start()
        )
        try:
            while not query.awaitTermination(_TURN_S):
                self._send()
        finally:
            query.stop()
            self._send()
            if self._sender is not None:
                self._sender.close()

    def stop(self) -> None:
        if self._query is not None:
            self._query.stop()

    def _on_batch(self, lines: DataFrame, number: int) -> None:
        events = events_of(lines, self._options.selection)
        rows = summarise(events, self._options.window_s).collect()
        self._windows.add(summaries(rows, self._samples))
        shown = None
        for readings in self._windows.close():
            for alert in self._watch.look(readings):
                self._screen.show_alert(alert)
                if self._sender is not None:
                    self._sender.add(alert)
            shown = readings
        if shown is not None:
            self._screen.show(shown, self._watch.active, self._windows.late)

    def _send(self) -> None:
        if self._sender is not None:
            trouble = self._sender.send()
            if trouble is not None:
                self._screen.say(trouble)


def run(spark: SparkSession, options: argparse.Namespace) -> int:
    """The command. Raises LakeError and LinkError."""
    sender = None if options.alert is None else AlertSender(options.alert, options.exchange)
    screen = Screen(sys.stdout, in_place=sys.stdout.isatty(), limit=options.limit)
    selection = Selection(options.since, None, options.vhost, options.queue)
    wanted = TailOptions(
        options.log, options.window, options.interval, selection, options.rules or DEFAULT_RULES
    )
    screen.say(f"following {options.log}; end with Ctrl-C")
    try:
        Tail(spark, wanted, screen, sender).run()
    except KeyboardInterrupt:
        screen.say("stopped")
    return 0


def _folders(segments: str, options: TailOptions) -> str:
    """A pattern for the folders of the days that matter, today's and those to come included."""
    since = options.selection.since
    if since is None:
        return segments
    # Segments are filed by the day they were opened on.
    first = datetime.fromtimestamp(since / 1_000_000, UTC).date() - timedelta(days=1)
    days = ",".join((first + timedelta(days=day)).isoformat() for day in range(_DAYS))
    return f"{segments}/date={{{days}}}"
