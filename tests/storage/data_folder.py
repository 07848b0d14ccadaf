"""A data folder with a sound file in it, made by hand, for tests that then spoil it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from importlib.resources import files
from pathlib import Path

SCHEMA = files("leveret.storage").joinpath("schema.sql").read_text()
FILE = "vhosts/%2F.db"
# Two queues share a body; 'jobs' has two messages besides, one of them with its body embedded.
SOUND = """
INSERT INTO meta VALUES ('schema_version', 2), ('vhost', x'2f'), ('clean', 1);
INSERT INTO exchange VALUES ('orders', 'fanout', 0, 0, x'00000000');
INSERT INTO queue (id, name, auto_delete, arguments)
VALUES (1, 'jobs', 0, x'00000000'), (2, 'mail', 0, x'00000000');
INSERT INTO binding VALUES ('orders', 'queue', 'jobs', '', x'00000000');
INSERT INTO body VALUES (7, 2, zeroblob(5000)), (8, 1, zeroblob(6000));
INSERT INTO message
    (key, size, flags, expires_at, envelope, extra_keys, header, body_id, body, delivery_count)
VALUES
    ((1 << 40) | 0, 3, 256, NULL, x'0000', NULL, x'0000', NULL, x'414243', 0),
    ((1 << 40) | 1, 5000, 256, NULL, x'0000', NULL, x'0000', 7, NULL, 0),
    ((1 << 40) | 5, 6000, 256, NULL, x'0000', NULL, x'0000', 8, NULL, 0),
    ((2 << 40) | 0, 5000, 256, NULL, x'0000', NULL, x'0000', 7, NULL, 0);
INSERT INTO counter VALUES (1, 6, 3, 11003, -1, 0), (2, 1, 1, 5000, -1, 0);
"""


def make_folder(data: Path, change: str = "") -> Path:
    """A sound data folder, then changed by some SQL; returns it."""
    (data / "vhosts").mkdir(parents=True)
    with closing(sqlite3.connect(data / FILE)) as connection:
        connection.executescript(f"PRAGMA journal_mode=WAL; {SCHEMA} {SOUND} {change}")
    return data


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below the folder, byte by byte."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
