"""Who holds messages for long.

A consumer is its tag on its channel of its connection, in one queue. How long it held each message
is stamped on its answers. What makes it slow is the comparison with the others of its queue:
``times_others`` is its median by the middle one of the others' medians.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
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
    # What the broker took back by itself was never answered, but is not held either.
    taken_back = is_("requeue") & F.col("reason").isin("recover", "channel_closed")
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
    found = consumers(events)
    queue = ["vhost", "queue"]
    # Few rows from here on: consumers, not messages.
    mine = found.alias("mine")
    others = found.alias("others")
    same = [F.col(f"mine.{name}").eqNullSafe(F.col(f"others.{name}")) for name in _CONSUMER]
    is_me = same[0]
    for column in same[1:]:
        is_me &= column
    in_queue = (F.col("mine.vhost") == F.col("others.vhost")) & (
        F.col("mine.queue") == F.col("others.queue")
    )
    others_median = (
        mine.join(others, in_queue & ~is_me)
        .groupBy(*(F.col(f"mine.{name}") for name in _CONSUMER))
        .agg(F.percentile_approx(F.col("others.hold")[0], 0.5).alias("others_p50"))
    )
    totals = found.groupBy(*queue).agg(F.sum("held").alias("total"))
    return (
        found.join(others_median, list(_CONSUMER), "left")
        .join(totals, queue)
        .select(
            *_CONSUMER,
            "deliveries",
            "answers",
            "unacked",
            percentile_ms("hold", 0, "hold_p50_ms"),
            percentile_ms("hold", 1, "hold_p95_ms"),
            percentile_ms("hold", 2, "hold_p99_ms"),
            (F.col("hold_max") / 1000.0).alias("hold_max_ms"),
            F.try_divide("held", "total").alias("hold_share"),
            F.try_divide(F.col("hold")[0], "others_p50").alias("times_others"),
        )
    )


JOB = Job(
    "slow_consumers",
    "Which consumers hold messages for long?",
    SCHEMA,
    lambda inputs: slow_consumers(inputs.events),
    ("-hold_p99_ms", "vhost", "queue", "ctag"),
)
