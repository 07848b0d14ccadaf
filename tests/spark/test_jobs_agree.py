"""Every job against DuckDB over the same segments, and against what the generator knows."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from leveret.broker.event_log.schema import Event, encode_lines
from leveret.spark_jobs.cli import JOB_NAMES
from leveret.spark_jobs.generator_load import event
from leveret.spark_jobs.jobs import JOBS
from leveret.spark_jobs.jobs.base import Options
from leveret.spark_jobs.lake import Selection
from leveret.spark_jobs.report import Report
from leveret.spark_jobs.runner import open_inputs
from tests.spark.answers import as_numbered, assert_same, frame, in_micros, inputs, rows
from tests.spark.conftest import Log
from tests.spark.oracle import QUESTIONS, Oracle

Answer = Callable[[str], list[dict[str, Any]]]

KEYS = {
    "throughput": ("window", "vhost", "ev"),
    "queue_latency": ("window", "vhost", "queue"),
    "backlog": ("window", "vhost", "queue"),
    "slow_consumers": ("vhost", "queue", "ctag"),
    "fairness": ("vhost", "queue"),
    "poison": ("vhost", "queue", "msg"),
    "dead_letters": ("vhost", "queue", "exchange", "rk", "reason"),
    "unroutable": ("vhost", "exchange", "rk", "user"),
    "hot_keys": ("vhost", "exchange", "rk"),
    "churn": ("user", "host"),
    "usage": ("vhost", "user"),
    "unused": ("vhost", "kind", "name"),
    "quality": ("boot",),
    "forecast": ("vhost", "queue"),
    "lifecycle": ("vhost", "queue", "msg"),
    "anomalies": ("window", "vhost", "queue", "metric"),
    "throttling": ("who", "waited_for", "path"),
}


@pytest.fixture(scope="session")
def oracle(busy: Log) -> Oracle:
    return Oracle(busy.truth.files, busy.inputs.options.window_s)


@pytest.fixture(scope="session")
def answer(busy: Log, report: Report) -> Answer:
    """A job's answer, as the report has it; each job runs once for all tests."""

    def read(job: str) -> list[dict[str, Any]]:
        if job in report.answers:
            return in_micros(report.answers[job])
        return rows(JOBS[job].run(busy.inputs))

    return cache(read)


@pytest.mark.parametrize("job", QUESTIONS)
def test_job_agrees_with_duckdb(answer: Answer, oracle: Oracle, job: str) -> None:
    expected = oracle.ask(job)
    assert expected, "the log says nothing on this question"
    assert_same(answer(job), expected, KEYS[job])


def test_every_job_is_compared() -> None:
    assert set(QUESTIONS) == set(KEYS) == set(JOBS)


def troubled() -> list[Event]:
    """Two restarts, and queues that are purged, deleted, recovered and forgotten."""
    events: list[Event] = []

    def add(boot: str, ev: str, **fields: object) -> None:
        at = 1_000_000 * (100 * "abc".index(boot) + len(events))
        if "ctag" in fields:
            fields["ctag"] = f"c-{boot}"
        events.append(event(at, ev, boot=boot, **fields))

    def send(boot: str, queue: str, *numbers: int, persistent: bool = True) -> None:
        for msg in numbers:
            place = {"vhost": "/", "queue": queue, "msg": msg}
            add(boot, "publish", **place, persistent=persistent, routed=1)

    def of(queue: str, msg: int = 0, **fields: object) -> dict[str, object]:
        return {"vhost": "/", "queue": queue, "msg": msg, **fields}

    taker = {"ctag": "c", "conn": 1, "ch": 1}
    add("a", "broker_start")
    send("a", "kept", 1, 2, 3)
    send("a", "kept", 4, 5, persistent=False)
    send("a", "forgotten", 6, 7)
    send("a", "purged", 8, 9, 10)
    add("a", "deliver", **of("purged", 8), **taker, depth=2)
    add("a", "purge", **of("purged"), n=2, depth=0)
    send("a", "purged", 11)
    send("a", "deleted", 12, 13, 14)
    add("a", "deliver", **of("deleted", 12), **taker, depth=2)
    add("a", "drop", **of("deleted", 12), **taker, reason="queue_deleted")
    add("a", "drop", **of("deleted", 13), reason="queue_deleted")
    add("a", "queue_delete", **of("deleted"), n=2)
    send("a", "deleted", 15)
    add("a", "deliver", **of("kept", 1), **taker, depth=4)
    # Its publish was before the log began.
    add("a", "deliver", **of("kept", 18), **taker, depth=4)
    for msg in (1, 6):
        add("a", "credit_blocked", attrs={"who": f"channel:{msg}/1", "by": "queue://kept"})
    add("b", "broker_start")
    add("b", "queue_declare", **of("kept"), reason="recovered", depth=3)
    add("b", "queue_declare", **of("purged"), reason="recovered", depth=2)
    send("b", "forgotten", 16)
    add("b", "purge", **of("purged"), n=2, depth=0)
    send("b", "limited", 17)
    for _ in range(2):
        add("b", "deliver", **of("limited", 17), **taker, depth=0, wait_us=1)
        add("b", "requeue", **of("limited", 17), **taker, reason="consumer_timeout")
    add("b", "dead_letter", **of("limited", 17), reason="delivery_limit")
    send("b", "without-dlx", 19)
    add("b", "deliver", **of("without-dlx", 19), **taker, depth=0, wait_us=1)
    add("b", "requeue", **of("without-dlx", 19), **taker, reason="consumer_timeout")
    add("b", "drop", **of("without-dlx", 19), reason="delivery_limit")
    add("b", "deliver", **of("kept", 2), **taker, wait_us=2, depth=2)
    add("b", "ack", **of("kept", 2), **taker, hold_us=5)
    add("c", "broker_start")
    add("c", "queue_declare", **of("kept"), reason="recovered", depth=2)
    add("c", "broker_stop")
    return events


