"""The check of a data folder finds what is wrong, names it, and changes nothing."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from leveret.storage.check import Finding, check_folder
from tests.storage.data_folder import FILE, SCHEMA, contents, make_folder


def test_sound_folder_is_described(tmp_path: Path) -> None:
    report = check_folder(make_folder(tmp_path))
    assert report.is_sound
    assert report.problems == report.remarks == []
    [file] = report.files
    assert (file.file, file.vhost, file.is_clean) == (FILE, "/", True)
    assert (file.queues, file.messages, file.message_bytes, file.bodies) == (2, 4, 16003, 2)


@pytest.mark.parametrize(
    ("change", "queue", "number", "words"),
    [
        pytest.param(
            "UPDATE body SET refs = 3 WHERE id = 7",
            None,
            1,
            "1 bodies whose references were miscounted: 7 (3, named 2 times)",
            id="too-many-references",
        ),
        pytest.param(
            "INSERT INTO body VALUES (9, 1, x'00')", None, 1, "9 (1, named 0 times)", id="leak"
        ),
        pytest.param(
            "DELETE FROM body WHERE id = 8",
            "jobs",
            1,
            "1 messages without their body, at 5",
            id="body-lost",
        ),
        pytest.param(
            "UPDATE message SET body = NULL WHERE body_id IS NULL",
            "jobs",
            1,
            "without their body, at 0",
            id="embedded-body-lost",
        ),
        pytest.param(
            "UPDATE message SET body = x'41' WHERE body_id IS NULL",
            "jobs",
            1,
            "another size than noted, at 0",
            id="embedded-body-cut",
        ),
        pytest.param(
            "UPDATE body SET body = x'41' WHERE id = 8", "jobs", 1, "another size", id="body-cut"
        ),
        pytest.param(
            "UPDATE counter SET messages = 4 WHERE queue_id = 1",
            "jobs",
            1,
            "counters that are wrong: 4 messages, there are 3",
            id="messages",
        ),
        pytest.param(
            "UPDATE counter SET bytes = 1 WHERE queue_id = 2",
            "mail",
            1,
            "1 bytes, there are 5000",
            id="bytes",
        ),
        pytest.param(
            "UPDATE counter SET next_seq = 5 WHERE queue_id = 1",
            "jobs",
            1,
            "next position 5, there is one at 5",
            id="next",
        ),
        pytest.param(
            "DELETE FROM counter WHERE queue_id = 2",
            "mail",
            1,
            "0 messages, there are 1",
            id="no-counter",
        ),
        pytest.param(
            "DELETE FROM queue WHERE id = 1; DELETE FROM counter WHERE queue_id = 1;"
            "DELETE FROM binding",
            None,
            3,
            "3 messages of no queue (id 1)",
            id="orphans",
        ),
        pytest.param(
            "UPDATE meta SET value = 99 WHERE name = 'schema_version'",
            None,
            1,
            "has schema version 99",
            id="newer",
        ),
        pytest.param("DROP TABLE counter", None, 1, "it lacks counter", id="not-ours"),
    ],
)
def test_problem_is_named(
    tmp_path: Path, change: str, queue: str | None, number: int, words: str
) -> None:
    report = check_folder(make_folder(tmp_path, change))
    assert not report.is_sound
    [problem] = report.problems
    assert (problem.file, problem.queue, problem.number) == (FILE, queue, number)
    assert words in problem.text
    assert str(problem).startswith(FILE)


def test_every_problem_is_told(tmp_path: Path) -> None:
    change = "UPDATE counter SET messages = 9; DELETE FROM body"
    report = check_folder(make_folder(tmp_path, change))
    assert [(problem.queue, problem.number) for problem in report.problems] == [
        ("jobs", 1),
        ("mail", 1),
        ("jobs", 2),
        ("mail", 1),
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(
            "DELETE FROM queue WHERE id = 1; DELETE FROM binding", "next start", id="deleted-queue"
        ),
        pytest.param(
            "UPDATE binding SET destination = 'gone'", "to the queue 'gone'", id="binding"
        ),
        pytest.param(
            "INSERT INTO binding VALUES ('orders', 'exchange', 'gone', '', x'')",
            "to the exchange 'gone'",
            id="exchange-binding",
        ),
    ],
)
def test_what_a_start_puts_right_is_only_remarked(tmp_path: Path, change: str, words: str) -> None:
    report = check_folder(make_folder(tmp_path, change))
    assert report.is_sound
    [remark] = report.remarks
    assert words in remark.text


def test_exchanges_that_are_always_there_need_no_row(tmp_path: Path) -> None:
    change = "INSERT INTO binding VALUES ('orders', 'exchange', 'amq.topic', '', x'')"
    assert check_folder(make_folder(tmp_path, change)).remarks == []


def test_orphans_are_found_on_either_side_of_a_queue(tmp_path: Path) -> None:
    rows = ",".join(
        f"(({queue} << 40) | 3, 1, 256, NULL, x'0000', NULL, x'0000', NULL, x'00', 0, NULL, NULL)"
        for queue in (0, 4, 5)
    )
    report = check_folder(make_folder(tmp_path, f"INSERT INTO message VALUES {rows}"))
    assert [problem.text for problem in report.problems] == [
        f"1 messages of no queue (id {queue})" for queue in (0, 4, 5)
    ]


def test_damaged_page_is_found(tmp_path: Path) -> None:
    path = make_folder(tmp_path) / FILE
    with closing(sqlite3.connect(path)) as connection:
        (root,) = connection.execute(
            "SELECT rootpage FROM sqlite_master WHERE name = 'message'"
        ).fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    raw = bytearray(path.read_bytes())
    # The pointers to the cells of its leaf.
    raw[(root - 1) * size + 8 : (root - 1) * size + 16] = b"\xff" * 8
    path.write_bytes(raw)
    report = check_folder(tmp_path)
    assert not report.is_sound
    assert {problem.file for problem in report.problems} == {FILE}


def test_file_that_is_no_database_is_a_problem(tmp_path: Path) -> None:
    path = make_folder(tmp_path) / FILE
    path.write_bytes(b"not a database, but long enough to be read as the head of one" * 20)
    [problem] = check_folder(tmp_path).problems
    assert "cannot be read" in problem.text


def test_folder_without_files_is_a_problem(tmp_path: Path) -> None:
    [problem] = check_folder(tmp_path).problems
    assert problem == Finding(str(tmp_path), None, 0, "there are no files of a broker in it")


def test_what_was_paged_out_is_not_looked_at(tmp_path: Path) -> None:
    make_folder(tmp_path)
    (tmp_path / "vhosts" / "%2F.transient.db").write_bytes(b"rubbish")
    assert check_folder(tmp_path).is_sound


def test_every_file_is_told_and_checked(tmp_path: Path) -> None:
    make_folder(tmp_path)
    other = tmp_path / "vhosts" / "other.db"
    with closing(sqlite3.connect(other)) as connection:
        connection.executescript(SCHEMA)
    told: list[str] = []
    [problem] = check_folder(tmp_path, told.append).problems
    assert told == [FILE, "vhosts/other.db"]
    assert problem.file == "vhosts/other.db"


def test_nothing_is_changed(tmp_path: Path) -> None:
    before = contents(make_folder(tmp_path))
    check_folder(tmp_path)
    assert contents(tmp_path) == before


def test_wal_of_a_killed_broker_is_read_and_kept(tmp_path: Path) -> None:
    """As a crash leaves it: what is committed is in the WAL alone."""
    living, dead = make_folder(tmp_path / "living"), tmp_path / "dead"
    with closing(sqlite3.connect(living / FILE)) as connection:
        connection.execute("UPDATE counter SET messages = 77 WHERE queue_id = 2")
        connection.commit()
        (dead / "vhosts").mkdir(parents=True)
        for suffix in ("", "-wal"):
            (dead / f"{FILE}{suffix}").write_bytes((living / f"{FILE}{suffix}").read_bytes())
    before = contents(dead)
    [problem] = check_folder(dead).problems
    assert "77 messages" in problem.text
    after = contents(dead)
    assert {name: after[name] for name in before} == before
