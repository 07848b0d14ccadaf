"""What Spark noted of ingest's batches: which segments each has, and which was not finished.

``offsets/<n>`` is written before batch n, ``commits/<n>`` after it; ``sources/0`` has the segments,
under a count of its own (``logOffset``) to which the offset leads. Every tenth of those files is
named ``<m>.compact`` and has all entries up to it.
"""

from __future__ import annotations

import json

from pyspark.sql import SparkSession

from leveret.spark_jobs.hadoop_files import is_there, names_in, read_text


def unfinished(spark: SparkSession, checkpoint: str) -> int | None:
    """The batch that was begun and not noted as done."""
    begun = _numbers(names_in(spark, f"{checkpoint}/offsets"))
    done = _numbers(names_in(spark, f"{checkpoint}/commits"))
    return max(begun) if begun and (not done or max(begun) > max(done)) else None


def gone(spark: SparkSession, checkpoint: str, batch: int) -> list[str]:
    """Segments of a batch that are not where they were when it was begun."""
    return [uri for uri in segments(spark, checkpoint, batch) if not is_there(spark, uri)]


def segments(spark: SparkSession, checkpoint: str, batch: int) -> list[str]:
    """Addresses of a batch's segments."""
    after, up_to = (_log_offset(spark, checkpoint, number) for number in (batch - 1, batch))
    found = []
    for number in range(after + 1, up_to + 1):
        name = f"{checkpoint}/sources/0/{number}"
        text = read_text(spark, name) or read_text(spark, f"{name}.compact") or ""
        entries = (json.loads(line) for line in text.splitlines() if line.startswith("{"))
        found += [str(entry["path"]) for entry in entries if entry["batchId"] == number]
    return found


def _log_offset(spark: SparkSession, checkpoint: str, batch: int) -> int:
    text = read_text(spark, f"{checkpoint}/offsets/{batch}")
    if text is None:
        # Before the first batch there were none.
        return batch if batch >= 0 else -1
    return int(json.loads(text.splitlines()[-1])["logOffset"])


def _numbers(names: list[str]) -> list[int]:
    return [int(name) for name in names if name.isdecimal()]
