"""The audit finds what it is there to find."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.durability.audit import audit
from tests.support.broker_process import ROOT

SOUND = """
INSERT INTO meta VALUES ('schema_version', 2), ('vhost', x'2f'), ('clean', 1);
INSERT INTO queue (id, name, auto_delete, arguments) VALUES (3, 'q', 0, x'');
INSERT INTO body VALUES (7, 1, x'00');
INSERT INTO message
    (key, size, flags, expires_at, envelope, extra_keys, header, body_id, body, delivery_count)
VALUES ((3 << 40) | 5, 1, 256, NULL, x'0000', NULL, x'0000', 7, NULL, 0);
INSERT INTO counter VALUES (3, 6, 1, 1, -1, 0);
"""


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        pytest.param("", "", id="sound"),
        pytest.param("UPDATE body SET refs = 2", "references were miscounted", id="leaked-body"),
        pytest.param("DELETE FROM body", "without their body", id="no-body"),
        pytest.param("DELETE FROM queue", "of no queue", id="orphan"),
        pytest.param("UPDATE counter SET messages = 2", "counters that are wrong", id="count"),
        pytest.param("UPDATE counter SET next_seq = 5", "counters that are wrong", id="next"),
        pytest.param("DELETE FROM counter", "counters that are wrong", id="no-counter"),
    ],
)
def test_finding(tmp_path: Path, change: str, finding: str) -> None:
    (tmp_path / "vhosts").mkdir()
    schema = (ROOT / "storage" / "schema.sql").read_text()
    with closing(sqlite3.connect(tmp_path / "vhosts" / "x.db")) as connection:
        connection.executescript(schema + SOUND + change)
    wrong = audit(tmp_path)
    assert len(wrong) == bool(finding), wrong
    assert not finding or finding in wrong[0]
