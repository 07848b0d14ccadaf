"""Says what a command is at while it takes its time.

On a terminal a line that is written over, twice a second, with how much of Spark's work is done.
Elsewhere, as under cron, plain lines and few of them: what is over within half a minute needs none.
All on stderr: stdout is for answers.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TextIO

from pyspark.sql import SparkSession

_ON_TERMINAL_S: Final = 0.5
_ELSEWHERE_S: Final = 30.0


class Progress:
    """What is going on, said by a thread of its own until it is closed."""

    def __init__(
        self, text: str, work: Callable[[], str], out: TextIO, *, every_s: float | None = None
    ) -> None:
        self._text = text
        # How far it is, in words; asked by the thread.
        self._work = work
        self._out = out
        self._in_place = out.isatty()
        self._every_s = every_s or (_ON_TERMINAL_S if self._in_place else _ELSEWHERE_S)
        self._started = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def say(self, text: str) -> None:
        """What it is at from now on."""
        self._text = text

    def start(self) -> None:
        if self._in_place:
            self._write()
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        if self._in_place:
            print("\r\x1b[K", end="", file=self._out, flush=True)

    def _run(self) -> None:
        while not self._closed.wait(self._every_s):
            self._write()

    def _write(self) -> None:
        work = self._work()
        text = f"{self._text}, {work}" if work else f"{self._text} …"
        if self._in_place:
            print(f"\r\x1b[K{text}", end="", file=self._out, flush=True)
        else:
            elapsed = time.monotonic() - self._started
            print(f"leveret: {text} ({elapsed:.0f} s so far)", file=self._out, flush=True)


@contextmanager
def progress(text: str, spark: SparkSession | None = None) -> Iterator[Progress]:
    """Shown while the block runs; with a session, along with how far Spark is."""
    shown = Progress(text, (lambda: tasks(spark)) if spark else str, sys.stderr)
    shown.start()
    try:
        yield shown
    finally:
        shown.close()


def tasks(spark: SparkSession) -> str:
    """Of the stages that run now, how many tasks are done; nothing if none runs."""
    tracker = spark.sparkContext.statusTracker()
    stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
    known = [stage for stage in stages if stage is not None]
    if not known:
        return ""
    done, all_ = sum(one.numCompletedTasks for one in known), sum(one.numTasks for one in known)
    return f"{done:,} of {all_:,} tasks"
