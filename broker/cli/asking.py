"""What the commands that ask a running broker for something have in common: the question, what
becomes of the answer, and tables."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from leveret.broker.cli import folder
from leveret.broker.config import SettingsError


def ask_and_tell(
    options: argparse.Namespace,
    request: dict[str, object],
    describe: Callable[[Any], Iterable[str]],
    *,
    key: str | None = None,
) -> int:
    """Ask, and print the answer as the user wants it; returns the exit status.

    ``describe`` makes lines for people of it. In JSON its entries stand beside ``ok``, or as a
    whole under ``key``.
    """
    from leveret.broker.admin.client import ControlError, NotRunning, ask

    try:
        result = ask(folder.data_folder(options), request)
    except SettingsError as error:
        return folder.fail(options, str(error), folder.BAD_SETTINGS)
    except (ControlError, NotRunning) as error:
        return folder.fail(options, str(error))
    if options.json:
        print(json.dumps({"ok": True, **(result if key is None else {key: result})}))
    else:
        for line in describe(result):
            # Names need not be text, and a terminal takes nothing else.
            print(line.encode("utf-8", "backslashreplace").decode())
    return 0


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table; the first row is its head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
