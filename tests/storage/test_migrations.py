"""Files of older versions: brought up to date with all that is in them, or left alone."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import aio_pika
import pytest

from leveret.broker.config import Settings
from leveret.broker.server import Broker
from leveret.storage.check import check_folder
from leveret.storage.definitions import StoredParameter
from leveret.storage.migrations import SCHEMA_VERSION, Step, check_version, migrate
from leveret.storage.vhost_store import StoreError
from tests.storage.data_folder import FILE, SCHEMA, contents
from tests.storage.store import opened_store

# What version 1 made, to the letter: it must never change here.
VERSION_1 = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value NOT NULL) WITHOUT ROWID;
CREATE TABLE exchange (
    name TEXT PRIMARY KEY, type TEXT NOT NULL, auto_delete INTEGER NOT NULL,
    internal INTEGER NOT NULL, arguments BLOB NOT NULL
) WITHOUT ROWID;
CREATE TABLE queue (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, auto_delete INTEGER NOT NULL,
    arguments BLOB NOT NULL
);
CREATE TABLE binding (
    source TEXT NOT NULL, kind TEXT NOT NULL, destination TEXT NOT NULL, key TEXT NOT NULL,
    arguments BLOB NOT NULL, PRIMARY KEY (source, kind, destination, key, arguments)
) WITHOUT ROWID;
CREATE TABLE counter (
    queue_id INTEGER PRIMARY KEY, next_seq INTEGER NOT NULL, messages INTEGER NOT NULL,
    bytes INTEGER NOT NULL, delivered INTEGER NOT NULL
);
CREATE TABLE message (
    key INTEGER PRIMARY KEY, size INTEGER NOT NULL, flags INTEGER NOT NULL, expires_at INTEGER,
    envelope BLOB NOT NULL, extra_keys BLOB, header BLOB NOT NULL, body_id INTEGER, body BLOB
);
CREATE TABLE body (id INTEGER PRIMARY KEY, refs INTEGER NOT NULL, body BLOB NOT NULL);
"""
# A queue 'jobs', bound to the exchange 'orders'; three messages, one with its body kept apart.
CONTENT = """
INSERT INTO meta VALUES ('schema_version', 1), ('vhost', x'2f'), ('clean', 1);
INSERT INTO exchange VALUES ('orders', 'fanout', 0, 0, x'00000000');
INSERT INTO queue VALUES (1, 'jobs', 0, x'00000000');
INSERT INTO binding VALUES ('orders', 'queue', 'jobs', '', x'00000000');
INSERT INTO body VALUES (7, 1, zeroblob(5000));
INSERT INTO message VALUES
    ((1 << 40) | 0, 5, 256, NULL, x'00046a6f6273', NULL, x'100002', NULL, x'6669727374'),
    ((1 << 40) | 1, 5000, 256, NULL, x'00046a6f6273', NULL, x'100002', 7, NULL),
    ((1 << 40) | 5, 4, 256, NULL, x'00046a6f6273', NULL, x'100002', NULL, x'6c617374');
INSERT INTO counter VALUES (1, 6, 3, 5009, 0);
"""

pytestmark = pytest.mark.timeout(20)


def version_1(data: Path, change: str = "") -> Path:
    """A data folder as version 1 left it, then changed by some SQL; returns it."""
    (data / "vhosts").mkdir(parents=True)
    with closing(sqlite3.connect(data / FILE)) as connection:
        connection.executescript(
            "PRAGMA page_size=8192; PRAGMA auto_vacuum=INCREMENTAL; PRAGMA journal_mode=WAL;"
            f"{VERSION_1} {CONTENT} {change}"
        )
    return data


def structure(connection: sqlite3.Connection) -> dict[str, list[tuple[Any, ...]]]:
    """Columns of every table, parts of every index; layout and comments do not count."""
    found: dict[str, list[tuple[Any, ...]]] = {}
    for kind, name, sql in connection.execute("SELECT type, name, sql FROM sqlite_master"):
        found[name] = connection.execute(f"PRAGMA {kind}_xinfo('{name}')").fetchall()
        if kind == "index" and sql is not None:
            found[f"{name}, where"] = [(" ".join(sql.split()).partition("WHERE")[2],)]
    return found


def version_of(path: Path) -> object:
    with closing(sqlite3.connect(path)) as connection:
        [(version,)] = connection.execute("SELECT value FROM meta WHERE name = 'schema_version'")
    return version


