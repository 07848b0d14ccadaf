"""A message as a row, and a row as a message.

Reading gives every message in the columns of ``MESSAGE``. Writing takes any selection of them that
has ``body``, so that what was read can be written elsewhere as it is.

Headers are JSON text. What JSON has no word for is an object with one key, which writing turns
back: ``{"$base64": "…"}`` for bytes, ``{"$decimal": "1.5"}``, ``{"$timestamp": "…Z"}``.

Upstream and downstream: pika's values on one side, Spark's on the other. No connection here.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, Final, NamedTuple

from pika import BasicProperties  # type: ignore[import-untyped]
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
_NOT_SENT: Final = ("redelivered", "delivery_tag")
_PROPERTY_NAMES: Final = tuple(PROPERTIES.names)


class ColumnError(ValueError):
    """The columns do not fit; the text says which and what to do."""


class Outgoing(NamedTuple):
    """A message to be sent; no exchange or key where the row does not say."""

    exchange: str | None
    routing_key: str | None
    body: bytes
    properties: BasicProperties


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
    """A delivery (or the answer to basic.get) in the columns of MESSAGE."""
    headers = properties.headers
    timestamp = properties.timestamp
    return (
        body,
        method.exchange,
        method.routing_key,
        tuple(getattr(properties, name) for name in _PROPERTY_NAMES),
        None if headers is None else headers_to_json(headers),
        None if timestamp is None else datetime.fromtimestamp(timestamp, UTC),
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
    properties = BasicProperties(
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
    return json.dumps(headers, default=_tagged, ensure_ascii=False)


def headers_from_json(text: str) -> dict[str, Any]:
    """Raises ColumnError if the text is no JSON object."""
    try:
        headers = json.loads(text, object_hook=_untagged, parse_float=_decimal)
    except ColumnError:
        raise
    except (ValueError, InvalidOperation) as error:
        raise ColumnError(f"headers are no JSON object ({error}): {text[:200]}") from error
    if not isinstance(headers, dict):
        raise ColumnError(f"headers are no JSON object: {text[:200]}")
    return headers


def _headers(value: str | Mapping[str, Any] | None) -> dict[str, Any] | None:
    if value is None:
        return None
    return headers_from_json(value) if isinstance(value, str) else dict(value)


def _tagged(value: object) -> dict[str, str]:
    if isinstance(value, bytes):
        return {"$base64": base64.b64encode(value).decode()}
    if isinstance(value, Decimal):
        return {"$decimal": str(value)}
    if isinstance(value, datetime):
        # pika gives UTC without saying so.
        return {"$timestamp": value.replace(tzinfo=UTC).isoformat().replace("+00:00", "Z")}
    raise TypeError(f"{type(value).__name__} in headers")


def _untagged(fields: dict[str, Any]) -> Any:
    if len(fields) == 1:
        ((tag, value),) = fields.items()
        if isinstance(value, str):
            if tag == "$base64":
                return base64.b64decode(value, validate=True)
            if tag == "$decimal":
                return _decimal(value)
            if tag == "$timestamp":
                return datetime.fromisoformat(value)
    return fields


def _decimal(text: str) -> Decimal:
    """As AMQP's decimal, the only broken number that pika can send. Raises ColumnError."""
    value = Decimal(text)
    digits = value.normalize().as_tuple()
    places = digits.exponent
    if not isinstance(places, int) or not (
        -255 <= places <= 10 and abs(value.scaleb(max(-places, 0))) < 2**31
    ):
        raise ColumnError(f"the number {text} does not fit into a header: write it as text")
    return value


def _named(schema: StructType) -> str:
    return ", ".join(f"{field.name} ({field.dataType.typeName()})" for field in schema)
