"""A consistent copy of all files while the broker serves; one archive, and back.

Upstream: ``broker/admin/handlers.py`` (a broker that runs), ``leveret backup`` (one that does
not), ``leveret restore``. Downstream: SQLite's backup API, tar.

All writers are held between two commits for as long as it takes to begin one read transaction per
file (milliseconds): the snapshots show the same moment. From then on commits go on; each file is
copied within its transaction, else SQLite would begin anew at every write. A snapshot keeps the
WAL from starting anew, so the copies are made first and at full speed, packed afterwards, and a
backup gives up when a WAL grows beyond a limit.

The archive is a tar of the files, and at its end ``manifest.json`` with their sizes and hashes:
one that has it is whole. It is written as ``FILE.part``, synced, and renamed.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import sqlite3
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    closing,
    contextmanager,
    nullcontext,
)
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

from leveret import __version__
from leveret.storage.broker_store import BROKER_FILE
from leveret.storage.check import Report, check_folder
from leveret.storage.connections import open_read_only
from leveret.storage.data_folder import database_files
from leveret.storage.folder_lock import LOCK_FILE
from leveret.storage.folder_sync import sync_folder
from leveret.storage.migrations import SCHEMA_VERSION

if TYPE_CHECKING:
    from leveret.storage.database import Database

FORMAT = 1
MANIFEST = "manifest.json"
# A WAL that grows beyond this while a file is copied ends the backup, not the disk.
WAL_MAX_BYTES = 1 << 30
# How long the commit that runs may take to end; one that fails is tried again for ever.
BOUNDARY_S = 30.0
_PAGES_PER_STEP = 1_000
_CHUNK = 1 << 20
_PROGRESS_S = 0.1
# What an archive may hold; anything else is not ours, or not meant well.
_MEMBER = re.compile(r"broker\.db|vhosts/[A-Za-z0-9_.~%-]+\.db")
# May be in a folder that counts as empty: of a broker that is stopped, of a mounted disk.
_NOTHING = frozenset({LOCK_FILE, "control.sock", "control.path", "lost+found"})


class BackupError(Exception):
    """No backup, or none restored; the text tells a person why."""


class Progress(NamedTuple):
    """``stage`` is copy, pack or restore."""

    stage: str
    file: str
    done_bytes: int
    total_bytes: int


Tell = Callable[[Progress], object]


class Made(NamedTuple):
    """What a backup came to."""

    file: str
    size_bytes: int
    files: list[dict[str, Any]]
    seconds: float
    # For how long commits were held, and the longest WAL there was during the copy.
    held_s: float
    wal_bytes: int


# --- making one ----------------------------------------------------------------------------------


class _Snapshot:
    """A file as it was at one moment."""

    def __init__(self, path: Path, name: str, *, is_in_use: bool) -> None:
        self.path = path
        self.name = name
        self.connection = open_read_only(path, is_in_use=is_in_use)
        try:
            self.connection.execute("PRAGMA busy_timeout=2000")
            # Begun by the first read, not by BEGIN.
            self.connection.execute("BEGIN")
            (pages,) = self.connection.execute("PRAGMA page_count").fetchone()
            self.connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            (page_size,) = self.connection.execute("PRAGMA page_size").fetchone()
        except BaseException:
            self.connection.close()
            raise
        self.page_size = page_size
        self.size_bytes = pages * page_size


async def back_up(
    databases: Sequence[Database],
    data: Path,
    target: Path,
    *,
    created_at: float,
    tell: Tell = lambda progress: None,
    wal_max_bytes: int = WAL_MAX_BYTES,
) -> Made:
    """Back up files that are being written to. ``tell`` is called in the event loop.

    Raises BackupError. Cancelled, it leaves nothing behind.
    """
    begun = time.perf_counter()
    loop = asyncio.get_running_loop()
    cancelled = threading.Event()
    for database in databases:
        # A WAL that is kept from starting anew is nothing a commit should wait for now.
        database.snapshots += 1
    try:
        held = 0.0
        async with AsyncExitStack() as boundary:
            try:
                async with asyncio.timeout(BOUNDARY_S):
                    for database in databases:
                        await boundary.enter_async_context(database.between_commits())
            except TimeoutError:
                raise BackupError(
                    f"no commit has ended for {BOUNDARY_S:g} s: is the disk full?"
                ) from None
            held_since = time.perf_counter()
            paths = [database.path for database in databases]
            snapshots = await _in_thread(cancelled, _pin, paths, data, True)
            held = time.perf_counter() - held_since
        job = _Job(
            snapshots,
            target,
            created_at,
            lambda progress: loop.call_soon_threadsafe(tell, progress),
            wal_max_bytes,
            cancelled,
        )
        made: Made = await _in_thread(cancelled, job.run)
    except (sqlite3.Error, OSError) as error:
        raise BackupError(f"the backup failed: {error}") from error
    finally:
        for database in databases:
            database.snapshots -= 1
    return made._replace(seconds=time.perf_counter() - begun, held_s=held)


def back_up_folder(data: Path, target: Path, *, created_at: float, tell: Tell) -> Made:
    """Back up the files of a broker that does not run; the caller holds the folder's lock."""
    begun = time.perf_counter()
    paths = database_files(data)
    if not paths:
        raise BackupError(f"there are no files of a broker in {data}")
    try:
        snapshots = _pin(paths, data, False)
        job = _Job(snapshots, target, created_at, tell, WAL_MAX_BYTES, threading.Event())
        made = job.run()
    except (sqlite3.Error, OSError) as error:
        raise BackupError(f"the backup failed: {error}") from error
    return made._replace(seconds=time.perf_counter() - begun)


