"""Charts of the report, whatever the names in the log."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from leveret.spark_jobs import charts
from leveret.spark_jobs.report_tables import VIEWS
from leveret.spark_jobs.scope import Scope

NOTHING: dict[str, list[dict[str, Any]]] = {name: [] for name in VIEWS}
HOUR = datetime(2026, 3, 2, 8, tzinfo=UTC)
SCOPE = Scope(1772438400_000000, 1772442000_000000)


def holder(queue: str, ctag: str, p50: float) -> dict[str, Any]:
    times = {"hold_p50_ms": p50, "hold_p99_ms": 2 * p50}
    return {"vhost": "/", "queue": queue, "ctag": ctag, **times}


@pytest.mark.parametrize(
    ("hours", "label"), [(1, "08:30:00"), (20, "12:00"), (72, "03-03 00:00"), (2000, "2026-04")]
)
def test_time_axes_say_when(hours: int, label: str) -> None:
    row = {"vhost": "/", "ev": "publish", "n": 6, "bytes": 6, "per_s": 0.1}
    windows = [HOUR + timedelta(hours=hours) * step / 20 for step in range(21)]
    answers = {**NOTHING, "throughput": [{**row, "window": window} for window in windows]}
    ((_, svg),) = charts.draw(answers, SCOPE)
    assert label in svg


def test_dollars_in_names_are_no_formulas() -> None:
    name = "$a$ $\\frac$"
    windows = [HOUR + timedelta(minutes=minute) for minute in range(3)]
    place = {"vhost": name, "queue": name}
    share = {"share": 1.0, "bytes_in": 1, "bytes_out": 1}
    waits = zip(windows, (20.0, 40.0, 60.0), strict=True)
    answers = {
        **NOTHING,
        "queue_latency": [{**place, "window": at, "wait_p99_ms": p99} for at, p99 in waits],
        "backlog": [{**place, "window": at, "depth": 1} for at in windows],
        "slow_consumers": [holder(name, name, 5.0)],
        "usage": [{"vhost": name, "user": name, **share}],
    }
    drawn = dict(charts.draw(answers, SCOPE))
    assert len(drawn) == 4
    assert all(f"{name}</text>" in svg for svg in drawn.values())
    # Nor are there any beside the axis, where it has less than a decade.
    assert "mathdefault" not in drawn["Waiting in the queue, p99"]


def test_consumers_of_one_name_have_a_bar_each() -> None:
    answers = {**NOTHING, "slow_consumers": [holder("q", "ctag1", p50) for p50 in (5.0, 9.0, 70.0)]}
    ((_, svg),) = charts.draw(answers, SCOPE)
    assert svg.count(">//q: ctag1<") == 3
    heights = re.findall(r'd="M \S+ (\S+)[^"]*"[^>]*fill: #56b4e9', svg)
    # The fourth is in the legend.
    assert len(set(heights)) == 4
