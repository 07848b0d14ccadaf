"""The data source ``leveret`` in Spark: round trips, and what dies on the way loses nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pika import BasicProperties  # type: ignore[import-untyped]
from pika.adapters.blocking_connection import BlockingChannel  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from leveret.spark_jobs.datasource import LeveretDataSource
from tests.spark.amqp import channel_to, drain, numbers_in, publish_numbers, ready, wait_until
from tests.spark.copying_driver import PART
from tests.spark.dying_writer import AT_ROW
from tests.support.broker_process import ROOT, BrokerProcess, running_broker

PROGRAM_S = 110.0


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with running_broker(tmp_path_factory.mktemp("broker")) as process:
        yield process


@pytest.fixture
def channel(broker: BrokerProcess) -> Iterator[BlockingChannel]:
    with channel_to(broker.url) as channel:
        for queue in ("in", "out"):
            channel.queue_declare(queue, durable=True)
        yield channel
        for queue in ("in", "out"):
            channel.queue_delete(queue)


@pytest.fixture
def source(spark: SparkSession) -> SparkSession:
    """The session, with the data source."""
    spark.dataSource.register(LeveretDataSource)
    return spark


@pytest.mark.slow  # the fast set has its reader in test_datasource_parts.py, its writer below
def test_a_stream_from_queue_to_queue(
    source: SparkSession, broker: BrokerProcess, channel: BlockingChannel, tmp_path: Path
) -> None:
    """Messages arrive with everything they had, and are acked when the query has ended."""
    sent = BasicProperties(
        content_type="text/plain",
        delivery_mode=2,
        priority=3,
        correlation_id="c",
        message_id="m",
        app_id="a",
        timestamp=1_772_438_400,
        headers={"text": "ä", "number": 7, "bytes": b"\xff", "table": {"flag": True}},
    )
    for number in range(25):
        channel.basic_publish("", "in", str(number).encode(), sent)
    messages = (
        source.readStream.format("leveret")
        .options(url=broker.url, queue="in", batchSize="15")
        .load()
    )
    query = (
        messages.writeStream.format("leveret")
        .options(url=broker.url, exchange="", routingKey="out")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()

    assert [progress["numInputRows"] for progress in query.recentProgress] == [15, 10]
    received = drain(channel, "out")
    assert [int(body) for _, _, body in received] == list(range(25))
    assert {str(properties) for _, properties, _ in received} == {str(sent)}
    # Nothing is left, and nothing comes back from the connection that has ended.
    channel.queue_delete("in", if_empty=True)


def test_a_batch_from_table_to_queue_to_table(
    source: SparkSession, broker: BrokerProcess, channel: BlockingChannel
) -> None:
    frame = source.sql(
        "SELECT 'one' AS body, 'in' AS routing_key, map('a', 'b') AS headers, "
        "timestamp'2026-03-02 08:15:00' AS timestamp, "
        "named_struct('content_type', 'text/plain', 'delivery_mode', 1) AS properties "
        "UNION ALL SELECT 'two', 'in', NULL, NULL, NULL"
    )
    frame.write.format("leveret").mode("append").option("url", broker.url).save()

    read = source.read.format("leveret").options(url=broker.url, queue="in").load()
    rows = {bytes(row.body): row for row in read.collect()}

    first, second = rows[b"one"], rows[b"two"]
    assert (first.exchange, first.routing_key, first.redelivered) == ("", "in", False)
    assert (first.properties.content_type, first.properties.delivery_mode) == ("text/plain", 1)
    assert first.headers == '{"a": "b"}'
    assert first.timestamp.astimezone(UTC) == datetime(2026, 3, 2, 8, 15, tzinfo=UTC)
    assert (second.properties.delivery_mode, second.headers, second.timestamp) == (2, None, None)
    wait_until(lambda: ready(channel, "in") == 0)


def test_a_wrong_option_is_told_by_spark(source: SparkSession) -> None:
    reader = source.read.format("leveret").options(url="amqp://localhost", qeue="in")
    with pytest.raises(PySparkException, match="there is no option 'qeue'"):
        reader.load()


def start_program(name: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", f"tests.spark.{name}", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A group of its own, so that its JVM and workers end along with it.
        start_new_session=True,
    )


def kill_program(program: subprocess.Popen[str]) -> str:
    """End it and all that it started; what it said."""
    try:
        os.killpg(program.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it has ended, and so has everything of it
    said, _ = program.communicate()
    return said


def run_program(name: str, *arguments: str) -> None:
    program = start_program(name, *arguments)
    try:
        said, _ = program.communicate(timeout=PROGRAM_S)
    except subprocess.TimeoutExpired:
        pytest.fail(kill_program(program))
    assert program.returncode == 0, said


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_driver_killed_in_the_middle_of_a_batch(
    broker: BrokerProcess, channel: BlockingChannel, tmp_path: Path
) -> None:
    publish_numbers(channel, "in", range(50))
    marker = tmp_path / "marker"
    driver = start_program(
        "copying_driver", broker.url, str(tmp_path / "checkpoint"), "2", str(marker)
    )
    try:
        wait_until(lambda: marker.exists() or driver.poll() is not None)
        # Two batches are done and acked, the third is half written, the rest may be on its way.
        assert (driver.poll(), ready(channel, "out")) == (None, 20 + PART)
    finally:
        said = kill_program(driver)
    assert marker.exists(), said
    wait_until(lambda: ready(channel, "in") == 30)

    run_program("copying_driver", broker.url, str(tmp_path / "checkpoint"), "-1", str(marker))

    copied = numbers_in(channel, "out")
    assert set(copied) == set(range(50))
    # Once more is what was written of the batch that was not finished, and nothing else.
    assert sorted(copied)[:20] == list(range(20))
    assert len(copied) == 50 + PART
    assert ready(channel, "in") == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("victim", "master"),
    [
        pytest.param("worker", "local[1,2]", id="python-worker"),
        pytest.param("executor", "local-cluster[1,1,512]", id="executor"),
    ],
)
def test_a_writer_killed_on_the_way(
    broker: BrokerProcess, channel: BlockingChannel, victim: str, master: str
) -> None:
    """Spark runs its task again: everything is there, and what the first had sent twice."""
    run_program("dying_writer", broker.url, master, victim, "1000")
    written = numbers_in(channel, "out")
    assert set(written) == set(range(1000))
    assert 0 < len(written) - 1000 <= AT_ROW
