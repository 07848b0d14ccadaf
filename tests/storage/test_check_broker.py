"""The check of ``broker.db``, and which files count as damaged."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from leveret.storage.broker_store import BROKER_FILE, BrokerStore, StoredUser
from leveret.storage.check import check_folder
from tests.storage.data_folder import FILE, contents, make_folder


@pytest.fixture
async def data(tmp_path: Path) -> Path:
    make_folder(tmp_path)
    store = BrokerStore(tmp_path)
    await store.open()
    await store.make_defaults(["/"], StoredUser("guest", bytes(36), ()))
    await store.close()
    return tmp_path


def change(path: Path, sql: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as file:
        file.executescript(sql)


def test_it_is_described(data: Path) -> None:
    before = contents(data)
    report = check_folder(data)
    assert report.problems == report.remarks == []
    assert report.damaged == []
    [broker] = report.broker
    assert (broker.file, broker.vhosts, broker.users) == (BROKER_FILE, 1, 1)
    assert contents(data) == before


@pytest.mark.parametrize(
    ("sql", "remark"),
    [
        pytest.param(
            "INSERT INTO vhost VALUES ('new', 0)",
            "the file of vhost 'new' is not there: it will be empty",
            id="no-file",
        ),
        pytest.param("DELETE FROM vhost", "vhosts/%2F.db is of no vhost", id="no-vhost"),
        pytest.param(
            "UPDATE vhost SET is_deleting = 1",
            "vhost '/' was deleted, the next start goes on",
            id="half-deleted",
        ),
    ],
)
def test_what_does_not_fit_together_is_remarked(data: Path, sql: str, remark: str) -> None:
    change(data / BROKER_FILE, sql)
    report = check_folder(data)
    assert report.is_sound
    [found] = report.remarks
    assert remark in found.text


@pytest.mark.parametrize(
    ("sql", "problem", "is_damaged"),
    [
        pytest.param("DROP TABLE user", "it lacks user", True, id="not-ours"),
        pytest.param(
            "UPDATE user SET tags = 'x'", "cannot be understood: Expecting", True, id="nonsense"
        ),
        pytest.param(
            "UPDATE meta SET value = 9 WHERE name = 'schema_version'",
            "has schema version 9",
            False,
            id="newer",
        ),
    ],
)
def test_what_is_wrong_is_found(data: Path, sql: str, problem: str, is_damaged: bool) -> None:
    change(data / BROKER_FILE, sql)
    report = check_folder(data)
    [found] = report.problems
    assert problem in found.text
    assert report.damaged == ([BROKER_FILE] if is_damaged else [])


@pytest.mark.parametrize("name", [BROKER_FILE, FILE])
def test_a_file_that_cannot_be_read_is_damaged(data: Path, name: str) -> None:
    (data / name).write_bytes(b"\xaa" * (data / name).stat().st_size)
    report = check_folder(data)
    assert report.damaged == [name]


@pytest.mark.parametrize(
    "sql",
    [
        pytest.param("UPDATE counter SET messages = 99", id="wrong-counter"),
        pytest.param("UPDATE meta SET value = 99 WHERE name = 'schema_version'", id="newer"),
    ],
)
def test_a_file_that_sqlite_can_read_is_not_damaged(data: Path, sql: str) -> None:
    """It must not be put aside with everything in it."""
    change(data / FILE, sql)
    report = check_folder(data)
    assert not report.is_sound
    assert report.damaged == []
