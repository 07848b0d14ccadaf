"""How much goes through, window by window."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from leveret.broker.event_log.schema import MESSAGE_KINDS
from leveret.spark_jobs.jobs.base import (
    COUNT,
    NUMBER,
    TEXT,
    TIME,
    Job,
    Options,
    columns,
    is_,
    window,
)

SCHEMA = columns(window=TIME, vhost=TEXT, ev=TEXT, n=COUNT, bytes=COUNT, per_s=NUMBER)

_KINDS = tuple(kind.name for kind in MESSAGE_KINDS)


def throughput(events: DataFrame, options: Options) -> DataFrame:
    """Messages, not lines: an event that stands for several counts as many.

    Where a sample is logged, of the sample; purge, paged_out and paged_in are of all messages.
    """
    return (
        events.where(is_(*_KINDS))
        .groupBy(window(options), "vhost", "ev")
        .agg(F.sum("n").alias("n"), F.sum("size").alias("bytes"))
        .withColumn("per_s", F.col("n") / options.window_s)
    )


JOB = Job(
    "throughput",
    "How many messages and bytes pass, and when?",
    SCHEMA,
    lambda inputs: throughput(inputs.events, inputs.options),
    ("window", "vhost", "ev"),
)
