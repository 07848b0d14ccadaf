"""Messages that fail again and again: delivered many times in one queue and never done with."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from leveret.spark_jobs.jobs.base import (
    COUNT,
    FLAG,
    TEXT,
    TIME,
    Job,
    Options,
    at,
    columns,
    count_of,
    is_,
)

SCHEMA = columns(
    vhost=TEXT,
    queue=TEXT,
    msg=COUNT,
    deliveries=COUNT,
    reasons=TEXT,
    consumers=COUNT,
    first_at=TIME,
    last_at=TIME,
    acked=FLAG,
)


def poison(events: DataFrame, options: Options) -> DataFrame:
    """Messages with many deliveries, and those that a delivery limit removed.

    The broker's own count is believed where the log begins in the middle of a message's life.
    """
    given = is_("deliver", "get")
    # Dropped where the queue has no dead-letter exchange.
    limited = is_("dead_letter", "drop") & (F.col("reason") == "delivery_limit")
    # Most messages are delivered once: nothing that was never refused is grouped.
    suspicious = (given & (F.col("delivery_count") > 0)) | is_("nack", "reject", "requeue")
    suspects = (
        events.where((F.col("msg") != 0) & (suspicious | limited))
        .select("vhost", "queue", "msg")
        .distinct()
    )
    tells = given | limited | is_("nack", "reject", "requeue", "ack", "dead_letter")
    lives = events.where(tells).join(suspects, ["vhost", "queue", "msg"], "left_semi")
    return (
        lives.groupBy("vhost", "queue", "msg")
        .agg(
            F.greatest(
                count_of(given),
                F.coalesce(F.max(F.when(given, F.col("delivery_count") + 1)), F.lit(0)),
            ).alias("deliveries"),
            F.array_join(
                F.array_sort(F.collect_set(F.when(~given & ~is_("ack"), F.col("reason")))), ", "
            ).alias("reasons"),
            F.count_distinct(F.when(given, F.struct("conn", "ch", "ctag"))).alias("consumers"),
            at(F.min("ts")).alias("first_at"),
            at(F.max("ts")).alias("last_at"),
            F.max(is_("ack")).alias("acked"),
            F.max(limited).alias("was_limited"),
        )
        .where((F.col("deliveries") >= options.poison_deliveries) | F.col("was_limited"))
    )


JOB = Job(
    "poison",
    "Which messages fail again and again?",
    SCHEMA,
    lambda inputs: poison(inputs.events, inputs.options),
    ("-deliveries", "vhost", "queue", "msg"),
)
