"""Whether the consumers of a queue get even shares.

The Gini coefficient is 0 if all get the same and nears 1 if one gets everything. A consumer that
registered and got nothing counts. After a restart the same workers are other consumers: of each
queue the start of the broker with most deliveries is looked at. Where one consumer is to get more
than others there is no answer: with a single active consumer, or with unlike priorities.
"""

from __future__ import annotations

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from leveret.spark_jobs.jobs.base import COUNT, NUMBER, TEXT, Job, columns, count_of, is_

SCHEMA = columns(
    vhost=TEXT,
    queue=TEXT,
    consumers=COUNT,
    deliveries=COUNT,
    gini=NUMBER,
    max_share=NUMBER,
    busiest=TEXT,
)

# What is told of one start of the broker: of several that had as many deliveries, the last.
_OF_BOOT = ("boot", "consumers", "weighted", "most", "busiest", "ranked")


def fairness(events: DataFrame) -> DataFrame:
    queue = ["vhost", "queue"]
    single = is_("queue_declare") & (F.col("attrs")["x-single-active-consumer"] == "true")
    of_consumers = is_("consume", "deliver") & (F.col("ctag") != "")
    # A number, since Spark would sort everything for the greatest of texts.
    priority = F.coalesce(F.col("attrs")["x-priority"].try_cast("bigint"), F.lit(0))
    shares = (
        events.where(of_consumers | single)
        .groupBy(*queue, "boot", "conn", "ch", "ctag")
        .agg(
            count_of(is_("deliver")).alias("got"),
            F.max(F.when(is_("consume"), priority)).alias("priority"),
            F.max(is_("queue_declare")).alias("single"),
        )
    )
    # Declarations are no consumers: they come last, and get nothing.
    by_share = Window.partitionBy(*queue, "boot").orderBy(F.col("ctag") == "", "got")
    boots = (
        shares.withColumn("rank", F.row_number().over(by_share))
        .groupBy(*queue, "boot")
        .agg(
            count_of(F.col("ctag") != "").alias("consumers"),
            F.sum("got").alias("deliveries"),
            F.sum(F.col("rank") * F.col("got")).alias("weighted"),
            F.max("got").alias("most"),
            F.max_by("ctag", F.struct("got", "ctag")).alias("busiest"),
            (F.min("priority") != F.max("priority")).alias("ranked"),
            F.max("single").alias("single"),
        )
    )
    gini = F.try_divide(
        F.lit(2.0) * F.col("weighted"), F.col("consumers") * F.col("deliveries")
    ) - (F.col("consumers") + 1) / F.col("consumers")
    return (
        boots.groupBy(*queue)
        .agg(
            F.max(F.struct("deliveries", *_OF_BOOT)).alias("busy"),
            F.max("single").alias("single"),
        )
        .where(~F.col("single"))
        .select(*queue, "busy.*")
        .where(~F.coalesce("ranked", F.lit(False)))
        .select(
            *queue,
            "consumers",
            "deliveries",
            gini.alias("gini"),
            F.try_divide("most", "deliveries").alias("max_share"),
            "busiest",
        )
    )


JOB = Job(
    "fairness",
    "Do the consumers of a queue get even shares?",
    SCHEMA,
    lambda inputs: fairness(inputs.events),
    ("-gini", "vhost", "queue"),
)
