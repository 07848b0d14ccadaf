"""Who throttled whom: the critical path of credit flow.

A reader waits for its channel, a channel for a queue, a queue for the store. What stands still is
seldom the cause: of each time that somebody was blocked, the root is found by asking whether the
one it waited for was itself blocked meanwhile, and by whom, up to the end of the chain.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from leveret.spark_jobs.jobs.base import COUNT, NUMBER, TEXT, Job, columns, is_

SCHEMA = columns(
    who=TEXT,
    waited_for=TEXT,
    root=TEXT,
    path=TEXT,
    times=COUNT,
    blocked_s=NUMBER,
    longest_s=NUMBER,
)

# reader -> channel -> queue -> store: two steps lead from the first cause to the last.
_STEPS = 3


def blocks(events: DataFrame) -> DataFrame:
    """boot, who, by, start and end (microseconds) of every time that somebody was blocked, and n:
    many short blocks are told as one.

    Whoever is still blocked when the log ends is so until its last event.
    """
    who, by = F.col("attrs")["who"], F.col("attrs")["by"]
    ended = events.where(is_("credit_unblocked")).select(
        "boot",
        who.alias("who"),
        by.alias("by"),
        (F.col("ts") - F.coalesce("hold_us", F.lit(0))).alias("start"),
        F.col("ts").alias("end"),
        F.coalesce("n", F.lit(1)).alias("n"),
    )
    # Blocks and releases of a pair alternate: one more block than releases is one that lasts.
    lasting = (
        events.where(is_("credit_blocked", "credit_unblocked"))
        .groupBy("boot", who.alias("who"), by.alias("by"))
        .agg(
            F.max_by("ev", F.struct("ts", "seq")).alias("last"),
            F.max("ts").alias("start"),
        )
        .where(F.col("last") == "credit_blocked")
        .drop("last")
        .withColumn("n", F.lit(1).cast("long"))
    )
    ends = events.groupBy("boot").agg(F.max("ts").alias("end"))
    return ended.unionByName(lasting.join(ends, "boot"))


def throttling(events: DataFrame) -> DataFrame:
    all_blocks = blocks(events)
    cause = all_blocks.select(
        *(F.col(name).alias(f"cause_{name}") for name in ("boot", "who", "by", "start", "end"))
    )
    found = all_blocks.withColumn("root", F.col("by")).withColumn(
        "path", F.concat("who", F.lit(" <- "), "by")
    )
    key = ["boot", "who", "by", "start", "end", "n"]
    for _ in range(_STEPS):
        meanwhile = (
            (F.col("cause_boot") == F.col("boot"))
            & (F.col("cause_who") == F.col("root"))
            & (F.col("cause_start") < F.col("end"))
            & (F.col("cause_end") > F.col("start"))
        )
        overlap = F.least("cause_end", "end") - F.greatest("cause_start", "start")
        # Of several that held the root up, the one that did so longest; none, and it is the root.
        found = (
            found.join(cause, meanwhile, "left")
            .groupBy(*key, "root", "path")
            .agg(F.max_by("cause_by", F.struct(overlap, F.col("cause_by"))).alias("next"))
            .withColumn("path", F.concat_ws(" <- ", "path", "next"))
            .withColumn("root", F.coalesce("next", "root"))
            .drop("next")
        )
    length = F.col("end") - F.col("start")
    return found.groupBy("who", F.col("by").alias("waited_for"), "root", "path").agg(
        F.sum("n").alias("times"),
        (F.sum(length) / 1_000_000.0).alias("blocked_s"),
        (F.max(length) / 1_000_000.0).alias("longest_s"),
    )


JOB = Job(
    "throttling",
    "Who was slowed down by credit flow, and who was the cause?",
    SCHEMA,
    lambda inputs: throttling(inputs.events),
    ("-blocked_s", "who", "waited_for"),
)
