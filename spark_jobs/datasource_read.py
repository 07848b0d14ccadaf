"""Reading a queue with Spark: as a stream, at least once, or once as a batch.

**Stream.** The driver holds the connection. ``read`` hands Spark the rows of a batch along with its
end; they stay unacknowledged until Spark says that the batch is done. So a driver that is killed,
at whatever moment, loses its connection and the broker gives what was not acknowledged to the next
one. An offset is the number of messages taken so far. It cannot bring messages back: a batch that
Spark repeats after a restart is empty, and what was in it comes in a later batch.

Spark says that a batch is done in two ways: by ``commit``, when the batch after it begins, and by
asking to ``read`` from its end on, which it does only once the batch is in its commit log. Both are
taken for acks, because the first alone would leave the last batch before a pause without any.

**Batch.** One task drains what is in the queue when it starts, and acknowledges when all of it was
handed to Spark. Spark tells no reader how a batch job ended, so a job that fails later has lost it.

Upstream: Spark. Downstream: ``amqp_link.py``. Invariant: what Spark has not finished is unacked.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from pyspark.sql.datasource import DataSourceReader, InputPartition, SimpleDataSourceStreamReader
from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from leveret.spark_jobs.amqp_link import Link, LinkError, LinkLost
from leveret.spark_jobs.amqp_rows import row_maker
from leveret.spark_jobs.datasource_options import ReadOptions
from leveret.spark_jobs.datasource_properties import read_own_properties

_BETWEEN_TRIES_S: Final = 1.0
# A queue whose messages others may take meanwhile is waited for this long, not for ever.
_DRAIN_IDLE_S: Final = 2.0
# A batch that trickles in goes to Spark as it is after this time.
_GATHER_S: Final = 2.0

Offset = dict[str, int]
Row = tuple[Any, ...]


class Delivery(NamedTuple):
    tag: int
    row: Row


class Consumer:
    """Deliveries of one queue, over a connection of its own."""

    def __init__(self, options: ReadOptions, prefetch: int, make_row: Callable[..., Row]) -> None:
        """Raises LinkError."""
        self._queue = options.queue
        self._make_row = make_row
        # Delivered by the broker and not taken by Spark yet: at most ``prefetch``, or what the
        # socket has brought where that is 0.
        self.waiting: deque[Delivery] = deque()
        self._is_cancelled = False
        self._link = Link(options.url, f"Spark reads {options.queue}")
        self._link.open()
        try:
            with self._link.lock:
                self.ready = self._count()
                channel = self._link.channel
                read_own_properties(channel.connection)
                self._link.ask(
                    lambda done: channel.basic_qos(prefetch_count=prefetch, callback=done),
                    "basic.qos",
                )
                channel.add_on_cancel_callback(self._on_cancel)
                self._link.ask(
                    lambda done: channel.basic_consume(
                        self._queue, self._on_delivery, callback=done
                    ),
                    "basic.consume",
                )
        except BaseException:
            self._link.close()
            raise

    def _count(self) -> int:
        """How many are ready. Raises LinkError, also if there is no such queue."""
        channel = self._link.channel
        answer = self._link.ask(
            lambda done: channel.queue_declare(self._queue, passive=True, callback=done),
            "queue.declare",
        )
        return int(answer.method.message_count)

    def take(self, count: int, wait_s: float) -> list[Delivery]:
        """Up to ``count`` deliveries; fewer, or none, if no more come for ``wait_s``.

        Raises LinkError.
        """
        taken: list[Delivery] = []
        deadline = time.monotonic() + _GATHER_S
        with self._link.lock:
            while len(taken) < count and (not taken or time.monotonic() < deadline):
                if not self._link.wait(self._has_news, wait_s):
                    break
                if not self.waiting:
                    raise LinkError(
                        f"the broker cancelled the consumer of queue '{self._queue}': was the "
                        f"queue deleted?"
                    )
                while self.waiting and len(taken) < count:
                    taken.append(self.waiting.popleft())
        return taken

    def ack(self, tag: int) -> None:
        """All up to this one. Raises LinkError."""
        with self._link.lock:
            self._link.channel.basic_ack(tag, multiple=True)
            # Sent at once: it may be long until somebody asks for more.
            self._link.push()

    def close(self) -> None:
        """What was not acked goes back to the queue."""
        self._link.close()

    def _has_news(self) -> bool:
        return bool(self.waiting) or self._is_cancelled

    def _on_delivery(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        row = self._make_row(method, properties, body)
        self.waiting.append(Delivery(method.delivery_tag, row))

    def _on_cancel(self, frame: Any) -> None:
        self._is_cancelled = True


class _Batch(NamedTuple):
    """Rows that Spark was given and has not finished, and how to ack them."""

    end: int
    rows: list[Row]
    consumer: Consumer
    tag: int


class StreamReader(SimpleDataSourceStreamReader, SupportsTriggerAvailableNow):
    """Lives in the driver, in a process of its own, for as long as the query runs."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._make_row = row_maker(schema)
        self._consumer: Consumer | None = None
        # In order; Spark works on one at a time.
        self._unfinished: deque[_Batch] = deque()
        # With availableNow: how many messages there still are to take.
        self._left: int | None = None

    def initialOffset(self) -> Offset:
        return {"taken": 0}

    def prepareForTriggerAvailableNow(self) -> None:
        self._left = self._connect().ready

    def read(self, start: Offset) -> tuple[Iterator[Row], Offset]:
        """The next batch. Raises LinkError once the broker cannot be reached for too long."""
        self._finish(start["taken"])
        if self._unfinished:
            # Asked again for what was given already; anything else would be lost to Spark.
            batch = self._unfinished[-1]
            return iter(batch.rows), {"taken": batch.end}
        deliveries = self._take()
        if not deliveries:
            return iter(()), start
        assert self._consumer is not None
        end = start["taken"] + len(deliveries)
        rows = [delivery.row for delivery in deliveries]
        self._unfinished.append(_Batch(end, rows, self._consumer, deliveries[-1].tag))
        return iter(rows), {"taken": end}

    def readBetweenOffsets(self, start: Offset, end: Offset) -> Iterator[Row]:
        """A batch of a driver that is gone: its messages are in the queue again."""
        return iter(())

    def commit(self, end: Offset) -> None:
        self._finish(end["taken"])

    def _take(self) -> list[Delivery]:
        count = self._options.batch_size
        if self._left is not None:
            count = min(count, self._left)
        if count == 0:
            return []
        # With availableNow a pause is not the end, unless it is a long one.
        wait_s = self._options.wait_s if self._left is None else _DRAIN_IDLE_S
        try:
            deliveries = self._connect().take(count, wait_s)
        except LinkLost:
            # What was unacked is in the queue again, and comes once more.
            self._disconnect()
            deliveries = self._connect().take(count, wait_s)
        if self._left is not None:
            self._left = self._left - len(deliveries) if deliveries else 0
        return deliveries

    def _finish(self, taken: int) -> None:
        while self._unfinished and self._unfinished[0].end <= taken:
            batch = self._unfinished.popleft()
            if batch.consumer is not self._consumer:
                continue  # its connection was lost, and with it what there was to ack
            try:
                batch.consumer.ack(batch.tag)
            except LinkLost:
                self._disconnect()

    def _connect(self) -> Consumer:
        deadline = time.monotonic() + self._options.reconnect_s
        while self._consumer is None:
            try:
                self._consumer = Consumer(self._options, self._options.prefetch, self._make_row)
            except LinkLost:
                if time.monotonic() + _BETWEEN_TRIES_S > deadline:
                    raise
                time.sleep(_BETWEEN_TRIES_S)
        return self._consumer

    def _disconnect(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None


class BatchReader(DataSourceReader):
    """Drains a queue once, in one task."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[Row]:
        """The messages. Raises LinkError."""
        most = self._options.max_messages
        # Nothing is acked before the end, so a prefetch limit below the number would stop it.
        # With none, what the socket holds bounds what waits here.
        prefetch = most if most is not None and most <= 65_535 else 0
        consumer = Consumer(self._options, prefetch, row_maker(self._schema))
        try:
            left = consumer.ready if most is None else min(most, consumer.ready)
            last_tag = 0
            while left:
                deliveries = consumer.take(min(left, self._options.batch_size), _DRAIN_IDLE_S)
                if not deliveries:
                    break
                for delivery in deliveries:
                    yield delivery.row
                left -= len(deliveries)
                last_tag = deliveries[-1].tag
            if last_tag and self._options.ack:
                consumer.ack(last_tag)
        finally:
            consumer.close()
