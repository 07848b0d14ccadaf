"""What a job is, and the few columns that several of them compute alike.

A job is one question. Its module has pure functions from DataFrames to DataFrames and a ``JOB``
that names the question and the columns of the answer. Jobs know nothing of sessions, files or
arguments: ``runner.py`` gives them their inputs and takes what they return.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import (
    BooleanType,
    DataType,
    DoubleType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

TEXT: Final = StringType()
COUNT: Final = LongType()
NUMBER: Final = DoubleType()
TIME: Final = TimestampType()
FLAG: Final = BooleanType()

# Half, nineteen of twenty, ninety-nine of a hundred.
PERCENTILES: Final = (0.5, 0.95, 0.99)
# How many numbers a sketch keeps as they are; of more, ranks are right to one in 10,000.
_SKETCH: Final = 65_535


@dataclass(frozen=True, slots=True)
class Options:
    """What a person may set."""

    # Length of the windows that time is cut into.
    window_s: int = 60
    # Deliveries of one message in one queue that make it a suspect.
    poison_deliveries: int = 5
    # Ready messages that a queue may hold before somebody should act; forecasts aim at it.
    capacity: int = 1_000_000
    # A connection that was open for less is short-lived.
    short_s: float = 5.0
    # How many routing keys to list for each exchange.
    top: int = 20
    # How many times its usual deviation a window must be off to be called odd.
    odd_score: float = 8.0


@dataclass(frozen=True, slots=True)
class Inputs:
    """``events`` are those of the time, vhost and queue that were asked for."""

    events: DataFrame
    quarantine: DataFrame
    options: Options = Options()
    # By boot, the share of messages that it logged; those not named logged all.
    samples: Mapping[str, float] = field(default_factory=dict)
    # Every event of the time, for questions that a part of them would answer wrongly; None if
    # that is what ``events`` are.
    everything: DataFrame | None = None
    # What ``events`` are restricted to.
    vhost: str | None = None
    queue: str | None = None

    @property
    def of_the_time(self) -> DataFrame:
        return self.events if self.everything is None else self.everything

    @property
    def of_the_vhost(self) -> DataFrame:
        """Events of the time and the vhost, of every queue."""
        if self.vhost is None:
            return self.of_the_time
        return self.of_the_time.where(F.col("vhost").isin(self.vhost, ""))


@dataclass(frozen=True, slots=True)
class Job:
    name: str
    question: str
    schema: StructType
    build: Callable[[Inputs], DataFrame]
    # How rows are put before people; "-" in front for the largest first.
    order: tuple[str, ...]
    # "silver" is one row per message, for other jobs to read; "gold" is an answer.
    layer: str = "gold"

    def run(self, inputs: Inputs) -> DataFrame:
        """The answer, in exactly the job's columns."""
        return self.build(inputs).to(self.schema)

    def ordered(self, answer: DataFrame) -> DataFrame:
        columns = [
            F.col(name[1:]).desc_nulls_last() if name[0] == "-" else F.col(name).asc()
            for name in self.order
        ]
        return answer.orderBy(*columns)


def columns(**types: DataType) -> StructType:
    return StructType([StructField(name, type_) for name, type_ in types.items()])


def window(options: Options) -> Column:
    """The beginning of the window an event falls into, as a column ``window``."""
    length = options.window_s * 1_000_000
    return F.timestamp_micros(F.col("ts") - F.col("ts") % length).alias("window")


def at(ts: Column | str) -> Column:
    return F.timestamp_micros(ts)


def is_(*kinds: str) -> Column:
    """Events of these kinds."""
    return F.col("ev").isin(*kinds) if len(kinds) > 1 else F.col("ev") == kinds[0]


def count_of(condition: Column) -> Column:
    return F.count_if(condition)


def sum_of(column: str, condition: Column) -> Column:
    return F.coalesce(F.sum(F.when(condition, F.col(column))), F.lit(0))


def messages_per_logged(samples: Mapping[str, float]) -> Column:
    """How many messages one that is in the log stands for, by the boot of its event."""
    column = F.lit(1.0)
    for boot, share in samples.items():
        if 0 < share < 1:
            column = F.when(F.col("boot") == boot, F.lit(1.0 / share)).otherwise(column)
    return column


def percentiles(column: Column | str) -> Column:
    """A sketch of how a number is distributed, for ``percentile_ms``.

    Half the work of Spark's percentile_approx, and exact where there are few numbers.
    """
    return F.kll_sketch_agg_bigint(column, _SKETCH)


def percentile_ms(sketch: str, index: int, name: str) -> Column:
    """One of PERCENTILES, from microseconds to milliseconds; null where there was no number."""
    has_any = F.kll_sketch_get_n_bigint(sketch) > 0
    found = F.kll_sketch_get_quantile_bigint(sketch, F.lit(PERCENTILES[index]))
    return (F.when(has_any, found) / 1000.0).alias(name)
