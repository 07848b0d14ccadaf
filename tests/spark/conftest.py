"""One Spark session for all tests here, and three logs: with problems, without, and of the demo.

The session is small on purpose (two cores, one shuffle partition, no adaptive execution, the quick
compiler): on little data everything else is pure cost. What takes long and many tests look at is
made ahead, in a thread of its own, since one test alone keeps less than one core busy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from leveret.spark_jobs import demo, demo_script
from leveret.spark_jobs.demo_truth import Truth as DemoTruth
from leveret.spark_jobs.generator import Plan, Truth, generate
from leveret.spark_jobs.ingest import ingest
from leveret.spark_jobs.jobs import JOBS
from leveret.spark_jobs.jobs.base import Inputs, Options
from leveret.spark_jobs.lake import Lake, Selection, read_events, read_quarantine
from leveret.spark_jobs.report import Report, make
from leveret.spark_jobs.runner import keep
from leveret.spark_jobs.session import build_session

# Room for young objects, or a third of the time goes into collecting them; and for what was
# compiled, or it is thrown out and compiled again.
JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xmn600m -XX:ReservedCodeCacheSize=256m"
SESSION = {
    "spark.driver.extraJavaOptions": JVM,
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


@dataclass(frozen=True)
class Played:
    """The demo: what its clients did, and what became of the log."""

    truth: DemoTruth
    files: list[Path]
    lake: Lake
    inputs: Inputs
    report: Report


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    session = build_session("tests", master="local[2]", conf=SESSION)
    yield session
    session.stop()


class Ahead:
    """Work that was begun before the first test that needs it."""

    def __init__(self, pool: ThreadPoolExecutor, wanted: set[str]) -> None:
        self._pool = pool
        # The fixtures of all tests that were selected.
        self._wanted = wanted
        self._begun: dict[str, Future[Any]] = {}

    def is_wanted(self, fixture: str) -> bool:
        return fixture in self._wanted

    def begin(self, fixture: str, work: Callable[..., object], *arguments: object) -> None:
        if self.is_wanted(fixture):
            self._begun[fixture] = self._pool.submit(work, *arguments)

    def get(self, fixture: str) -> Any:
        return self._begun[fixture].result()

    def wait_done(self) -> None:
        for future in self._begun.values():
            future.exception()


@pytest.fixture(scope="session", autouse=True)
def ahead(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ahead]:
    """Nothing is begun, and Spark not started, where no test asks for any of it."""
    wanted = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as pool:
        ahead = Ahead(pool, wanted)
        if ahead.is_wanted("played"):
            folder = tmp_path_factory.mktemp("demo")
            # Clients and a broker, while Spark starts.
            performed = pool.submit(demo.perform, folder, demo_script.SECONDS_LEAST)
            spark = request.getfixturevalue("spark")
            ahead.begin("played", look_at, spark, folder, performed)
        if ahead.is_wanted("quiet_report"):
            spark = request.getfixturevalue("spark")
            ahead.begin("quiet_report", report_quiet, spark, tmp_path_factory.mktemp("quiet"))
        yield ahead


@pytest.fixture
def spark_alone(spark: SparkSession, ahead: Ahead) -> SparkSession:
    """The session, with nothing else going on in it."""
    ahead.wait_done()
    return spark


@pytest.fixture(scope="session")
def busy(spark: SparkSession, ahead: Ahead, tmp_path_factory: pytest.TempPathFactory) -> Log:
    """Every problem there is, in two minutes of three tenants' traffic."""
    log = take_in(spark, tmp_path_factory.mktemp("busy"), Plan(messages=1200))
    ahead.begin("report", make, spark, log.inputs, log.lake)
    return log


@pytest.fixture(scope="session")
def report(busy: Log, ahead: Ahead) -> Report:
    """Of the log with problems. On the way every job but lifecycle is run and kept in the lake."""
    made: Report = ahead.get("report")
    return made


@pytest.fixture(scope="session")
def quiet_report(ahead: Ahead) -> Report:
    """Of the same traffic without any problem."""
    made: Report = ahead.get("quiet_report")
    return made


@pytest.fixture(scope="session")
def played(ahead: Ahead) -> Played:
    """The demo, and every job on the log its broker wrote."""
    made: Played = ahead.get("played")
    return made


def report_quiet(spark: SparkSession, folder: Path) -> Report:
    log = take_in(spark, folder, Plan(messages=1200, seed=11, problems=frozenset()))
    return make(spark, log.inputs, log.lake)


def look_at(spark: SparkSession, folder: Path, performed: Future[DemoTruth]) -> Played:
    truth = performed.result()
    lake = Lake(str(folder / "lake"))
    ingest(spark, str(folder / "data"), lake)
    events = read_events(spark, lake, Selection()).cache()
    inputs = Inputs(events, read_quarantine(spark, lake), Options(window_s=1))
    report = make(spark, inputs, lake)
    keep(spark, JOBS["lifecycle"], inputs, lake)
    files = sorted((folder / "data" / "events").rglob("*.jsonl"))
    return Played(truth, files, lake, inputs, report)


def take_in(spark: SparkSession, folder: Path, plan: Plan) -> Log:
    truth = generate(folder / "log" / "events", plan)
    lake = Lake(str(folder / "lake"))
    ingest(spark, str(folder / "log"), lake)
    # Read once: every job of every test begins with it.
    events: DataFrame = read_events(spark, lake, Selection()).cache()
    inputs = Inputs(events, read_quarantine(spark, lake), Options(window_s=10))
    return Log(folder / "log", lake, truth, inputs)
