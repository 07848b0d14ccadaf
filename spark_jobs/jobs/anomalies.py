"""Windows that are unlike the others of their queue.

Each metric of each queue is compared with its own median; the score is the distance in (scaled)
median absolute deviations, which a few odd windows do not disturb. Rates are taken over all windows
of the log, also those without an event. A deviation is never taken to be smaller than a tenth of
the median, or than what one message or ten milliseconds make, so that a steady queue is not odd for
trifles.
"""

from __future__ import annotations

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from leveret.spark_jobs.jobs.backlog import flows
from leveret.spark_jobs.jobs.base import (
    NUMBER,
    TEXT,
    TIME,
    Job,
    Options,
    columns,
)
from leveret.spark_jobs.jobs.queue_latency import waits

SCHEMA = columns(
    window=TIME,
    vhost=TEXT,
    queue=TEXT,
    metric=TEXT,
    value=NUMBER,
    median=NUMBER,
    score=NUMBER,
)

# Makes a median absolute deviation comparable with a standard deviation.
_SCALE = 1.4826
# Windows that there must be before anything can be called usual.
_FEWEST = 10


def metrics(events: DataFrame, options: Options) -> DataFrame:
    """window, vhost, queue, metric, value: messages that came per second, and p99 of waiting."""
    came = flows(events, options).select("window", "vhost", "queue", F.col("came").alias("n"))
    length = F.expr(f"INTERVAL {int(options.window_s)} SECONDS")
    # The first and the last window are mostly not whole.
    span = came.agg(
        (F.min("window") + length).alias("from"), (F.max("window") - length).alias("to")
    )
    inner = span.where(F.col("from") <= F.col("to"))
    every = inner.select(F.explode(F.sequence("from", "to", length)).alias("window"))
    names = came.select("vhost", "queue").distinct()
    rates = (
        names.crossJoin(every)
        .join(came, ["window", "vhost", "queue"], "left")
        .select(
            *("window", "vhost", "queue"),
            F.lit("messages in per second").alias("metric"),
            (F.coalesce("n", F.lit(0)) / F.lit(float(options.window_s))).alias("value"),
        )
    )
    waiting = waits(events, options).select(
        *("window", "vhost", "queue"),
        F.lit("p99 wait in ms").alias("metric"),
        F.col("wait_p99_ms").alias("value"),
    )
    return rates.unionByName(waiting)


def scores(measured: DataFrame, options: Options) -> DataFrame:
    """Each value with the median of its series, and how far it is from it."""
    series = Window.partitionBy("vhost", "queue", "metric")
    deviation = F.abs(F.col("value") - F.col("median"))
    least = F.greatest(
        F.abs(F.col("median")) * 0.1,
        F.when(F.col("metric") == "p99 wait in ms", F.lit(10.0)).otherwise(
            F.lit(1.0 / options.window_s)
        ),
    )
    return (
        measured.withColumn("median", F.median("value").over(series))
        .withColumn("windows", F.count(F.lit(1)).over(series))
        .withColumn("deviation", deviation)
        .withColumn("usual", F.median("deviation").over(series))
        .withColumn(
            "score",
            (F.col("value") - F.col("median")) / (F.lit(_SCALE) * F.greatest("usual", least)),
        )
        .where(F.col("windows") >= _FEWEST)
        .drop("windows", "deviation", "usual")
    )


def anomalies(events: DataFrame, options: Options) -> DataFrame:
    found = scores(metrics(events, options), options)
    return found.where(F.abs("score") >= options.odd_score)


JOB = Job(
    "anomalies",
    "Which moments were unlike the rest?",
    SCHEMA,
    lambda inputs: anomalies(inputs.events, inputs.options),
    ("-score", "window", "vhost", "queue"),
)
