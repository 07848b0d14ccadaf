"""Where messages pile up: what came in, what went out and how many wait, by window and queue.

The depth is the last one that the broker stamped in a window. A window without a stamp continues
from the one before by what came and went, so that a queue nobody consumes is followed, too.
"""

from __future__ import annotations

from pyspark.sql import DataFrame, Window
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

# What changes the number of ready messages: a nack with requeue=true is told by its requeue.
_CAME = ("publish", "enqueue", "requeue")
_WENT = ("deliver", "get", "expire", "drop", "purge")


def flows(events: DataFrame, options: Options) -> DataFrame:
    """Came, went and the last stamped depth, by window and queue."""
    in_queue = F.col("queue") != ""
    moment = F.when(F.col("depth").isNotNull(), F.struct("ts", "seq"))
    # A message that is dead-lettered for its queue's length leaves it ready; after a reject it
    # was not ready, and after expiry the expire event has counted it.
    overflow = is_("dead_letter") & (F.col("reason") == "maxlen")
    return (
        events.where(in_queue & (is_(*_CAME, *_WENT) | overflow))
        .groupBy(window(options), "vhost", "queue")
        .agg(
            sum_of("n", is_(*_CAME)).alias("came"),
            sum_of("n", is_(*_WENT) | overflow).alias("went"),
            F.max_by("depth", moment).alias("stamped"),
        )
    )


def backlog(events: DataFrame, options: Options) -> DataFrame:
    so_far = Window.partitionBy("vhost", "queue").orderBy("window")
    net = F.sum(F.col("came") - F.col("went")).over(so_far)
    # How far the sum is off the truth at the last stamp: what was there before the log began.
    offset = F.last(F.col("stamped") - F.col("net"), ignorenulls=True).over(so_far)
    depth = F.greatest(F.col("net") + F.coalesce("offset", F.lit(0)), F.lit(0))
    elapsed = F.unix_micros("window") - F.unix_micros(F.lag("window").over(so_far))
    slope = (F.col("depth") - F.lag("depth").over(so_far)) * 1_000_000.0 / elapsed
    return (
        flows(events, options)
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
    lambda inputs: backlog(inputs.events, inputs.options),
    ("vhost", "queue", "window"),
)
