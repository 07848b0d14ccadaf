"""What each tenant costs: messages and bytes in and out, by virtual host and user."""

from __future__ import annotations

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from leveret.spark_jobs.jobs.base import (
    COUNT,
    NUMBER,
    TEXT,
    Job,
    columns,
    count_of,
    is_,
    sum_of,
)

SCHEMA = columns(
    vhost=TEXT,
    user=TEXT,
    msgs_in=COUNT,
    bytes_in=COUNT,
    msgs_out=COUNT,
    bytes_out=COUNT,
    connections=COUNT,
    # Of all bytes in and out.
    share=NUMBER,
)


def usage(events: DataFrame) -> DataFrame:
    out = is_("deliver", "get")
    everybody = Window.partitionBy()
    moved = F.col("bytes_in") + F.col("bytes_out")
    return (
        events.where((F.col("user") != "") & (is_("publish", "connection_open") | out))
        .groupBy("vhost", "user")
        .agg(
            count_of(is_("publish")).alias("msgs_in"),
            sum_of("size", is_("publish")).alias("bytes_in"),
            count_of(out).alias("msgs_out"),
            sum_of("size", out).alias("bytes_out"),
            count_of(is_("connection_open")).alias("connections"),
        )
        .withColumn("share", F.try_divide(moved, F.sum(moved).over(everybody)))
    )


JOB = Job(
    "usage",
    "What does each tenant use?",
    SCHEMA,
    lambda inputs: usage(inputs.events),
    ("-share", "vhost", "user"),
)