async def test_an_older_file_keeps_its_messages(tmp_path: Path, settings: Settings) -> None:
    data = version_1(tmp_path / "old")
    for _ in range(2):  # what was brought up to date is opened once more
        async with Broker(replace(settings, data=data)) as broker:
            address = f"amqp://guest:guest@127.0.0.1:{broker.port}/"
            async with await aio_pika.connect(address) as client:
                channel = await client.channel()
                queue = await channel.get_queue("jobs")
                taken = [await queue.get() for _ in range(3)]
                assert [message.body for message in taken] == [b"first", bytes(5000), b"last"]
                assert taken[0].redelivered
                exchange = await channel.get_exchange("orders")
                assert await exchange.publish(aio_pika.Message(b"more"), "") is not None
                await (await queue.get()).ack()
    assert version_of(data / FILE) == SCHEMA_VERSION
    assert check_folder(data).is_sound


def test_every_older_file_comes_to_what_a_new_one_has(tmp_path: Path) -> None:
    with (
        closing(sqlite3.connect(version_1(tmp_path) / FILE, isolation_level=None)) as old,
        closing(sqlite3.connect(":memory:")) as new,
    ):
        new.executescript(SCHEMA)
        migrate(old, 1)
        assert structure(old) == structure(new)


async def test_parameters_survive(tmp_path: Path) -> None:
    vhosts = version_1(tmp_path) / "vhosts"
    async with opened_store(vhosts) as (store, definitions):
        assert definitions.parameters == []
        store.definitions.save_parameter("policy", "ttl", '{"pattern": ""}')
        store.definitions.save_parameter("policy", "ttl", '{"pattern": "^a"}')
        store.definitions.save_parameter("operator_policy", "ttl", "{}")
        store.definitions.save_parameter("policy", "short-lived", "{}")
        store.definitions.delete_parameter("policy", "short-lived")
    async with opened_store(vhosts) as (_, definitions):
        assert definitions.parameters == [
            StoredParameter("operator_policy", "ttl", "{}"),
            StoredParameter("policy", "ttl", '{"pattern": "^a"}'),
        ]


@pytest.mark.parametrize(
    ("version", "words"),
    [
        pytest.param(99, "this Leveret knows 2: use the version that wrote it", id="newer"),
        pytest.param(0, "no schema version that there ever was", id="never-was"),
        pytest.param("'two'", "no schema version that there ever was", id="not-a-number"),
    ],
)
async def test_a_file_of_an_unknown_version_is_refused(
    tmp_path: Path, version: object, words: str
) -> None:
    change = f"UPDATE meta SET value = {version} WHERE name = 'schema_version'"
    vhosts = version_1(tmp_path, change) / "vhosts"
    before = contents(vhosts)
    with pytest.raises(StoreError, match=words) as raised:
        async with opened_store(vhosts):
            pass
    assert str(vhosts) in str(raised.value)
    assert contents(vhosts) == before


async def test_a_step_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    """The last statement of the step finds its name taken; the first ones must not stay."""
    vhosts = version_1(tmp_path, "CREATE INDEX message_expiry ON message (size)") / "vhosts"
    with closing(sqlite3.connect(tmp_path / FILE)) as connection:
        before = structure(connection)
    with pytest.raises(StoreError, match="Nothing in it was changed"):
        async with opened_store(vhosts):
            pass
    with closing(sqlite3.connect(tmp_path / FILE)) as connection:
        assert structure(connection) == before
    assert version_of(tmp_path / FILE) == 1


def test_steps_are_taken_in_order_from_where_the_file_stands(tmp_path: Path) -> None:
    def count_messages(connection: sqlite3.Connection) -> None:
        (number,) = connection.execute("SELECT count(*) FROM message").fetchone()
        connection.execute("INSERT INTO note VALUES (?)", (f"{number} messages",))

    steps: dict[int, Step] = {
        4: ("INSERT INTO note VALUES ('four')",),
        3: count_messages,
        2: ("CREATE TABLE note (text TEXT)", "INSERT INTO note VALUES ('two')"),
    }
    path = version_1(tmp_path) / FILE
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        migrate(connection, 1, {2: steps[2]})
        assert check_version(version_of(path)) == 2
        migrate(connection, 2, steps)
        notes = [text for (text,) in connection.execute("SELECT text FROM note ORDER BY rowid")]
    assert notes == ["two", "3 messages", "four"]
    assert version_of(path) == 4


def test_a_file_of_an_older_version_can_be_checked(tmp_path: Path) -> None:
    """Before it is brought up to date, and where it comes out of an old backup."""
    assert check_folder(version_1(tmp_path)).is_sound
