"""Who holds messages for long.

A consumer is its tag on its channel of its connection, in one queue. How long it held each message
is stamped on its answers. What makes it slow is the comparison with the others of its queue:
``times_others`` is its median by the middle one of the others' medians.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from leveret.spark_jobs.jobs.base import (
    COUNT,
    NUMBER,
    TEXT,
    Job,
    columns,
    count_of,
    is_,
    percentile_ms,
    percentiles,
)

SCHEMA = columns(
    vhost=TEXT,
    queue=TEXT,
    ctag=TEXT,
    boot=TEXT,
    conn=COUNT,
    ch=COUNT,
    user=TEXT,
    deliveries=COUNT,
    answers=COUNT,
    unacked=COUNT,
    hold_p50_ms=NUMBER,
    hold_p95_ms=NUMBER,
    hold_p99_ms=NUMBER,
    hold_max_ms=NUMBER,
    # Of all the time that consumers of the queue held messages.
    hold_share=NUMBER,
    times_others=NUMBER,
)

_CONSUMER = ("vhost", "queue", "ctag", "boot", "conn", "ch", "user")


def consumers(events: DataFrame) -> DataFrame:
    """One row per consumer that was given something."""
    answer = is_("ack", "nack", "reject")
    # What the broker took back by itself, or what went with its queue, was never answered, but is
    # not held either.
    answered = F.col("reason").isin("nack", "reject")
    taken_back = (is_("requeue") & ~answered) | is_("drop")
    given = is_("deliver") & (F.col("reason") != "auto_ack")
    return (
        events.where((F.col("ctag") != "") & (is_("deliver") | answer | taken_back))
        .groupBy(*_CONSUMER)
        .agg(
            count_of(is_("deliver")).alias("deliveries"),
            count_of(answer).alias("answers"),
            (count_of(given) - count_of(answer) - count_of(taken_back)).alias("unacked"),
            percentiles(F.when(answer, F.col("hold_us"))).alias("hold"),
            F.max(F.when(answer, F.col("hold_us"))).alias("hold_max"),
            F.sum(F.when(answer, F.col("hold_us"))).alias("held"),
        )
    )


def slow_consumers(events: DataFrame) -> DataFrame:
    # Few rows from here on: consumers, not messages.
    queue = Window.partitionBy("vhost", "queue")
    return (
        consumers(events)
        .withColumn("median", percentile_ms("hold", 0, "median"))
        .withColumn("medians", F.array_sort(F.collect_list("median").over(queue)))
        .withColumn("total", F.sum("held").over(queue))
        .select(
            *_CONSUMER,
            "deliveries",
            "answers",
            "unacked",
            F.col("median").alias("hold_p50_ms"),
            percentile_ms("hold", 1, "hold_p95_ms"),
            percentile_ms("hold", 2, "hold_p99_ms"),
            (F.col("hold_max") / 1000.0).alias("hold_max_ms"),
            F.try_divide("held", "total").alias("hold_share"),
            F.try_divide("median", _middle_of_others()).alias("times_others"),
        )
    )


def _middle_of_others() -> Column:
    """Of the sorted ``medians``, the middle one if ``median`` itself is left out."""
    others = F.size("medians") - 1
    middle = F.ceil(others / 2).cast("int")
    # From where it stood on, the others move up by one.
    moved = F.when(F.array_position("medians", F.col("median")) <= middle, middle + 1)
    return F.when(others > 0, F.element_at("medians", F.coalesce(moved, middle)))


JOB = Job(
    "slow_consumers",
    "Which consumers hold messages for long?",
    SCHEMA,
    lambda inputs: slow_consumers(inputs.events),
    ("-hold_p99_ms", "vhost", "queue", "ctag"),
)
