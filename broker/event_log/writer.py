"""The thread that writes the event log's segments.

Upstream: ``journal.py`` hands over batches, in the event loop; their lines are made here, without
the GIL where the codec is compiled (``protocol/lines.py``). Downstream: ``segments.py``, which is
touched by this thread alone. What was done goes back as a ``Report``, one for each batch, through
the loop.

While the disk refuses, what was handed over waits here in its order and is tried again each time
the journal asks (``Retry``). The thread never sleeps, never gives up before the broker stops, and
raises nothing: whoever keeps a log must not end for it.

A busy event loop leaves the GIL to this thread for moments only, every few milliseconds. So what
has been handed over meanwhile is taken together, formatted together and written together: the
busier the loop, the more is done in each of these moments.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from leveret.broker.event_log.segments import Segments
from leveret.protocol.twin import format_lines

if TYPE_CHECKING:
    from leveret.protocol.lines import Entry

log = logging.getLogger(__name__)

# Batches that wait are written together up to this, which is what their lines take in memory.
TOGETHER_BYTES = 4 * 1024**2


class Batch(NamedTuple):
    """Lines in their order, with the times of the first and the last."""

    # From here on the thread's.
    entries: list[Entry]
    # How much of the journal's buffer they take.
    size: int
    first_us: int
    last_us: int


class Seal(NamedTuple):
    now_us: int


class Retry(NamedTuple):
    """Try again what failed."""


class Stop(NamedTuple):
    """Seal and end, whether that succeeds or not."""

    now_us: int


class Report(NamedTuple):
    """``size`` of the journal's buffer is free again; ``written`` bytes are in the file."""

    size: int
    written: int
    sealed_count: int
    # Why nothing can be written just now.
    trouble: str | None
    has_ended: bool = False


class SegmentWriter:
    """``report`` is called in the thread; all other methods belong to the event loop."""

    def __init__(self, segments: Segments, report: Callable[[Report], object]) -> None:
        self._segments = segments
        self._report = report
        self._inbox: SimpleQueue[Batch | Seal | Retry | Stop] = SimpleQueue()
        self._thread: threading.Thread | None = None
        # Of the thread alone: what is to be done, in order, and why it cannot.
        self._backlog: deque[Batch | Seal] = deque()
        self._trouble: str | None = None
        # Lines as they are about to be written.
        self._buffer = bytearray()

    def put(self, item: Batch | Seal | Retry | Stop) -> None:
        """The thread starts with the first: a broker that starts does not wait for it."""
        self._inbox.put(item)
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="event log", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                # The machine has none left: the next batch tries again.
                log.error("the event log cannot be written for now: %s", error)
            else:
                self._thread = thread

    def join(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    # --- in the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        is_recovered = False
        is_stopped = False
        while not is_stopped:
            items = [self._inbox.get()]
            # Nobody else takes from it.
            while not self._inbox.empty():
                items.append(self._inbox.get())
            if not is_recovered:
                is_recovered = True
                self._recover(items[0])
            is_retry = False
            for item in items:
                if isinstance(item, Batch | Seal):
                    self._backlog.append(item)
                elif isinstance(item, Stop):
                    self._backlog.append(Seal(item.now_us))
                    is_stopped = True
                else:
                    is_retry = True
            if self._trouble is None or is_retry or is_stopped:
                self._work()
        if self._trouble is not None:
            log.error("the event log's last lines are lost: %s", self._trouble)
        self._segments.close()
        self._report(Report(0, 0, self._segments.sealed_count, self._trouble, has_ended=True))

    def _recover(self, first: Batch | Seal | Retry | Stop) -> None:
        now_us = first.last_us if isinstance(first, Batch) else getattr(first, "now_us", 0)
        try:
            self._segments.recover(now_us)
        except Exception:
            log.exception("segments that an earlier start has left are not taken care of")

    def _work(self) -> None:
        while self._backlog:
            written = 0
            item = self._backlog[0]
            batches = self._together()
            try:
                if isinstance(item, Seal):
                    self._segments.seal(item.now_us)
                else:
                    written = self._write(batches)
            except OSError as error:
                self._note_trouble(error)
                # Whoever keeps the error keeps a view of it, and then it could not grow.
                self._buffer = bytearray()
                self._report(Report(0, 0, self._segments.sealed_count, self._trouble))
                return
            except Exception:
                # A bug: these lines are lost, what follows is not.
                log.exception("a part of the event log cannot be written")
            if self._trouble is not None:
                self._trouble = None
                log.warning("the event log is written again")
            for _ in range(len(batches) or 1):
                self._backlog.popleft()
            # One that could not be sealed is still full: the next batch tries again.
            if batches and self._segments.is_full:
                self._backlog.appendleft(Seal(batches[-1].last_us))
            size = sum([batch.size for batch in batches])
            self._report(Report(size, written, self._segments.sealed_count, None))

    def _together(self) -> list[Batch]:
        """Those that are next, as many as the segment has room for; none if it is to be sealed."""
        room = min(self._segments.room, TOGETHER_BYTES)
        batches: list[Batch] = []
        for item in self._backlog:
            if isinstance(item, Seal) or (batches and room <= 0):
                break
            batches.append(item)
            room -= item.size
        return batches

    def _write(self, batches: list[Batch]) -> int:
        """How many bytes it took."""
        entries = batches[0].entries
        if len(batches) > 1:
            entries = [entry for batch in batches for entry in batch.entries]
        size = format_lines(entries, self._buffer)
        with memoryview(self._buffer)[:size] as lines:
            self._segments.write(lines, batches[0].first_us, batches[-1].last_us)
        return size

    def _note_trouble(self, error: OSError) -> None:
        """Once, however often it is tried."""
        if self._trouble is None:
            log.error(
                "the event log cannot be written: %s. It is tried again and again; meanwhile"
                " events are kept in memory, and left out once there are too many",
                error,
            )
        self._trouble = str(error)
