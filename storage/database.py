"""One SQLite file: one writer, group commit, readers (hop 9).

Upstream: ``queue_index.py``, ``message_store.py`` and ``definitions.py`` put operations; nobody
else writes. Downstream: SQLite, in two threads of aiosqlite's: one that writes, one that reads.

There is one commit at a time, and no timer for what somebody waits for. While a commit runs,
operations gather; when it ends the next batch starts at once, with as many operations as fit under
a cap, in order. An idle broker commits one message in one fsync, a busy one thousands. What is put
is safe when its ``committed`` has been called, and never before: WAL with synchronous=FULL. Only
deletions of acked messages, which nobody waits for, wait for company (``put_lazily``).

A commit is one call in the writer's thread (``commit.py``: begin, statements, commit).

A commit that fails (disk full, I/O error) is rolled back and tried again until it succeeds;
nothing is ``committed`` meanwhile, and ``on_trouble`` is told. A file that is damaged or gone
(``damage.py``) is not written again: ``on_damage`` is told once, and who waits for it waits until
somebody abandons it.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiosqlite

from leveret.storage.commit import Batch, Operation
from leveret.storage.commit import commit as commit
from leveret.storage.connections import (
    PAGE_SIZE,
    connect,
    hold,
    look_at,
    measured,
    prepare_reader,
    prepare_writer,
    run_in_thread,
)
from leveret.storage.damage import READ_TRIES, FileGone, check_identity, identity, is_lasting
from leveret.storage.free_space import FreeSpace, free_bytes
from leveret.storage.operations import Barrier

log = logging.getLogger(__name__)

T = TypeVar("T")

# What one commit takes at most; the operation that passes the mark is still part of it.
COMMIT_ROWS = 2_000
COMMIT_BYTES = 4 << 20
# After this much written, pages are copied from the WAL into the database between two commits:
# 7 ms of CPU time or so (40 on a slow machine), and the writer does nothing else meanwhile.
CHECKPOINT_BYTES = 2 << 20
# A WAL this long makes one commit wait until readers are out of the way and it can start anew.
WAL_LIMIT_BYTES = 64 << 20
RETRY_S = 0.5
# How long a file that is closed waits for a disk on which commits only fail.
PATIENCE_S = 10.0
# What nobody waits for is written after this long, or when there is so much of it.
LAZY_S = 0.1
LAZY_OPERATIONS = 100


class Database:
    """Opened by ``open``, or when something is first put; ``close`` commits what is left."""

    def __init__(
        self,
        path: Path,
        *,
        schema: str,
        synchronous: str,
        on_trouble: Callable[[Exception | None], None] = lambda error: None,
        on_damage: Callable[[Exception], None] = lambda error: None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """``schema``: what makes the tables of a file that is new."""
        self.path = path
        self._schema = schema
        self._synchronous = synchronous
        self._on_trouble = on_trouble
        self._on_damage = on_damage
        # Device and inode of the file that was opened.
        self._identity = (0, 0)
        # Why nothing is read or written any more.
        self.damage: Exception | None = None
        # What somebody waits for and may never come.
        self._promises: set[asyncio.Future[None]] = set()
        self._sleep = sleep
        self._writer: aiosqlite.Connection | None = None
        self._reader: aiosqlite.Connection | None = None
        # Held while a connection is made: two that ask at once must get the same one.
        self._opening = asyncio.Lock()
        self._is_closed = False
        self._log: deque[Operation] = deque()
        # The task that commits; it ends when there is nothing to commit.
        self._task: asyncio.Task[None] | None = None
        # Operations in the log that somebody waits for, at most.
        self._awaited = 0
        # Starts a commit for those nobody waits for.
        self._moment: asyncio.Task[None] | None = None
        # Held for the length of each commit, and by who must be sure that none runs.
        self._boundary = asyncio.Lock()
        # Snapshots that are being copied: they stand in the way of a WAL that starts anew.
        self.snapshots = 0
        self._in_trouble = False
        # Of the commit that runs.
        self.committing_bytes = 0
        self._free_space = FreeSpace(self, sleep)
        self._since_checkpoint = 0
        self.numbers: dict[str, float] = {
            "commits": 0,
            "rows": 0,
            "bytes": 0,
            "failures": 0,
            "checkpoints": 0,
            # Given back to the file system; free at the last look, which only comes when there
            # may be something to give back.
            "returned_bytes": 0,
            "free_bytes": 0,
            "wal_bytes": 0,
            "longest_step_cpu_s": 0.0,
            "longest_commit_s": 0.0,
        }

    async def open(self) -> None:
        """Open or make the file. Raises sqlite3.Error."""
        self._is_closed = False
        await self._open_writer()

    @asynccontextmanager
    async def opening(self, look: Callable[[sqlite3.Connection], object]) -> AsyncIterator[None]:
        """Open or make the file for a start that may yet refuse it.

        ``look`` reads one that is there before anything can be written. If it or the block raises,
        the file is closed, and it and its WAL are byte by byte what they were, unless the block
        has committed something.
        """
        guard = await asyncio.to_thread(look_at, self.path, look)
        try:
            await self.open()
            yield
        except BaseException:
            await self.abandon()
            raise
        finally:
            # After the writer, whose last act would be to copy the WAL into the file.
            if guard is not None:
                guard.close()

    async def _open_writer(self) -> aiosqlite.Connection:
        async with self._opening:
            if self._writer is None:
                self._writer = await connect(
                    self.path, prepare_writer, self._synchronous, self._schema, WAL_LIMIT_BYTES
                )
                self._identity = identity(self.path)
                self._free_space.freed(await run_in_thread(self._writer, free_bytes))
            return self._writer

    async def _open_reader(self) -> aiosqlite.Connection:
        await self._open_writer()  # which makes the tables
        async with self._opening:
            if self._reader is None:
                self._reader = await connect(self.path, prepare_reader)
            return self._reader

    # --- writing ---------------------------------------------------------------------------------

    def put(self, operation: Operation) -> None:
        """Write it with the next commits; in the order in which things were put."""
        if self._is_closed:
            # Opening the file again would leave it open, with a thread that ends with nobody.
            log.warning("%s: closed, %s comes too late", self.path, type(operation).__name__)
            return
        self._log.append(operation)
        self._awaited += 1
        self._start()

    def put_lazily(self, operation: Operation) -> None:
        """The same for what nobody waits for (messages that were acked): it goes along with the
        next commit that somebody does wait for, or after a moment, or when there is enough of it.
        """
        if self._is_closed:
            return
        self._log.append(operation)
        if len(self._log) >= LAZY_OPERATIONS:
            self._start()
        elif self._task is None and self._moment is None:
            self._moment = asyncio.get_running_loop().create_task(
                self._start_in_a_moment(), name=f"lazy writer of {self.path.name}"
            )

    async def _start_in_a_moment(self) -> None:
        try:
            await self._sleep(LAZY_S)
        finally:
            self._moment = None
        if self._log:
            self._awaited = len(self._log)
            self._start()

    def _start(self) -> None:
        if self._task is None and self.damage is None:
            self._task = asyncio.get_running_loop().create_task(
                self._run(), name=f"writer of {self.path.name}"
            )

    async def wait_committed(self) -> None:
        """Return when everything put before is on disk; cancelled if that will never be."""
        reached = self._promise()

        def keep() -> None:
            if not reached.done():
                reached.set_result(None)

        self.put(Barrier(keep))
        await reached

    def _promise(self) -> asyncio.Future[None]:
        """To be waited for; cancelled when the file is closed."""
        promise = asyncio.get_running_loop().create_future()
        if self._is_closed:
            promise.cancel()
        self._promises.add(promise)
        promise.add_done_callback(self._promises.discard)
        return promise

    @asynccontextmanager
    async def between_commits(self) -> AsyncIterator[None]:
        """Entered when the commit that runs has ended; none begins before it is left."""
        async with self._boundary:
            yield

    @property
    def is_open(self) -> bool:
        return self._writer is not None

    @property
    def is_busy(self) -> bool:
        """Something was put and is not on disk."""
        return self._task is not None

    @property
    def pending_operations(self) -> int:
        return len(self._log)

    async def _run(self) -> None:
        """Commit until nobody waits for more. A batch has gathered since the last one began."""
        try:
            # What was put is mostly on its way to a consumer, too: that goes first, or it would
            # have to win the GIL back from the writer's thread.
            await asyncio.sleep(0)
            while self._awaited or len(self._log) >= LAZY_OPERATIONS:
                async with self._boundary:
                    batch = self._take()
                    if not batch.is_empty:
                        await self._commit(batch)
                    self._tell(batch)
                    if not batch.is_empty:
                        # Who waited for the commit need not wait for a checkpoint.
                        await self._wrote(batch)
        except Exception:
            if self.damage is None:
                raise
        finally:
            self._task = None
            if self._log and self._moment is None and not self._is_closed:
                self._moment = asyncio.get_running_loop().create_task(
                    self._start_in_a_moment(), name=f"lazy writer of {self.path.name}"
                )

    def _take(self) -> Batch:
        batch, log_ = Batch(), self._log
        while log_ and batch.rows < COMMIT_ROWS and batch.bytes < COMMIT_BYTES:
            log_.popleft().gather(batch)
        # What is left is in order: lazy operations among it go along as well.
        self._awaited = min(self._awaited, len(log_)) if log_ else 0
        return batch

    def _tell(self, batch: Batch) -> None:
        for call in batch.after:
            try:
                call()
            except Exception:
                # One that fails must not keep others from hearing of their commit.
                log.exception("%s: after a commit", self.path)

    async def _commit(self, batch: Batch) -> None:
        begun = time.perf_counter()
        self.committing_bytes = batch.bytes
        while True:
            try:
                writer = await self._open_writer()
                cpu = await run_in_thread(writer, _commit_here, batch, self.path, self._identity)
                break
            except Exception as error:
                if is_lasting(error):
                    self._note_damage(error)
                    raise
                self._trouble(error)
                await self._sleep(RETRY_S)
        self.committing_bytes = 0
        if self._in_trouble:
            self._trouble(None)
        numbers = self.numbers
        numbers["commits"] += 1
        numbers["rows"] += batch.rows
        numbers["bytes"] += batch.bytes
        numbers["longest_commit_s"] = max(numbers["longest_commit_s"], time.perf_counter() - begun)
        self._note_step(cpu)

    async def _wrote(self, batch: Batch) -> None:
        # A guess: rows, and the pages that even the smallest commit writes. Those are mostly the
        # same each time, and are copied once: a fourth of them is counted.
        freed = batch.freed_bytes + sum([drop.freed_bytes for drop in batch.drops])
        await self._grew(batch.bytes + freed + 100 * batch.rows + PAGE_SIZE // 2)
        self._free_space.freed(freed + batch.freed_apart_bytes)

    async def _grew(self, size: int) -> None:
        """The WAL did, by so much."""
        self._since_checkpoint += size
        if self._since_checkpoint >= CHECKPOINT_BYTES:
            self._since_checkpoint = 0
            await self._checkpoint()

    async def _checkpoint(self) -> None:
        assert self._writer is not None
        try:
            wal_bytes, cpu = await run_in_thread(self._writer, _checkpoint, self.snapshots == 0)
        except sqlite3.Error as error:
            if is_lasting(error):
                self._note_damage(error)
                raise
            log.warning("%s: checkpoint failed, it is tried again later: %s", self.path, error)
            return
        self.numbers["checkpoints"] += 1
        self.numbers["wal_bytes"] = max(self.numbers["wal_bytes"], wal_bytes)
        self._note_step(cpu)

    def _note_step(self, cpu_s: float) -> None:
        numbers = self.numbers
        numbers["longest_step_cpu_s"] = max(numbers["longest_step_cpu_s"], cpu_s)

    def _trouble(self, error: Exception | None) -> None:
        if error is not None:
            self.numbers["failures"] += 1
            if not self._in_trouble:
                log.error(
                    "%s: writing fails; until it works, only what its consumers have acked is"
                    " confirmed: %s",
                    self.path,
                    error,
                )
        elif self._in_trouble:
            log.warning("%s: writing works again", self.path)
        self._in_trouble = error is not None
        self._on_trouble(error)

    def _note_damage(self, error: Exception) -> None:
        self.numbers["failures"] += 1
        if self.damage is None:
            self.damage = error
            self._on_damage(error)

    # --- reading ---------------------------------------------------------------------------------

    async def read(self, query: Callable[..., T], *arguments: Any) -> T:
        """Run ``query(connection, ...)`` in the reader's thread; it sees what is committed."""
        reader = self._reader or await self._open_reader()
        result: T
        result, cpu = await run_in_thread(reader, measured, query, *arguments)
        self._note_step(cpu)
        return result

    async def read_patiently(self, query: Callable[..., T], *arguments: Any) -> T:
        """As ``read``, but an I/O error is told and tried again: the caller cannot do better.

        Of a file that is damaged nothing ever comes: whoever abandons it cancels its readers.
        """
        tries = 0
        while True:
            try:
                return await self.read(query, *arguments)
            except sqlite3.Error as error:
                tries += 1
                if is_lasting(error) or tries == READ_TRIES:
                    self._note_damage(error)
                    await self._promise()
                log.error("%s: reading fails, it is tried again: %s", self.path, error)
                self.numbers["failures"] += 1
                await self._sleep(RETRY_S)

    async def call_writer(self, function: Callable[..., T], *arguments: Any) -> T:
        """For start-up and upkeep: ``function(connection, ...)`` in the writer's thread."""
        return await run_in_thread(await self._open_writer(), function, *arguments)

    async def upkeep(
        self, function: Callable[..., T], *arguments: Any, written_bytes: int = 0
    ) -> T:
        """``function(connection, ...)`` in the writer's thread, between two commits.

        ``written_bytes``: what that adds to the WAL, more or less. Raises sqlite3.Error.
        """
        async with self._boundary:
            try:
                timed: tuple[T, float] = await self.call_writer(measured, function, *arguments)
            except sqlite3.Error as error:
                if is_lasting(error):
                    self._note_damage(error)
                raise
            answer, cpu = timed
            self._note_step(cpu)
            await self._grew(written_bytes)
        return answer

    async def checkpoint(self) -> None:
        """Copy what is in the WAL to the file, as far as readers allow, between two commits."""
        async with self._boundary:
            await self._checkpoint()

    async def close(
        self,
        at_last: Callable[[sqlite3.Connection], object] | None = None,
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Commit what is left, run ``at_last`` in the writer's thread, then close.

        If no commit succeeds for ``patience_s``, what is left is given up, and ``at_last`` not run.
        A file that is damaged is only closed.
        """
        while (self._log or self._task is not None) and self.damage is None:
            self._awaited = len(self._log)
            self._start()
            assert self._task is not None
            if not await self._wait_written(self._task, patience_s):
                log.critical(
                    "%s: nothing could be written for %g s (is the disk full?), so it is closed"
                    " without what is left. Nothing of that was confirmed: publishers know what"
                    " to send again. Messages that were acked meanwhile may be delivered again.",
                    self.path,
                    patience_s,
                )
                await self.abandon()
                return
        if at_last is not None and self.damage is None:
            try:
                await self.call_writer(at_last)
            except sqlite3.Error as error:
                log.error("%s: the stop in order could not be noted: %s", self.path, error)
        await self._close_connections()

    async def _wait_written(self, writer: asyncio.Task[None], patience_s: float) -> bool:
        """Return when the task has ended; False if commits only fail. A slow disk is waited for."""
        while True:
            commits = self.numbers["commits"]
            patience = asyncio.ensure_future(self._sleep(patience_s))
            await asyncio.wait([writer, patience], return_when=asyncio.FIRST_COMPLETED)
            patience.cancel()
            await asyncio.wait([patience])
            if writer.done() or commits == self.numbers["commits"]:
                return writer.done()

    async def abandon(self) -> None:
        """Close without committing what is left."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._log.clear()
        await self._close_connections()

    async def _close_connections(self) -> None:
        self._is_closed = True
        for promise in tuple(self._promises):
            promise.cancel()
        if self._moment is not None:
            self._moment.cancel()
            await asyncio.wait([self._moment])
        await self._free_space.stop()
        guard = None
        if self.damage is not None and not isinstance(self.damage, FileGone):
            guard = hold(self.path)
        for connection in (self._reader, self._writer):
            if connection is not None:
                await connection.close()
        self._reader = self._writer = None
        if guard is not None:
            guard.close()


# --- in the threads ------------------------------------------------------------------------------


def _commit_here(
    connection: sqlite3.Connection, batch: Batch, path: Path, known: tuple[int, int]
) -> float:
    """Commit, and see that it went to the file that the next start will find."""
    cpu_s = commit(connection, batch)
    check_identity(path, known)
    return cpu_s


def _checkpoint(connection: sqlite3.Connection, may_wait: bool) -> tuple[int, float]:
    """Copy pages from the WAL to the database; returns how long the WAL is, in bytes."""
    begun = time.thread_time()
    _, frames, _ = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    # The next commit starts the WAL anew if all was copied and nobody reads from it. One that
    # long was kept from that again and again: wait until the readers are out of the way. A
    # snapshot that is being copied reads for long: waiting would stop all commits, for nothing.
    if may_wait and frames * PAGE_SIZE >= WAL_LIMIT_BYTES:
        connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()
    return frames * PAGE_SIZE, time.thread_time() - begun
