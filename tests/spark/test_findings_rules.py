"""What single rules make of answers: no Spark here."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from leveret.spark_jobs import findings
from leveret.spark_jobs.report_tables import VIEWS
from leveret.spark_jobs.scope import Scope

# A log in which no job has an answer.
NOTHING: dict[str, list[dict[str, Any]]] = {name: [] for name in VIEWS}
# An hour of one day.
HOUR = datetime(2026, 3, 2, 8, tzinfo=UTC)
SCOPE = Scope(1772438400_000000, 1772442000_000000)
PLACE = {"vhost": "/", "queue": "q"}


def texts(**answers: list[dict[str, Any]]) -> list[str]:
    return [one.text for one in findings.find({**NOTHING, **answers}, SCOPE)]


def boot(name: str, hour: int, **fields: object) -> dict[str, Any]:
    time = datetime(2026, 3, 2, hour, tzinfo=UTC)
    well = {"events": 9, "missing": 0, "duplicates": 0, "shed": 0, "malformed": 0}
    ends = {"first_at": time, "last_at": time, "has_stop": True, "sample": 1.0}
    return {"boot": name, **well, **ends, **fields}


def test_a_broken_log_is_told() -> None:
    quality = [
        boot("one", 8, has_stop=False),
        boot("two", 9, missing=3, shed=7),
        boot("three", 10, has_stop=False),
        boot("", 8, malformed=2, first_at=None, has_stop=None),
    ]
    said = texts(quality=quality)
    assert len(said) == 4, "the last boot may still run"
    for part in ("boot one ended", "3 lines of the log are missing", "shed 7 events", "2 lines"):
        assert any(part in text for text in said), part


def test_dead_letters_that_reach_nothing_are_a_problem() -> None:
    row = {"vhost": "/", "queue": "q", "exchange": "dlx", "rk": "k", "reason": "expired"}
    answers = {**NOTHING, "dead_letters": [{**row, "n": 5, "lost": 2}]}
    found = findings.find(answers, SCOPE)
    assert [(one.severity, "2 messages" in one.text) for one in found] == [
        ("problem", True),
        ("warning", False),
    ]


def test_one_consumer_that_gets_everything_is_told() -> None:
    row = {"vhost": "/", "queue": "q", "consumers": 4, "deliveries": 1000, "busiest": "c-17"}
    answers = {**NOTHING, "fairness": [{**row, "gini": 0.7, "max_share": 0.95}]}
    (found,) = findings.find(answers, SCOPE)
    assert "c-17 got 95 % of 1,000 deliveries" in found.text


def letter(key: str, n: int = 1, **fields: object) -> dict[str, Any]:
    place = {**PLACE, "exchange": "dlx", "reason": "rejected"}
    return {**place, "rk": key, "n": n, "lost": 0, **fields}


def suspect(msg: int, reasons: str, *, acked: bool = False) -> dict[str, Any]:
    times = {"first_at": HOUR, "last_at": HOUR, "consumers": 1, "deliveries": 5}
    return {**PLACE, "msg": msg, **times, "reasons": reasons, "acked": acked}


def test_dead_letters_are_told_once_not_for_each_key() -> None:
    rows = [letter(f"key.{number:04}", 2 if number < 3 else 1) for number in range(2000)]
    (text,) = texts(dead_letters=rows)
    assert "2,003 messages dead-lettered (rejected) to exchange dlx" in text
    assert "(2,000 keys: 'key.0000', 'key.0001', 'key.0002', …)" in text
    lost = [{**row, "lost": 1} for row in rows]
    problem, _ = texts(dead_letters=lost)
    assert "2,000 messages went to dead-letter exchange dlx" in problem
    assert "(2,000 keys: 'key.0000'" in problem


def test_dead_letters_that_are_findings_already_are_not_told_again() -> None:
    """One poison message does not hide the others, only because their keys differ."""
    poison = [suspect(1, "nack, rejected, requeue")]
    assert not any(
        "dead-lettered (" in text for text in texts(poison=poison, dead_letters=[letter("a")])
    )
    both = texts(poison=poison, dead_letters=[letter("a"), letter("b")])
    assert any("2 messages dead-lettered (rejected)" in text for text in both)
    expired = texts(poison=poison, dead_letters=[letter("a", reason="expired")])
    assert any("1 message dead-lettered (expired)" in text for text in expired)


@pytest.mark.parametrize(
    ("reasons", "acked", "end"),
    [
        ("nack, rejected", True, "(acked in the end)"),
        ("nack, rejected", False, "(then rejected and dead-lettered)"),
        ("delivery_limit, nack", False, "(then removed by the delivery limit)"),
        ("nack", False, "(never acked)"),
    ],
)
def test_how_a_poison_message_ended(reasons: str, acked: bool, end: str) -> None:
    (text,) = texts(poison=[suspect(1, reasons, acked=acked)])
    assert end in text


def rise(minute: int, value: float = 4000.0) -> dict[str, Any]:
    window = HOUR + timedelta(minutes=minute)
    return {**PLACE, "window": window, "metric": "p99 wait in ms", "value": value} | {
        "median": 20.0,
        "score": 50.0,
    }


@pytest.mark.parametrize(
    ("minutes", "said"),
    [
        pytest.param([5], "at 08:05:00.", id="one"),
        pytest.param([6, 5, 7], "between 08:05:00 and 08:07:00.", id="run"),
        pytest.param([5, 500, 502, 503], "at 08:05:00 (and 2 other times).", id="apart"),
    ],
)
def test_a_rise_is_told_as_long_as_it_lasted(minutes: list[int], said: str) -> None:
    worst, *rest = minutes
    (text,) = texts(anomalies=[rise(worst), *(rise(minute, 3000.0) for minute in rest)])
    assert f"p99 wait rose from 20 ms to 4.0 s {said}" in text


def test_who_held_messages_during_a_rise() -> None:
    """Not who was there in an earlier boot only."""
    slow = {**PLACE, "ctag": "c-17", "boot": "two", "times_others": 9.0, "hold_share": 0.8}
    slow |= {"answers": 0, "unacked": 0}
    quality = [boot("one", 6), boot("two", 8, last_at=HOUR + timedelta(hours=1))]
    (text,) = texts(anomalies=[rise(5)], slow_consumers=[slow], quality=quality)
    assert text == (
        "queue q in vhost /: p99 wait rose from 20 ms to 4.0 s at 08:05:00 while consumer c-17 "
        "held 80 % of deliveries (by time held, over the whole time)."
    )
    earlier = {**slow, "boot": "one"}
    (text,) = texts(anomalies=[rise(5)], slow_consumers=[earlier], quality=quality)
    assert "c-17" not in text


def test_what_is_not_certain_is_not_called_unused() -> None:
    row = {"vhost": "/", "kind": "queue", "last_used": None}
    rows = [{**row, "name": name, "certain": name == "sure"} for name in ("sure", "perhaps")]
    assert texts(unused=rows) == ["vhost /: never used in this time: queue sure."]
