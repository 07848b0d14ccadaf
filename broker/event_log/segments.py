"""The files of the event log: one open segment, sealed ones, and how long these are kept.

Owns ``<folder>/date=YYYY-MM-DD/``: ``_open-<boot>-<n>.jsonl`` while it is written to, and
``<boot>-<n>.jsonl`` (or ``.jsonl.zst``) once it is sealed. Readers may take every file whose name
does not begin with ``_``: it is whole, on disk, and never changes again. The date is that of its
first event, in UTC; its time of modification that of its last.

Upstream: ``writer.py``, whose thread is the only one in here; nothing waits for the event loop.
All that touches the disk raises OSError and can be tried again: a batch of lines is written whole
or not at all, and a segment whose sealing failed is still the open one.

A segment that is open is locked (``flock``), so that brokers which share a folder do not take each
other's for leftovers of a crash.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from leveret.broker.event_log.compression import compress_file
from leveret.storage.folder_sync import sync_folder

log = logging.getLogger(__name__)

OPEN = "_open-"
SEALING = "_sealing-"
PLAIN = ".jsonl"
COMPRESSED = ".jsonl.zst"

# How far from its end the last line of a leftover is looked for at a time.
_STEP = 1 << 16


class SegmentSettings(NamedTuple):
    """Sizes in bytes; 0 stands for no limit."""

    folder: Path
    segment_bytes: int
    retention_s: int
    retention_bytes: int
    is_compressed: bool


@dataclass(slots=True)
class _Open:
    path: Path
    descriptor: int
    # As far as whole batches go; a write that failed may have left more.
    size: int = 0
    last_us: int = 0


class _Sealed(NamedTuple):
    last_us: int
    path: Path
    size: int


class Segments:
    def __init__(self, settings: SegmentSettings, boot: str) -> None:
        self._settings = settings
        self._boot = boot
        self._open: _Open | None = None
        self._number = 0
        # All that are there, of any boot, the oldest first.
        self._sealed: deque[_Sealed] = deque()
        self._sealed_bytes = 0
        # How many this boot has sealed.
        self.sealed_count = 0

    # --- writing ----------------------------------------------------------------------------------

    def write(self, lines: bytes | memoryview, first_us: int, last_us: int) -> None:
        """Append whole lines; ``first_us`` and ``last_us`` are the times of the first and last."""
        if self._open is None:
            self._open = self._begin(first_us)
        segment = self._open
        at = 0
        while at < len(lines):
            at += os.pwrite(segment.descriptor, lines[at:], segment.size + at)
        segment.size += at
        segment.last_us = last_us

    @property
    def room(self) -> int:
        """How many bytes the segment takes until it is full."""
        return self._settings.segment_bytes - (0 if self._open is None else self._open.size)

    @property
    def is_full(self) -> bool:
        return self.room <= 0

    def _begin(self, first_us: int) -> _Open:
        day = datetime.fromtimestamp(first_us / 1_000_000, UTC)
        folder = self._settings.folder / f"date={day:%Y-%m-%d}"
        folder.mkdir(parents=True, exist_ok=True)
        self._number += 1
        path = folder / f"{OPEN}{self._boot}-{self._number:06}{PLAIN}"
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o640)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            # A file system without locks: then nobody else looks for any.
            log.debug("%s cannot be locked", path)
        return _Open(path, descriptor)

    def seal(self, now_us: int) -> None:
        """Make what was written so far a segment that readers see, and drop those too old."""
        segment = self._open
        if segment is None:
            return
        try:
            self._publish(segment)
        except FileNotFoundError:
            # Somebody has deleted it: the next one is made anew, folder and all.
            log.error("the event log's segment %s is gone, and what it held", segment.path)
        os.close(segment.descriptor)
        self._open = None
        self.sealed_count += 1
        self._retain(now_us)

    def _publish(self, segment: _Open) -> None:
        """From hidden to sealed: nothing is seen of it before all of it is on disk."""
        descriptor, path = segment.descriptor, segment.path
        os.ftruncate(descriptor, segment.size)
        time_ns = segment.last_us * 1000
        os.utime(descriptor, ns=(time_ns, time_ns))
        stem = path.name.removeprefix(OPEN).removesuffix(PLAIN)
        sealed = path.with_name(stem + PLAIN)
        hidden = self._compress(path, stem) if self._settings.is_compressed else None
        if hidden is None:
            os.fsync(descriptor)
            path.rename(sealed)
        else:
            os.utime(hidden, ns=(time_ns, time_ns))
            sealed = path.with_name(stem + COMPRESSED)
            hidden.rename(sealed)
            path.unlink()
        # From here on it is sealed, whatever happens: nothing may be tried again.
        try:
            # The folder of a day may be new, and that of the whole log.
            for folder in (path.parent, self._settings.folder, self._settings.folder.parent):
                sync_folder(folder)
            self._note(sealed)
        except OSError as error:
            log.warning("a power cut may lose %s: %s", sealed, error)

    def _compress(self, path: Path, stem: str) -> Path | None:
        """A compressed copy on disk; None, and no copy, if there is no room for it, say."""
        hidden = path.with_name(f"{SEALING}{stem}{COMPRESSED}")
        try:
            compress_file(path, hidden)
        # Whatever it is (a lack of memory, zstd's own): lines matter more than their size.
        except Exception as error:
            if not path.exists():
                raise FileNotFoundError(path) from error
            log.warning("%s is sealed without compression: %s", path, error or repr(error))
            hidden.unlink(missing_ok=True)
            return None
        return hidden

    def close(self) -> None:
        """Let go of a segment that could not be sealed: the next start finds it."""
        if self._open is not None:
            os.close(self._open.descriptor)
            self._open = None

    # --- what an earlier boot has left -----------------------------------------------------------

    def newest_us(self) -> int:
        """When the last event of all that is there was written; 0 if nothing is."""
        newest = 0
        for folder in sorted(self._settings.folder.glob("date=*"))[-1:]:
            for path in folder.glob(f"*{PLAIN}*"):
                try:
                    newest = max(newest, path.stat().st_mtime_ns // 1000)
                except OSError:
                    continue  # another broker has sealed it, or let it go
        return newest

    def recover(self, now_us: int) -> None:
        """Seal what a crash left open, up to its last whole line; find out what there is."""
        for path in sorted(self._files(SEALING)):
            if not _is_locked(path.with_name(_open_name(path))):
                path.unlink(missing_ok=True)
        for path in sorted(self._files(OPEN)):
            try:
                self._recover(path)
            except OSError as error:
                log.error("%s cannot be sealed and is left as it is: %s", path, error)
        found = []
        for path in self._files(""):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue  # somebody who shares the folder has let it go
            found.append(_Sealed(status.st_mtime_ns // 1000, path, status.st_size))
        self._sealed = deque(sorted(found))
        self._sealed_bytes = sum(sealed.size for sealed in found)
        self._retain(now_us)

    def _recover(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return  # of another broker, which runs
            except OSError:
                log.debug("%s cannot be locked", path)
            stem = path.name.removeprefix(OPEN).removesuffix(PLAIN)
            size = _whole_lines(descriptor)
            # A crash between the last two steps of sealing leaves both.
            if not size or path.with_name(stem + COMPRESSED).exists():
                path.unlink()
                return
            last_us = os.fstat(descriptor).st_mtime_ns // 1000
            self._publish(_Open(path, descriptor, size, last_us))
            log.info("the event log's segment %s, left open by a crash, is sealed", stem)
        finally:
            os.close(descriptor)

    def _files(self, prefix: str) -> Iterator[Path]:
        """The segments whose names begin so; none with ``_`` where nothing is asked for."""
        for path in self._settings.folder.glob(f"date=*/{prefix}*{PLAIN}*"):
            if prefix or not path.name.startswith("_"):
                yield path

    # --- retention --------------------------------------------------------------------------------

    def _note(self, path: Path) -> None:
        status = path.stat()
        self._sealed.append(_Sealed(status.st_mtime_ns // 1000, path, status.st_size))
        self._sealed_bytes += status.st_size

    def _retain(self, now_us: int) -> None:
        """Delete the oldest that are too old, or too much. The open one never goes."""
        settings, sealed = self._settings, self._sealed
        oldest_us = now_us - settings.retention_s * 1_000_000
        while sealed:
            is_old = settings.retention_s and sealed[0].last_us < oldest_us
            is_much = settings.retention_bytes and self._sealed_bytes > settings.retention_bytes
            if not is_old and not is_much:
                return
            _, path, size = sealed.popleft()
            self._sealed_bytes -= size
            try:
                path.unlink(missing_ok=True)
                if not any(path.parent.iterdir()):
                    path.parent.rmdir()
            except OSError as error:
                log.warning("%s, which is not to be kept, cannot be deleted: %s", path, error)


def _open_name(sealing: Path) -> str:
    """Of the segment that was being compressed."""
    return OPEN + sealing.name.removeprefix(SEALING).removesuffix(COMPRESSED) + PLAIN


def _is_locked(path: Path) -> bool:
    """It is another broker's, which runs."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        log.debug("%s cannot be locked", path)
    finally:
        os.close(descriptor)
    return False


def _whole_lines(descriptor: int) -> int:
    """How many bytes of the file make whole lines."""
    end = os.fstat(descriptor).st_size
    while end:
        start = max(0, end - _STEP)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
