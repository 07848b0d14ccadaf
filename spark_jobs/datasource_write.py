"""Writing messages with Spark: each task has a connection of its own, and waits for its confirms.

A task succeeds when the broker has confirmed every message of it. One that dies halfway is run
again by Spark and publishes from the beginning: at least once, for batches and streams alike.
Nothing is left to be done when all tasks are, and nothing can be taken back.

Upstream: Spark's executors. Downstream: ``amqp_publisher.py``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from pika.exceptions import AMQPError  # type: ignore[import-untyped]
from pyspark.sql.datasource import DataSourceStreamWriter, DataSourceWriter, WriterCommitMessage
from pyspark.sql.types import Row

from leveret.protocol.field_table import TableError
from leveret.spark_jobs.amqp_link import Link
from leveret.spark_jobs.amqp_publisher import Publisher
from leveret.spark_jobs.amqp_rows import ColumnError, to_message
from leveret.spark_jobs.datasource_options import WriteOptions


@dataclass
class Written(WriterCommitMessage):
    """What a task confirms to the driver."""

    messages: int


class BatchWriter(DataSourceWriter):
    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[Row]) -> Written:
        return write_rows(self._options, iterator)


class StreamWriter(DataSourceStreamWriter):
    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[Row]) -> Written:
        return write_rows(self._options, iterator)


def write_rows(options: WriteOptions, rows: Iterator[Row]) -> Written:
    """Publish all rows; returns when they are confirmed. Raises LinkError and ColumnError."""
    first = next(rows, None)
    if first is None:
        # Empty partitions are common, and a connection is not cheap.
        return Written(0)
    with Link(options.url, "Spark writes") as link:
        publisher = Publisher(link, window=options.confirm_window)
        _publish(publisher, options, first)
        for row in rows:
            _publish(publisher, options, row)
        publisher.flush()
        return Written(publisher.published)


def _publish(publisher: Publisher, options: WriteOptions, row: Row) -> None:
    message = to_message(row.asDict(), persistent=options.persistent)
    # What the user wrote for all rows goes before what a row brings along from where it was read.
    exchange = options.exchange if options.exchange is not None else message.exchange
    key = options.routing_key if options.routing_key is not None else message.routing_key
    if exchange is None or key is None:
        raise ColumnError("a row has no exchange or no routing_key (null): give it one")
    try:
        publisher.publish(
            exchange, key, message.body, message.properties, mandatory=options.mandatory
        )
    except (struct.error, TableError, AMQPError) as error:
        raise ColumnError(f"a row cannot be sent as a message: {error!r}: {row}") from error
