"""Where messages pile up: what came in, what went out and how many wait, by window and queue.

The depth is the last one that the broker stamped in a window and what came and went since. A window
without a stamp continues from the one before by what came and went, so that a queue nobody consumes
is followed, too; where only a sample of messages is logged, by what the sample stands for.

A queue that is deleted is empty. After a restart it has what it was recovered with, or nothing if
it was not.
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
# Within a boot numbers tell the order.
_PART = (*_KEY, "boot")

# What changes the number of ready messages: a nack with requeue=true is told by its requeue.
_CAME = ("publish", "enqueue", "requeue")
_WENT = ("deliver", "get", "expire", "purge")


def came() -> Column:
    """Events that make a message ready."""
    return is_(*_CAME)


def went() -> Column:
    """Events after which a message is not ready any more."""
    # One that is dead-lettered for its queue's length leaves it ready, and so does one that came
    # back too often, after its requeue; after a reject it was not ready, and after expiry the
    # expire event has counted it.
    dead = is_("dead_letter") & F.col("reason").isin("maxlen", "delivery_limit")
    # A consumer had what is dropped in its name.
    dropped = is_("drop") & (F.col("ctag") == "")
    return is_(*_WENT) | dead | dropped


def recovered() -> Column:
    """A start found the queue on disk."""
    return is_("queue_declare") & (F.col("reason") == "recovered")


def stamp() -> Column:
    """The depth after an event, where that is known."""
    return F.when(is_("queue_delete"), F.lit(0)).otherwise(F.col("depth"))


def flows(events: DataFrame, options: Options) -> DataFrame:
    """What came and went, by window and queue."""
    return (
        events.where((F.col("queue") != "") & (came() | went()))
        .groupBy(window(options), "vhost", "queue")
        .agg(sum_of("n", came()).alias("came"), sum_of("n", went()).alias("went"))
    )


def parts(
    events: DataFrame, options: Options, samples: Mapping[str, float] | None = None
) -> DataFrame:
    """The same by boot, with the last stamp (``stamped``), what changed the depth in all
    (``change``) and since the stamp (``after``), and when the part begins (``first``)."""
    moving = _moving(events).select(
        window(options),
        *("vhost", "queue", "boot", "ts", "seq"),
        F.when(came(), F.col("n")).otherwise(0).alias("came"),
        F.when(went(), F.col("n")).otherwise(0).alias("went"),
        stamp().alias("stamp"),
        _change(samples).alias("change"),
    )
    # Of all numbers, so that neither step has to sort.
    last = moving.groupBy(*_PART).agg(
        F.max(F.when(F.col("stamp").isNotNull(), F.col("seq"))).alias("last")
    )
    is_last, is_after = F.col("seq") == F.col("last"), F.col("seq") > F.col("last")
    return (
        moving.join(last, list(_PART))
        .groupBy(*_PART)
        .agg(
            F.min("ts").alias("first"),
            F.sum("came").alias("came"),
            F.sum("went").alias("went"),
            F.sum("change").alias("change"),
            F.max(F.when(is_last, F.col("stamp"))).alias("stamped"),
            F.sum(F.when(is_after, F.col("change"))).alias("after"),
        )
    )


def gone(events: DataFrame, options: Options) -> DataFrame:
    """A part for every queue that a restart did away with: nothing is in it from then on."""
    starts = events.where(is_("broker_start")).select(
        F.col("ts").alias("start"), F.col("boot").alias("next")
    )
    back = events.where(recovered()).select(F.col("boot").alias("next"), "vhost", "queue")
    return (
        _moving(events)
        .groupBy("vhost", "queue", "boot")
        .agg(F.max("ts").alias("ended"))
        .join(F.broadcast(starts), F.col("start") > F.col("ended"))
        .groupBy("vhost", "queue", "boot")
        .agg(F.min_by("next", "start").alias("next"), F.min("start").alias("ts"))
        .join(F.broadcast(back), ["next", "vhost", "queue"], "left_anti")
        .select(
            window(options),
            *("vhost", "queue"),
            F.col("ts").alias("first"),
            *(F.lit(0).alias(name) for name in ("came", "went", "stamped")),
            F.lit(0.0).alias("change"),
        )
    )


def _moving(events: DataFrame) -> DataFrame:
    tells = came() | went() | is_("queue_delete") | recovered()
    return events.where((F.col("queue") != "") & tells)


def _change(samples: Mapping[str, float] | None) -> Column:
    """By how much an event changes the depth."""
    # A purge counts what was there, logged or not, and so does what a queue lost unread.
    is_whole = is_("purge") | (is_("drop", "expire") & (F.col("msg") == 0))
    stands_for = F.when(is_whole, F.lit(1.0)).otherwise(messages_per_logged(samples or {}))
    number = F.when(came(), F.col("n")).when(went(), -F.col("n")).otherwise(0)
    return number * stands_for


def backlog(
    events: DataFrame, options: Options, samples: Mapping[str, float] | None = None
) -> DataFrame:
    by_part = Window.partitionBy("vhost", "queue").orderBy("window", "first")
    net = F.round(F.sum("change").over(by_part)).cast("long")
    # How far the sum is off the truth at the last stamp: what was there before the log began.
    at_end = F.col("stamped") + F.round(F.coalesce("after", F.lit(0.0))).cast("long")
    offset = F.last(at_end - F.col("net"), ignorenulls=True).over(by_part)
    depth = F.greatest(F.col("net") + F.coalesce("offset", F.lit(0)), F.lit(0))
    so_far = Window.partitionBy("vhost", "queue").orderBy("window")
    elapsed = F.unix_micros("window") - F.unix_micros(F.lag("window").over(so_far))
    slope = (F.col("depth") - F.lag("depth").over(so_far)) * 1_000_000.0 / elapsed
    return (
        parts(events, options, samples)
        .drop("boot")
        .unionByName(gone(events, options), allowMissingColumns=True)
        .withColumn("net", net)
        .withColumn("offset", offset)
        .withColumn("depth", depth)
        .groupBy(*_KEY)
        .agg(
            F.sum("came").alias("came"),
            F.sum("went").alias("went"),
            F.max_by("depth", "first").alias("depth"),
        )
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