def assert_agree(
    spark: SparkSession, folder: Path, events: list[Event], *jobs: str
) -> dict[str, list[dict[str, Any]]]:
    """The jobs' answers, which are DuckDB's, too."""
    lines = folder / "lines.jsonl"
    lines.write_bytes(encode_lines(as_numbered(events)))
    oracle = Oracle([lines], window_s=10)
    given = inputs(frame(spark, *events), Options(window_s=10))
    found = {job: rows(JOBS[job].run(given)) for job in jobs}
    for job, answer in found.items():
        assert_same(answer, oracle.ask(job), KEYS[job])
    return found


def test_restarts_purges_and_deletions(spark: SparkSession, tmp_path: Path) -> None:
    jobs = ("backlog", "lifecycle", "slow_consumers", "forecast", "throttling", "poison")
    found = assert_agree(spark, tmp_path, troubled(), *jobs)
    last = {row["queue"]: row for row in sorted(found["backlog"], key=lambda row: row["window"])}
    assert {queue: row["depth"] for queue, row in last.items()} == {
        **{"kept": 2, "forgotten": 0, "purged": 0, "deleted": 0, "limited": 0, "without-dlx": 0}
    }
    assert {row["msg"]: row["outcome"] for row in found["lifecycle"]} == {
        **{1: "ready", 2: "acked", 3: "ready", 4: "lost", 5: "lost", 6: "lost", 7: "lost"},
        **{8: "purged", 9: "purged", 10: "purged", 11: "purged", 12: "dropped", 13: "dropped"},
        **{14: "dropped", 15: "lost", 16: "lost", 17: "dead_lettered", 18: "ready", 19: "dropped"},
    }
    assert {row["msg"]: row["deliveries"] for row in found["poison"]} == {17: 2, 19: 1}


def shared() -> list[Event]:
    """Queues with three consumers each, and a restart after which they are others."""
    events: list[Event] = []

    def add(boot: str, ev: str, queue: str, **fields: object) -> None:
        events.append(event(len(events), ev, boot=boot, vhost="/", queue=queue, **fields))

    for boot, messages in (("a", 3), ("b", 12)):
        add(boot, "queue_declare", "even", attrs={"durable": "true"})
        add(boot, "queue_declare", "single", attrs={"x-single-active-consumer": "true"})
        for queue in ("even", "single", "standby"):
            for conn in (1, 2, 3):
                attrs = {"x-priority": "5"} if queue == "standby" and conn == 1 else {}
                add(boot, "consume", queue, conn=conn, ctag=f"{boot}-{conn}", attrs=attrs)
            for number in range(messages):
                conn = 1 + number % 3 if queue == "even" else 1
                add(boot, "deliver", queue, conn=conn, ctag=f"{boot}-{conn}", msg=number + 1)
    # None of its consumers says more than the others.
    add("a", "consume", "same", conn=1, ctag="c", attrs={"x-priority": "0"})
    add("a", "consume", "same", conn=2, ctag="d")
    for _ in range(4):
        add("a", "deliver", "same", conn=2, ctag="d", msg=1)
    return events


