"""Clients that connect again and again, or cannot log in.

By user and address (ports change with every connection). How long a connection was open is stamped
on its closing. Asked about one queue, only connections that had to do with it count; those that
were refused did not.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from leveret.spark_jobs.jobs.base import (
    COUNT,
    NUMBER,
    TEXT,
    Inputs,
    Job,
    Options,
    columns,
    count_of,
    is_,
)

SCHEMA = columns(
    user=TEXT,
    host=TEXT,
    opens=COUNT,
    closes=COUNT,
    short=COUNT,
    median_life_s=NUMBER,
    channels=COUNT,
    refused=COUNT,
)


def churn(events: DataFrame, options: Options) -> DataFrame:
    host = F.regexp_replace("peer", r":\d+$", "").alias("host")
    closing = is_("connection_close")
    life_us = F.when(closing, F.col("hold_us"))
    return (
        events.where(is_("connection_open", "connection_close", "channel_open", "auth_fail"))
        .groupBy("user", host)
        .agg(
            count_of(is_("connection_open")).alias("opens"),
            count_of(closing).alias("closes"),
            count_of(life_us < options.short_s * 1_000_000).alias("short"),
            (F.percentile_approx(life_us, 0.5) / 1_000_000.0).alias("median_life_s"),
            count_of(is_("channel_open")).alias("channels"),
            count_of(is_("auth_fail")).alias("refused"),
        )
    )


def of_queue(events: DataFrame, queue: str) -> DataFrame:
    """The events of connections that had to do with a queue."""
    clients = events.where((F.col("queue") == queue) & (F.col("conn") != 0))
    return events.join(clients.select("boot", "conn").distinct(), ["boot", "conn"], "left_semi")


def _of(inputs: Inputs) -> DataFrame:
    if inputs.queue is None:
        return inputs.events
    return of_queue(inputs.events, inputs.queue)


JOB = Job(
    "churn",
    "Which clients connect again and again?",
    SCHEMA,
    lambda inputs: churn(_of(inputs), inputs.options),
    ("-opens", "-refused", "user", "host"),
)
