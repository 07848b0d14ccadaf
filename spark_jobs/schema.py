"""The event as Spark sees it, derived from the broker's definition.

Upstream: ``broker/event_log/schema.py``, the only place that names fields. Downstream: ingest,
which reads lines with ``EVENT`` and gives every omitted field its default, so that jobs meet null
only where null has a meaning.
"""

from __future__ import annotations

import types
import typing
from typing import Any

import msgspec
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import (
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from leveret.broker.event_log.schema import REQUIRED, Event, Small

_TYPES: dict[Any, DataType] = {
    Small: IntegerType(),
    int: LongType(),
    str: StringType(),
    bool: BooleanType(),
    dict[str, str]: MapType(StringType(), StringType()),
}


def _spark_type(annotation: Any) -> DataType:
    if isinstance(annotation, types.UnionType):
        (annotation,) = (one for one in typing.get_args(annotation) if one is not type(None))
    return _TYPES[annotation]


_FIELDS = msgspec.structs.fields(Event)

# Every field may be missing from a line, so every one is nullable here.
EVENT = StructType([StructField(field.name, _spark_type(field.type)) for field in _FIELDS])


def with_defaults() -> list[Column]:
    """The event's columns with the defaults that the writer left out put back."""
    columns = []
    for field in _FIELDS:
        column = F.col(field.name)
        if field.name not in REQUIRED and field.default is not msgspec.NODEFAULT:
            if field.default is not None:
                column = F.coalesce(column, F.lit(field.default))
        columns.append(column.alias(field.name))
    return columns
