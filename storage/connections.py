"""How a file is opened: to write, to read, or to look at it and leave it as it is.

Upstream: ``database.py``; ``check.py`` and ``backup.py`` for files nobody may write to. Downstream:
SQLite, in threads of aiosqlite's.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import aiosqlite

T = TypeVar("T")

# Against 4096 a sixth less CPU time for 1 KB bodies (benchmarks/storage.py), 16384 a quarter less;
# but the commit of a lone message writes 12, 20 and 36 KB to the WAL.
PAGE_SIZE = 8192


async def connect(
    path: Path, prepare: Callable[..., None], *arguments: Any
) -> aiosqlite.Connection:
    connection = await aiosqlite.connect(path, isolation_level=None)
    try:
        await run_in_thread(connection, prepare, *arguments)
    except BaseException:
        await connection.close()
        raise
    return connection


async def run_in_thread(
    connection: aiosqlite.Connection, function: Callable[..., T], *arguments: Any
) -> T:
    """``function(sqlite3 connection, ...)`` in the connection's own thread: one hop.

    aiosqlite has this only as a private method; ``tests/storage/test_database.py`` fails if a new
    version lacks it.
    """
    execute: Callable[..., Awaitable[T]] = getattr(connection, "_execute")  # noqa: B009
    return await execute(function, connection._conn, *arguments)


def open_read_only(path: Path, *, is_in_use: bool) -> sqlite3.Connection:
    """Open it such that nothing is written, not even what is left in its WAL.

    The connection may be handed from thread to thread.
    """
    # Else SQLite would make files of its own beside one that has everything in it.
    flags = "mode=ro" if is_in_use or _has_wal(path) else "mode=ro&immutable=1"
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?{flags}",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
    )


def look_at(path: Path, look: Callable[[sqlite3.Connection], object]) -> sqlite3.Connection | None:
    """Call ``look`` with a file that is there, before it is opened to be written to.

    Whoever closes a file last and may write to it copies its WAL into it and deletes the WAL. That
    is not to happen to a file that is refused, so of one that has a WAL the connection is returned:
    it must be closed after all others, and may not write. Raises sqlite3.Error, or what ``look``
    raises.
    """
    # A journal: killed while the file was made, and only who may write to it can undo that.
    if not path.exists() or Path(f"{path}-journal").exists():
        return None
    has_wal = _has_wal(path)
    if not path.stat().st_size:
        if has_wal:
            # SQLite would take the file for a new one, and delete the WAL.
            raise sqlite3.DatabaseError("file is empty, but has a WAL")
        return None
    connection = open_read_only(path, is_in_use=False)
    try:
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if tables:
            look(connection)
    except BaseException:
        connection.close()
        raise
    if has_wal:
        return connection
    connection.close()
    return None


def hold(path: Path) -> sqlite3.Connection | None:
    """The same for a file that is open, and found to be damaged: to be closed after all others.

    None if that cannot be: a file whose very first page makes no sense takes what is in its WAL.
    """
    try:
        connection = open_read_only(path, is_in_use=True)
    except sqlite3.Error:
        return None
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.Error:
        connection.close()
        return None
    return connection


def _has_wal(path: Path) -> bool:
    wal = Path(f"{path}-wal")
    return wal.exists() and wal.stat().st_size > 0


# --- in the threads ------------------------------------------------------------------------------


def prepare_writer(
    connection: sqlite3.Connection, synchronous: str, schema: str, wal_limit_bytes: int
) -> None:
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if not tables:
        # Others keep what they have; to set it again would write to a file we may yet refuse.
        connection.execute(f"PRAGMA page_size={PAGE_SIZE}")
        connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute(f"PRAGMA synchronous={synchronous}")
    # Checkpoints come between commits, not within them; but how much a commit writes is only
    # guessed, so SQLite itself sees to it that the WAL does not get out of hand.
    connection.execute(f"PRAGMA wal_autocheckpoint={wal_limit_bytes // PAGE_SIZE}")
    connection.execute(f"PRAGMA journal_size_limit={wal_limit_bytes}")
    connection.execute("PRAGMA busy_timeout=2000")
    connection.execute("PRAGMA cache_size=-8192")
    connection.execute("PRAGMA temp_store=MEMORY")
    if not tables:
        connection.executescript(f"BEGIN IMMEDIATE; {schema}; COMMIT")


def prepare_reader(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA query_only=1")
    connection.execute("PRAGMA cache_size=-2048")
    connection.execute("PRAGMA busy_timeout=2000")


def measured(
    connection: sqlite3.Connection, function: Callable[..., T], *arguments: Any
) -> tuple[T, float]:
    """What a function brings, and the CPU time it took of this thread."""
    begun = time.thread_time()
    result = function(connection, *arguments)
    return result, time.thread_time() - begun
