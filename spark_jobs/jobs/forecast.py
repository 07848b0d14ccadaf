"""When a queue that grows will be full.

A straight line through the depths of the second half of the log, by least squares; ``eta_s`` is
when it meets the capacity, from the end of the log on. The interval comes from the standard error
of the slope (95 %); a line whose slope may as well be zero has no forecast. A queue that nothing
happens to keeps its depth, to the end of the log.
"""

from __future__ import annotations

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from leveret.spark_jobs.jobs.backlog import backlog
from leveret.spark_jobs.jobs.base import COUNT, NUMBER, TEXT, Inputs, Job, Options, columns, window

SCHEMA = columns(
    vhost=TEXT,
    queue=TEXT,
    windows=COUNT,
    depth=COUNT,
    slope=NUMBER,
    slope_low=NUMBER,
    slope_high=NUMBER,
    eta_s=NUMBER,
    eta_low_s=NUMBER,
    eta_high_s=NUMBER,
)

# A line needs more points than it has parameters, by a margin.
_FEWEST = 5
_CONFIDENCE = 1.96


def forecast(inputs: Inputs) -> DataFrame:
    """Queues that grow, and when they reach the capacity."""
    depths = backlog(inputs.events, inputs.options, inputs.samples)
    # Not only of the queues that were asked for: silence tells something, too.
    end = inputs.of_the_time.agg(F.max("ts").alias("ts")).select(
        window(inputs.options).alias("end")
    )
    return lines(depths, end, inputs.options)


def lines(depths: DataFrame, end: DataFrame, options: Options) -> DataFrame:
    """``end`` has the log's last window."""
    whole, queue = Window.partitionBy(), Window.partitionBy("vhost", "queue").orderBy("window")
    length = F.expr(f"INTERVAL {int(options.window_s)} SECONDS")
    middle = (F.unix_micros(F.min("window").over(whole)) + F.unix_micros("end")) / 2_000_000.0
    until = F.coalesce(F.lead("window").over(queue) - length, "end")
    recent = (
        depths.crossJoin(F.broadcast(end))
        .withColumn("half", middle)
        .withColumn("until", until)
        .where(F.unix_micros("until") / 1_000_000.0 >= F.col("half"))
        .withColumn("window", F.explode(F.sequence("window", "until", length)))
        .withColumn("x", F.unix_micros("window") / 1_000_000.0)
        .where(F.col("x") >= F.col("half"))
        # Near zero, or squares of times lose their digits.
        .withColumn("x", F.col("x") - F.col("half"))
        .withColumn("y", F.col("depth").cast("double"))
    )
    fitted = recent.groupBy("vhost", "queue").agg(
        F.count(F.lit(1)).alias("windows"),
        F.max_by("depth", "x").alias("depth"),
        F.regr_slope("y", "x").alias("slope"),
        F.regr_sxx("y", "x").alias("sxx"),
        F.regr_syy("y", "x").alias("syy"),
    )
    # Residuals around the line: what of the variance of y the slope does not explain.
    residual = F.greatest(F.col("syy") - F.col("slope") ** 2 * F.col("sxx"), F.lit(0.0))
    error = F.sqrt(residual / (F.col("windows") - 2) / F.col("sxx"))
    room = F.greatest(F.lit(options.capacity) - F.col("depth"), F.lit(0)).cast("double")
    return (
        fitted.where((F.col("windows") >= _FEWEST) & (F.col("sxx") > 0))
        .withColumn("error", error * _CONFIDENCE)
        .withColumn("slope_low", F.col("slope") - F.col("error"))
        .withColumn("slope_high", F.col("slope") + F.col("error"))
        .where(F.col("slope_low") > 0)
        .select(
            "vhost",
            "queue",
            "windows",
            "depth",
            "slope",
            "slope_low",
            "slope_high",
            (room / F.col("slope")).alias("eta_s"),
            (room / F.col("slope_high")).alias("eta_low_s"),
            (room / F.col("slope_low")).alias("eta_high_s"),
        )
    )


JOB = Job(
    "forecast",
    "When will a queue be full?",
    SCHEMA,
    forecast,
    ("eta_s", "vhost", "queue"),
)
