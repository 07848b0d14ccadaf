"""Events of a batch of segments, summed up in Spark by window, queue and waiting time.

One pass and one shuffle; what comes out is small enough for the driver, however many events went
in: a row for each bucket of waiting times that a queue had in a window, and one for the rest.

Upstream: ``ingest.read_segments``. Downstream: ``tail_windows.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pyspark.sql import Column, DataFrame, Row, Window
from pyspark.sql import functions as F

from leveret.spark_jobs.ingest import objection
from leveret.spark_jobs.jobs.backlog import came, went
from leveret.spark_jobs.jobs.base import count_of, is_, sum_of
from leveret.spark_jobs.lake import Selection
from leveret.spark_jobs.schema import with_defaults
from leveret.spark_jobs.tail_windows import BUCKET_RATIO, Subject, Summary


def events_of(lines: DataFrame, selection: Selection) -> DataFrame:
    """The events of parsed lines that were selected; lines that are none are left to ingest."""
    events = lines.where(objection().isNull()).select(*with_defaults())
    wanted = F.lit(True)
    if selection.since is not None:
        wanted &= F.col("ts") >= selection.since
    if selection.vhost is not None:
        wanted &= F.col("vhost") == selection.vhost
    if selection.queue is not None:
        wanted &= F.col("queue") == selection.queue
    # A start says which share of messages is logged, however long ago it was.
    return events.where(wanted | is_("broker_start"))


def summarise(events: DataFrame, window_s: int) -> DataFrame:
    given = is_("deliver", "get")
    # What no queue took is told of its exchange.
    lost = is_("return") | (is_("drop") & (F.col("reason") == "unroutable"))
    in_queue = F.col("queue") != ""
    is_first = given & (F.col("delivery_count") == 0) & F.col("wait_us").isNotNull()
    window = F.col("ts") - F.col("ts") % (window_s * 1_000_000)
    is_new = is_("queue_declare") & (F.col("reason") != "recovered")
    # A queue that comes to be is empty, and one that is deleted takes its messages along.
    stamp = F.when(is_new | is_("queue_delete"), F.lit(0)).otherwise(F.col("depth"))
    deliveries = F.when(given, F.col("delivery_count") + 1)
    subject = ("boot", "window", "vhost", "subject", "source")
    last = F.max(F.when(stamp.isNotNull(), F.struct("ts", "seq", stamp.alias("depth"))))
    is_after = F.col("last").isNull() | (
        F.struct("ts", "seq") > F.struct(F.col("last.ts"), F.col("last.seq"))
    )
    purged = is_("purge")
    goes = went() & ~lost & ~purged
    return (
        events.where(lost | in_queue | is_("broker_start"))
        .withColumn("window", window)
        .withColumn("subject", F.when(lost, F.lit("")).otherwise(F.col("queue")))
        .withColumn("source", F.when(lost, F.col("exchange")).otherwise(F.lit("")))
        .withColumn("last", last.over(Window.partitionBy(*subject)))
        .groupBy(*subject, F.when(is_first, _bucket("wait_us")).alias("bucket"))
        .agg(
            count_of(is_first).alias("waits"),
            sum_of("n", came() & ~lost).alias("came"),
            sum_of("n", goes).alias("went"),
            sum_of("n", purged).alias("purged"),
            sum_of("n", came() & ~lost & is_after).alias("came_after"),
            sum_of("n", goes & is_after).alias("went_after"),
            sum_of("n", purged & is_after).alias("purged_after"),
            count_of(given).alias("gave"),
            F.coalesce(F.max(deliveries), F.lit(0)).alias("most_deliveries"),
            sum_of("n", lost).alias("unroutable"),
            F.max(is_new).alias("is_new"),
            F.max("last").alias("stamp"),
            F.max(F.when(is_("broker_start"), F.col("attrs")["sample"].cast("double"))).alias(
                "sample"
            ),
        )
    )


def summaries(rows: Sequence[Row], samples: dict[str, float]) -> Iterator[Summary]:
    """What the rows say. ``samples`` has the share of messages that each boot logs, and learns.

    Counts are of all messages, also of those that were not logged; a purge counts them itself.
    """
    samples.update({row["boot"]: row["sample"] for row in rows if row["sample"]})
    # Boots sort by time: what the later one tells goes on from the earlier.
    for row in sorted(rows, key=lambda row: str(row["boot"])):
        subject = Subject(row["vhost"], row["subject"], row["source"])
        if not subject.queue and not row["unroutable"]:
            continue
        stands_for = 1 / samples.get(row["boot"], 1.0)
        stamp = row["stamp"]
        yield Summary(
            window=row["window"],
            subject=subject,
            bucket=row["bucket"],
            waits=row["waits"],
            came=row["came"] * stands_for,
            went=row["went"] * stands_for + row["purged"],
            gave=row["gave"],
            most_deliveries=row["most_deliveries"],
            unroutable=row["unroutable"] * stands_for,
            is_new=row["is_new"],
            depth=None if stamp is None else stamp["depth"],
            depth_at=(0, 0) if stamp is None else (stamp["ts"], stamp["seq"]),
            after=(row["came_after"] - row["went_after"]) * stands_for - row["purged_after"],
        )


def _bucket(column: str) -> Column:
    positive = F.greatest(F.col(column), F.lit(1))
    return F.floor(F.log(positive) / math.log(BUCKET_RATIO)).cast("int")
