"""Routing keys that carry most of an exchange's messages.

Asked about one queue, only messages that reached it count, also those that others got as well.
"""

from __future__ import annotations

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from leveret.spark_jobs.jobs.base import COUNT, NUMBER, TEXT, Job, Options, columns, is_

SCHEMA = columns(vhost=TEXT, exchange=TEXT, rk=TEXT, n=COUNT, bytes=COUNT, share=NUMBER, rank=COUNT)


def hot_keys(events: DataFrame, options: Options, queue: str | None = None) -> DataFrame:
    """The first keys of each exchange, with their share of all its messages."""
    came = is_("publish")
    if queue is not None:
        # Messages with several queues name each in an event of its own.
        came |= is_("enqueue") & (F.col("reason") != "dead_letter")
    exchange = Window.partitionBy("vhost", "exchange")
    rank = F.row_number().over(exchange.orderBy(F.col("n").desc(), "rk"))
    return (
        events.where(came)
        .groupBy("vhost", "exchange", "rk")
        .agg(F.count(F.lit(1)).alias("n"), F.sum("size").alias("bytes"))
        .withColumn("share", F.col("n") / F.sum("n").over(exchange))
        .withColumn("rank", rank)
        .where(F.col("rank") <= options.top)
    )


JOB = Job(
    "hot_keys",
    "Which routing keys carry the load?",
    SCHEMA,
    lambda inputs: hot_keys(inputs.events, inputs.options, inputs.queue),
    ("vhost", "exchange", "rank"),
)
