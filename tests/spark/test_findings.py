"""What a report says in words: every planted problem, and nothing about a quiet log."""

from __future__ import annotations

import shutil
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from leveret.spark_jobs import findings
from leveret.spark_jobs.jobs import JOBS
from leveret.spark_jobs.lake import LakeError
from leveret.spark_jobs.report import BROWSERS, Report, print_pdf, render
from leveret.spark_jobs.report_tables import VIEWS
from leveret.spark_jobs.scope import Scope
from tests.spark.conftest import Log

# A log in which no job has an answer.
NOTHING: dict[str, list[dict[str, Any]]] = {name: [] for name in VIEWS}
# An hour of one day.
HOUR = datetime(2026, 3, 2, 8, tzinfo=UTC)
SCOPE = Scope(1772438400_000000, 1772442000_000000)


def test_every_planted_problem_is_named(busy: Log, report: Report) -> None:
    planted = busy.truth.planted
    assert planted.slow_consumer is not None
    assert planted.poison is not None
    assert planted.burst is not None
    assert planted.backlog is not None
    assert planted.churn is not None
    assert planted.throttling is not None
    expected = [
        ("slow_consumers", f"consumer {planted.slow_consumer[2]} (user web, at 10.0."),
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


def test_a_quiet_log_yields_no_finding(quiet_report: Report) -> None:
    assert quiet_report.findings == []
    assert "Nothing out of the ordinary" in quiet_report.html


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
    page = render(answers, found, SCOPE)
    assert "<script" not in page
    assert page.count("&lt;script&gt;alert(1)") == 2


def poisoned(queue: str, msg: int, deliveries: int) -> dict[str, Any]:
    times = {"first_at": HOUR, "last_at": HOUR + timedelta(days=3), "consumers": 1}
    how = {"deliveries": deliveries, "reasons": "requeue", "acked": False}
    return {"vhost": "/", "queue": queue, "msg": msg, **times, **how}


def test_of_many_poison_messages_five_are_told_for_each_queue() -> None:
    """The answer has those with the most deliveries first, whatever their queue."""
    rows = [poisoned(queue, msg, 200 - msg) for msg in range(60) for queue in "ab"]
    texts = [one.text for one in findings.find({**NOTHING, "poison": rows}, SCOPE)]
    assert len(texts) == 12
    assert [text for text in texts if "55 more" in text] == [texts[5], texts[11]]


def test_times_have_a_date_if_there_is_more_than_one() -> None:
    answers = {**NOTHING, "poison": [poisoned("q", 7, 9)]}
    (of_a_day,) = findings.find(answers, SCOPE)
    (of_two,) = findings.find(answers, replace(SCOPE, last=SCOPE.last + 86_400_000_000))
    assert "from 08:00:00 on, within 3.0 days" in of_a_day.text
    assert "from 2026-03-02 08:00:00 on" in of_two.text


NEVER_USED = {
    "vhost": "/",
    "kind": "exchange",
    "name": "orders",
    "declared_at": HOUR,
    "last_used": None,
    "certain": True,
}


@pytest.mark.parametrize("share", [0.0, 0.01], ids=["objects", "sampled"])
def test_what_is_not_logged_is_not_called_unused(share: float) -> None:
    """Nor are chances of a sample: neighbours are taken together."""
    place = {"vhost": "/", "queue": "q"}
    burst = {**place, "window": HOUR, "metric": "messages in per second"}
    answers = {
        **NOTHING,
        "unused": [NEVER_USED],
        "anomalies": [{**burst, "value": 1.6, "median": 0.1, "score": 15.0}],
        "fairness": [
            {
                **place,
                "consumers": 4,
                "deliveries": 128,
                "busiest": "c",
                "gini": 0.5,
                "max_share": 0.6,
            }
        ],
    }
    assert len(findings.find(answers, SCOPE)) == 3
    scope = replace(SCOPE, samples={"b": share})
    assert findings.find(answers, scope) == []
    page = render(answers, [], scope)
    assert "A sample of messages does not tell." in page


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        pytest.param({"b": 1.0}, "40 messages of user web", id="all"),
        pytest.param({"b": 0.01, "c": 0.0}, "≈ 4,000 messages of user web", id="sample"),
        pytest.param({"b": 0.01, "c": 0.5}, "40 messages of the sample of user web", id="several"),
    ],
)
def test_counts_of_a_sample_are_estimates(samples: dict[str, float], said: str) -> None:
    row = {"vhost": "/", "exchange": "orders", "rk": "k", "user": "web"}
    answers = {**NOTHING, "unroutable": [{**row, "n": 40, "dropped": 30, "returned": 10}]}
    scope = replace(SCOPE, samples=samples)
    found = findings.find(answers, scope)
    assert said in found[0].text
    page = render(answers, found, scope)
    assert ("≈ 3,000</td>" in page) is ("≈" in said)


