"""Where messages are dead-lettered from, where to, and why."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from leveret.spark_jobs.jobs.base import (
    COUNT,
    TEXT,
    TIME,
    Job,
    at,
    columns,
    count_of,
    is_,
)

SCHEMA = columns(
    vhost=TEXT,
    queue=TEXT,
    exchange=TEXT,
    rk=TEXT,
    reason=TEXT,
    n=COUNT,
    bytes=COUNT,
    # Dead-lettered to an exchange from which no queue took them: gone.
    lost=COUNT,
    first_at=TIME,
    last_at=TIME,
)


def dead_letters(events: DataFrame) -> DataFrame:
    return (
        events.where(is_("dead_letter"))
        .groupBy("vhost", "queue", "exchange", "rk", "reason")
        .agg(
            F.count(F.lit(1)).alias("n"),
            F.sum("size").alias("bytes"),
            count_of(F.col("routed") == 0).alias("lost"),
            at(F.min("ts")).alias("first_at"),
            at(F.max("ts")).alias("last_at"),
        )
    )


JOB = Job(
    "dead_letters",
    "Which messages are dead-lettered, and why?",
    SCHEMA,
    lambda inputs: dead_letters(inputs.events),
    ("-n", "vhost", "queue", "reason"),
)
