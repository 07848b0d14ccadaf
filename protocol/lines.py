"""Lines of the event log for runs of messages, without an object for each (pure twin).

Events of a run share all but a few numbers. The event loop notes what is shared, encoded once
(``Template``), and the numbers: an ``Entry`` of a ``LineBuffer``. ``format_lines`` puts them
together, in the thread that writes the log.
``stamp`` and ``logged`` write and read what a message carries for the log: its number there, whose
upper part is the time it was published. ``Held`` remembers the numbers of what was delivered until
it is answered. ``_hot.pyx`` has the same, compiled: numbers are kept in arrays, so that it makes no
Python object of any of them, and lines are formatted while the event loop goes on.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import count as counting
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from leveret.protocol.message import Message

if TYPE_CHECKING:
    # Signed, eight bytes each.
    Numbers = array[int]
    # Numbers that differ from line to line, or the first of consecutive ones.
    Column = Numbers | int
    # Time in microseconds, depth (-1: none is told), number of the first line, what stands
    # between the other numbers of a line and after them, these numbers, and how many lines.
    Run = tuple[int, int, int, tuple[bytes, ...], tuple[Column, ...], int]
    # Lines to be, or whole ones.
    Entry = Run | bytes
    # Source of deliveries, how many of it, tags, message numbers and microseconds since.
    Settled = tuple[Any, int, Column, Column, Column]

# A message's number is the time in microseconds, and so many bits to tell those of one time apart.
ID_BITS = 11
COLUMNS_MAX = 8
# So many runs that have been answered altogether may stay among the others.
DEAD_RUNS = 32


# Guesses: a line's time and number, each of its other numbers, and what waits for the thread that
# makes a line or a run of them.
LINE_BYTES = 40
NUMBER_BYTES = 8
ENTRY_BYTES = 200


def now_us() -> int:
    """The time of this machine in microseconds since 1970."""
    return time.time_ns() // 1000


class Template:
    """What lines of a kind have in common."""

    __slots__ = ("pieces", "size")

    def __init__(self, pieces: tuple[bytes, ...]) -> None:
        # What stands behind the number of a line, between its other numbers, and at its end.
        self.pieces = pieces
        # What a line of it takes, more or less: in the file, or in memory until it is formatted.
        self.size = LINE_BYTES + sum([len(piece) + NUMBER_BYTES for piece in pieces])


class LineBuffer:
    """Runs of lines that wait for the next batch."""

    __slots__ = (
        "_full_size",
        "_on_first",
        "_on_full",
        "_on_shed",
        "entries",
        "is_shut",
        "next_seq",
        "size",
    )

    def __init__(
        self,
        full_size: int,
        on_first: Callable[[int], None],
        on_full: Callable[[], None],
        on_shed: Callable[[int], None],
    ) -> None:
        """``on_first`` is told the time of the first line of a batch, before it is in; ``on_full``
        is called with ``full_size`` or more; ``on_shed`` is told how many lines were refused."""
        self._full_size = full_size
        self._on_first = on_first
        self._on_full = on_full
        self._on_shed = on_shed
        # Those of the next batch, and more or less how many bytes.
        self.entries: list[Entry] = []
        self.size = 0
        # The number of the next line.
        self.next_seq = 1
        # Nothing is taken.
        self.is_shut = False

    def add(
        self,
        now_us: int,
        template: Template,
        columns: tuple[Column, ...],
        count: int,
        depth: int = -1,
    ) -> None:
        """``count`` lines; one column for each number of the template but the line's own.

        Nobody may change the columns afterwards: lines are made of them later.
        """
        if self.is_shut:
            self._on_shed(count)
            return
        if not self.entries:
            self._on_first(now_us)
        seq = self.next_seq
        self.next_seq = seq + count
        self.entries.append((now_us, depth, seq, template.pieces, columns, count))
        self.size += ENTRY_BYTES + template.size * count
        if self.size >= self._full_size:
            self._on_full()

    def add_line(self, now_us: int, line: bytes) -> None:
        """A whole one, which has ``next_seq``; not while ``is_shut``."""
        if not self.entries:
            self._on_first(now_us)
        self.next_seq += 1
        self.entries.append(line)
        self.size += len(line)
        if self.size >= self._full_size:
            self._on_full()

    def take(self) -> list[Entry]:
        """All that waits; nothing does, then."""
        entries, self.entries, self.size = self.entries, [], 0
        return entries


def each_of(column: Column, count: int) -> Sequence[int]:
    """The numbers of a column."""
    return range(column, column + count) if isinstance(column, int) else column


def format_lines(entries: list[Entry], into: bytearray) -> int:
    """All lines: time, depth, number; then piece, number, piece, number, ... piece.

    There is one piece more than there are columns. Nobody may change the columns meanwhile. The
    lines are the first so many bytes of ``into``, which grows as needed: who formats again and
    again has the same memory for it.
    """
    lines = b"".join(
        [entry if isinstance(entry, bytes) else _format_run(*entry) for entry in entries]
    )
    into[: len(lines)] = lines
    return len(lines)


def _format_run(
    now_us: int,
    depth: int,
    seq: int,
    pieces: tuple[bytes, ...],
    columns: tuple[Column, ...],
    count: int,
) -> bytes:
    if len(columns) > COLUMNS_MAX or len(pieces) != len(columns) + 1:
        raise ValueError("too many columns, or not one piece more")
    numbers: list[Iterable[int]] = [counting(seq)]
    for column in columns:
        if isinstance(column, int):
            numbers.append(counting(column))
        elif len(column) < count:
            raise ValueError("a column is too short")
        else:
            numbers.append(column)
    head = b'{"ts":%d,' % now_us + (b'"depth":%d,' % depth if depth >= 0 else b"") + b'"seq":'
    # A number is never a percent sign, but a piece may have one.
    line = b"%d".join([head, *[piece.replace(b"%", b"%%") for piece in pieces]])
    rows = zip(range(count), *numbers, strict=False)
    return b"".join([line % row[1:] for row in rows])


def stamp(messages: Sequence[Message], first_id: int, now_us: int) -> Column:
    """Number a run for the log; the sizes of its bodies."""
    is_ahead = first_id >> ID_BITS > now_us
    for at, message in enumerate(messages):
        message.log_id = first_id + at
        if is_ahead:
            # The clock was set back: the number does not tell the time.
            message.stamp_us = now_us
    return _column([len(message.body) for message in messages], is_one=len(messages) == 1)


def is_told(messages: Sequence[Message]) -> bool:
    """Whether any of them has a number."""
    return any(message.log_id for message in messages)


def logged(
    messages: Sequence[Message], now_us: int
) -> tuple[int, Column, Column, Column, Column] | None:
    """Of those that have a number: how many, place in the run, number, size, age in microseconds.

    None if none has a number.
    """
    places = [at for at, message in enumerate(messages) if message.log_id]
    if not places:
        return None
    chosen = [messages[at] for at in places]
    ages = [max(0, now_us - (each.stamp_us or each.log_id >> ID_BITS)) for each in chosen]
    is_one = len(messages) == 1
    return (
        len(places),
        _column(places, is_one=is_one),
        _column([message.log_id for message in chosen], is_one=is_one),
        _column([len(message.body) for message in chosen], is_one=is_one),
        _column(ages, is_one=is_one),
    )


def _column(numbers: list[int], *, is_one: bool) -> Column:
    """A run of one needs no array."""
    return numbers[0] if is_one else array("q", numbers)


class _Run:
    """Deliveries that were made together."""

    __slots__ = ("first", "ids", "left", "since_us", "source", "tags")

    def __init__(self, tags: Sequence[int], ids: Sequence[int], since_us: int, source: Any) -> None:
        # Ascending.
        self.tags = tags
        self.first = tags[0]
        # Of the messages; 0 once it was answered.
        self.ids = list(ids)
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

    def add(self, tags: Column, ids: Column, count: int, since_us: int, source: object) -> None:
        """``tags`` are above all earlier ones. Whoever asks for answers gets ``source`` back."""
        self._runs.append(_Run(each_of(tags, count), each_of(ids, count), since_us, source))
        self._count += count

    def may_hold(self, tags: list[int]) -> bool:
        """Whether any is between the first and the last that are held: if not, none is held."""
        if not self._count:
            return False
        first, last = self._runs[0].first, self._runs[-1].tags[-1]
        return any(first <= tag <= last for tag in tags)

    def settle(self, tags: Sequence[int], now_us: int) -> list[Settled]:
        """They are answered.

        In the order of ``tags``, consecutive ones of one source together; tags that are not held
        are passed over.
        """
        found: list[tuple[Any, list[int], list[int], list[int]]] = []
        for tag in tags:
            run = self._run_of(tag)
            if run is None:
                continue
            at = bisect_left(run.tags, tag)
            if run.tags[at] != tag or not run.ids[at]:
                continue
            if not found or found[-1][0] is not run.source:
                found.append((run.source, [], [], []))
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
        is_one = len(tags) == 1
        return [
            (
                source,
                len(ids),
                _column(found_tags, is_one=is_one),
                _column(ids, is_one=is_one),
                _column(holds, is_one=is_one),
            )
            for source, found_tags, ids, holds in found
        ]

    def settle_all(self, now_us: int) -> list[Settled]:
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
