"""A backup shows one moment of all files, disturbs nobody, and comes back whole or not at all."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import sqlite3
import stat
import tarfile
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from leveret.storage import backup as backup_module
from leveret.storage import database as database_module
from leveret.storage.backup import BackupError, Progress, back_up, back_up_folder, restore
from leveret.storage.check import check_folder
from leveret.storage.connections import PAGE_SIZE
from leveret.storage.database import Database
from leveret.storage.operations import Statement
from leveret.storage.vhost_store import StoreSettings, VhostStore, file_stem
from tests.storage.data_folder import FILE, contents, make_folder

NOW = 1_700_000_000.0
DEADLINE_S = 20.0


@asynccontextmanager
async def open_stores(data: Path, *vhosts: str) -> AsyncIterator[list[VhostStore]]:
    stores = [
        VhostStore(
            data / "vhosts",
            vhost,
            StoreSettings("full", 4096),
            now=lambda: 0.0,
            sleep=asyncio.sleep,
            on_trouble=lambda error: None,
        )
        for vhost in vhosts
    ]
    for store in stores:
        await store.open()
    try:
        yield stores
    finally:
        for store in stores:
            await store.close()


def put_row(database: Database, name: str, size: int = 0) -> None:
    database.put(
        Statement("INSERT INTO exchange VALUES (?, 'fanout', 0, 0, zeroblob(?))", (name, size))
    )


def rows(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return [name for (name,) in connection.execute("SELECT name FROM exchange ORDER BY name")]


class Made(NamedTuple):
    data: Path
    file: Path


@pytest.fixture
def archive(tmp_path: Path) -> Made:
    """A backup of a sound folder."""
    data = make_folder(tmp_path / "data")
    file = tmp_path / "backup.tar"
    back_up_folder(data, file, created_at=NOW, tell=lambda progress: None)
    return Made(data, file)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "restored").mkdir()
    return tmp_path / "restored"


# --- one moment ---------------------------------------------------------------------------------


async def test_files_show_the_same_moment(tmp_path: Path, target: Path) -> None:
    """A row is put into the second file once the same is on disk in the first, for ever."""
    data = tmp_path / "data"
    async with open_stores(data, "a", "b") as (first, second):
        reached = asyncio.Event()

        async def write() -> None:
            number = 0
            while True:
                for store in (first, second):
                    put_row(store.database, f"{number:06}")
                    await store.database.wait_committed()
                number += 1
                if number == 20:
                    reached.set()

        writer = asyncio.create_task(write())
        try:
            for turn in range(5):
                await reached.wait()
                file = tmp_path / f"{turn}.tar"
                before = len(rows(data / "vhosts" / "b.db"))
                # In the order that shows a later moment of the file that must not be ahead.
                databases = [first.database, second.database]
                await back_up(databases, data, file, created_at=NOW)
                folder = target / str(turn)
                folder.mkdir()
                restore(file, folder)
                in_first = rows(folder / "vhosts" / "a.db")
                in_second = rows(folder / "vhosts" / "b.db")
                assert in_first[: len(in_second)] == in_second
                assert len(in_first) - len(in_second) in (0, 1)
                assert len(in_second) >= before
        finally:
            writer.cancel()
            await asyncio.wait([writer])


async def test_no_commit_begins_while_snapshots_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the first file's snapshot and the last one's nothing may be committed."""
    async with open_stores(tmp_path, "a") as (store,):
        database, pin = store.database, backup_module._pin
        loop = asyncio.get_running_loop()
        seen: list[float] = []

        async def put_and_look() -> float:
            put_row(database, "while held")
            try:
                async with asyncio.timeout(0.1):
                    await database.wait_committed()
            except TimeoutError:
                pass
            return database.numbers["commits"]

        def pin_and_look(*arguments: Any) -> list[Any]:
            future = asyncio.run_coroutine_threadsafe(put_and_look(), loop)
            seen.append(future.result(DEADLINE_S))
            return pin(*arguments)

        monkeypatch.setattr(backup_module, "_pin", pin_and_look)
        put_row(database, "before")
        await database.wait_committed()
        file = tmp_path / "x.tar"
        made = await back_up([database], tmp_path, file, created_at=NOW)
        assert seen == [1]
        assert made.held_s >= 0.1
        await database.wait_committed()
        assert database.numbers["commits"] == 2
    (tmp_path / "restored").mkdir()
    restore(file, tmp_path / "restored")
    assert rows(tmp_path / "restored" / "vhosts" / "a.db") == ["before"]


