"""A message as a row, and a row as a message.

Reading gives every message in the columns of ``MESSAGE``, whatever its clients put into it. Writing
takes any selection of them that has ``body``, and always what was read. Two things are not as they
were: a ``timestamp`` beyond the calendar is null, and in properties a question mark stands for what
is no UTF-8. Headers keep their values: numbers may be of a wider type, and strings that are no
UTF-8 are bytes.

Headers are JSON text. What JSON has no word for is an object with one key, which writing turns
back: ``{"$base64": "…"}`` for bytes, ``{"$decimal": "1.5"}``, ``{"$double": "NaN"}``,
``{"$timestamp": "…Z"}`` (a number of seconds beyond the calendar); ``{"$table": {…}}`` around a
table that looks like one of these and is none.

Upstream and downstream: pika's values on one side, Spark's on the other. No connection here.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, Final, NamedTuple

from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from leveret.spark_jobs.datasource_properties import (
    FarTime,
    Properties,
    fits_decimal,
    moment_of,
    text_of,
)

_TEXT = StringType()

# In the order of the specification; headers and timestamp are columns of their own.
PROPERTIES: Final = StructType(
    [
        StructField("content_type", _TEXT),
        StructField("content_encoding", _TEXT),
        StructField("delivery_mode", IntegerType()),
        StructField("priority", IntegerType()),
        StructField("correlation_id", _TEXT),
        StructField("reply_to", _TEXT),
        StructField("expiration", _TEXT),
        StructField("message_id", _TEXT),
        StructField("type", _TEXT),
        StructField("user_id", _TEXT),
        StructField("app_id", _TEXT),
    ]
)

MESSAGE: Final = StructType(
    [
        StructField("body", BinaryType()),
        StructField("exchange", _TEXT),
        StructField("routing_key", _TEXT),
        StructField("properties", PROPERTIES),
        StructField("headers", _TEXT),
        StructField("timestamp", TimestampType()),
        StructField("redelivered", BooleanType()),
        StructField("delivery_tag", LongType()),
    ]
)

# What a column may be when it is written; the others of MESSAGE say how it came and are not sent.
_WRITTEN: Final[dict[str, tuple[type[DataType], ...]]] = {
    "body": (BinaryType, StringType),
    "exchange": (StringType,),
    "routing_key": (StringType,),
    "properties": (StructType,),
    "headers": (StringType, MapType),
    "timestamp": (TimestampType,),
}
# What JSON has no word for, in a header.
_TAGS: Final = frozenset(("$base64", "$decimal", "$double", "$timestamp", "$table"))
_NOT_SENT: Final = ("redelivered", "delivery_tag")
_PROPERTY_NAMES: Final = tuple(PROPERTIES.names)


class ColumnError(ValueError):
    """The columns do not fit; the text says which and what to do."""


class Outgoing(NamedTuple):
    """A message to be sent; no exchange or key where the row does not say."""

    exchange: str | None
    routing_key: str | None
    body: bytes
    properties: Properties


def row_maker(schema: StructType) -> Callable[[Any, Any, bytes], tuple[Any, ...]]:
    """A function from a delivery to a row of the schema. Raises ColumnError.

    The schema may leave out columns and change their order.
    """
    known = {field.name: field.dataType for field in MESSAGE}
    for field in schema:
        if known.get(field.name) != field.dataType:
            raise ColumnError(
                f"messages have no column '{field.name}' of type {field.dataType.simpleString()}: "
                f"there are {_named(MESSAGE)}"
            )
    order = [MESSAGE.names.index(field.name) for field in schema]

    def make(method: Any, properties: Any, body: bytes) -> tuple[Any, ...]:
        row = to_row(method, properties, body)
        return tuple(row[index] for index in order)

    return to_row if order == list(range(len(MESSAGE))) else make


def to_row(method: Any, properties: Any, body: bytes) -> tuple[Any, ...]:
    """A delivery in the columns of MESSAGE; ``properties`` are of our own kind. Never raises."""
    headers = properties.headers
    timestamp = properties.timestamp
    return (
        body,
        _text(method.exchange),
        _text(method.routing_key),
        tuple(getattr(properties, name) for name in _PROPERTY_NAMES),
        None if headers is None else headers_to_json(headers),
        None if timestamp is None else moment_of(timestamp),
        method.redelivered,
        method.delivery_tag,
    )


def check_columns(schema: StructType) -> None:
    """Whether rows of the schema can be written. Raises ColumnError."""
    if "body" not in schema.names:
        raise ColumnError("there is no column body: select one as body, to be sent as the message")
    for field in schema:
        if field.name in _NOT_SENT:
            continue
        allowed = _WRITTEN.get(field.name)
        if allowed is None:
            raise ColumnError(
                f"column '{field.name}' would not be sent: drop it, or make it a part of the body. "
                f"Messages have {_named(MESSAGE)}"
            )
        if not isinstance(field.dataType, allowed):
            types = " or ".join(one.typeName() for one in allowed)
            raise ColumnError(
                f"column {field.name} is {field.dataType.simpleString()}: cast it to {types}"
            )
        if isinstance(field.dataType, StructType):
            unknown = set(field.dataType.names) - set(_PROPERTY_NAMES)
            if unknown:
                raise ColumnError(
                    f"there is no property {', '.join(sorted(unknown))}: a message has "
                    f"{', '.join(_PROPERTY_NAMES)}"
                )


def to_message(row: Mapping[str, Any], *, persistent: bool) -> Outgoing:
    """A row whose columns were checked. ``persistent`` where the row itself does not say.

    Raises ColumnError if its values do not make a message.
    """
    body = row["body"]
    if body is None:
        raise ColumnError(
            "a row has no body (null): filter such rows out, or give them an empty one"
        )
    given = row.get("properties")
    fields = {} if given is None else {name: given[name] for name in given.__fields__}
    if fields.get("delivery_mode") is None:
        fields["delivery_mode"] = 2 if persistent else 1
    timestamp = row.get("timestamp")
    properties = Properties(
        **fields,
        headers=_headers(row.get("headers")),
        timestamp=None if timestamp is None else int(timestamp.timestamp()),
    )
    return Outgoing(
        row.get("exchange"),
        row.get("routing_key"),
        body.encode() if isinstance(body, str) else bytes(body),
        properties,
    )


def headers_to_json(headers: Mapping[str, Any]) -> str:
    fields = {key: _tagged(value) for key, value in headers.items()}
    return json.dumps(fields, ensure_ascii=False, allow_nan=False)


def headers_from_json(text: str) -> dict[str, Any]:
    """Raises ColumnError if the text is no JSON object."""
    try:
        headers = json.loads(text)
        if isinstance(headers, dict):
            return {key: _untagged(value) for key, value in headers.items()}
    except ColumnError:
        raise
    except (ValueError, InvalidOperation) as error:
        raise ColumnError(f"headers are no JSON object ({error}): {text[:200]}") from error
    raise ColumnError(f"headers are no JSON object: {text[:200]}")


def _headers(value: str | Mapping[str, Any] | None) -> dict[str, Any] | None:
    if value is None:
        return None
    return headers_from_json(value) if isinstance(value, str) else dict(value)


def _text(value: str | bytes) -> str:
    # pika leaves bytes that are no UTF-8 as they are.
    return text_of(value) if isinstance(value, bytes) else value


def _tagged(value: Any) -> Any:
    """The value in JSON's words, and tags for what it has none for."""
    match value:
        case dict():
            table = {key: _tagged(one) for key, one in value.items()}
            # A client may have named a field of its own like one of ours.
            return {"$table": table} if table.keys() <= _TAGS and len(table) == 1 else table
        case list():
            return [_tagged(one) for one in value]
        case bytes():
            return {"$base64": base64.b64encode(value).decode()}
        case Decimal():
            return {"$decimal": str(value)}
        case float() if not math.isfinite(value):
            return {"$double": str(value)}
        case datetime():
            return {"$timestamp": value.isoformat().replace("+00:00", "Z")}
        case FarTime():
            return {"$timestamp": value.seconds}
        case _:
            return value


