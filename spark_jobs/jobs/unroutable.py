"""Messages that no queue took: returned to their publishers, or dropped without a word."""

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
    exchange=TEXT,
    rk=TEXT,
    user=TEXT,
    n=COUNT,
    returned=COUNT,
    dropped=COUNT,
    bytes=COUNT,
    first_at=TIME,
    last_at=TIME,
)


def unroutable(events: DataFrame) -> DataFrame:
    lost = is_("return") | (is_("drop") & (F.col("reason") == "unroutable"))
    return (
        events.where(lost)
        .groupBy("vhost", "exchange", "rk", "user")
        .agg(
            F.count(F.lit(1)).alias("n"),
            count_of(is_("return")).alias("returned"),
            count_of(is_("drop")).alias("dropped"),
            F.sum("size").alias("bytes"),
            at(F.min("ts")).alias("first_at"),
            at(F.max("ts")).alias("last_at"),
        )
    )


JOB = Job(
    "unroutable",
    "Which messages does no queue take?",
    SCHEMA,
    lambda inputs: unroutable(inputs.events),
    ("-n", "vhost", "exchange", "rk"),
)