async def _in_thread(cancelled: threading.Event, function: Callable[..., Any], *args: Any) -> Any:
    """As asyncio.to_thread, but who is cancelled waits until the thread has noticed."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        cancelled.set()
        await asyncio.wait([work])
        if not work.cancelled() and work.exception() is None and function is _pin:
            _unpin(work.result())
        raise


def _pin(paths: Sequence[Path], data: Path, is_in_use: bool) -> list[_Snapshot]:
    snapshots: list[_Snapshot] = []
    try:
        for path in paths:
            name = path.relative_to(data).as_posix()
            snapshots.append(_Snapshot(path, name, is_in_use=is_in_use))
    except BaseException:
        _unpin(snapshots)
        raise
    return snapshots


def _unpin(snapshots: Sequence[_Snapshot]) -> None:
    for snapshot in snapshots:
        snapshot.connection.close()


class _Job:
    """Copies and packs, in a thread of its own."""

    def __init__(
        self,
        snapshots: Sequence[_Snapshot],
        target: Path,
        created_at: float,
        tell: Tell,
        wal_max_bytes: int,
        cancelled: threading.Event,
    ) -> None:
        self._snapshots = snapshots
        self._target = target
        self._created_at = created_at
        self._tell = tell
        self._wal_max_bytes = wal_max_bytes
        self._cancelled = cancelled
        self._total = sum(snapshot.size_bytes for snapshot in snapshots)
        self._told_at = 0.0
        self._wal_bytes = 0

    def run(self) -> Made:
        # Beside the target: on a disk that was chosen for much, not where the messages are.
        folder: Path | None = None
        try:
            try:
                if self._target.is_dir():
                    raise BackupError(f"{self._target} is a folder: name a file")
                free = shutil.disk_usage(self._target.parent).free
                if free < self._total:
                    raise BackupError(
                        f"{self._target.parent} has {free} bytes left, a copy takes {self._total}"
                    )
                folder = Path(
                    tempfile.mkdtemp(dir=self._target.parent, prefix=f".{self._target.name}.")
                )
                copies = [
                    (snapshot.name, self._copy(snapshot, folder / str(number)))
                    for number, snapshot in enumerate(self._snapshots)
                ]
            finally:
                _unpin(self._snapshots)
            return self._pack(copies)
        finally:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)

    def _copy(self, snapshot: _Snapshot, to: Path) -> Path:
        wal = Path(f"{snapshot.path}-wal")

        def progress(status: int, remaining: int, total: int) -> None:
            if self._cancelled.is_set():
                raise BackupError("the backup was cancelled")
            length = wal.stat().st_size if wal.exists() else 0
            self._wal_bytes = max(self._wal_bytes, length)
            if length > self._wal_max_bytes:
                raise BackupError(
                    f"gave up: so much is written that the WAL of {snapshot.name} grew to"
                    f" {length} bytes. Try again when there is less to do"
                )
            done = (total - remaining) * snapshot.page_size
            self._say("copy", snapshot.name, done, total * snapshot.page_size)

        with closing(sqlite3.connect(to, isolation_level=None)) as copy:
            # Worth nothing until it is packed: no journal, no sync.
            copy.execute("PRAGMA journal_mode=OFF")
            copy.execute("PRAGMA synchronous=OFF")
            snapshot.connection.backup(copy, pages=_PAGES_PER_STEP, progress=progress, sleep=0)
        return to

    def _pack(self, copies: Sequence[tuple[str, Path]]) -> Made:
        part = self._target.with_name(self._target.name + ".part")
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as raw:
                with (
                    self._compressed(raw) as stream,
                    tarfile.open(fileobj=stream, mode="w|", format=tarfile.GNU_FORMAT) as archive,
                ):
                    archive.copybufsize = _CHUNK  # type: ignore[attr-defined]
                    files = [self._add(archive, name, path) for name, path in copies]
                    manifest = {
                        "format": FORMAT,
                        "leveret": __version__,
                        "schema_version": SCHEMA_VERSION,
                        "created_at": self._created_at,
                        "files": files,
                    }
                    text = json.dumps(manifest, indent=2).encode()
                    archive.addfile(self._info(MANIFEST, len(text)), io.BytesIO(text))
                raw.flush()
                os.fsync(raw.fileno())
            part.rename(self._target)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        sync_folder(self._target.parent)
        size = self._target.stat().st_size
        return Made(str(self._target), size, files, 0.0, 0.0, self._wal_bytes)

    def _compressed(self, raw: IO[bytes]) -> AbstractContextManager[IO[bytes]]:
        if not self._target.name.endswith((".gz", ".tgz")):
            return nullcontext(raw)
        # A low level: the broker has better things to do, and gains little from a higher one.
        return cast(
            AbstractContextManager[IO[bytes]],
            gzip.GzipFile("", "wb", compresslevel=1, fileobj=raw, mtime=int(self._created_at)),
        )

    def _add(self, archive: tarfile.TarFile, name: str, path: Path) -> dict[str, Any]:
        size = path.stat().st_size
        with path.open("rb") as source:
            reader = _Hashing(source, lambda done: self._check_and_say(name, done, size))
            archive.addfile(self._info(name, size), reader)
        path.unlink()
        return {"name": name, "size": size, "sha256": reader.digest.hexdigest()}

    def _check_and_say(self, name: str, done: int, total: int) -> None:
        if self._cancelled.is_set():
            raise BackupError("the backup was cancelled")
        self._say("pack", name, done, total)

    def _info(self, name: str, size: int) -> tarfile.TarInfo:
        info = tarfile.TarInfo(name)
        info.size = size
        info.mode = 0o600
        info.mtime = int(self._created_at)
        return info

    def _say(self, stage: str, name: str, done: int, total: int) -> None:
        now = time.perf_counter()
        if now - self._told_at >= _PROGRESS_S or done >= total:
            self._told_at = now
            self._tell(Progress(stage, name, done, total))


class _Hashing(io.RawIOBase):
    """Reads from a file and hashes what it reads."""

    def __init__(self, source: IO[bytes], tell: Callable[[int], object]) -> None:
        self._source = source
        self._tell = tell
        self._done = 0
        self.digest = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._source.read(size)
        self.digest.update(data)
        self._done += len(data)
        self._tell(self._done)
        return data


# --- and back ------------------------------------------------------------------------------------


def restore(
    archive: Path,
    data: Path,
    *,
    force: bool = False,
    tell: Tell = lambda progress: None,
) -> tuple[Report, Path | None]:
    """Make a data folder of an archive; the caller holds the folder's lock.

    The files are unpacked beside those that may be there, checked, and only then put in place.
    Returns what the check says, and where what was there before (``force``) is now. Raises
    BackupError; the folder is then as it was.
    """
    there = sorted(entry.name for entry in data.iterdir() if entry.name not in _NOTHING)
    if there and not force:
        raise BackupError(
            f"{data} is not empty ({', '.join(there[:3])}{', ...' if len(there) > 3 else ''}):"
            " name another folder, or use --force to put what is there aside"
        )
    folder = Path(tempfile.mkdtemp(dir=data, prefix="restoring-"))
    try:
        try:
            _unpack(archive, folder, tell)
        except (OSError, EOFError, tarfile.TarError) as error:
            raise BackupError(f"{archive} cannot be restored: {error}") from error
        report = check_folder(folder)
        if not report.is_sound:
            found = "\n".join(f"  {problem}" for problem in report.problems)
            raise BackupError(f"what is in {archive} is damaged:\n{found}")
        aside: Path | None = None
        if there:
            aside = Path(tempfile.mkdtemp(dir=data, prefix="replaced-"))
            for name in there:
                (data / name).rename(aside / name)
        for name in ("vhosts", BROKER_FILE):
            # A broker without virtual hosts has no files of any; an old backup has no broker.db.
            if (folder / name).exists():
                (folder / name).rename(data / name)
        sync_folder(data)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return report, aside


def _unpack(archive: Path, folder: Path, tell: Tell) -> None:
    found: dict[str, dict[str, Any]] = {}
    manifest: dict[str, Any] | None = None
    with _opened(archive) as tar:
        for member in tar:
            source = tar.extractfile(member) if member.isreg() else None
            if source is not None and member.name == MANIFEST:
                manifest = json.loads(source.read(_CHUNK))
                continue
            if source is None or not _MEMBER.fullmatch(member.name) or member.name in found:
                raise BackupError(f"{archive} is no backup: {member.name!r} does not belong there")
            found[member.name] = _write(source, folder / member.name, member, tell)
    if manifest is None:
        raise BackupError(f"{archive} is no backup, or not all of one: {MANIFEST} is missing")
    if manifest.get("format") != FORMAT:
        raise BackupError(
            f"{archive} has format {manifest.get('format')}, this Leveret knows {FORMAT}"
        )
    expected = {entry["name"]: entry for entry in manifest["files"]}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise BackupError(f"{archive} is damaged: {name} is not what was backed up")
    for path in (folder, folder / "vhosts"):
        if path.exists():
            sync_folder(path)


@contextmanager
def _opened(archive: Path) -> Iterator[tarfile.TarFile]:
    try:
        # As a stream: read once, from front to end, compressed or not.
        tar = tarfile.open(archive, "r|*", bufsize=_CHUNK)
    except tarfile.ReadError:
        raise BackupError(f"{archive} is no backup") from None
    with tar:
        yield tar


def _write(source: IO[bytes], to: Path, member: tarfile.TarInfo, tell: Tell) -> dict[str, Any]:
    to.parent.mkdir(exist_ok=True)
    digest = hashlib.sha256()
    done = 0
    with to.open("xb") as file:
        while data := source.read(_CHUNK):
            digest.update(data)
            file.write(data)
            done += len(data)
            tell(Progress("restore", member.name, done, member.size))
        file.flush()
        os.fsync(file.fileno())
    return {"name": member.name, "size": done, "sha256": digest.hexdigest()}
