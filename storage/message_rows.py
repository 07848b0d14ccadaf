"""Rows of the table ``message``: what their numbers mean, and how they are read (hop 8).

Upstream: ``queue_index.py``, which calls all of it in the reader's thread, and writes the rows.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import Any, NamedTuple

from leveret.protocol.twin import Message
from leveret.storage.commit import SEQ_BITS

SEQ_MASK = (1 << SEQ_BITS) - 1
# In the column flags, beside what a message needs.
PERSISTENT = 256
# Of a queue with exact TTL: the row is in the index message_expiry.
EXACT = 512


class Position(NamedTuple):
    """A message that is known to be there and was not read."""

    seq_id: int
    size: int
    is_persistent: bool
    expires_at_ms: int | None
    body_id: int | None
    # How often it came back from a consumer.
    delivery_count: int


def select_positions(connection: sqlite3.Connection, first: int, end: int, limit: int) -> list[Any]:
    return connection.execute(
        "SELECT key, size, flags, expires_at, body_id, delivery_count FROM message"
        " WHERE key >= ? AND key < ? ORDER BY key LIMIT ?",
        (first, end, limit),
    ).fetchall()


def select_due(connection: sqlite3.Connection, first: int, end: int, limit: int) -> list[Any]:
    # The conditions are those of the index message_expiry, or it is not used.
    return connection.execute(
        "SELECT key, size, flags, expires_at, body_id, delivery_count FROM message"
        " WHERE key >> 40 = ? AND expires_at IS NOT NULL AND flags & 512"
        " AND key >= ? AND key < ? ORDER BY expires_at LIMIT ?",
        (first >> SEQ_BITS, first, end, limit),
    ).fetchall()


def make_position(row: tuple[Any, ...]) -> Position:
    key, size, flags, expires_at_ms, body_id, returned = row
    return Position(
        key & SEQ_MASK, size, bool(flags & PERSISTENT), expires_at_ms, body_id, returned
    )


_MESSAGES = (
    "SELECT m.key, m.size, m.flags, m.envelope, m.extra_keys, m.header, m.body_id,"
    " coalesce(m.body, b.body), m.log_id, m.stamp_us"
    " FROM message m LEFT JOIN body b ON b.id = m.body_id"
)


def select_messages(
    connection: sqlite3.Connection, first: int, last: int, limit: int, max_bytes: int
) -> list[tuple[int, Message]]:
    cursor = connection.execute(
        f"{_MESSAGES} WHERE m.key BETWEEN ? AND ? ORDER BY m.key LIMIT ?", (first, last, limit)
    )
    return _messages(cursor, max_bytes)


def select_chosen(connection: sqlite3.Connection, keys: list[int]) -> list[tuple[int, Message]]:
    marks = ",".join("?" * len(keys))
    return _messages(connection.execute(f"{_MESSAGES} WHERE m.key IN ({marks})", keys), None)


def _messages(cursor: sqlite3.Cursor, max_bytes: int | None) -> list[tuple[int, Message]]:
    found: list[tuple[int, Message]] = []
    size = 0
    for key, length, flags, envelope, extra_keys, header, body_id, body, log_id, stamp_us in cursor:
        size += length
        if found and max_bytes is not None and size > max_bytes:
            break
        exchange, routing_key = _names(envelope)
        message = Message(
            envelope, exchange, routing_key, header, body, flags & 255, bool(flags & PERSISTENT)
        )
        if extra_keys is not None:
            message.extra_keys = _names(extra_keys)
        if body_id is not None:
            message.body_id = body_id
        if log_id is not None:
            message.log_id, message.stamp_us = log_id, stamp_us or 0
        found.append((key & SEQ_MASK, message))
    return found


def short_strings(names: Iterable[str]) -> bytes:
    raw = [name.encode("utf-8", "surrogateescape") for name in names]
    return b"".join(bytes((len(name),)) + name for name in raw)


def _names(data: bytes) -> tuple[str, ...]:
    names = []
    at = 0
    while at < len(data):
        end = at + 1 + data[at]
        names.append(data[at + 1 : end].decode("utf-8", "surrogateescape"))
        at = end
    return tuple(names)
