"""The same jobs on a real cluster: a standalone master and a worker, each a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyspark
import pytest
from pyspark.sql import SparkSession

from leveret.spark_jobs import java
from leveret.spark_jobs.jobs import JOBS
from leveret.spark_jobs.lake import Lake
from tests.spark.answers import assert_same, rows
from tests.spark.conftest import Log
from tests.spark.test_jobs_agree import KEYS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

START_S = 120.0
COMMAND_S = 400.0
SPARK_HOME = Path(pyspark.__file__).parent
MAIN = Path(__file__).parents[2] / "spark_jobs" / "__main__.py"
# Everything stays on this machine.
LOOPBACK = ["spark.driver.host=127.0.0.1", "spark.driver.bindAddress=127.0.0.1"]


@dataclass(frozen=True)
class Cluster:
    url: str
    env: dict[str, str]


def environment() -> dict[str, str]:
    if shutil.which("bash") is None:
        pytest.skip("Spark's start scripts need bash")
    try:
        home = java.prepare(java.find_java(os.environ), java.cache_folder(os.environ))
    except java.NoJava as error:
        pytest.skip(f"there is no Java to start a cluster with: {error}")
    return {
        **os.environ,
        "JAVA_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    env = {**environment(), "SPARK_DAEMON_MEMORY": "256m"}
    port, status_port = free_port(), free_port()
    url = f"spark://127.0.0.1:{port}"
    deploy = "org.apache.spark.deploy"
    with contextlib.ExitStack() as stack:
        output = stack.enter_context((folder / "output").open("wb"))

        def start(*arguments: str) -> None:
            command = [str(SPARK_HOME / "bin" / "spark-class"), *arguments]
            process = subprocess.Popen(command, env=env, stdout=output, stderr=output)
            stack.callback(process.wait)
            stack.callback(process.kill)

        start(
            f"{deploy}.master.Master",
            *("--host", "127.0.0.1", "--port", str(port), "--webui-port", str(status_port)),
        )
        start(
            f"{deploy}.worker.Worker",
            *("--host", "127.0.0.1", "--cores", "1", "--memory", "1g", "-d", str(folder / "work")),
            *("--webui-port", str(free_port()), url),
        )
        wait_for_worker(status_port, folder / "output")
        yield Cluster(url, env)


def wait_for_worker(status_port: int, output: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            address = f"http://127.0.0.1:{status_port}/json/"
            with urllib.request.urlopen(address, timeout=5) as answer:
                if json.load(answer)["aliveworkers"] == 1:
                    return
        time.sleep(0.1)
    pytest.fail(f"the cluster did not come up:\n{output.read_text(errors='replace')[-2000:]}")


def test_a_cluster_gives_the_same_answers(
    spark: SparkSession, busy: Log, cluster: Cluster, tmp_path: Path
) -> None:
    """From taking in the log to every job, with all data read and written by executors."""
    lake = Lake(str(tmp_path / "lake"))
    command = [sys.executable, "-m", "leveret", "analytics", "all", "--master", cluster.url]
    command += ["--log", str(busy.folder), "--lake", lake.root, "--window", "10s"]
    for setting in (*LOOPBACK, "spark.executor.memory=700m", "spark.sql.shuffle.partitions=2"):
        command += ["--conf", setting]
    done = subprocess.run(
        command, env=cluster.env, capture_output=True, text=True, timeout=COMMAND_S, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{busy.truth.events:,} events taken in" in done.stdout
    for name, key in KEYS.items():
        job = JOBS[name]
        there = rows(spark.read.schema(job.schema).parquet(lake.result(job.layer, name)))
        assert there or name == "fairness", name
        assert_same(there, rows(job.run(busy.inputs)), key)


def submit(log: Log, main: Path, *flags: str, env: dict[str, str]) -> str:
    """What spark-submit printed; there the master is its choice, and the JVM is there first."""
    command = [str(SPARK_HOME / "bin" / "spark-submit"), "--master", "local[1]", *flags]
    for setting in LOOPBACK:
        command += ["--conf", setting]
    command += [str(main), "run", "unroutable", "--lake", log.lake.root, "--format", "csv"]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=COMMAND_S, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "shop,shop.orders,cancelled.eu,web,25,5,20" in done.stdout
    return done.stdout


def test_spark_submit_runs_jobs(busy: Log) -> None:
    submit(busy, MAIN, env=environment())


def test_spark_submit_takes_leveret_from_its_wheel(busy: Log, tmp_path: Path) -> None:
    """As docs/analytics.md has it: nothing of Leveret is installed on the machine."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path)]
    built = subprocess.run(
        [*build, str(MAIN.parents[1])], capture_output=True, text=True, timeout=300, check=False
    )
    if built.returncode:
        pytest.skip(f"the wheel cannot be built here: {built.stderr[-300:]}")
    (wheel,) = tmp_path.glob("leveret-*.whl")
    env = environment()
    env.pop("PYTHONPATH", None)
    main = tmp_path / "main.py"
    where = "import leveret\nprint(leveret.__file__)\n"
    main.write_text(
        MAIN.read_text(encoding="utf-8").replace("import sys\n", f"import sys\n{where}"),
        encoding="utf-8",
    )
    assert f"{wheel}/leveret/" in submit(busy, main, "--py-files", str(wheel), env=env)
