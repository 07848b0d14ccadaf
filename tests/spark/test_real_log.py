"""Every job on a log that a real broker wrote, for clients whose doings are known."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pika  # type: ignore[import-untyped]
import pytest
from pyspark.sql import SparkSession

from leveret.spark_jobs.ingest import ingest
from leveret.spark_jobs.jobs import JOBS
from leveret.spark_jobs.jobs.base import Options
from leveret.spark_jobs.lake import Lake, Selection
from leveret.spark_jobs.report import Report, make
from leveret.spark_jobs.runner import keep, open_inputs, rows_of
from tests.spark.answers import assert_same, rows
from tests.spark.oracle import Oracle
from tests.spark.test_jobs_agree import KEYS
from tests.support.broker_process import running_broker

# The fast set has every job on a real log in test_demo.py.
pytestmark = pytest.mark.slow

MESSAGES = 30
RETRIES = 6
WINDOW_S = 10


def work(url: str) -> None:
    """Three dozen messages: acked, refused again and again, dead-lettered, fanned out, lost."""
    connection = pika.BlockingConnection(pika.URLParameters(url))
    channel = connection.channel()
    channel.exchange_declare("dlx", "direct")
    channel.exchange_declare("fan", "fanout")
    channel.exchange_declare("t", "topic")
    channel.queue_declare("work", arguments={"x-dead-letter-exchange": "dlx"})
    for queue, exchange in (("dead", "dlx"), ("a", "fan"), ("b", "fan")):
        channel.queue_declare(queue)
        channel.queue_bind(queue, exchange, "work")
    channel.queue_declare("idle")
    for _ in range(MESSAGES):
        channel.basic_publish("", "work", b"x" * 100)
    for _ in range(5):
        channel.basic_publish("fan", "", b"y" * 10)
    for number in range(3):
        channel.basic_publish("t", "no.where", b"z", mandatory=number == 0)
    for _ in range(RETRIES):
        method, _, _ = channel.basic_get("work")
        channel.basic_nack(method.delivery_tag, requeue=True)
    channel.basic_qos(prefetch_count=1)
    for number, (method, _, _) in enumerate(channel.consume("work"), 1):
        if number == 1:
            channel.basic_reject(method.delivery_tag, requeue=False)
        elif number < MESSAGES:
            channel.basic_ack(method.delivery_tag)
        else:
            # The last one is held until the connection ends.
            break
    for _ in range(2):
        channel.basic_get("a", auto_ack=True)
    channel.queue_purge("b")
    connection.close()


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data folder of a broker that has stopped."""
    folder = tmp_path_factory.mktemp("real")
    with running_broker(folder, "--event-log", "all") as broker:
        work(broker.url)
    return folder / "data"


@pytest.fixture(scope="module")
def lake(spark: SparkSession, log: Path, tmp_path_factory: pytest.TempPathFactory) -> Lake:
    lake = Lake(str(tmp_path_factory.mktemp("lake")))
    done = ingest(spark, str(log), lake)
    assert done.malformed == 0
    return lake


@pytest.fixture(scope="module")
def report(spark: SparkSession, lake: Lake) -> Report:
    options = Options(window_s=WINDOW_S)
    inputs = open_inputs(spark, lake, Selection(), options, auto_window=False)
    return make(spark, inputs, lake)


def only(given: Any) -> dict[str, Any]:
    (row,) = given
    return dict(row)


@pytest.mark.parametrize(
    "job", ["throughput", "hot_keys", "unroutable", "dead_letters", "churn", "quality"]
)
def test_duckdb_agrees(
    spark: SparkSession, log: Path, lake: Lake, report: Report, job: str
) -> None:
    oracle = Oracle(sorted(log.glob("events/*/*.jsonl")), WINDOW_S)
    kept = spark.read.schema(JOBS[job].schema).parquet(lake.result("gold", job))
    assert_same(rows(kept), oracle.ask(job), KEYS[job])


def test_every_message_ends_as_it_did(spark: SparkSession, lake: Lake) -> None:
    inputs = open_inputs(spark, lake, Selection(), Options(), auto_window=False)
    lives = rows_of(keep(spark, JOBS["lifecycle"], inputs, lake))
    assert Counter((row["queue"], row["outcome"]) for row in lives) == {
        ("work", "acked"): MESSAGES - 2,
        ("work", "dead_lettered"): 1,
        ("work", "ready"): 1,
        ("dead", "ready"): 1,
        ("a", "acked"): 2,
        ("a", "ready"): 3,
        ("b", "purged"): 5,
        ("", "returned"): 1,
        ("", "dropped"): 2,
    }


def test_the_log_is_whole(report: Report) -> None:
    row = only(report.answers["quality"])
    assert (row["missing"], row["duplicates"], row["shed"]) == (0, 0, 0)
    assert (row["has_start"], row["has_stop"], row["sample"]) == (True, True, 1.0)


def test_who_did_what(report: Report) -> None:
    usage = only(report.answers["usage"])
    assert (usage["vhost"], usage["user"], usage["connections"]) == ("/", "guest", 1)
    assert usage["msgs_in"] == MESSAGES + 5 + 3
    assert usage["bytes_in"] == 100 * MESSAGES + 5 * 10 + 3
    assert usage["msgs_out"] == MESSAGES + RETRIES + 2
    consumer = only(report.answers["slow_consumers"])
    assert (consumer["deliveries"], consumer["answers"]) == (MESSAGES, MESSAGES - 1)
    assert consumer["unacked"] == 0, "it went back when the connection was closed"
    assert only(report.answers["fairness"])["consumers"] == 1


def test_depths_are_what_was_left(report: Report) -> None:
    left = {row["queue"]: row["depth"] for row in report.answers["backlog"]}
    assert left == {"work": 1, "dead": 1, "a": 3, "b": 0}


def test_problems_are_named(report: Report) -> None:
    poison = only(report.answers["poison"])
    assert (poison["queue"], poison["deliveries"]) == ("work", RETRIES + 1)
    assert {finding.job for finding in report.findings} == {"poison", "unroutable", "unused"}
    texts = " ".join(finding.text for finding in report.findings)
    assert f"was delivered {RETRIES + 1} times" in texts
    assert "2 were dropped without notice, 1 returned" in texts
    assert "never used in this time: queue idle." in texts
