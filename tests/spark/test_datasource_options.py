"""What may be asked of the data source, and how messages become rows and rows messages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal

import pytest
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    Row,
    StringType,
    StructField,
    StructType,
)

from leveret.spark_jobs.amqp_link import LinkError, parameters, without_password
from leveret.spark_jobs.amqp_rows import (
    MESSAGE,
    ColumnError,
    check_columns,
    headers_from_json,
    headers_to_json,
    row_maker,
    to_message,
)
from leveret.spark_jobs.datasource import LeveretDataSource
from leveret.spark_jobs.datasource_options import OptionError, read_options, write_options
from leveret.spark_jobs.datasource_properties import FarTime

URL = "amqp://guest:secret@localhost/%2F"


def columns(**types: DataType) -> StructType:
    return StructType([StructField(name, type_) for name, type_ in types.items()])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        pytest.param({"queue": "q"}, "url is missing.*amqp://user", id="no-url"),
        pytest.param({"url": "localhost:5672", "queue": "q"}, "no address", id="no-scheme"),
        pytest.param({"url": "amqp://h:port/", "queue": "q"}, "no address", id="bad-port"),
        pytest.param({"url": URL}, "queue is missing", id="no-queue"),
        pytest.param({"url": URL, "queue": "q", "prefech": "1"}, "no option 'prefech'", id="typo"),
        pytest.param({"url": URL, "queue": "q", "batchSize": "0"}, "1 to 65535", id="zero"),
        pytest.param({"url": URL, "queue": "q", "prefetch": "many"}, "whole number", id="text"),
        pytest.param({"url": URL, "queue": "q", "ack": "yes"}, "true or false", id="flag"),
        pytest.param({"url": URL, "queue": "q", "exchange": "x"}, "for reading", id="of-writing"),
    ],
)
def test_wrong_options_for_reading(options: Mapping[str, str], told: str) -> None:
    with pytest.raises(OptionError, match=told) as caught:
        read_options(options)
    assert "secret" not in str(caught.value)


def test_options_for_reading() -> None:
    options = read_options({"URL": URL, "QUEUE": "q", "batchsize": "50", "path": ""})
    assert (options.batch_size, options.prefetch, options.ack) == (50, 100, True)
    assert options.max_messages is None


@pytest.mark.parametrize(
    ("options", "told"),
    [
        pytest.param({"url": URL}, "routingKey", id="no-key"),
        pytest.param({"url": URL, "routingKey": "k", "mandatory": "1"}, "true or", id="flag"),
        pytest.param({"url": URL, "routingKey": "k", "queue": "q"}, "for writing", id="of-reading"),
    ],
)
def test_wrong_options_for_writing(options: Mapping[str, str], told: str) -> None:
    with pytest.raises(OptionError, match=told):
        write_options(options, ["body"])


def test_a_row_may_say_where_it_goes() -> None:
    options = write_options({"url": URL}, ["body", "routing_key"])
    assert (options.exchange, options.routing_key) == ("", None)


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        pytest.param(columns(routing_key=StringType()), "no column body", id="no-body"),
        pytest.param(
            columns(body=BinaryType(), price=IntegerType()),
            "'price' would not be sent",
            id="unknown",
        ),
        pytest.param(columns(body=IntegerType()), "cast it to binary or string", id="type"),
        pytest.param(
            columns(body=StringType(), properties=columns(colour=StringType())),
            "no property colour",
            id="property",
        ),
    ],
)
def test_columns_that_cannot_be_written(schema: StructType, told: str) -> None:
    with pytest.raises(ColumnError, match=told):
        check_columns(schema)


def test_what_was_read_can_be_written() -> None:
    check_columns(MESSAGE)


def test_columns_that_cannot_be_read() -> None:
    with pytest.raises(ColumnError, match="no column 'price'"):
        row_maker(columns(body=BinaryType(), price=IntegerType()))


def test_messages_are_only_added() -> None:
    source = LeveretDataSource({"url": URL, "routingKey": "k"})
    with pytest.raises(OptionError, match="append"):
        source.writer(columns(body=StringType()), overwrite=True)
    with pytest.raises(OptionError, match="append"):
        source.streamWriter(columns(body=StringType()), overwrite=True)


def test_headers_of_every_kind_come_back() -> None:
    headers = {
        "text": "ä",
        "number": 2**40,
        "flag": True,
        "none": None,
        "bytes": b"\xff\x00",
        "decimal": Decimal("1.25"),
        "when": datetime(2026, 3, 2, 8, 15, tzinfo=UTC),
        "table": {"list": [1, {"deep": b"\x80"}]},
        "exact": 3.141592653589793,
        "endless": -math.inf,
        "least": Decimal("-2147483648"),
        "in milliseconds": FarTime(1_772_438_400_000),
        # As ours look in JSON, but a client's.
        "like ours": {"$decimal": "much"},
        "like both": {"$table": {"$timestamp": 1}},
        "$base64": "no bytes",
    }
    assert headers_from_json(headers_to_json(headers)) == headers


def test_a_single_header_may_be_named_like_a_tag() -> None:
    headers = {"$decimal": "1.5"}
    assert headers_from_json(headers_to_json(headers)) == headers


def test_broken_numbers_become_doubles() -> None:
    assert headers_from_json('{"x": 0.5, "y": 1e300}') == {"x": 0.5, "y": 1e300}


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        "{",
        '{"x": {"$decimal": "1e300"}}',
        '{"x": {"$decimal": "12345678901"}}',
        '{"x": {"$decimal": "much"}}',
        '{"x": {"$timestamp": "noon"}}',
    ],
)
def test_no_headers(text: str) -> None:
    with pytest.raises(ColumnError, match=r"header|decimal"):
        headers_from_json(text)


def test_rows_as_messages() -> None:
    message = to_message({"body": "ü", "routing_key": "k", "headers": {"a": "b"}}, persistent=True)
    assert (message.exchange, message.routing_key, message.body) == (None, "k", "ü".encode())
    assert (message.properties.delivery_mode, message.properties.headers) == (2, {"a": "b"})
    kept = to_message({"body": b"", "properties": Row(delivery_mode=1)}, persistent=True)
    assert kept.properties.delivery_mode == 1


def test_a_row_without_a_body() -> None:
    with pytest.raises(ColumnError, match="null"):
        to_message({"body": None}, persistent=True)


def test_passwords_are_not_shown() -> None:
    assert without_password(URL) == "amqp://guest:***@localhost/%2F"
    assert without_password("amqp://localhost") == "amqp://localhost"


def test_no_address() -> None:
    with pytest.raises(LinkError, match="amqp://user:password@host"):
        parameters("http://localhost/")
