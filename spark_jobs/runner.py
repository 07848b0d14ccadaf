"""Gives jobs their inputs and keeps their answers: the only code between jobs and files.

Upstream: the commands. Downstream: ``jobs/``, and the lake's ``silver`` and ``gold`` folders, where
each answer replaces the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any, Final, TypeVar
from uuid import uuid4

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from leveret.spark_jobs.jobs.base import Inputs, Job, Options
from leveret.spark_jobs.lake import Lake, LakeError, Selection, read_events, read_quarantine

# Lengths that people think in, and how many windows make a readable chart.
_LENGTHS_S: Final = (1, 5, 10, 30, 60, 300, 600, 1800, 3600, 21_600, 86_400)
_WINDOWS: Final = 120
# Jobs that run at the same time: while one is planned, or waits for its last task, others compute.
_AT_ONCE: Final = 4

Made = TypeVar("Made")


def open_inputs(
    spark: SparkSession, lake: Lake, selection: Selection, options: Options, *, auto_window: bool
) -> Inputs:
    """What jobs work on. Raises LakeError if the selection has no events."""
    events = read_events(spark, lake, selection)
    if auto_window:
        first, last = span(events)
        options = replace(options, window_s=window_for((last - first) / 1_000_000))
    everything = None
    if selection.vhost is not None or selection.queue is not None:
        of_the_time = replace(selection, vhost=None, queue=None)
        everything = read_events(spark, lake, of_the_time)
    return Inputs(
        events,
        read_quarantine(spark, lake),
        options,
        samples(spark, lake),
        everything,
        selection.vhost,
        selection.queue,
    )


def samples(spark: SparkSession, lake: Lake) -> dict[str, float]:
    """By boot, the share of messages that it logged; also of those that began before --since."""
    starts = read_events(spark, lake, Selection()).where(F.col("ev") == "broker_start")
    share = F.col("attrs")["sample"].cast("double").alias("sample")
    rows = starts.select("boot", share).where(share.isNotNull()).collect()
    return {row["boot"]: row["sample"] for row in rows}


def span(events: DataFrame) -> tuple[int, int]:
    """Times of the first and the last event, in microseconds. Raises LakeError without any."""
    row = events.agg(F.min("ts"), F.max("ts")).first()
    if row is None or row[0] is None:
        raise LakeError("no events match: look at --since, --until, --vhost and --queue")
    return int(row[0]), int(row[1])


def window_for(seconds: float) -> int:
    """The shortest usual length that cuts a time into few enough windows."""
    for length in _LENGTHS_S:
        if seconds / length <= _WINDOWS:
            return length
    return _LENGTHS_S[-1]


def keep(spark: SparkSession, job: Job, inputs: Inputs, lake: Lake) -> DataFrame:
    """Run a job, write its answer to the lake, and return it from there, in order."""
    path = lake.result(job.layer, job.name)
    job.run(inputs).write.mode("overwrite").parquet(path)
    return job.ordered(spark.read.schema(job.schema).parquet(path))


def at_once(
    spark: SparkSession, jobs: Iterable[Job], work: Callable[[Job], Made]
) -> dict[str, Made]:
    """What ``work`` makes of each job, by its name; several are worked on at the same time.

    Raises what the first that failed raised; the others are given up then, as on Ctrl-C. Whatever
    else the session works on goes on.
    """
    tag = f"leveret-{uuid4().hex}"

    def tagged(job: Job) -> Made:
        spark.sparkContext.addJobTag(tag)
        return work(job)

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="job") as pool:
        begun = {job.name: pool.submit(tagged, job) for job in jobs}
        try:
            return {name: future.result() for name, future in begun.items()}
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            # One that is between two of Spark's jobs would begin the next.
            while running := [future for future in begun.values() if not future.done()]:
                spark.sparkContext.cancelJobsWithTag(tag)
                wait(running, timeout=0.2)
            raise


def rows_of(answer: DataFrame) -> Sequence[dict[str, Any]]:
    """A small answer as plain Python."""
    return [row.asDict() for row in answer.collect()]
