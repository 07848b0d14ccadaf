"""What a report says in words: every planted problem, and nothing about a quiet log."""

from __future__ import annotations

from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from leveret.spark_jobs import findings
from leveret.spark_jobs.jobs import JOBS
from leveret.spark_jobs.lake import LakeError
from leveret.spark_jobs.report import Report, make, print_pdf, render
from tests.spark.conftest import Log

# A log in which no job has an answer.
NOTHING: dict[str, list[dict[str, Any]]] = {name: [] for name in JOBS}


def test_every_planted_problem_is_named(busy: Log, report: Report) -> None:
    planted = busy.truth.planted
    assert planted.slow_consumer is not None
    assert planted.poison is not None
    assert planted.burst is not None
    assert planted.backlog is not None
    assert planted.churn is not None
    assert planted.throttling is not None
    expected = [
        ("slow_consumers", planted.slow_consumer[2]),
        ("poison", f"message {planted.poison[2]} was delivered 9 times"),
        ("anomalies", f"queue {planted.burst[1]} in vhost {planted.burst[0]}: p99 wait rose"),
        ("unroutable", "50 messages of user web reached no queue (2 keys"),
        ("unroutable", "40 were dropped without notice, 10 returned"),
        ("forecast", f"{planted.backlog[1]} in vhost {planted.backlog[0]} grows"),
        ("forecast", "nobody consumes it"),
        ("churn", f"user {planted.churn[0]} from 10.9.9.9 opened {planted.churn[1]} connections"),
        ("churn", "12 logins as intruder"),
        ("throttling", f"{planted.throttling[0]} was the bottleneck"),
        *(("unused", name) for _, _, name in planted.unused),
    ]
    said = [(finding.job, finding.text) for finding in report.findings]
    for job, text in expected:
        assert any(job == one and text in words for one, words in said), (job, text, said)


def test_nothing_else_is_said(report: Report) -> None:
    """A finding for each problem, two for churn (connections and logins); no more."""
    assert sorted(finding.job for finding in report.findings) == sorted(
        "anomalies churn churn forecast poison slow_consumers throttling unroutable unused".split()
    )


def test_a_quiet_log_yields_no_finding(spark: SparkSession, quiet: Log) -> None:
    found = make(spark, quiet.inputs, quiet.lake)
    assert found.findings == []
    assert "Nothing out of the ordinary" in found.html


def test_problems_come_before_notes(report: Report) -> None:
    order = [finding.severity for finding in report.findings]
    assert order == sorted(order, key=["problem", "warning", "note"].index)


class _Page(HTMLParser):
    """Checks that elements are closed in order, and gathers what the page points to."""

    EMPTY = frozenset({"meta", "br", "hr", "img", "link"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.EMPTY:
            self.open.append(tag)
        given = dict(attrs)
        if given.get("id"):
            self.ids.add(str(given["id"]))
        self.links |= {str(given[name]) for name in ("href", "src") if given.get(name)}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_stands_alone(report: Report) -> None:
    """Well-formed, one file, and links lead to places in it."""
    page = _Page()
    page.feed(report.html)
    assert page.open == []
    assert "<script" not in report.html
    assert page.links
    assert all(link[0] == "#" and link[1:] in page.ids for link in page.links)
    assert set(JOBS) - {"lifecycle"} <= page.ids
    assert report.html.count("<svg") == 5
    for finding in report.findings:
        assert finding.text in page.text


def test_names_from_the_log_are_escaped() -> None:
    """Whoever may publish chooses routing keys."""
    evil = "<script>alert(1)</script>"
    row = {name: None for name in JOBS["hot_keys"].schema.names}
    answers = {**NOTHING, "hot_keys": [{**row, "rk": evil}]}
    found = [findings.Finding("problem", "hot_keys", f"key '{evil}'")]
    page = render(answers, found, 0, 1, 60)
    assert "<script" not in page
    assert page.count("&lt;script&gt;alert(1)") == 2


def test_without_a_browser_there_is_no_pdf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LakeError, match="no browser"):
        print_pdf(tmp_path / "report.html")


def test_a_broken_log_is_told() -> None:
    def boot(name: str, hour: int, **fields: object) -> dict[str, Any]:
        time = datetime(2026, 3, 2, hour, tzinfo=UTC)
        well = {"events": 9, "missing": 0, "duplicates": 0, "shed": 0, "malformed": 0}
        ends = {"first_at": time, "last_at": time, "has_stop": True, "sample": 1.0}
        return {"boot": name, **well, **ends, **fields}

    quality = [
        boot("one", 8, has_stop=False),
        boot("two", 9, missing=3, shed=7),
        boot("three", 10, has_stop=False),
        boot("", 8, malformed=2, first_at=None, has_stop=None),
    ]
    texts = [one.text for one in findings.find({**NOTHING, "quality": quality}, 3600.0)]
    assert len(texts) == 4, "the last boot may still run"
    for part in ("boot one ended", "3 lines of the log are missing", "shed 7 events", "2 lines"):
        assert any(part in text for text in texts), part


def test_dead_letters_that_reach_nothing_are_a_problem() -> None:
    row = {"vhost": "/", "queue": "q", "exchange": "dlx", "rk": "k", "reason": "expired"}
    answers = {**NOTHING, "dead_letters": [{**row, "n": 5, "lost": 2}]}
    found = findings.find(answers, 60.0)
    assert [(one.severity, "2 messages" in one.text) for one in found] == [
        ("problem", True),
        ("warning", False),
    ]


def test_one_consumer_that_gets_everything_is_told() -> None:
    row = {"vhost": "/", "queue": "q", "consumers": 4, "deliveries": 1000, "busiest": "c-17"}
    answers = {**NOTHING, "fairness": [{**row, "gini": 0.7, "max_share": 0.95}]}
    (found,) = findings.find(answers, 60.0)
    assert "c-17 got 95 % of 1,000 deliveries" in found.text
