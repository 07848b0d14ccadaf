"""Lines of the event log for runs of messages, without an object for each (pure twin).

Events of a run share all but a few numbers. ``fill_lines`` puts those between pieces that were
encoded once; ``stamp`` and ``logged`` write and read what a message carries for the log: its
number there, whose upper part is the time it was published. ``Held`` remembers the numbers of what
was delivered until it is answered. ``_hot.pyx`` has the same, compiled: numbers are kept in arrays,
so that it makes no Python object of any of them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import count as counting
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from leveret.protocol.message import Message

if TYPE_CHECKING:
    # Signed, eight bytes each.
    Numbers = array[int]
    # Numbers that differ from line to line, or the first of consecutive ones.
    Column = Numbers | int

# A message's number is the time in microseconds, and so many bits to tell those of one time apart.
ID_BITS = 11
COLUMNS_MAX = 8
# So many runs that have been answered altogether may stay among the others.
DEAD_RUNS = 32


def fill_lines(pieces: Sequence[bytes], columns: Sequence[Column], count: int) -> bytes:
    """``count`` lines: piece, number, piece, number, ... piece. One piece more than columns."""
    if len(columns) > COLUMNS_MAX or len(pieces) != len(columns) + 1:
        raise ValueError("too many columns, or not one piece more")
    if count <= 0:
        return b""
    if not columns:
        return pieces[0] * count
    numbers: list[Iterable[int]] = []
    for column in columns:
        if isinstance(column, int):
            numbers.append(counting(column))
        elif len(column) < count:
            raise ValueError("a column is too short")
        else:
            numbers.append(column)
    # A number is never a percent sign, but a piece may have one.
    line = b"%d".join([piece.replace(b"%", b"%%") for piece in pieces])
    rows = zip(range(count), *numbers, strict=False)
    return b"".join([line % row[1:] for row in rows])


def stamp(messages: Sequence[Message], first_id: int) -> Numbers:
    """Number a run for the log; the sizes of its bodies."""
    for at, message in enumerate(messages):
        message.log_id = first_id + at
    return array("q", [len(message.body) for message in messages])


def logged(
    messages: Sequence[Message], now_us: int
) -> tuple[Numbers, Numbers, Numbers, Numbers] | None:
    """Of those that have a number: place in the run, number, size, age in microseconds.

    None if none has a number.
    """
    places = [at for at, message in enumerate(messages) if message.log_id]
    if not places:
        return None
    chosen = [messages[at] for at in places]
    return (
        array("q", places),
        array("q", [message.log_id for message in chosen]),
        array("q", [len(message.body) for message in chosen]),
        array("q", [max(0, now_us - (each.stamp_us or each.log_id >> ID_BITS)) for each in chosen]),
    )


class _Run:
    """Deliveries that were made together."""

    __slots__ = ("first", "ids", "left", "since_us", "source", "tags")

    def __init__(self, tags: Sequence[int], ids: Numbers, since_us: int, source: Any) -> None:
        # Ascending.
        self.tags = tags
        self.first = tags[0]
        # Of the messages; 0 once it was answered.
        self.ids = ids
        self.left = len(ids)
        self.since_us = since_us
        self.source = source


_first = attrgetter("first")


class Held:
    """Deliveries of a channel that wait for an answer: by delivery tag, kept by the run."""

    def __init__(self) -> None:
        # In order of tags. Those with nothing left go when there are many of them.
        self._runs: list[_Run] = []
        self._dead = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, tags: Column, ids: Numbers, since_us: int, source: object) -> None:
        """``tags`` are above all earlier ones; ``ids`` is taken over. Whoever asks for answers
        gets ``source`` back."""
        given = range(tags, tags + len(ids)) if isinstance(tags, int) else tags
        self._runs.append(_Run(given, ids, since_us, source))
        self._count += len(ids)

    def settle(
        self, tags: Iterable[int], now_us: int
    ) -> list[tuple[Any, Numbers, Numbers, Numbers]]:
        """They are answered: source, tags, message numbers and microseconds since, by source.

        In the order of ``tags``, consecutive ones of one source together; tags that are not held
        are passed over.
        """
        found: list[tuple[Any, Numbers, Numbers, Numbers]] = []
        for tag in tags:
            run = self._run_of(tag)
            if run is None:
                continue
            at = bisect_left(run.tags, tag)
            if run.tags[at] != tag or not run.ids[at]:
                continue
            if not found or found[-1][0] is not run.source:
                found.append((run.source, array("q"), array("q"), array("q")))
            _, found_tags, ids, holds = found[-1]
            found_tags.append(tag)
            ids.append(run.ids[at])
            holds.append(max(0, now_us - run.since_us))
            run.ids[at] = 0
            run.left -= 1
            self._count -= 1
            if not run.left:
                self._dead += 1
        self._bury()
        return found

    def settle_all(self, now_us: int) -> list[tuple[Any, Numbers, Numbers, Numbers]]:
        """The same for everything that is held."""
        return self.settle([tag for run in self._runs for tag in run.tags], now_us)

    def _run_of(self, tag: int) -> _Run | None:
        at = bisect_right(self._runs, tag, key=_first) - 1
        if at < 0 or self._runs[at].tags[-1] < tag:
            return None
        return self._runs[at]

    def _bury(self) -> None:
        if self._dead and (not self._count or self._dead > DEAD_RUNS + len(self._runs) // 2):
            self._runs = [run for run in self._runs if run.left]
            self._dead = 0
