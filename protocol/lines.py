"""Lines of the event log for runs of messages, without an object for each (pure twin).

Events of a run share all but a few numbers. ``fill_lines`` puts those between pieces that were
encoded once; ``stamp`` and ``logged`` write and read what a message carries for the log: its
number there, and when it came. ``_hot.pyx`` has the same three, compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count as counting

from leveret.protocol.message import Message

# Numbers that differ from line to line, or the first of consecutive ones.
Column = list[int] | int


def fill_lines(pieces: Sequence[bytes], columns: Sequence[Column], count: int) -> bytes:
    """``count`` lines: piece, number, piece, number, ... piece. One piece more than columns."""
    if not count:
        return b""
    # A number is never a percent sign, but a piece may have one.
    line = b"%d".join([piece.replace(b"%", b"%%") for piece in pieces])
    if not columns:
        return pieces[0] * count
    numbers = [column if isinstance(column, list) else counting(column) for column in columns]
    rows = zip(range(count), *numbers, strict=False)
    return b"".join([line % row[1:] for row in rows])


def stamp(messages: Sequence[Message], first_id: int, now_us: int) -> None:
    """Number a run for the log."""
    for at, message in enumerate(messages):
        message.log_id = first_id + at
        message.stamp_us = now_us


def logged(
    messages: Sequence[Message], now_us: int
) -> tuple[list[int], list[int], list[int], list[int]] | None:
    """Of those that have a number: place in the run, number, size, age in microseconds.

    The age is -1 where it is not known. None if none has a number.
    """
    places = [at for at, message in enumerate(messages) if message.log_id]
    if not places:
        return None
    chosen = [messages[at] for at in places]
    return (
        places,
        [message.log_id for message in chosen],
        [len(message.body) for message in chosen],
        [
            max(0, now_us - message.stamp_us) if message.stamp_us else -1
            for message in chosen
        ],
    )
