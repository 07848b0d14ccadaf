"""Messages with all that clients may put into them: through the wire, and from queue to queue."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from pika import BasicProperties, frame  # type: ignore[import-untyped]
from pika.exceptions import InvalidFrameError  # type: ignore[import-untyped]
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import Row

from leveret.protocol.field_table import Field, Table, TableError, decode_table, encode_table
from leveret.spark_jobs.amqp_rows import MESSAGE, to_message, to_row
from leveret.spark_jobs.datasource_options import read_options, write_options
from leveret.spark_jobs.datasource_properties import Properties, _read_frame
from leveret.spark_jobs.datasource_read import BatchReader
from leveret.spark_jobs.datasource_write import write_rows
from tests.spark.amqp import channel_to
from tests.support.broker_process import BrokerProcess, running_broker

MILLISECONDS = 1_772_438_400_000
# Every type, and values that pika, Python or JSON trip over.
TABLE: Table = {
    "bool": Field("t", True),
    "byte": Field("b", -5),
    "short": Field("s", -300),
    "unsigned": Field("i", 4_000_000_000),
    "long": Field("l", -(2**63)),
    "float": Field("f", 0.5),
    "double": Field("d", 3.141592653589793),
    "huge": Field("d", 1e300),
    "infinite": Field("d", -math.inf),
    "decimal": Field("D", (2, 125)),
    "below zero": Field("D", (0, 2**32 - 7)),
    "time": Field("T", 1_772_438_400),
    "far": Field("T", MILLISECONDS),
    "void": Field("V", None),
    "text": Field("S", "ä"),
    "torn": Field("S", "a\udcff"),
    "bytes": Field("x", b"\xff\x00"),
    "table": Field("F", {"$decimal": Field("S", "much")}),
    "array": Field("A", [Field("d", 0.1), Field("F", {"x": Field("x", b"\x80")})]),
    "b\udcffd key": Field("S", "x"),
}
# Types that JSON does not tell apart come back as the widest.
BACK: Table = TABLE | {
    "byte": Field("I", -5),
    "short": Field("I", -300),
    "unsigned": Field("l", 4_000_000_000),
    "float": Field("d", 0.5),
    "torn": Field("x", b"a\xff"),
    "b?d key": Field("S", "x"),
}
del BACK["b\udcffd key"]


class Raw(BasicProperties):  # type: ignore[misc]
    """Properties with a table as it is on the wire."""

    def __init__(self, table: bytes, timestamp: int, correlation_id: bytes = b"c") -> None:
        super().__init__()
        self.parts = [b"\x24\x40", table, bytes((len(correlation_id),)), correlation_id]
        self.parts.append(struct.pack(">Q", timestamp))

    def encode(self) -> list[bytes]:
        return list(self.parts)


def received(properties: BasicProperties) -> Properties:
    """As a connection reads it, from a header frame between others."""
    data = frame.Header(1, 5, properties).marshal() + frame.Heartbeat().marshal()
    for end in range(len(data) - 9, 0, -50):
        assert _read_frame(data[:end]) == (0, None)
    used, header = _read_frame(data)
    assert (used, header.body_size, header.channel_number) == (len(data) - 8, 5, 1)
    assert isinstance(_read_frame(data[used:])[1], frame.Heartbeat)
    assert isinstance(header.properties, Properties)
    return header.properties


def row_of(properties: BasicProperties) -> dict[str, Any]:
    method = SimpleNamespace(exchange="", routing_key=b"k\xff", redelivered=False, delivery_tag=1)
    fields = dict(zip(MESSAGE.names, to_row(method, received(properties), b"body"), strict=True))
    names = MESSAGE["properties"].dataType.names  # type: ignore[attr-defined]
    fields["properties"] = Row(*names)(*fields["properties"])
    return fields


def test_whatever_was_read_can_be_written() -> None:
    row = row_of(Raw(encode_table(TABLE), MILLISECONDS, b"\xff" * 255))
    assert (row["timestamp"], row["routing_key"]) == (None, "k?")
    assert row["properties"]["correlation_id"] == "?" * 255
    shown = json.loads(row["headers"], parse_constant=pytest.fail)
    assert shown["far"] == {"$timestamp": MILLISECONDS}
    assert shown["infinite"] == {"$double": "-inf"}

    written = received(to_message(row, persistent=True).properties)

    assert written.correlation_id == "?" * 255
    encoded = b"".join(Properties(headers=written.headers).encode()[1:])
    assert decode_table(encoded, 0)[0] == BACK


def test_a_nan_comes_back() -> None:
    row = row_of(Raw(encode_table({"x": Field("d", math.nan)}), 0))
    assert row["headers"] == '{"x": {"$double": "nan"}}'
    assert math.isnan(received(to_message(row, persistent=True).properties).headers["x"])


def test_properties_are_those_of_pika() -> None:
    given = BasicProperties(
        content_type="text/plain",
        content_encoding="ü",
        headers={"a": 1, "b": "x", "c": {"d": [None, True]}},
        delivery_mode=2,
        priority=3,
        correlation_id="c",
        reply_to="r",
        expiration="60000",
        message_id="m",
        timestamp=1_772_438_400,
        type="t",
        user_id="guest",
        app_id="a",
        cluster_id="",
    )
    read = received(given)
    assert vars(read) == vars(given)
    assert b"".join(read.encode()) == b"".join(given.encode())
    assert row_of(given)["timestamp"] == datetime(2026, 3, 2, 8, tzinfo=UTC)
    assert vars(received(Properties())) == vars(BasicProperties())


def test_a_table_that_is_none_costs_the_headers_alone() -> None:
    row = row_of(Raw(b"\x00\x00\x00\x03\x01k?", 1_772_438_400))
    assert (row["headers"], row["body"]) == (None, b"body")
    assert row["timestamp"] is not None


def test_frames_that_do_not_end() -> None:
    data = frame.Header(1, 5, Properties()).marshal()
    with pytest.raises(InvalidFrameError):
        _read_frame(data[:-1] + b"\x00")


@pytest.mark.parametrize(
    "value",
    [pytest.param(2**63, id="too-large"), pytest.param({1}, id="set")],
)
def test_what_has_no_type(value: object) -> None:
    with pytest.raises(TableError):
        Properties(headers={"x": value}).encode()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with running_broker(tmp_path_factory.mktemp("broker")) as process:
        yield process


def test_one_odd_message_stops_nothing(broker: BrokerProcess) -> None:
    """From queue to queue, through a broker."""
    odd = Raw(encode_table(TABLE), MILLISECONDS)
    with channel_to(broker.url) as channel:
        for queue in ("in", "out"):
            channel.queue_declare(queue)
        for properties in (None, odd, None):
            channel.basic_publish("", "in", b"x", properties)
        rows = list(reader(broker, "in").read(InputPartition(0)))
        assert len(rows) == 3
        options = write_options({"url": broker.url, "routingKey": "out"}, MESSAGE.names)
        names = MESSAGE["properties"].dataType.names  # type: ignore[attr-defined]
        made = (Row(*MESSAGE.names)(*row) for row in rows)
        named = (
            Row(**{**row.asDict(), "properties": Row(*names)(*row["properties"])}) for row in made
        )
        assert write_rows(options, named).messages == 3
        copied = list(reader(broker, "out").read(InputPartition(0)))
    at = MESSAGE.names.index("headers")
    assert [row[at] for row in copied] == [row[at] for row in rows]


def reader(broker: BrokerProcess, queue: str) -> BatchReader:
    return BatchReader(read_options({"url": broker.url, "queue": queue}), MESSAGE)
