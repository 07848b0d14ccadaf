"""From segments of JSON lines to Parquet by date, each event exactly once.

A stream over the log's sealed segments takes what is there and ends (``availableNow``). Spark notes
in the checkpoint which files make up a batch before it works on it, and that it is done after; a
batch that was interrupted is done again with the same files. Each batch writes partitions of its
own (``batch=<n>``) and replaces whatever is there, so doing it again changes nothing. That is the
whole of exactly-once; do not write a batch anywhere else.

Lines that are no events are kept, with the file they were in and what is wrong with them.

Upstream: the broker's sealed segments; names that begin with ``_`` are still open and are not
seen. Downstream: every job, through ``lake.read_events``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from leveret.broker.event_log.schema import REQUIRED
from leveret.spark_jobs.lake import Lake, LakeError, delete, exists, segments_of
from leveret.spark_jobs.schema import EVENT, with_defaults

_LINE: Final = "_line"
# Files of a batch: 16 GiB of full segments, hours of those that were sealed by time.
FILES_PER_BATCH: Final = 256
# Spark forgets files older than the newest by this much, and would take them in again.
_REMEMBERED: Final = "3650d"


@dataclass(slots=True)
class Ingested:
    """What one run took in."""

    batches: int = 0
    events: int = 0
    malformed: int = 0


def ingest(
    spark: SparkSession,
    log: str,
    lake: Lake,
    *,
    files_per_batch: int = FILES_PER_BATCH,
    on_batch: Callable[[Ingested], None] | None = None,
) -> Ingested:
    """Take in every sealed segment that is not in yet. Raises LakeError."""
    segments = segments_of(spark, log)
    if exists(spark, lake.bronze) and not exists(spark, lake.checkpoint):
        raise LakeError(
            f"{lake.root} has events but no record of which segments they came from: "
            f"take everything in anew with --rebuild"
        )
    done = Ingested()

    def take(batch: DataFrame, number: int) -> None:
        malformed, events = _write(batch, number, lake)
        done.batches += 1
        done.malformed += malformed
        done.events += events
        if on_batch is not None:
            on_batch(done)

    query = (
        read_segments(spark, segments, files_per_batch)
        .writeStream.foreachBatch(take)
        .option("checkpointLocation", lake.checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return done


def forget(spark: SparkSession, lake: Lake) -> None:
    """Make the lake empty of events, so that the next ingest takes everything in anew."""
    for path in (lake.bronze, lake.quarantine, lake.checkpoint):
        delete(spark, path)


def read_segments(spark: SparkSession, segments: str, files_per_batch: int) -> DataFrame:
    """The stream of lines, parsed; ``_line`` has the text of those that cannot be."""
    schema = StructType([*EVENT.fields, StructField(_LINE, StringType())])
    return (
        spark.readStream.schema(schema)
        .option("columnNameOfCorruptRecord", _LINE)
        .option("maxFilesPerTrigger", files_per_batch)
        .option("maxFileAge", _REMEMBERED)
        # The folders' dates are for people; an event's date comes from its time.
        .option("recursiveFileLookup", "true")
        .json(segments)
        .withColumn("file", F.col("_metadata.file_path"))
    )


def objection() -> Column:
    """Why a parsed line is no event; null if it is one."""
    missing = [F.when(F.col(name).isNull(), F.lit(f"no {name}")) for name in REQUIRED]
    return F.coalesce(
        F.when(F.col(_LINE).isNotNull(), F.lit("not a JSON object of an event's fields")), *missing
    )


def _write(batch: DataFrame, number: int, lake: Lake) -> tuple[int, int]:
    """Lines refused and events written."""
    judged = batch.withColumn("reason_refused", objection())
    is_event = F.col("reason_refused").isNull()
    counts = Observation()
    events = (
        judged.observe(
            counts,
            F.count_if(is_event).alias("events"),
            F.count_if(~is_event).alias("malformed"),
        )
        .where(is_event)
        .select(
            *with_defaults(),
            F.date_format(F.timestamp_micros("ts"), "yyyy-MM-dd").alias("date"),
            F.lit(str(number)).alias("batch"),
        )
    )
    events.write.mode("overwrite").partitionBy("date", "batch").parquet(lake.bronze)
    malformed = int(counts.get["malformed"])
    if malformed:
        # A second reading, for the rare batch that needs it.
        refused = judged.where(~is_event).select(
            "file",
            F.coalesce(_LINE, F.to_json(F.struct(*EVENT.names))).alias("line"),
            F.col("reason_refused").alias("reason"),
            F.lit(str(number)).alias("batch"),
        )
        refused.write.mode("overwrite").partitionBy("batch").parquet(lake.quarantine)
    return malformed, int(counts.get["events"])