def test_a_forecast_says_what_full_is() -> None:
    row = {"vhost": "/", "queue": "q", "windows": 30, "depth": 900, "slope": 0.5}
    slopes = {"slope_low": 0.4, "slope_high": 0.6}
    etas = {"eta_s": 18_200.0, "eta_low_s": 15_000.0, "eta_high_s": 23_000.0}
    answers = {**NOTHING, "forecast": [{**row, **slopes, **etas}]}
    scope = replace(SCOPE, capacity=10_000)
    (found,) = findings.find(answers, scope)
    assert "it holds 10,000 (--capacity) in 5.1 hours (4.2 hours to 6.4 hours)" in found.text
    page = render(answers, [], scope)
    assert "full is 10,000 messages" in page
    assert "+0.5/s</td>" in page


def test_tables_have_a_row_for_each_queue_not_for_each_window() -> None:
    windows = [HOUR + timedelta(minutes=minute) for minute in range(3)]
    place = {"vhost": "/", "queue": "q", "came": 6, "went": 5, "slope": None}
    backlog = [
        {**place, "window": window, "depth": depth}
        for window, depth in zip(windows, (0, 9, 6), strict=True)
    ]
    (row,) = VIEWS["backlog"].rows(backlog, SCOPE)
    cells = [column.show(row, SCOPE) for column in VIEWS["backlog"].columns]
    assert cells == ["/", "q", "18", "15", "9", "08:01:00", "6", "+0.1/s"]


def test_message_ids_are_as_in_the_log() -> None:
    page = render({**NOTHING, "poison": [poisoned("q", 3676162086695217152, 9)]}, [], SCOPE)
    assert ">3676162086695217152</td>" in page


def test_only_what_is_not_used_is_listed() -> None:
    now = {**NEVER_USED, "name": "busy", "last_used": HOUR}
    long_ago = {**NEVER_USED, "name": "old", "last_used": HOUR - timedelta(days=8)}
    shown = VIEWS["unused"].rows([NEVER_USED, now, long_ago], SCOPE)
    assert [row["name"] for row in shown] == ["orders", "old"]


def test_what_needs_no_ack_does_not_look_lost(report: Report) -> None:
    assert not report.scope.auto_acked
    assert "need no ack" not in report.html
    page = render(NOTHING, [], replace(SCOPE, auto_acked=1200))
    assert "acked; 1,200 need no ack" in page


def test_the_page_is_printed(tmp_path: Path) -> None:
    if not any(shutil.which(name) for name in BROWSERS):
        pytest.skip("there is no Chromium or Chrome to print with")
    page = tmp_path / "report.html"
    page.write_text(render(NOTHING, [], SCOPE), encoding="utf-8")
    assert print_pdf(page).read_bytes().startswith(b"%PDF-")


def test_without_a_browser_there_is_no_pdf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LakeError, match="no browser"):
        print_pdf(tmp_path / "report.html")
