"""One Spark session for all tests here, and two logs: one with problems, one without.

The session is small on purpose (one core, one shuffle partition, no adaptive execution, the quick
compiler): on little data everything else is pure cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from leveret.spark_jobs.generator import Plan, Truth, generate
from leveret.spark_jobs.ingest import ingest
from leveret.spark_jobs.jobs.base import Inputs, Options
from leveret.spark_jobs.lake import Lake, Selection, read_events, read_quarantine
from leveret.spark_jobs.report import Report, make
from leveret.spark_jobs.session import build_session

SESSION = {
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.shuffle.partitions": "1",
    "spark.default.parallelism": "1",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}


@dataclass(frozen=True)
class Log:
    """A log, what is known of it, and the lake it was taken into."""

    folder: Path
    lake: Lake
    truth: Truth
    inputs: Inputs


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    session = build_session("tests", master="local[2]", conf=SESSION)
    yield session
    session.stop()


@pytest.fixture(scope="session")
def busy(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Log:
    """Every problem there is, in two minutes of three tenants' traffic."""
    return take_in(spark, tmp_path_factory.mktemp("busy"), Plan(messages=3000))


@pytest.fixture(scope="session")
def quiet(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Log:
    """The same traffic without any problem."""
    plan = Plan(messages=3000, seed=11, problems=frozenset())
    return take_in(spark, tmp_path_factory.mktemp("quiet"), plan)


@pytest.fixture(scope="session")
def report(spark: SparkSession, busy: Log) -> Report:
    """Of the log with problems. On the way every job but lifecycle is run and kept in the lake."""
    return make(spark, busy.inputs, busy.lake)


def take_in(spark: SparkSession, folder: Path, plan: Plan) -> Log:
    truth = generate(folder / "log" / "events", plan)
    lake = Lake(str(folder / "lake"))
    ingest(spark, str(folder / "log"), lake)
    # Read once: every job of every test begins with it.
    events: DataFrame = read_events(spark, lake, Selection()).cache()
    inputs = Inputs(events, read_quarantine(spark, lake), Options(window_s=10))
    return Log(folder / "log", lake, truth, inputs)
