"""The data source's readers and writers as Spark calls them, without Spark, on a real broker."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pika.adapters.blocking_connection import BlockingChannel  # type: ignore[import-untyped]
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import Row

from leveret.spark_jobs.amqp_link import Link, LinkError, LinkLost
from leveret.spark_jobs.amqp_rows import MESSAGE, ColumnError
from leveret.spark_jobs.datasource_options import read_options, write_options
from leveret.spark_jobs.datasource_read import BatchReader, StreamReader
from leveret.spark_jobs.datasource_write import write_rows
from tests.spark.amqp import channel_to, numbers_in, publish_numbers, ready, wait_until
from tests.support.broker_process import BrokerProcess, running_broker

START = {"taken": 0}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with running_broker(tmp_path_factory.mktemp("broker")) as process:
        yield process


@pytest.fixture
def channel(broker: BrokerProcess) -> Iterator[BlockingChannel]:
    with channel_to(broker.url) as channel:
        channel.queue_declare("in", durable=True)
        yield channel
        channel.queue_delete("in")


def stream_reader(url: str, **options: str) -> StreamReader:
    return StreamReader(read_options({"url": url, "queue": "in", **options}), MESSAGE)


def numbers(rows: Iterator[tuple]) -> list[int]:
    return [int(row[0]) for row in rows]


def test_what_spark_did_not_finish_comes_again(
    broker: BrokerProcess, channel: BlockingChannel
) -> None:
    """The driver is gone after it was given two batches and committed one."""
    publish_numbers(channel, "in", range(30))
    first = stream_reader(broker.url, batchSize="10")
    rows, end = first.read(START)
    assert numbers(rows) == list(range(10))
    rows, second_end = first.read(end)
    assert numbers(rows) == list(range(10, 20))
    first.commit(end)
    first._disconnect()

    second = stream_reader(broker.url, batchSize="100")
    # Spark repeats the batch that it had noted and not finished.
    assert list(second.readBetweenOffsets(end, second_end)) == []
    rows, _ = second.read(second_end)
    assert numbers(rows) == list(range(10, 30))
    second._disconnect()


def test_reading_on_is_an_ack(broker: BrokerProcess, channel: BlockingChannel) -> None:
    """Spark commits a batch when the next one begins; before a pause that would be never."""
    publish_numbers(channel, "in", range(3))
    reader = stream_reader(broker.url)
    _, end = reader.read(START)
    rows, same = reader.read(end)
    assert (list(rows), same) == ([], end)
    reader._disconnect()
    assert ready(channel, "in") == 0


def test_asking_again_gives_the_same_rows(broker: BrokerProcess, channel: BlockingChannel) -> None:
    publish_numbers(channel, "in", range(20))
    reader = stream_reader(broker.url, batchSize="10")
    once = reader.read(START)
    again = reader.read(START)
    assert numbers(once[0]) == numbers(again[0]) == list(range(10))
    assert once[1] == again[1]
    reader._disconnect()


def test_memory_is_bounded_by_prefetch(broker: BrokerProcess, channel: BlockingChannel) -> None:
    """However much there is, and however long Spark takes."""
    publish_numbers(channel, "in", range(400))
    reader = stream_reader(broker.url, batchSize="30", prefetch="50")
    offset, taken = START, 0
    while taken < 400:
        rows, offset = reader.read(offset)
        got = numbers(rows)
        assert 0 < len(got) <= 30
        taken += len(got)
        held = sum(len(batch.rows) for batch in reader._unfinished)
        assert reader._consumer is not None
        assert len(reader._consumer.waiting) + held <= 50
        # All that is not with us is in the queue.
        assert ready(channel, "in") >= 400 - taken - 50
    reader._disconnect()


def test_available_now_ends_at_what_was_there(
    broker: BrokerProcess, channel: BlockingChannel
) -> None:
    publish_numbers(channel, "in", range(12))
    reader = stream_reader(broker.url, batchSize="10")
    reader.prepareForTriggerAvailableNow()
    publish_numbers(channel, "in", range(12, 20))
    rows, end = reader.read(START)
    assert numbers(rows) == list(range(10))
    rows, end = reader.read(end)
    assert numbers(rows) == [10, 11]
    rows, last = reader.read(end)
    assert (list(rows), last) == ([], end)
    reader._disconnect()
    assert numbers_in(channel, "in") == list(range(12, 20))


def test_a_broker_that_comes_back(tmp_path: Path) -> None:
    """Its restart takes the unacked messages back; the query goes on."""
    data, log = tmp_path / "data", tmp_path / "log"
    broker = BrokerProcess(data, log)
    try:
        with channel_to(broker.url) as channel:
            channel.queue_declare("in", durable=True)
            write = write_options({"url": broker.url, "routingKey": "in"}, ["body"])
            write_rows(write, iter([Row(body=str(number)) for number in range(20)]))
        reader = stream_reader(broker.url, batchSize="10")
        rows, end = reader.read(START)
        assert numbers(rows) == list(range(10))
        port = broker.port
        broker.kill()
        broker = BrokerProcess(data, log, "--port", str(port))
        # The ack finds no connection, so all twenty are there again.
        seen: set[int] = set()
        while len(seen) < 20:
            rows, end = reader.read(end)
            seen.update(numbers(rows))
        reader.commit(end)
        reader._disconnect()
        with channel_to(broker.url) as channel:
            assert ready(channel, "in") == 0
    finally:
        broker.kill()


def test_a_broker_that_stays_away(tmp_path: Path) -> None:
    reader = stream_reader("amqp://guest:guest@127.0.0.1:1/%2F", reconnectSeconds="0")
    with pytest.raises(LinkLost, match=r"guest:\*\*\*@127.0.0.1:1/%2F cannot be reached"):
        reader.read(START)


def test_a_wrong_password_is_not_tried_again(broker: BrokerProcess) -> None:
    link = Link(broker.url.replace("guest:guest", "guest:wrong"), "test")
    with pytest.raises(LinkError, match="refused") as caught:
        link.open()
    assert not isinstance(caught.value, LinkLost)


def test_a_queue_that_is_deleted(broker: BrokerProcess, channel: BlockingChannel) -> None:
    reader = stream_reader(broker.url, waitMs="10000")
    reader.prepareForTriggerAvailableNow()
    reader._left = None
    channel.queue_delete("in")
    with pytest.raises(LinkError, match="was the queue deleted"):
        reader.read(START)
    reader._disconnect()


def test_a_queue_that_is_not_there(broker: BrokerProcess) -> None:
    reader = StreamReader(read_options({"url": broker.url, "queue": "nope"}), MESSAGE)
    with pytest.raises(LinkError, match="no queue 'nope'"):
        reader.read(START)


@pytest.mark.parametrize(
    ("options", "left"),
    [
        pytest.param({}, [], id="all"),
        pytest.param({"maxMessages": "4"}, [4, 5, 6], id="some"),
        pytest.param({"ack": "false"}, [0, 1, 2, 3, 4, 5, 6], id="only-looking"),
    ],
)
def test_draining_once(
    broker: BrokerProcess, channel: BlockingChannel, options: dict[str, str], left: list[int]
) -> None:
    publish_numbers(channel, "in", range(7))
    given = {"url": broker.url, "queue": "in", "batchSize": "3", **options}
    reader = BatchReader(read_options(given), MESSAGE)
    rows = numbers(reader.read(InputPartition(0)))
    assert rows == list(range(4 if "maxMessages" in options else 7))
    wait_until(lambda: ready(channel, "in") == len(left))
    assert numbers_in(channel, "in") == left


def test_a_draining_that_fails_gives_everything_back(
    broker: BrokerProcess, channel: BlockingChannel
) -> None:
    publish_numbers(channel, "in", range(7))
    reader = BatchReader(read_options({"url": broker.url, "queue": "in"}), MESSAGE)
    rows = reader.read(InputPartition(0))
    next(rows)
    del rows
    wait_until(lambda: ready(channel, "in") == 7)


def test_confirms_are_waited_for_together(broker: BrokerProcess, channel: BlockingChannel) -> None:
    options = write_options(
        {"url": broker.url, "routingKey": "in", "confirmWindow": "16"}, ["body"]
    )
    written = write_rows(options, (Row(body=str(number)) for number in range(200)))
    assert written.messages == 200
    assert numbers_in(channel, "in") == list(range(200))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        pytest.param({"routingKey": "nowhere"}, "no queue takes.*'nowhere'", id="unroutable"),
        pytest.param({"routingKey": "in", "exchange": "nope"}, "no exchange 'nope'", id="exchange"),
    ],
)
def test_what_is_not_taken_fails_the_task(
    broker: BrokerProcess, options: dict[str, str], told: str
) -> None:
    given = write_options({"url": broker.url, **options}, ["body"])
    with pytest.raises(LinkError, match=told):
        write_rows(given, iter([Row(body="x")]))


def test_a_refused_message_fails_the_task(broker: BrokerProcess, channel: BlockingChannel) -> None:
    full = {"x-max-length": 2, "x-overflow": "reject-publish"}
    channel.queue_declare("full", arguments=full, exclusive=True)
    options = write_options({"url": broker.url, "routingKey": "full"}, ["body"])
    with pytest.raises(LinkError, match="reject-publish"):
        write_rows(options, iter([Row(body="x")] * 5))


def test_values_that_amqp_cannot_carry(broker: BrokerProcess) -> None:
    options = write_options({"url": broker.url}, ["body", "routing_key"])
    with pytest.raises(ColumnError, match="cannot be sent"):
        write_rows(options, iter([Row(body="x", routing_key="k" * 300)]))
    with pytest.raises(ColumnError, match="null"):
        write_rows(options, iter([Row(body="x", routing_key=None)]))


def test_no_rows_no_connection() -> None:
    options = write_options({"url": "amqp://127.0.0.1:1", "routingKey": "k"}, ["body"])
    assert write_rows(options, iter([])).messages == 0


@pytest.mark.slow
def test_heartbeats_are_answered_while_spark_is_busy(
    broker: BrokerProcess, channel: BlockingChannel
) -> None:
    """A broker that hears nothing for two intervals closes the connection."""
    options = write_options({"url": f"{broker.url}?heartbeat=1", "routingKey": "in"}, ["body"])

    def rows() -> Iterator[Row]:
        yield Row(body="0")
        over = time.monotonic() + 4
        wait_until(lambda: time.monotonic() > over)
        yield Row(body="1")

    assert write_rows(options, rows()).messages == 2
