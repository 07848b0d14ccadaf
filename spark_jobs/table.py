"""Answers for people and programs: a table on the terminal, CSV, JSON lines.

Rows come one by one, so that an answer need not fit into memory (a table shows its first rows
only). Numbers are rounded in tables alone.

Clients choose names, and people look at them on terminals, which obey some characters: what is for
people goes through ``printable``. What is for programs stays as it is.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final, TextIO

Cells = Sequence[Any]

_IDS: Final = ("msg", "conn", "ch", "dtag", "seq")


# Besides control characters: ends of lines, and what turns the direction of writing.
_OBEYED: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """With \\xNN (or \\uNNNN) for each character that a terminal would obey, not show."""
    return _OBEYED.sub(_escape, text)


def write_table(names: Sequence[str], rows: Iterable[Cells], out: TextIO, *, limit: int) -> None:
    """Aligned columns; numbers to the right. Says so if there is more."""
    iterator = iter(rows)
    shown = list(islice(iterator, limit))
    is_more = next(iterator, None) is not None
    if not shown:
        print("  nothing", file=out)
        return
    texts = [
        [_of_column(name, value) for name, value in zip(names, row, strict=True)] for row in shown
    ]
    widths = [max(len(name), *(len(row[i]) for row in texts)) for i, name in enumerate(names)]
    to_the_right = [
        all(row[i] is None or _is_number(row[i]) for row in shown) for i in range(len(names))
    ]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, to_the_right, strict=True)
        ]
        return ("  " + "  ".join(padded)).rstrip()

    print(line(names), file=out)
    print(line(["-" * width for width in widths]), file=out)
    for row in texts:
        print(line(row), file=out)
    if is_more:
        print(f"  … and more: --limit shows more than {limit} rows", file=out)


def write_csv(names: Sequence[str], rows: Iterable[Cells], out: TextIO) -> None:
    # Quoted is what has a character of the end of a line, so that a lone \r needs one there.
    writer = csv.writer(_Lines(out), lineterminator=_Lines.end)
    writer.writerow(names)
    writer.writerows([_plain(value) for value in row] for row in rows)


def write_json(names: Sequence[str], rows: Iterable[Cells], out: TextIO) -> None:
    """One object per line."""
    for row in rows:
        fields = {name: _plain(value) for name, value in zip(names, row, strict=True)}
        out.write(json.dumps(fields, ensure_ascii=False) + "\n")


def for_people(value: Any) -> str:
    """A value as a person wants to read it; nothing for null."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return _rounded(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, datetime):
        # Spark hands over local time without a zone.
        moment = value.astimezone(UTC)
        return moment.strftime("%Y-%m-%d %H:%M:%S")
    return printable(str(value))


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class _Lines:
    """Takes lines as a CSV writer gives them, one at a time; passes them on with \\n alone."""

    end: Final = "\r\n"

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def write(self, line: str) -> int:
        return self._out.write(line.removesuffix(self.end) + "\n")


def _of_column(name: str, value: Any) -> str:
    # Numbers that are names are as in the log: to be searched for.
    return str(value) if name in _IDS and value is not None else for_people(value)


def _rounded(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    digits = 1 if abs(value) >= 100 else 2 if abs(value) >= 1 else 3
    return f"{value:.{digits}f}" if abs(value) >= 0.001 else f"{value:.2g}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    return value
