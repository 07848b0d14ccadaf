"""Whether the consumers of a queue get even shares.

The Gini coefficient is 0 if all get the same and nears 1 if one gets everything. A consumer that
registered and got nothing counts.
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


def fairness(events: DataFrame) -> DataFrame:
    queue = ["vhost", "queue"]
    shares = (
        events.where(is_("consume", "deliver") & (F.col("ctag") != ""))
        .groupBy(*queue, "boot", "conn", "ch", "ctag")
        .agg(count_of(is_("deliver")).alias("got"))
    )
    rank = F.row_number().over(Window.partitionBy(*queue).orderBy("got"))
    return (
        shares.withColumn("rank", rank)
        .groupBy(*queue)
        .agg(
            F.count(F.lit(1)).alias("consumers"),
            F.sum("got").alias("deliveries"),
            F.sum(F.col("rank") * F.col("got")).alias("weighted"),
            F.max("got").alias("most"),
            F.max_by("ctag", F.struct("got", "ctag")).alias("busiest"),
        )
        .select(
            *queue,
            "consumers",
            "deliveries",
            (
                F.try_divide(
                    F.lit(2.0) * F.col("weighted"), F.col("consumers") * F.col("deliveries")
                )
                - (F.col("consumers") + 1) / F.col("consumers")
            ).alias("gini"),
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
