"""Brings the file of an older Leveret up to date.

Upstream: ``vhost_store.py``, at start, before anything else looks at the file. ``schema.sql`` makes
new files; what is here must lead an old one to the same tables (``tests/storage`` compares them).

The version stands in the file itself, in ``meta``. All steps from there to ours run in one
transaction with the new version: a start that is killed half-way, or finds the disk full, leaves
the file as it was. There is no way back: an older Leveret refuses a file that is newer than it is.

A version is never changed once it was released: what comes later is a step of its own.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping

Step = tuple[str, ...] | Callable[[sqlite3.Connection], None]

# The version a step leads to -> statements, or a function for what SQL alone cannot do. Adding a
# column touches no row: SQLite gives old ones the default as they are read.
STEPS: Mapping[int, Step] = {
    2: (
        "CREATE TABLE parameter (component TEXT NOT NULL, name TEXT NOT NULL,"
        " value TEXT NOT NULL, PRIMARY KEY (component, name)) WITHOUT ROWID",
        "CREATE TABLE sub_queue (id INTEGER PRIMARY KEY, queue_id INTEGER NOT NULL,"
        " priority INTEGER NOT NULL)",
        "ALTER TABLE queue ADD COLUMN declared_by TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE message ADD COLUMN delivery_count INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE message ADD COLUMN log_id INTEGER",
        "ALTER TABLE message ADD COLUMN stamp_us INTEGER",
        "ALTER TABLE counter ADD COLUMN expiring INTEGER NOT NULL DEFAULT 0",
        "CREATE INDEX message_expiry ON message (key >> 40, expires_at)"
        " WHERE expires_at IS NOT NULL AND flags & 512",
    ),
}

SCHEMA_VERSION = max(STEPS)


class UnknownVersion(Exception):
    """There is no way from the file's version to ours; the text tells a person what to do."""


def check_version(version: object) -> int:
    """The version of a file, as ``meta`` has it; raises UnknownVersion."""
    if isinstance(version, int) and 1 <= version <= SCHEMA_VERSION:
        return version
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise UnknownVersion(
            f"has schema version {version}, this Leveret knows {SCHEMA_VERSION}: use the version"
            " that wrote it, or a newer one"
        )
    raise UnknownVersion(f"has no schema version that there ever was ({version!r})")


def migrate(
    connection: sqlite3.Connection, version: int, steps: Mapping[int, Step] = STEPS
) -> None:
    """Take all steps after ``version``: all of them or, with sqlite3.Error, none."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        for number in sorted(steps):
            if number > version:
                _take(connection, steps[number])
        connection.execute("UPDATE meta SET value = ? WHERE name = 'schema_version'", (max(steps),))
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.rollback()
        raise


def _take(connection: sqlite3.Connection, step: Step) -> None:
    if callable(step):
        step(connection)
        return
    for statement in step:
        connection.execute(statement)
