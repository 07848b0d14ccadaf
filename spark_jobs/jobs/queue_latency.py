"""How long messages wait in a queue, and how long until they are done.

Waiting is what the broker stamped on each first delivery. End to end is from publishing to the ack,
and needs the message's life; it is counted in the window in which the message was done.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from leveret.spark_jobs.jobs.base import (
    COUNT,
    NUMBER,
    TEXT,
    TIME,
    Inputs,
    Job,
    Options,
    columns,
    is_,
    percentile_ms,
    percentiles,
    window,
)
from leveret.spark_jobs.jobs.lifecycle import acked

SCHEMA = columns(
    window=TIME,
    vhost=TEXT,
    queue=TEXT,
    n=COUNT,
    wait_p50_ms=NUMBER,
    wait_p95_ms=NUMBER,
    wait_p99_ms=NUMBER,
    wait_max_ms=NUMBER,
    done=COUNT,
    e2e_p50_ms=NUMBER,
    e2e_p95_ms=NUMBER,
    e2e_p99_ms=NUMBER,
)

_KEYS = ("window", "vhost", "queue")


def waits(events: DataFrame, options: Options) -> DataFrame:
    """Percentiles of waiting, by window and queue; each message counts once, when first given."""
    first = is_("deliver", "get") & (F.col("delivery_count") == 0) & F.col("wait_us").isNotNull()
    return (
        events.where(first)
        .groupBy(window(options), "vhost", "queue")
        .agg(
            F.count(F.lit(1)).alias("n"),
            percentiles("wait_us").alias("wait"),
            (F.max("wait_us") / 1000.0).alias("wait_max_ms"),
        )
        .select(
            *_KEYS,
            "n",
            percentile_ms("wait", 0, "wait_p50_ms"),
            percentile_ms("wait", 1, "wait_p95_ms"),
            percentile_ms("wait", 2, "wait_p99_ms"),
            "wait_max_ms",
        )
    )


def end_to_end(done: DataFrame, options: Options) -> DataFrame:
    """Percentiles from publish to ack, by the window of the ack and queue."""
    return (
        done.groupBy(window(options), "vhost", "queue")
        .agg(F.count(F.lit(1)).alias("done"), percentiles("e2e_us").alias("e2e"))
        .select(
            *_KEYS,
            "done",
            percentile_ms("e2e", 0, "e2e_p50_ms"),
            percentile_ms("e2e", 1, "e2e_p95_ms"),
            percentile_ms("e2e", 2, "e2e_p99_ms"),
        )
    )


def queue_latency(inputs: Inputs) -> DataFrame:
    waiting = waits(inputs.events, inputs.options)
    done = end_to_end(acked(inputs.events), inputs.options)
    both = waiting.join(done, list(_KEYS), "full_outer")
    return both.fillna(0, ["n", "done"])


JOB = Job(
    "queue_latency",
    "How long do messages wait, and how long until they are done?",
    SCHEMA,
    queue_latency,
    ("vhost", "queue", "window"),
)
