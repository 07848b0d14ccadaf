"""Names that clients chose, on a terminal that obeys some characters, and in CSV."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leveret.broker.cli.main import build_parser
from leveret.spark_jobs import cli, commands, report, table
from leveret.spark_jobs.alert_rules import Alert
from leveret.spark_jobs.tail_screen import Screen
from leveret.spark_jobs.tail_windows import Reading

# Deletes the screen, and ends a line.
NAME = "a\x1b[2J\n\x9b1mä"
SHOWN = "a\\x1b[2J\\x0a\\x9b1mä"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        pytest.param(NAME, SHOWN, id="escape"),
        pytest.param("\x00\t\r\x7f", "\\x00\\x09\\x0d\\x7f", id="control"),
        pytest.param("x\u202egnp.exe\u2028", "x\\u202egnp.exe\\u2028", id="direction"),
        pytest.param("naïve 队列 ✓ \\ ~", "naïve 队列 ✓ \\ ~", id="ordinary"),
    ],
)
def test_what_a_terminal_would_obey_is_shown(text: str, shown: str) -> None:
    assert table.printable(text) == shown


def test_tables() -> None:
    out = io.StringIO()
    table.write_table(("queue", "n"), [(NAME, 1), ("b", 22)], out, limit=5)
    assert out.getvalue().splitlines()[2:] == [
        f"  {SHOWN}   1",
        f"  b{' ' * (len(SHOWN) - 1)}  22",
    ]


def test_programs_get_names_as_they_are() -> None:
    out = io.StringIO()
    rows = [(NAME, "a\rb"), ("plain", 'q"'), ("", None), ("two\r\nlines", "x,y")]
    table.write_csv(("queue", "key"), rows, out)
    written = out.getvalue()
    again = list(csv.reader(io.StringIO(written, newline="")))
    assert again == [["queue", "key"], *([name, key or ""] for name, key in rows)]
    assert written.startswith("queue,key\n")
    assert '"a\rb"\n' in written
    out = io.StringIO()
    table.write_json(("queue",), [(NAME,)], out)
    assert out.getvalue() == '{"queue": "a\\u001b[2J\\n\x9b1mä"}\n'


@pytest.mark.parametrize("in_place", [True, False])
def test_following_the_log(in_place: bool) -> None:
    out = io.StringIO()
    screen = Screen(out, in_place=in_place, limit=5)
    screen.show_alert(Alert("r", "latency", True, NAME, NAME, "", 1.0, 1.0, "ms", 0, 0))
    readings = [
        Reading(0, NAME, queue, exchange, 1.0, 1.0, 1, 0.0, 0, 0.0, 0, 1.0)
        for queue, exchange in ((NAME, ""), ("", NAME))
    ]
    screen.show(readings, {(NAME, NAME, ""), (NAME, "", NAME)}, 0)
    screen.say(f"no queue '{NAME}'")
    # What the screen itself says to the terminal.
    text = re.sub("\x1b\\[\\d+A\x1b\\[J", "", out.getvalue())
    assert text.count(SHOWN) == 7
    assert not set(text) & {"\x1b", "\x9b"}


def test_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    finding = SimpleNamespace(severity="bad", text=f"queue {NAME} grows")
    written = SimpleNamespace(scope=SimpleNamespace(words=lambda: "all day"), findings=[finding])
    monkeypatch.setattr(commands, "_inputs", lambda *given: None)
    monkeypatch.setattr(report, "write", lambda *given, **more: written)
    asked = ["analytics", "report", "--output", str(tmp_path / "report.html")]
    commands.execute(None, build_parser().parse_args(asked))  # type: ignore[arg-type]
    assert f"bad: queue {SHOWN} grows\n" in capsys.readouterr().out


def test_errors(capsys: pytest.CaptureFixture[str]) -> None:
    cli.fail("no queue 'a\x1b[2J'\n\tat java.lang")
    assert capsys.readouterr().err.splitlines() == [
        "leveret: no queue 'a\\x1b[2J'",
        "leveret:         at java.lang",
    ]
