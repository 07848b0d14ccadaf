"""Pages of a file that hold nothing: kept for what comes, or given back to the file system.

Upstream: ``database.py`` tells how much its commits have freed, and runs the steps between them.

SQLite uses free pages again, so a file under steady load does not grow; nor should it be made
smaller only to grow again. But a backlog that has been drained leaves a file as large as it ever
was, on a disk that may be short of room (``broker/alarms.py``). So once enough was freed, the free
pages are counted for a while, and what was not needed in that time is given back: all but a
reserve, a bounded number of pages at a time, with pauses in which commits have their turn.

A step takes pages from the end of the file, after moving what is on them to free ones before
(``PRAGMA incremental_vacuum``). The file itself becomes shorter with the next checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leveret.storage.database import Database

log = logging.getLogger(__name__)

# Counting begins when so much was freed, or was free when the file was opened.
LOOK_BYTES = 32 << 20
# For so long, so often: what was free all the time is not needed.
LOOK_S = 10.0
LOOKS = 10
# What is never given back: so much, and an eighth of what is in use.
RESERVE_BYTES = 16 << 20
RESERVE_SHARE = 8
# A step takes so many pages at most, and fewer where that takes too long: one that must be moved
# costs 13 us in a file of 200 MiB, 35 us in one of 1.8 GiB.
STEP_PAGES = 32
FIRST_STEP_PAGES = 8
LONG_STEP_S = 0.01
# Pauses between steps while nobody else writes, and while somebody does.
IDLE_PAUSE_S = 0.005
BUSY_PAUSE_S = 0.05


class FreeSpace:
    def __init__(self, database: Database, sleep: Callable[[float], Awaitable[object]]) -> None:
        self._database = database
        self._sleep = sleep
        # Bytes of rows that went since pages were last counted; bodies that several rows name
        # count as often.
        self._freed = 0
        # Of this file, once pages were counted.
        self._page_size = 0
        # Counts and gives back; there is none while little was freed.
        self._task: asyncio.Task[None] | None = None

    def freed(self, size: int) -> None:
        """So much was deleted, more or less."""
        self._freed += size
        if self._freed >= LOOK_BYTES and self._task is None:
            self._task = asyncio.get_running_loop().create_task(
                self._run(), name=f"free space of {self._database.path.name}"
            )

    async def stop(self) -> None:
        """A step that has begun is finished by its thread."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            while self._freed >= LOOK_BYTES:
                self._freed = 0
                await self._give_back(await self._count_surplus())
        except sqlite3.Error as error:
            log.warning("%s: free space is not given back: %s", self._database.path, error)
        finally:
            self._task = None

    async def _count_surplus(self) -> int:
        """Pages that nobody needed for a while."""
        least: int | None = None
        for _ in range(LOOKS):
            await self._sleep(LOOK_S / LOOKS)
            free, used, page_size = await self._database.upkeep(_count_pages)
            self._database.numbers["free_bytes"] = free * page_size
            self._page_size = page_size
            surplus = free - max(RESERVE_BYTES // page_size, used // RESERVE_SHARE)
            least = surplus if least is None else min(least, surplus)
        return least or 0

    async def _give_back(self, surplus: int) -> None:
        database = self._database
        pages = FIRST_STEP_PAGES
        while surplus > 0:
            if database.snapshots:
                # Until they are copied the WAL cannot start anew: do not add to it.
                await self._sleep(LOOK_S)
                continue
            pages = min(pages, surplus)
            given, cpu_s = await database.upkeep(
                _give_back_pages, pages, written_bytes=pages * self._page_size
            )
            if not given:
                break
            surplus -= given
            database.numbers["free_bytes"] -= given * self._page_size
            database.numbers["returned_bytes"] += given * self._page_size
            pages = max(1, pages // 2) if cpu_s > LONG_STEP_S else min(2 * pages, STEP_PAGES)
            await self._sleep(BUSY_PAUSE_S if database.is_busy else IDLE_PAUSE_S)
            if surplus <= 0:
                # The file is as long as before until all that the steps wrote is in it.
                await database.checkpoint()


# --- in the writer's thread ----------------------------------------------------------------------


def _count_pages(connection: sqlite3.Connection) -> tuple[int, int, int]:
    """Those that are free, those that are not, and how large they are."""
    (free,) = connection.execute("PRAGMA freelist_count").fetchone()
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    (page_size,) = connection.execute("PRAGMA page_size").fetchone()
    return free, pages - free, page_size


def _give_back_pages(connection: sqlite3.Connection, pages: int) -> tuple[int, float]:
    """So many at most; returns how many it were, and the CPU time it took."""
    begun = time.thread_time()
    before = _count_pages(connection)[0]
    # As a script: ``execute`` would take a single page. A transaction of its own.
    connection.executescript(f"PRAGMA incremental_vacuum({pages})")
    given = before - _count_pages(connection)[0]
    return given, time.thread_time() - begun


def free_bytes(connection: sqlite3.Connection) -> int:
    free, _, page_size = _count_pages(connection)
    return free * page_size
