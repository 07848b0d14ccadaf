"""Where things are: the log that the broker writes, and the lake that analytics keep.

    <log>/[events/]date=YYYY-MM-DD/<boot>-<n>.jsonl[.zst]    sealed segments
    <lake>/bronze/date=YYYY-MM-DD/batch=<n>/                 every event, as Parquet
    <lake>/quarantine/batch=<n>/                             lines that are no events, and why
    <lake>/silver/<job>/  <lake>/gold/<job>/                 results
    <lake>/_checkpoints/ingest/                              which segments are in

Paths are texts and are only touched through Hadoop's file systems, so that a lake can be wherever
the cluster reaches: a folder, HDFS, an object store.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from leveret.broker.event_log.schema import OBJECT_KINDS
from leveret.spark_jobs.schema import EVENT

# Partition columns are texts: see session.py.
BRONZE = StructType(
    [*EVENT.fields, StructField("date", StringType()), StructField("batch", StringType())]
)
QUARANTINE = StructType(
    [
        StructField("file", StringType()),
        StructField("line", StringType()),
        StructField("reason", StringType()),
        StructField("batch", StringType()),
    ]
)


class LakeError(Exception):
    """The lake cannot be used as asked; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Lake:
    root: str

    @property
    def bronze(self) -> str:
        return f"{self.root}/bronze"

    @property
    def quarantine(self) -> str:
        return f"{self.root}/quarantine"

    @property
    def checkpoint(self) -> str:
        return f"{self.root}/_checkpoints/ingest"

    def result(self, layer: str, job: str) -> str:
        return f"{self.root}/{layer}/{job}"


@dataclass(frozen=True, slots=True)
class Selection:
    """Which events to look at. Times are microseconds; ``until`` is not included."""

    since: int | None = None
    until: int | None = None
    vhost: str | None = None
    queue: str | None = None


def read_events(spark: SparkSession, lake: Lake, selection: Selection) -> DataFrame:
    """Events of the lake. Raises LakeError if there are none to read."""
    if not exists(spark, lake.bronze):
        raise LakeError(
            f"there are no events in {lake.root} yet: run `leveret analytics ingest --log LOG "
            f"--lake {lake.root}` first"
        )
    return select(spark.read.schema(BRONZE).parquet(lake.bronze), selection).drop("date", "batch")


def select(events: DataFrame, selection: Selection) -> DataFrame:
    """The events of a selection; those that name no vhost (the broker's own) stay in each."""
    if selection.since is not None:
        events = events.where(F.col("date") >= _date(selection.since))
        events = events.where(F.col("ts") >= selection.since)
    if selection.until is not None:
        events = events.where(F.col("date") <= _date(selection.until))
        events = events.where(F.col("ts") < selection.until)
    if selection.vhost is not None:
        events = events.where(F.col("vhost").isin(selection.vhost, ""))
    if selection.queue is not None:
        # What happens to messages without a queue being named is about others, or about none.
        about_objects = F.col("ev").isin(*(kind.name for kind in OBJECT_KINDS))
        is_named = F.col("queue") == selection.queue
        events = events.where(is_named | ((F.col("queue") == "") & about_objects))
    return events


def read_quarantine(spark: SparkSession, lake: Lake) -> DataFrame:
    """Lines that were no events; none if there never were any."""
    if not exists(spark, lake.quarantine):
        return spark.createDataFrame([], QUARANTINE)
    return spark.read.schema(QUARANTINE).parquet(lake.quarantine)


def segments_of(spark: SparkSession, log: str) -> str:
    """The folder that has the dates: ``log`` itself, or its ``events``. Raises LakeError."""
    for folder in (f"{log}/events", log):
        file_system, location = _locate(spark, f"{folder}/date=*")
        if file_system.globStatus(location):
            return folder
    raise LakeError(f"{log} is no event log: there are no folders date=YYYY-MM-DD in it")


def exists(spark: SparkSession, path: str) -> bool:
    file_system, location = _locate(spark, path)
    return bool(file_system.exists(location))


def delete(spark: SparkSession, path: str) -> None:
    """The whole tree; nothing happens if it is not there."""
    file_system, location = _locate(spark, path)
    file_system.delete(location, True)


def _locate(spark: SparkSession, path: str) -> tuple[Any, Any]:
    jvm: Any = spark.sparkContext._jvm
    context: Any = spark.sparkContext._jsc
    location = jvm.org.apache.hadoop.fs.Path(path)
    return location.getFileSystem(context.hadoopConfiguration()), location


def _date(ts: int) -> str:
    return datetime.fromtimestamp(ts / 1_000_000, UTC).date().isoformat()
