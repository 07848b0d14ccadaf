"""Lines of the event log for runs of messages, without an object for each (pure twin).

Events of a run share all but a few numbers. ``fill_lines`` puts those between pieces that were
encoded once; ``stamp`` and ``logged`` write and read what a message carries for the log: its
number there, whose upper part is the time it was published. ``_hot.pyx`` has the same, compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count as counting

from leveret.protocol.message import Message

# Numbers that differ from line to line, or the first of consecutive ones.
Column = list[int] | int
# A message's number is the time in microseconds, and so many bits to tell those of one time apart.
ID_BITS = 11


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


def stamp(messages: Sequence[Message], first_id: int) -> None:
    """Number a run for the log."""
    for at, message in enumerate(messages):
        message.log_id = first_id + at


def logged(
    messages: Sequence[Message], now_us: int
) -> tuple[list[int], list[int], list[int], list[int]] | None:
    """Of those that have a number: place in the run, number, size, age in microseconds.

    None if none has a number.
    """
    places = [at for at, message in enumerate(messages) if message.log_id]
    if not places:
        return None
    chosen = [messages[at] for at in places]
    return (
        places,
        [message.log_id for message in chosen],
        [len(message.body) for message in chosen],
        [max(0, now_us - (each.stamp_us or each.log_id >> ID_BITS)) for each in chosen],
    )
