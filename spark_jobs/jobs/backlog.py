"""Where messages pile up: what came in, what went out and how many wait, by window and queue.

The depth is the last one that the broker stamped in a window and what came and went since. A window
without a stamp continues from the one before by what came and went, so that a queue nobody consumes
is followed, too; where only a sample of messages is logged, by what the sample stands for.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from leveret.spark_jobs.jobs.base import (
    COUNT,
    NUMBER,
    TEXT,
    TIME,
    Job,
    Options,
    columns,
    is_,
    messages_per_logged,
    sum_of,
    window,
)

SCHEMA = columns(
    window=TIME,
    vhost=TEXT,
    queue=TEXT,
    came=COUNT,
    went=COUNT,
    depth=COUNT,
    # Of the depth, per second, since the window before.
    slope=NUMBER,
)

_KEY = ("window", "vhost", "queue")

# What changes the number of ready messages: a nack with requeue=true is told by its requeue.
_CAME = ("publish", "enqueue", "requeue")
_WENT = ("deliver", "get", "expire", "drop", "purge")


def came() -> Column:
    """Events that make a message ready."""
    return is_(*_CAME)


def went() -> Column:
    """Events after which a message is not ready any more."""
    # One that is dead-lettered for its queue's length leaves it ready; after a reject it was not
    # ready, and after expiry the expire event has counted it.
    overflow = is_("dead_letter") & (F.col("reason") == "maxlen")
    return is_(*_WENT) | overflow


def flows(
    events: DataFrame, options: Options, samples: Mapping[str, float] | None = None
) -> DataFrame:
    """Came, went, the net of both, and the last stamped depth, by window and queue."""
    moment = F.when(F.col("depth").isNotNull(), F.struct("ts", "seq"))
    return (
        events.where((F.col("queue") != "") & (came() | went()))
        .groupBy(window(options), "vhost", "queue")
        .agg(
            sum_of("n", came()).alias("came"),
            sum_of("n", went()).alias("went"),
            F.max_by("depth", moment).alias("stamped"),
            F.sum(_change(samples)).alias("change"),
        )
    )


def after_stamps(
    events: DataFrame, options: Options, samples: Mapping[str, float] | None = None
) -> DataFrame:
    """What came and went after the last stamp of a window, in it (``after``)."""
    moving = events.where((F.col("queue") != "") & (came() | went())).select(
        window(options), "vhost", "queue", "ts", "seq", "depth", _change(samples).alias("change")
    )
    is_stamped = F.col("depth").isNotNull()
    last = F.max(F.struct("ts", "seq")).alias("last")
    stamps = moving.where(is_stamped).groupBy(*_KEY).agg(last)
    return (
        moving.where(~is_stamped)
        .join(stamps, list(_KEY))
        .where(F.struct("ts", "seq") > F.col("last"))
        .groupBy(*_KEY)
        .agg(F.sum("change").alias("after"))
    )


def _change(samples: Mapping[str, float] | None) -> Column:
    """By how much an event changes the depth."""
    # A purge counts what was there, logged or not.
    stands_for = F.when(is_("purge"), F.lit(1.0)).otherwise(messages_per_logged(samples or {}))
    return F.when(came(), F.col("n")).otherwise(-F.col("n")) * stands_for


def backlog(
    events: DataFrame, options: Options, samples: Mapping[str, float] | None = None
) -> DataFrame:
    so_far = Window.partitionBy("vhost", "queue").orderBy("window")
    net = F.round(F.sum("change").over(so_far)).cast("long")
    # How far the sum is off the truth at the last stamp: what was there before the log began.
    at_end = F.col("stamped") + F.round(F.coalesce("after", F.lit(0.0))).cast("long")
    offset = F.last(at_end - F.col("net"), ignorenulls=True).over(so_far)
    depth = F.greatest(F.col("net") + F.coalesce("offset", F.lit(0)), F.lit(0))
    elapsed = F.unix_micros("window") - F.unix_micros(F.lag("window").over(so_far))
    slope = (F.col("depth") - F.lag("depth").over(so_far)) * 1_000_000.0 / elapsed
    return (
        flows(events, options, samples)
        .join(after_stamps(events, options, samples), list(_KEY), "left")
        .withColumn("net", net)
        .withColumn("offset", offset)
        .withColumn("depth", depth)
        .withColumn("slope", slope)
        .select("window", "vhost", "queue", "came", "went", "depth", "slope")
    )


JOB = Job(
    "backlog",
    "Where do messages pile up?",
    SCHEMA,
    lambda inputs: backlog(inputs.events, inputs.options, inputs.samples),
    ("vhost", "queue", "window"),
)
