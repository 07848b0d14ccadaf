"""Whether the log can be trusted: lines that are missing, doubled, malformed or shed.

One row per boot, and one without a name for the lines that could not be read. Numbers count lines
without gaps, so what lies between the first and the last of a boot and is not there was lost.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from leveret.spark_jobs.jobs.base import (
    COUNT,
    FLAG,
    NUMBER,
    TEXT,
    TIME,
    Inputs,
    Job,
    at,
    columns,
    is_,
)

SCHEMA = columns(
    boot=TEXT,
    events=COUNT,
    first_at=TIME,
    last_at=TIME,
    missing=COUNT,
    duplicates=COUNT,
    shed=COUNT,
    malformed=COUNT,
    # The first and the last line of the boot are there.
    has_start=FLAG,
    has_stop=FLAG,
    # Which share of messages is logged; counts are to be divided by it.
    sample=NUMBER,
)


def boots(events: DataFrame) -> DataFrame:
    """How whole the log of each boot is."""
    # Numbers that are there are marked in bitmaps, so that none has to be sent over the network.
    parts = events.groupBy("boot", F.bitmap_bucket_number("seq").alias("part")).agg(
        F.bitmap_count(F.bitmap_construct_agg(F.bitmap_bit_position("seq"))).alias("numbers"),
        F.count(F.lit(1)).alias("events"),
        F.min("seq").alias("low"),
        F.max("seq").alias("high"),
        F.min("ts").alias("first"),
        F.max("ts").alias("last"),
        F.sum(F.when(is_("log_gap"), F.col("n"))).alias("shed"),
        F.max(is_("broker_start")).alias("start"),
        F.max(is_("broker_stop")).alias("stop"),
        F.max(F.when(is_("broker_start"), F.col("attrs")["sample"].cast("double"))).alias("sample"),
    )
    return parts.groupBy("boot").agg(
        F.sum("events").alias("events"),
        at(F.min("first")).alias("first_at"),
        at(F.max("last")).alias("last_at"),
        (F.max("high") - F.min("low") + 1 - F.sum("numbers")).alias("missing"),
        (F.sum("events") - F.sum("numbers")).alias("duplicates"),
        F.coalesce(F.sum("shed"), F.lit(0)).alias("shed"),
        F.lit(0).alias("malformed"),
        F.max("start").alias("has_start"),
        F.max("stop").alias("has_stop"),
        F.max("sample").alias("sample"),
    )


def quality(inputs: Inputs) -> DataFrame:
    # Of all vhosts and queues, whichever were asked for: lines are numbered across them.
    whole = boots(inputs.of_the_time)
    malformed = inputs.quarantine.agg(F.count(F.lit(1)).alias("malformed")).where(
        F.col("malformed") > 0
    )
    both = whole.unionByName(malformed.withColumn("boot", F.lit("")), allowMissingColumns=True)
    return both.fillna(0, ["events", "missing", "duplicates", "shed"])


JOB = Job(
    "quality",
    "Can the log be trusted?",
    SCHEMA,
    quality,
    ("first_at", "boot"),
)
