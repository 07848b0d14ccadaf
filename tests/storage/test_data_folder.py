"""Which files a data folder has, whose they are, and how damaged ones get out of the way."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from leveret.storage.data_folder import database_files, found_vhosts, move_aside
from leveret.storage.vhost_store import file_stem
from tests.storage.data_folder import FILE, contents, make_folder


def test_files_that_must_survive(tmp_path: Path) -> None:
    make_folder(tmp_path)
    for name in ("broker.db", "vhosts/a.transient.db", "vhosts/x.db.damaged-1", "vhosts/b.db-wal"):
        (tmp_path / name).touch()
    assert database_files(tmp_path) == [tmp_path / "broker.db", tmp_path / FILE]


def add_vhost_file(data: Path, name: str) -> None:
    path = data / "vhosts" / f"{file_stem(name)}.db"
    with closing(sqlite3.connect(path)) as file:
        file.execute("CREATE TABLE meta (name TEXT PRIMARY KEY, value NOT NULL) WITHOUT ROWID")
        raw = name.encode("utf-8", "surrogateescape")
        file.execute("INSERT INTO meta VALUES ('vhost', ?)", (raw,))
        file.commit()


@pytest.mark.parametrize(
    "name", ["a", "with / and ü", "long " * 40, b"caf\xe9".decode("utf-8", "surrogateescape")]
)
def test_files_know_whose_they_are(tmp_path: Path, name: str) -> None:
    make_folder(tmp_path)
    add_vhost_file(tmp_path, name)
    assert sorted(found_vhosts(tmp_path)) == sorted(["/", name])


def test_most_damaged_files_tell_it_by_their_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_folder(tmp_path)
    for name in ("a b", "long " * 40):
        (tmp_path / "vhosts" / f"{file_stem(name)}.db").write_bytes(b"garbage" * 1000)
    assert sorted(found_vhosts(tmp_path)) == ["/", "a b"]
    [record] = caplog.records
    assert "whose file it is cannot be told" in record.getMessage()


def test_moved_aside_with_what_belongs_to_it(tmp_path: Path) -> None:
    for part in ("", "-wal", "-shm"):
        (tmp_path / f"x.db{part}").write_text(f"first{part}")
    aside = move_aside(tmp_path / "x.db", "now")
    assert aside == tmp_path / "x.db.damaged-now"
    assert contents(tmp_path) == {
        "x.db.damaged-now": b"first",
        "x.db.damaged-now-shm": b"first-shm",
        "x.db.damaged-now-wal": b"first-wal",
    }


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / "x.db").write_text(str(number))
        move_aside(tmp_path / "x.db", "now")
    # Also not by a file that has no WAL where one of that name is left.
    (tmp_path / "x.db.damaged-now-4-wal").write_text("somebody's")
    (tmp_path / "x.db").write_text("3")
    assert move_aside(tmp_path / "x.db", "now").name == "x.db.damaged-now-5"
    assert contents(tmp_path) == {
        "x.db.damaged-now": b"0",
        "x.db.damaged-now-2": b"1",
        "x.db.damaged-now-3": b"2",
        "x.db.damaged-now-4-wal": b"somebody's",
        "x.db.damaged-now-5": b"3",
    }
