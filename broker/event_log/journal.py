"""The event log as the rest of the broker sees it: take numbers, write lines, go on.

Owns the numbers of lines, what is buffered, and the count of what was left out. Upstream:
``messages.py`` and ``queue_log.py`` put whole runs of message events into its ``buffer``;
``objects.py``, ``credit.py`` and whoever has a rare event call ``event``. Downstream:
``writer.py``, whose thread gets a batch at a time, at ``BATCH_BYTES`` or after ``FLUSH_S``, and
makes lines of it.

All of it happens in the event loop and nothing waits: while more than the buffer allows is on its
way to the disk the buffer is shut, events are counted instead of written, and once there is
room again a ``log_gap`` says how many. Lines that were numbered are never left out, so the numbers
of a boot have no gaps.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from leveret import __version__
from leveret.broker.event_log.compression import load_zstd
from leveret.broker.event_log.schema import Event, encode_lines
from leveret.broker.event_log.segments import Segments, SegmentSettings
from leveret.broker.event_log.writer import Batch, Report, Retry, Seal, SegmentWriter, Stop
from leveret.protocol.twin import LineBuffer

if TYPE_CHECKING:
    from leveret.broker.clock import Clock, Timer
    from leveret.broker.config import Settings

log = logging.getLogger(__name__)

BATCH_BYTES = 256 * 1024
FLUSH_S = 0.1
# How long after a failure the disk is tried again.
RETRY_S = 1.0
# How long a stop waits for the last segment to be sealed.
STOP_S = 10.0


class Journal:
    """``level`` is never "off": then there is no journal."""

    def __init__(self, settings: Settings, clock: Clock) -> None:
        """Raises EventLogError for a compression that is not installed."""
        if settings.event_log_compression == "zstd":
            load_zstd()
        self.level = settings.event_log
        # The share of messages whose events are written.
        self.sample = {"all": 1.0, "objects": 0.0}.get(self.level, settings.event_log_sample)
        self._clock = clock
        self.now_us = clock.now_us
        # Sortable by the time of the start; two at the same time differ all the same.
        self.boot = f"{int(clock.now() * 1000):011x}{secrets.token_hex(2)}"
        # Lines for the next batch, and the time of the first. It is shut while too many wait for
        # the disk: events are then counted, not written.
        self.buffer = LineBuffer(BATCH_BYTES, self._begin_batch, self._hand_over, self.shed)
        self._first_us = 0
        # Handed over and not yet written, counted in the same way.
        self._pending = 0
        self._buffer_bytes = settings.event_log_buffer
        # Left out since the last log_gap, and in all.
        self._gap = 0
        self._shed = 0
        self._written = 0
        self._sealed_count = 0
        self._trouble: str | None = None
        self._flush_timer: Timer | None = None
        self._seal_timer: Timer | None = None
        self._segment_s = settings.event_log_segment_s
        self._segments = Segments(
            SegmentSettings(
                folder_of(settings),
                settings.event_log_segment_bytes,
                settings.event_log_retention_s,
                settings.event_log_retention_bytes,
                settings.event_log_compression == "zstd",
            ),
            self.boot,
        )
        # The time of the last event of earlier boots; the clock may have been set back since.
        self.newest_us = self._segments.newest_us()
        self._writer: SegmentWriter | None = None
        self._ended: asyncio.Future[None] | None = None

    # --- start and stop ---------------------------------------------------------------------------

    async def start(self) -> None:
        """The first line. Nothing is written yet: a start does not wait for the log's disk."""
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        self._writer = SegmentWriter(self._segments, partial(_tell, loop, self._on_report))
        self.event(
            "broker_start",
            attrs={"version": __version__, "level": self.level, "sample": f"{self.sample:g}"},
        )

    async def stop(self, reason: str = "") -> None:
        """The last line; the segment is sealed. Fine if it was never started."""
        if self._writer is None or self._ended is None:
            return
        self.buffer.is_shut = False
        self._note_gap()
        self.event("broker_stop", reason=reason)
        self._hand_over()
        for timer in (self._flush_timer, self._seal_timer):
            if timer is not None:
                timer.cancel()
        self._writer.put(Stop(self.now_us()))
        try:
            async with asyncio.timeout(STOP_S):
                await self._ended
        except TimeoutError:
            log.error("the event log's disk does not answer: its last segment is left open")
        else:
            self._writer.join(STOP_S)
        self._writer = None

    # --- for those who have something to tell -----------------------------------------------------

    @property
    def events(self) -> int:
        """How many have a number."""
        return self.buffer.next_seq - 1

    def shed(self, count: int) -> None:
        """So many events were not written, because the buffer is shut."""
        if not self._gap:
            log.warning("events come faster than the disk takes the event log: some are left out")
        self._gap += count
        self._shed += count

    def event(self, ev: str, *, ts: int | None = None, **fields: Any) -> None:
        """One event, of any kind; ``fields`` are those of ``schema.Event``.

        ``ts`` is for those who have asked for the time already.
        """
        buffer = self.buffer
        if buffer.is_shut:
            self.shed(1)
            return
        now_us = self.now_us() if ts is None else ts
        event = Event(ts=now_us, seq=buffer.next_seq, boot=self.boot, ev=ev, **fields)
        try:
            line = encode_lines([event])
        except UnicodeEncodeError:
            line = encode_lines([_readable(event)])
        buffer.add_line(now_us, line)

    # --- batches ----------------------------------------------------------------------------------

    def _begin_batch(self, now_us: int) -> None:
        self._first_us = now_us
        if self._flush_timer is None:
            self._flush_timer = self._clock.call_later(FLUSH_S, self._on_flush_due)

    def _on_flush_due(self) -> None:
        self._flush_timer = None
        self._hand_over()

    def _hand_over(self) -> None:
        size = self.buffer.size
        if not size or self._writer is None:
            return
        self._writer.put(Batch(self.buffer.take(), size, self._first_us, self.now_us()))
        self._pending += size
        if self._pending > self._buffer_bytes:
            self.buffer.is_shut = True
        if self._seal_timer is None:
            self._seal_timer = self._clock.call_later(self._segment_s, self._on_seal_due)

    def _on_seal_due(self) -> None:
        self._seal_timer = None
        self._hand_over()
        if self._seal_timer is not None:
            self._seal_timer.cancel()
            self._seal_timer = None
        if self._writer is not None:
            self._writer.put(Seal(self.now_us()))

    def _on_report(self, report: Report) -> None:
        self._pending -= report.size
        self._written += report.written
        self._sealed_count = report.sealed_count
        self._trouble = report.trouble
        if report.trouble is not None and self._writer is not None:
            self._clock.call_later(RETRY_S, self._writer.put, Retry())
        # Not at once: or a disk that is a little too slow would make a gap of every batch.
        if self.buffer.is_shut and self._pending * 2 <= self._buffer_bytes:
            self.buffer.is_shut = False
            self._note_gap()
        if report.has_ended and self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _note_gap(self) -> None:
        if self._gap:
            self.event("log_gap", n=self._gap)
            self._gap = 0

    def statistics(self) -> dict[str, object]:
        return {
            "level": self.level,
            "sample": self.sample,
            "boot": self.boot,
            "events": self.events,
            "bytes": self._written,
            "shed": self._shed,
            "segments": self._sealed_count,
            "pending": self._pending + self.buffer.size,
            "trouble": self._trouble,
        }


def folder_of(settings: Settings) -> Path:
    """Where the event log of a broker with these settings is."""
    given = settings.event_log_dir
    return Path(given).expanduser() if given else settings.data / "events"


def readable(text: str) -> str:
    """Names may hold bytes that are no UTF-8 (as lone surrogates); JSON may not."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _readable(event: Event) -> Event:
    changed: dict[str, Any] = {}
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if isinstance(value, str):
            changed[name] = readable(value)
    changed["attrs"] = {readable(name): readable(text) for name, text in event.attrs.items()}
    return msgspec.structs.replace(event, **changed)


def _tell(loop: asyncio.AbstractEventLoop, told: Any, report: Report) -> None:
    """From the writer's thread; a loop that has gone needs no news."""
    try:
        loop.call_soon_threadsafe(told, report)
    except RuntimeError:
        log.debug("the event loop ended before the event log did")
