"""Events for jobs, and their answers in a form that tests compare.

Times are microseconds, rows are found by their keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import TimestampType

from leveret.broker.event_log.schema import Event
from leveret.spark_jobs.jobs.base import Inputs, Options
from leveret.spark_jobs.lake import QUARANTINE
from leveret.spark_jobs.schema import EVENT

Row = Mapping[str, Any]


def frame(spark: SparkSession, *events: Event, boot: str = "b") -> DataFrame:
    """Events as a job meets them; they are numbered here, in the order given."""
    lines = [msgspec.structs.astuple(event) for event in as_numbered(events, boot)]
    return spark.createDataFrame(lines, EVENT)


def as_numbered(events: Sequence[Event], boot: str = "b") -> list[Event]:
    return [
        msgspec.structs.replace(event, seq=number, boot=event.boot or boot)
        for number, event in enumerate(events, 1)
    ]


def inputs(events: DataFrame, options: Options | None = None) -> Inputs:
    """What a job is given where no line was malformed."""
    return Inputs(events, quarantine(events.sparkSession), options or Options())


def quarantine(spark: SparkSession) -> DataFrame:
    """No malformed lines."""
    return spark.createDataFrame([], QUARANTINE)


def rows(answer: DataFrame) -> list[dict[str, Any]]:
    columns = [
        F.unix_micros(field.name).alias(field.name)
        if isinstance(field.dataType, TimestampType)
        else F.col(field.name)
        for field in answer.schema.fields
    ]
    return [row.asDict() for row in answer.select(*columns).collect()]


def in_micros(given: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows that Spark handed over, whose times are local, as ``rows`` has them."""
    return [{name: _micros(value) for name, value in row.items()} for row in given]


def _micros(value: Any) -> Any:
    if not isinstance(value, datetime):
        return value
    return (value.astimezone(UTC) - datetime.fromtimestamp(0, UTC)) // timedelta(microseconds=1)


def assert_same(ours: Sequence[Row], theirs: Sequence[Row], key: Sequence[str]) -> None:
    """Counts, names and times are equal; percentiles within 1 %, other fractions exactly.

    Compared are the columns of ``theirs``.
    """

    def by_key(given: Sequence[Row]) -> dict[tuple[Any, ...], Row]:
        found = {tuple(row[name] for name in key): row for row in given}
        assert len(found) == len(given), "keys are not unique"
        return found

    mine, other = by_key(ours), by_key(theirs)
    assert mine.keys() == other.keys()
    for identity, expected in other.items():
        for name, value in expected.items():
            got = mine[identity][name]
            if isinstance(value, float) and got is not None:
                tolerance = 0.01 if "_p" in name else 1e-6
                assert got == pytest.approx(value, rel=tolerance), (identity, name)
            else:
                assert got == value, (identity, name, got, value)
