"""Tells an error that may pass from a file that is lost.

Upstream: ``database.py``. A disk that is full, a device that does not answer for a while: these are
tried again, for as long as it takes. A file whose pages make no sense, or that is no longer there,
does not get better by waiting, and everything written to it meanwhile would be lost: its virtual
host has to end.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

# Primary result codes that the same statement will give again, whatever the disk does.
_LASTING = frozenset(
    {
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        # No such table, a key that is there already: the content is not what it was.
        sqlite3.SQLITE_ERROR,
        sqlite3.SQLITE_CONSTRAINT,
        sqlite3.SQLITE_MISMATCH,
    }
)
# Reads that failed in a row, half a second apart, until a file counts as unreadable.
READ_TRIES = 20


class FileGone(Exception):
    """The file was deleted, or another one has its name."""


def is_lasting(error: Exception) -> bool:
    """Trying again is of no use."""
    code = getattr(error, "sqlite_errorcode", None)
    return isinstance(error, FileGone) or (code is not None and code & 0xFF in _LASTING)


def identity(path: Path) -> tuple[int, int]:
    """What tells the file from another one of its name; raises OSError."""
    status = os.stat(path)
    return status.st_dev, status.st_ino


def check_identity(path: Path, known: tuple[int, int]) -> None:
    """SQLite goes on writing to a file that was deleted, and nobody would ever see it again."""
    try:
        found = identity(path)
    except FileNotFoundError:
        raise FileGone("the file was deleted or moved away") from None
    except OSError:
        return  # a folder that cannot be looked into for a moment: the commit itself will tell
    if found != known:
        raise FileGone("another file was put in its place")
