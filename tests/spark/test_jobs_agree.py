"""Every job against DuckDB over the same segments, and against what the generator knows."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from pyspark.sql import SparkSession

from leveret.spark_jobs.cli import JOB_NAMES
from leveret.spark_jobs.jobs import JOBS
from leveret.spark_jobs.report import Report
from leveret.spark_jobs.runner import keep
from tests.spark.answers import assert_same, rows
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
}


@pytest.fixture(scope="session")
def oracle(busy: Log) -> Oracle:
    return Oracle(busy.truth.files, busy.inputs.options.window_s)


@pytest.fixture(scope="session")
def answer(spark: SparkSession, busy: Log, report: Report) -> Answer:
    """A job's answer as the lake keeps it; each job runs once for all tests."""

    def read(job: str) -> list[dict[str, Any]]:
        if job not in report.answers:
            return rows(keep(spark, JOBS[job], busy.inputs, busy.lake))
        path = busy.lake.result(JOBS[job].layer, job)
        return rows(spark.read.schema(JOBS[job].schema).parquet(path))

    return cache(read)


@pytest.mark.parametrize("job", QUESTIONS)
def test_job_agrees_with_duckdb(answer: Answer, oracle: Oracle, job: str) -> None:
    expected = oracle.ask(job)
    assert expected, "the log says nothing on this question"
    assert_same(answer(job), expected, KEYS[job])


def test_every_job_is_compared() -> None:
    """Throttling has a test of its own: DuckDB has no shorter way to walk a chain."""
    assert set(QUESTIONS) | {"throttling"} == set(JOBS)


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


def test_unroutable_messages_are_those_planted(busy: Log, answer: Answer) -> None:
    found = answer("unroutable")
    planted = busy.truth.planted
    keys = {(row["exchange"], row["rk"], row["user"]): row for row in found}
    assert {key: row["returned"] for key, row in keys.items()} == dict(planted.returned)
    assert {key: row["dropped"] for key, row in keys.items()} == dict(planted.dropped)


def test_the_poison_message_is_the_one_planted(busy: Log, answer: Answer) -> None:
    (row,) = answer("poison")
    assert (row["vhost"], row["queue"], row["msg"]) == busy.truth.planted.poison
    assert row["reasons"] == "delivery_limit, discard, nack, requeue"


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
