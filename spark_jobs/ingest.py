"""From segments of JSON lines to Parquet by date, each event exactly once.

A stream over the log's sealed segments takes what is there and ends (``availableNow``). Spark notes
in the checkpoint which files make up a batch before it works on it, and that it is done after; a
batch that was interrupted is done again with the same files. Each batch writes partitions of its
own (``batch=<n>``) and replaces whatever is there, so doing it again changes nothing. That is the
whole of exactly-once; do not write a batch anywhere else.

A file is known by its name, which has the boot and a number: a log that was moved or copied is the
same log. Segments of an interrupted batch that have been deleted meanwhile are an error until
somebody accepts it, and even then nothing that is in the lake gives way to less.

Lines that are no events are kept, with the file they were in and what is wrong with them.

Upstream: the broker's sealed segments; names that begin with ``_`` are still open and are not
seen. Downstream: every job, through ``lake.read_events``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import StreamingQueryException
from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from leveret.broker.event_log.schema import REQUIRED, VERSION
from leveret.spark_jobs import checkpoint
from leveret.spark_jobs.hadoop_files import create
from leveret.spark_jobs.ingest_lock import alone
from leveret.spark_jobs.lake import BRONZE, QUARANTINE, Lake, LakeError, delete, exists, segments_of
from leveret.spark_jobs.schema import EVENT, with_defaults

_LINE: Final = "_line"
# Files of a batch: 16 GiB of full segments, hours of those that were sealed by time.
FILES_PER_BATCH: Final = 256
# Spark forgets files older than the newest by this much, and would take them in again.
_REMEMBERED: Final = "3650d"
# What Spark says of a second stream on a checkpoint, at its start and at the end of a batch.
_NOT_ALONE: Final = ("SparkConcurrentModificationException", "CONCURRENT_STREAM_LOG_UPDATE")


@dataclass(slots=True)
class Ingested:
    """What one run took in."""

    batches: int = 0
    events: int = 0
    malformed: int = 0
    # Segments that were deleted before they were read.
    gone: int = 0


def ingest(
    spark: SparkSession,
    log: str,
    lake: Lake,
    *,
    files_per_batch: int = FILES_PER_BATCH,
    rebuild: bool = False,
    accept_gone: bool = False,
    on_batch: Callable[[Ingested], None] | None = None,
) -> Ingested:
    """Take in every sealed segment that is not in yet. Raises LakeError.

    ``rebuild`` empties the lake of events first; ``accept_gone`` goes on if segments of a batch
    that was interrupted are not there any more.
    """
    segments = segments_of(spark, log)
    with alone(spark, lake):
        if rebuild:
            forget(spark, lake)
        _refuse_if_unknown(spark, lake)
        if not accept_gone:
            _refuse_if_gone(spark, log, lake)
        return _ingest(spark, segments, lake, files_per_batch, on_batch)


def _refuse_if_unknown(spark: SparkSession, lake: Lake) -> None:
    if exists(spark, _rebuilding(lake)):
        raise LakeError(
            f"{lake.root} was being emptied when an ingest was interrupted: take everything in "
            f"anew with --rebuild"
        )
    has_lines = exists(spark, lake.bronze) or exists(spark, lake.quarantine)
    if has_lines and not exists(spark, lake.checkpoint):
        raise LakeError(
            f"{lake.root} has events but no record of which segments they came from: "
            f"take everything in anew with --rebuild"
        )


def _refuse_if_gone(spark: SparkSession, log: str, lake: Lake) -> None:
    number = checkpoint.unfinished(spark, lake.checkpoint)
    gone = [] if number is None else checkpoint.gone(spark, lake.checkpoint, number)
    if gone:
        more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
        raise LakeError(
            f"{gone[0]}{more} was being taken in when an ingest was interrupted, and is not there "
            f"any more. Put it back, or go on without: leveret analytics ingest --accept-gone "
            f"--log {log} --lake {lake.root}"
        )


def _ingest(
    spark: SparkSession,
    segments: str,
    lake: Lake,
    files_per_batch: int,
    on_batch: Callable[[Ingested], None] | None,
) -> Ingested:
    done = Ingested()

    def take(batch: DataFrame, number: int) -> None:
        gone = len(checkpoint.gone(spark, lake.checkpoint, number))
        malformed, events = _write(batch, number, lake, may_be_less=gone > 0)
        done.batches += 1
        done.malformed += malformed
        done.events += events
        done.gone += gone
        if on_batch is not None:
            on_batch(done)

    stream = (
        read_segments(spark, segments, files_per_batch)
        .writeStream.foreachBatch(take)
        .option("checkpointLocation", lake.checkpoint)
        .trigger(availableNow=True)
    )
    try:
        stream.start().awaitTermination()
    except (StreamingQueryException, Py4JJavaError) as error:
        if any(sign in str(error) for sign in _NOT_ALONE):
            raise LakeError(
                f"another ingest works on {lake.root}, too: let it end, then run this again"
            ) from None
        raise
    return done


def forget(spark: SparkSession, lake: Lake) -> None:
    """Make the lake empty of events, so that the next ingest takes everything in anew.

    Interrupted at any moment, it leaves what the next ingest refuses to add to.
    """
    # Half a checkpoint says of segments that they are in, or of those in that they are new.
    create(spark, _rebuilding(lake), "")
    for path in (lake.checkpoint, lake.bronze, lake.quarantine, _rebuilding(lake)):
        delete(spark, path)


def _rebuilding(lake: Lake) -> str:
    """A file that is there while the lake is emptied."""
    return f"{lake.checkpoint}.rebuilding"


def read_segments(spark: SparkSession, segments: str, files_per_batch: int) -> DataFrame:
    """The stream of lines, parsed; ``_line`` has the text of those that cannot be."""
    schema = StructType([*EVENT.fields, StructField(_LINE, StringType())])
    return (
        spark.readStream.schema(schema)
        .option("columnNameOfCorruptRecord", _LINE)
        .option("maxFilesPerTrigger", files_per_batch)
        .option("maxFileAge", _REMEMBERED)
        .option("fileNameOnly", "true")
        # The folders' dates are for people; an event's date comes from its time.
        .option("recursiveFileLookup", "true")
        .json(segments)
        .withColumn("file", F.col("_metadata.file_path"))
    )


def objection() -> Column:
    """Why a parsed line is no event; null if it is one."""
    missing = [F.when(F.col(name).isNull(), F.lit(f"no {name}")) for name in REQUIRED]
    # A new version is a new meaning of known fields: not to be guessed at.
    version = F.concat(F.lit("version "), F.col("v"), F.lit(f", known is {VERSION}"))
    return F.coalesce(
        F.when(F.col(_LINE).isNotNull(), F.lit("not a JSON object of an event's fields")),
        F.when(F.col("v") != VERSION, version),
        *missing,
    )


def _write(batch: DataFrame, number: int, lake: Lake, *, may_be_less: bool) -> tuple[int, int]:
    """Lines refused and events written.

    ``may_be_less``: it may hold less than when it was written before; what is more stays.
    """
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
    if may_be_less:
        events = _where_more(events, _written(events.sparkSession, lake.bronze, BRONZE, number))
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
        if may_be_less:
            before = _written(events.sparkSession, lake.quarantine, QUARANTINE, number)
            if before is not None and before.count() > malformed:
                return malformed, int(counts.get["events"])
        refused.write.mode("overwrite").partitionBy("batch").parquet(lake.quarantine)
    return malformed, int(counts.get["events"])


def _written(spark: SparkSession, path: str, schema: StructType, number: int) -> DataFrame | None:
    """What is in the lake of a batch that is done again."""
    if not exists(spark, path):
        return None
    return spark.read.schema(schema).parquet(path).where(F.col("batch") == str(number))


def _where_more(events: DataFrame, before: DataFrame | None) -> DataFrame:
    """Events of those dates of which there are not more in the lake already."""
    if before is None:
        return events
    more = before.groupBy("date").count().collect()
    now = {row["date"]: row["count"] for row in events.groupBy("date").count().collect()}
    kept = [row["date"] for row in more if row["count"] > now.get(row["date"], 0)]
    return events.where(~F.col("date").isin(kept)) if kept else events
