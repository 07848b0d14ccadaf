"""A broker that has nothing to complain of: its log must yield no finding.

Its clock is moved by hand, so that what is measured is the load and not the machine: on a busy one
a message may wait for long, and the report would rightly say so.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import aio_pika
import pytest
from aio_pika.abc import AbstractIncomingMessage
from pyspark.sql import SparkSession

from leveret.broker.clock import VirtualClock
from leveret.broker.config import Settings
from leveret.broker.server import Broker
from leveret.spark_jobs.ingest import ingest
from leveret.spark_jobs.jobs.base import Options
from leveret.spark_jobs.lake import Lake, Selection
from leveret.spark_jobs.report import make
from leveret.spark_jobs.runner import open_inputs
from tests.support.waiting import wait_until

SECONDS = 40
# Of two publishers, to a queue with two consumers.
PER_SECOND = 4


async def steady_load(data: Path) -> None:
    clock = VirtualClock()
    acked = 0
    due = 0

    async def work(message: AbstractIncomingMessage) -> None:
        nonlocal acked
        await message.ack()
        acked += 1

    def is_done() -> bool:
        return acked == due

    async with Broker(Settings(port=0, data=data, event_log="all"), clock=clock) as broker:
        # Heartbeats would be by the broker's clock on one side only.
        async with await aio_pika.connect(f"{broker.url}?heartbeat=0") as connection:
            channel = await connection.channel()
            exchange = await channel.declare_exchange("events", "topic", durable=True)
            queue = await channel.declare_queue("steady", durable=True)
            await queue.bind(exchange, "event.#")
            for _ in range(2):
                consuming = await connection.channel()
                await consuming.set_qos(prefetch_count=1)
                await (await consuming.get_queue("steady")).consume(work)
            for _ in range(SECONDS):
                due += PER_SECOND
                for _ in range(PER_SECOND):
                    await exchange.publish(aio_pika.Message(b"." * 200), "event.ordinary")
                    clock.advance(0.5 / PER_SECOND)
                await wait_until(is_done)
                clock.advance(0.5)


@pytest.mark.slow  # test_findings.py has the same with a generated log
def test_a_quiet_broker_yields_no_finding(spark: SparkSession, tmp_path: Path) -> None:
    asyncio.run(steady_load(tmp_path / "data"))
    lake = Lake(str(tmp_path / "lake"))
    ingest(spark, str(tmp_path / "data"), lake)
    inputs = open_inputs(spark, lake, Selection(), Options(), auto_window=True)
    inputs.events.cache()
    report = make(spark, inputs, lake)
    assert report.findings == []
    assert sum(row["n"] for row in report.answers["hot_keys"]) == SECONDS * PER_SECOND
    (taken,) = report.answers["fairness"]
    assert (taken["consumers"], taken["deliveries"]) == (2, SECONDS * PER_SECOND)