def _untagged(value: Any) -> Any:
    match value:
        case list():
            return [_untagged(one) for one in value]
        case dict() if len(value) == 1:
            ((tag, given),) = value.items()
            return _of_tag(tag, given)
        case dict():
            return {key: _untagged(one) for key, one in value.items()}
        case _:
            return value


def _of_tag(tag: str, given: Any) -> Any:
    """A value of one of our kinds, or the table of one field that it is if it has no tag."""
    match tag, given:
        case "$base64", str():
            return base64.b64decode(given, validate=True)
        case "$decimal", str():
            return _decimal(given)
        case "$double", str():
            return float(given)
        case "$timestamp", str():
            moment = datetime.fromisoformat(given)
            return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
        case "$timestamp", int():
            return FarTime(given)
        case "$table", dict():
            return {key: _untagged(value) for key, value in given.items()}
        case _:
            return {tag: _untagged(given)}


def _decimal(text: str) -> Decimal:
    """Raises ColumnError if it is none of AMQP's."""
    value = Decimal(text)
    if not fits_decimal(value):
        raise ColumnError(
            f"the number {text} does not fit into a decimal of AMQP: write it as a number or a text"
        )
    return value


def _named(schema: StructType) -> str:
    return ", ".join(f"{field.name} ({field.dataType.typeName()})" for field in schema)
