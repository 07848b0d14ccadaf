"""A report printed as PDF, by browsers that do it, do not, and take for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from leveret.broker.cli.main import build_parser
from leveret.spark_jobs import commands, report
from leveret.spark_jobs.lake import LakeError

PRINTS = """
for argument; do case "$argument" in --print-to-pdf=*) echo new > "${argument#*=}";; esac; done
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    page = tmp_path / "report.html"
    page.write_text("page", encoding="utf-8")
    page.with_suffix(".pdf").write_text("old", encoding="utf-8")
    return page


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    return tools


def put_browser(tools: Path, script: str) -> None:
    browser = tools / report.BROWSERS[0]
    browser.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    browser.chmod(0o755)


def left_in(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.iterdir() if file.is_file()}


def test_it_is_printed_beside_the_page(page: Path, tools: Path) -> None:
    put_browser(tools, PRINTS)
    assert report.print_pdf(page) == page.with_suffix(".pdf")
    assert left_in(page.parent) == {"report.html": "page", "report.pdf": "new\n"}


@pytest.mark.parametrize(
    ("script", "told"),
    [
        pytest.param("exec /bin/sleep 60", "had not printed it after", id="takes-for-ever"),
        pytest.param("", "could not print it: it ended with status 0", id="does-nothing"),
        pytest.param("echo oh >&2; exit 3", "could not print it: oh", id="fails"),
        pytest.param(f"{PRINTS}\nexit 3", "status 3", id="fails-late"),
    ],
)
def test_what_is_not_printed_is_told(
    page: Path, tools: Path, monkeypatch: pytest.MonkeyPatch, script: str, told: str
) -> None:
    monkeypatch.setattr(report, "_PRINT_S", 0.5)
    put_browser(tools, script)
    with pytest.raises(LakeError, match=told):
        report.print_pdf(page)
    assert left_in(page.parent) == {"report.html": "page", "report.pdf": "old"}


def test_without_a_browser(page: Path, tools: Path) -> None:
    with pytest.raises(LakeError, match="no browser"):
        report.print_pdf(page)


@pytest.mark.parametrize("name", ["report.pdf", "report.PDF"])
def test_a_page_is_not_printed_over_itself(
    tmp_path: Path, tools: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Which is told before the work that the report is."""
    put_browser(tools, PRINTS)
    monkeypatch.setattr(commands, "_inputs", lambda *given: pytest.fail("it was begun"))
    page = tmp_path / name
    asked = ["analytics", "report", "--pdf", "--output", str(page)]
    with pytest.raises(LakeError, match=r"--output .*report\.html"):
        commands.execute(None, build_parser().parse_args(asked))  # type: ignore[arg-type]
    with pytest.raises(LakeError, match=r"report\.html"):
        report.print_pdf(page)