async def test_copy_goes_on_while_others_write(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit after each step: within no transaction SQLite would begin anew each time."""
    monkeypatch.setattr(backup_module, "_PAGES_PER_STEP", 10)
    monkeypatch.setattr(backup_module, "_PROGRESS_S", 0)
    steps: list[Progress] = []
    async with open_stores(tmp_path, "a") as (store,):
        database = store.database
        for number in range(50):
            put_row(database, f"{number:03}", size=5_000)
        await database.wait_committed()
        loop = asyncio.get_running_loop()
        say = backup_module._Job._say

        async def write() -> None:
            put_row(database, f"later {len(steps):03}", size=5_000)
            await database.wait_committed()

        def write_and_say(job: Any, stage: str, name: str, done: int, total: int) -> None:
            if stage == "copy":
                steps.append(Progress(stage, name, done, total))
                asyncio.run_coroutine_threadsafe(write(), loop).result(DEADLINE_S)
            say(job, stage, name, done, total)

        monkeypatch.setattr(backup_module._Job, "_say", write_and_say)
        told: list[Progress] = []
        file = tmp_path / "x.tar"
        made = await back_up([database], tmp_path, file, created_at=NOW, tell=told.append)
        assert database.snapshots == 0
    done = [step.done_bytes for step in steps]
    assert done == sorted(set(done))
    assert len(steps) == -(-steps[0].total_bytes // (10 * PAGE_SIZE))
    assert [step for step in told if step.stage == "copy"] == steps
    assert told[-1].stage == "pack"
    assert told[-1].done_bytes == told[-1].total_bytes == steps[0].total_bytes
    assert made.wal_bytes > 0
    restore(file, target)
    assert rows(target / "vhosts" / "a.db") == [f"{number:03}" for number in range(50)]


async def test_backup_waits_for_the_commit_that_runs_and_gives_up_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backup_module, "BOUNDARY_S", 0.05)
    async with open_stores(tmp_path, "a") as (store,):
        async with store.database.between_commits():
            with pytest.raises(BackupError, match="no commit has ended"):
                await back_up([store.database], tmp_path, tmp_path / "x.tar", created_at=NOW)
        assert store.database.snapshots == 0


# --- the WAL ------------------------------------------------------------------------------------


async def test_backup_gives_up_when_the_wal_grows_too_long(tmp_path: Path) -> None:
    async with open_stores(tmp_path / "data", "a") as (store,):
        put_row(store.database, "x", size=100_000)
        await store.database.wait_committed()
        (tmp_path / "to").mkdir()
        with pytest.raises(BackupError, match=r"the WAL of vhosts/a\.db grew"):
            await back_up(
                [store.database],
                tmp_path / "data",
                tmp_path / "to" / "x.tar",
                created_at=NOW,
                wal_max_bytes=1,
            )
        assert list((tmp_path / "to").iterdir()) == []
        assert store.database.snapshots == 0


@pytest.mark.parametrize("may_wait", [True, False])
def test_checkpoint_does_not_wait_for_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_wait: bool
) -> None:
    monkeypatch.setattr(database_module, "WAL_LIMIT_BYTES", 0)
    statements: list[str] = []
    with closing(sqlite3.connect(make_folder(tmp_path) / FILE)) as connection:
        connection.set_trace_callback(statements.append)
        database_module._checkpoint(connection, may_wait)
    assert any("RESTART" in statement for statement in statements) == may_wait


# --- failures leave nothing ---------------------------------------------------------------------


async def test_cancelled_backup_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go_on = asyncio.Event(), threading.Event()
    async with open_stores(tmp_path / "data", "a") as (store,):
        loop = asyncio.get_running_loop()
        copy = backup_module._Job._copy

        def held_copy(job: Any, snapshot: Any, to: Path) -> Path:
            loop.call_soon_threadsafe(reached.set)
            assert go_on.wait(DEADLINE_S)
            return copy(job, snapshot, to)

        monkeypatch.setattr(backup_module._Job, "_copy", held_copy)
        target = tmp_path / "to" / "x.tar"
        target.parent.mkdir()
        task = asyncio.create_task(
            back_up([store.database], tmp_path / "data", target, created_at=NOW)
        )
        async with asyncio.timeout(DEADLINE_S):
            await reached.wait()
            task.cancel()
            # It hears of it in the next turn of the loop; the thread must not end before.
            for _ in range(3):
                await asyncio.sleep(0)
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert list(target.parent.iterdir()) == []
        assert store.database.snapshots == 0


def back_up_into(data: Path, file: Path) -> None:
    back_up_folder(data, file, created_at=NOW, tell=lambda progress: None)


def test_failed_backup_leaves_the_last_one(
    archive: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = archive.file.read_bytes()

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(BackupError, match="No space left"):
        back_up_into(archive.data, archive.file)
    assert archive.file.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["backup.tar", "data"]


def test_disk_that_is_too_small_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=1000))
    with pytest.raises(BackupError, match="1000 bytes left"):
        back_up_into(make_folder(tmp_path / "data"), tmp_path / "x.tar")


@pytest.mark.parametrize("where", ["", "missing/x.tar"])
def test_target_that_cannot_be_written_is_refused(tmp_path: Path, where: str) -> None:
    data = make_folder(tmp_path / "data")
    (tmp_path / "to").mkdir()
    with pytest.raises(BackupError):
        back_up_into(data, tmp_path / "to" / where)
    assert list((tmp_path / "to").iterdir()) == []


def test_folder_without_files_cannot_be_backed_up(tmp_path: Path) -> None:
    with pytest.raises(BackupError, match="no files of a broker"):
        back_up_into(tmp_path, tmp_path / "x.tar")


def test_stopped_folder_is_not_changed_by_a_backup(archive: Made, tmp_path: Path) -> None:
    assert contents(archive.data) == contents(make_folder(tmp_path / "other"))


# --- and back -----------------------------------------------------------------------------------


def test_archive_is_a_tar_that_its_owner_alone_can_read(archive: Made) -> None:
    assert stat.S_IMODE(archive.file.stat().st_mode) == 0o600
    with tarfile.open(archive.file, "r:") as tar:
        assert tar.getnames() == [FILE, "manifest.json"]
        manifest = json.load(tar.extractfile("manifest.json") or io.BytesIO())
    assert manifest["format"] == 1
    assert manifest["created_at"] == NOW
    assert [entry["name"] for entry in manifest["files"]] == [FILE]


@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz", "x.tgz", "with space and ü"])
def test_restored_folder_is_what_was_backed_up(tmp_path: Path, target: Path, name: str) -> None:
    data = make_folder(tmp_path / "data")
    back_up_into(data, tmp_path / name)
    is_gzip = (tmp_path / name).read_bytes()[:2] == b"\x1f\x8b"
    assert is_gzip == name.endswith("gz")
    told: list[Progress] = []
    report, aside = restore(tmp_path / name, target, tell=told.append)
    assert aside is None
    assert [(file.queues, file.messages) for file in report.files] == [(2, 4)]
    assert told[-1].done_bytes == told[-1].total_bytes
    assert list(contents(target)) == [FILE]
    with (
        closing(sqlite3.connect(data / FILE)) as before,
        closing(sqlite3.connect(target / FILE)) as after,
    ):
        assert list(before.iterdump()) == list(after.iterdump())


def test_folder_with_data_is_refused_without_force(archive: Made, target: Path) -> None:
    make_folder(target)
    before = contents(target)
    with pytest.raises(BackupError, match=r"is not empty \(vhosts\).*--force"):
        restore(archive.file, target)
    assert contents(target) == before


def test_force_keeps_what_was_there(archive: Made, target: Path) -> None:
    make_folder(target, "DELETE FROM exchange")
    (target / "notes").write_text("mine")
    before = contents(target)
    _, aside = restore(archive.file, target, force=True)
    assert aside is not None
    assert aside.parent == target
    assert contents(aside) == before
    assert rows(target / FILE) == ["orders"]
    assert sorted(path.name for path in target.iterdir()) == [aside.name, "vhosts"]


def test_leftovers_of_a_broker_do_not_make_a_folder_full(archive: Made, target: Path) -> None:
    for name in ("lock", "control.sock", "control.path"):
        (target / name).touch()
    (target / "lost+found").mkdir()
    restore(archive.file, target)
    assert check_folder(target).is_sound


def cut(raw: bytes) -> bytes:
    return raw[: len(raw) // 2]


def cut_before_manifest(raw: bytes) -> bytes:
    return raw[: raw.index(b"manifest.json")]


def flip(raw: bytes) -> bytes:
    at = raw.index(b"orders")
    return raw[:at] + b"0rders" + raw[at + 6 :]


def other_format(raw: bytes) -> bytes:
    return raw.replace(b'"format": 1', b'"format": 2')


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        pytest.param(cut, "cannot be restored", id="half-of-it"),
        pytest.param(cut_before_manifest, "manifest.json is missing", id="no-manifest"),
        pytest.param(flip, "not what was backed up", id="changed"),
        pytest.param(other_format, "has format 2", id="other-format"),
        pytest.param(lambda raw: b"", "is no backup", id="empty"),
        pytest.param(lambda raw: b"something else " * 1000, "is no backup", id="no-archive"),
    ],
)
def test_spoilt_archive_is_refused_and_nothing_is_changed(
    archive: Made, target: Path, spoil: Callable[[bytes], bytes], words: str
) -> None:
    archive.file.write_bytes(spoil(archive.file.read_bytes()))
    make_folder(target)
    before = contents(target)
    with pytest.raises(BackupError, match=words):
        restore(archive.file, target, force=True)
    assert contents(target) == before
    assert [path.name for path in target.iterdir()] == ["vhosts"]


def member(name: str, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = "/etc/passwd"
    return info


@pytest.mark.parametrize(
    "info",
    [
        pytest.param(member("../outside.db"), id="above"),
        pytest.param(member("/outside.db"), id="absolute"),
        pytest.param(member("vhosts/../../outside.db"), id="through"),
        pytest.param(member("vhosts/a/b.db"), id="deeper"),
        pytest.param(member("lock"), id="other-file"),
        pytest.param(member("vhosts/a.db", tarfile.SYMTYPE), id="link"),
        pytest.param(member("vhosts/a.db", tarfile.FIFOTYPE), id="pipe"),
    ],
)
def test_archive_with_what_does_not_belong_there_is_refused(
    tmp_path: Path, target: Path, info: tarfile.TarInfo
) -> None:
    file = tmp_path / "x.tar"
    with tarfile.open(file, "w") as tar:
        tar.addfile(info)
    with pytest.raises(BackupError, match="does not belong there"):
        restore(file, target)
    assert list(target.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["restored", "x.tar"]


def test_backup_of_damaged_data_is_not_restored(tmp_path: Path, target: Path) -> None:
    data = make_folder(tmp_path / "data", "UPDATE counter SET messages = 9 WHERE queue_id = 2")
    back_up_into(data, tmp_path / "x.tar")
    with pytest.raises(BackupError, match="'mail': counters that are wrong: 9 messages"):
        restore(tmp_path / "x.tar", target)
    assert list(target.iterdir()) == []


# --- names --------------------------------------------------------------------------------------


def test_no_virtual_host_is_taken_for_what_another_paged_out() -> None:
    assert file_stem("a.transient") != "a.transient"
    assert len({file_stem(name) for name in ("a", "a.transient", "a%2Etransient")}) == 3
