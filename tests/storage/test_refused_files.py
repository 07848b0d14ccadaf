"""Files that a start refuses, as a broker that was killed left them: each and its WAL stay as is.

SQLite copies a WAL into its file, and deletes it, when the last connection that may write is
closed. Whoever wants to save what a damaged file holds needs both as they were.
"""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from leveret.storage.broker_store import BROKER_FILE, BrokerStore, StoredUser
from leveret.storage.vhost_store import StoreError
from tests.storage.data_folder import FILE, contents, make_folder
from tests.storage.store import opened_store
from tests.storage.test_migrations import version_1

# Whatever else is changed, this makes sure that there is something in the WAL.
CONFIRMED = "INSERT INTO exchange VALUES ('confirmed', 'fanout', 0, 0, x'00000000');"


def killed(sound: Path, file: str, change: str, *, broken_table: str | None = None) -> Path:
    """A copy of a folder as it is when a broker is killed after a change, which is in the WAL
    alone; a table, if one is given, is garbage in the file. Returns the copy."""
    with closing(sqlite3.connect(sound / file)) as connection:
        connection.executescript(f"PRAGMA wal_autocheckpoint=0; {change}")
        [(page_size,)] = connection.execute("PRAGMA page_size")
        pages = dict(connection.execute("SELECT name, rootpage FROM sqlite_master"))
        copy = sound.with_name("killed")
        shutil.copytree(sound, copy, ignore=shutil.ignore_patterns("*-shm"))
    if broken_table is not None:
        with open(copy / file, "r+b") as opened:
            opened.seek((pages[broken_table] - 1) * page_size)
            opened.write(b"\xaa" * page_size)
    assert (copy / f"{file}-wal").stat().st_size
    return copy


def lasting(folder: Path) -> dict[str, bytes]:
    """All but what SQLite makes anew from the WAL."""
    return {name: data for name, data in contents(folder).items() if not name.endswith("-shm")}


async def assert_refused(data: Path, words: str) -> None:
    before = lasting(data)
    for _ in range(2):  # what looks at it first must not leave it different, either
        with pytest.raises(StoreError, match=words):
            async with opened_store(data / "vhosts"):
                pass
        assert lasting(data) == before


@pytest.mark.parametrize("table", ["exchange", "queue", "counter", "body", "sub_queue"])
async def test_a_damaged_file(tmp_path: Path, table: str) -> None:
    change = "UPDATE meta SET value = 0 WHERE name = 'clean'"
    data = killed(make_folder(tmp_path / "sound"), FILE, change, broken_table=table)
    await assert_refused(data, "malformed. Nothing in it was changed")


async def test_a_file_of_a_newer_version(tmp_path: Path) -> None:
    change = f"{CONFIRMED} UPDATE meta SET value = 99 WHERE name = 'schema_version'"
    data = killed(make_folder(tmp_path / "sound"), FILE, change)
    await assert_refused(data, "use the version that wrote it")


async def test_a_file_of_an_older_version_that_cannot_be_brought_up_to_date(tmp_path: Path) -> None:
    change = f"{CONFIRMED} CREATE INDEX message_expiry ON message (size)"
    data = killed(version_1(tmp_path / "sound"), FILE, change)
    await assert_refused(data, "cannot be brought from schema version 1")


@pytest.mark.parametrize("table", ["queue", "counter", "message"])
async def test_a_damaged_file_of_an_older_version(tmp_path: Path, table: str) -> None:
    """It must not be brought up to date first and refused afterwards."""
    data = killed(version_1(tmp_path / "sound"), FILE, CONFIRMED, broken_table=table)
    await assert_refused(data, "malformed. Nothing in it was changed")


async def test_a_file_that_was_cut_to_nothing(tmp_path: Path) -> None:
    """SQLite takes it for a new one, and would delete the WAL that belonged to it."""
    data = killed(make_folder(tmp_path / "sound"), FILE, CONFIRMED)
    (data / FILE).write_bytes(b"")
    await assert_refused(data, "file is empty, but has a WAL")


async def test_a_file_of_somebody_else(tmp_path: Path) -> None:
    (tmp_path / "vhosts").mkdir()
    with closing(sqlite3.connect(tmp_path / FILE)) as connection:
        connection.execute("CREATE TABLE recipe (name)")
    await assert_refused(tmp_path, "no such table: meta")


async def test_a_sound_file_is_opened_with_what_is_in_its_wal(tmp_path: Path) -> None:
    data = killed(make_folder(tmp_path / "sound"), FILE, CONFIRMED)
    async with opened_store(data / "vhosts") as (_, definitions):
        assert {exchange.name for exchange in definitions.exchanges} == {"orders", "confirmed"}
    # Nobody holds it any more: what was in the WAL is in the file.
    assert not (data / f"{FILE}-wal").exists()


@pytest.mark.parametrize(
    ("change", "broken_table", "words"),
    [
        pytest.param("INSERT INTO vhost VALUES ('a', 0)", "user", "malformed", id="damaged"),
        pytest.param("UPDATE user SET tags = 'x'", None, "cannot be read", id="nonsense"),
        pytest.param(
            "UPDATE meta SET value = 99 WHERE name = 'schema_version'",
            None,
            "a newer one",
            id="new",
        ),
    ],
)
async def test_the_file_of_the_broker(
    tmp_path: Path, change: str, broken_table: str | None, words: str
) -> None:
    sound = tmp_path / "sound"
    sound.mkdir()
    store = BrokerStore(sound)
    await store.open()
    await store.make_defaults(["/"], StoredUser("guest", b"salt" + bytes(32), ()))
    await store.close()
    data = killed(sound, BROKER_FILE, change, broken_table=broken_table)
    before = lasting(data)
    with pytest.raises(StoreError, match=words):
        await BrokerStore(data).open()
    assert lasting(data) == before