def test_shares_are_compared_where_they_should_be_even(spark: SparkSession, tmp_path: Path) -> None:
    found = assert_agree(spark, tmp_path, shared(), "fairness")["fairness"]
    shown = {row["queue"]: (row["consumers"], row["deliveries"], row["gini"]) for row in found}
    assert shown == {"even": (3, 12, 0.0), "same": (2, 4, 0.5)}


def test_the_command_line_names_every_job() -> None:
    assert tuple(JOBS) == JOB_NAMES


def test_figures_are_what_was_generated(busy: Log, answer: Answer) -> None:
    truth = busy.truth
    assert busy.inputs.events.count() == truth.events
    (quality,) = answer("quality")
    assert (quality["events"], quality["missing"], quality["duplicates"]) == (truth.events, 0, 0)
    assert (quality["has_start"], quality["has_stop"], quality["sample"]) == (True, True, 1.0)
    by_ev = {row["ev"]: row["count"] for row in busy.inputs.events.groupBy("ev").count().collect()}
    assert by_ev == dict(truth.by_ev)
    waits = answer("queue_latency")
    given: dict[tuple[str, str], int] = {}
    for row in waits:
        queue = (row["vhost"], row["queue"])
        given[queue] = given.get(queue, 0) + row["n"]
    for queue, count in truth.delivered.items():
        # The poison message was given for the first time once, too.
        poison = truth.planted.poison
        assert given[queue] == count + (poison is not None and queue == poison[:2])


def test_nothing_is_missing_where_a_part_is_asked_for(spark: SparkSession, busy: Log) -> None:
    part = open_inputs(
        spark, busy.lake, Selection(vhost="shop", queue="orders"), Options(), auto_window=False
    )
    (quality,) = rows(JOBS["quality"].run(part))
    assert (quality["events"], quality["missing"]) == (busy.truth.events, 0)


def test_unroutable_messages_are_those_planted(busy: Log, answer: Answer) -> None:
    found = answer("unroutable")
    planted = busy.truth.planted
    keys = {(row["exchange"], row["rk"], row["user"]): row for row in found}
    assert {key: row["returned"] for key, row in keys.items()} == dict(planted.returned)
    assert {key: row["dropped"] for key, row in keys.items()} == dict(planted.dropped)


def test_the_poison_message_is_the_one_planted(busy: Log, answer: Answer) -> None:
    (row,) = answer("poison")
    assert (row["vhost"], row["queue"], row["msg"]) == busy.truth.planted.poison
    assert row["reasons"] == "delivery_limit, nack, requeue"


def test_the_backlog_ends_with_what_was_left(busy: Log, answer: Answer) -> None:
    assert busy.truth.planted.backlog is not None
    vhost, queue, left = busy.truth.planted.backlog
    mine = [r for r in answer("backlog") if (r["vhost"], r["queue"]) == (vhost, queue)]
    assert max(mine, key=lambda row: row["window"])["depth"] == left


def test_unused_objects_are_those_planted(busy: Log, answer: Answer) -> None:
    never = {
        (row["vhost"], row["kind"], row["name"])
        for row in answer("unused")
        if row["last_used"] is None
    }
    assert never == busy.truth.planted.unused


def test_throttling_is_traced_to_its_root(busy: Log, answer: Answer) -> None:
    assert busy.truth.planted.throttling is not None
    root, durations = busy.truth.planted.throttling
    found = answer("throttling")
    assert {row["root"] for row in found} == {root}
    assert {row["who"]: row["blocked_s"] for row in found} == {
        who: us / 1e6 for who, us in durations.items()
    }
    (reader,) = (row for row in found if row["who"] == "reader:10")
    assert reader["path"] == "reader:10 <- channel:10/1 <- queue:shop/orders <- store:shop"


@pytest.mark.parametrize("job", JOBS)
def test_answers_have_the_columns_they_promise(busy: Log, job: str) -> None:
    """So that a lake's readers need not ask which version of a job wrote there."""
    assert JOBS[job].run(busy.inputs).dtypes == [
        (field.name, field.dataType.simpleString()) for field in JOBS[job].schema.fields
    ]
