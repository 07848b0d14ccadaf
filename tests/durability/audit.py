"""Looks into the files of a broker that was stopped: do rows, counters and references agree?"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

# Each finds rows that should not be.
QUESTIONS = {
    "bodies whose references were miscounted": """
        SELECT b.id, b.refs, count(m.key) FROM body b LEFT JOIN message m ON m.body_id = b.id
        GROUP BY b.id HAVING b.refs != count(m.key)""",
    "messages without their body": """
        SELECT key FROM message m WHERE body IS NULL
        AND NOT EXISTS (SELECT 1 FROM body b WHERE b.id = m.body_id)""",
    "messages of no queue": """
        SELECT key >> 40, count(*) FROM message
        WHERE key >> 40 NOT IN (SELECT id FROM queue) GROUP BY 1""",
    "counters that are wrong": """
        SELECT q.name, c.messages, c.bytes, c.next_seq, count(m.key), total(m.size), max(m.key)
        FROM queue q LEFT JOIN counter c ON c.queue_id = q.id
        LEFT JOIN message m ON m.key >> 40 = q.id
        GROUP BY q.id HAVING coalesce(c.messages, 0) != count(m.key)
        OR coalesce(c.bytes, 0) != total(m.size)
        OR coalesce(c.next_seq, 0) <= coalesce(max(m.key) & ((1 << 40) - 1), -1)""",
}


def audit(data: Path) -> list[str]:
    """What is wrong, in words; nothing if all is well."""
    wrong = []
    files = sorted((data / "vhosts").glob("*.db"))
    assert files, f"no files in {data}"
    for file in files:
        with closing(sqlite3.connect(file)) as connection:
            for (text,) in connection.execute("PRAGMA integrity_check"):
                if text != "ok":
                    wrong.append(f"{file.name}: {text}")
            for what, question in QUESTIONS.items():
                rows = connection.execute(question).fetchall()
                if rows:
                    wrong.append(f"{file.name}: {what}: {len(rows)}, such as {rows[:5]}")
    return wrong
