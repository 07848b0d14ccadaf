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
from leveret.spark_jobs.report import Report, make
from leveret.spark_jobs.runner import open_inputs
from tests.support.waiting import wait_until

SECONDS = 40
# To a queue with two consumers.
PER_SECOND = 4
# Enough that some of one in a hundred are logged.
PER_SECOND_SAMPLED = 50


async def steady_load(settings: Settings, per_second: int) -> None:
    clock = VirtualClock()
    acked = 0
    due = 0

    async def work(message: AbstractIncomingMessage) -> None:
        nonlocal acked
        await message.ack()
        acked += 1

    def is_done() -> bool:
        return acked == due

    async with Broker(settings, clock=clock) as broker:
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
                due += per_second
                for _ in range(per_second):
                    await exchange.publish(aio_pika.Message(b"." * 200), "event.ordinary")
                    clock.advance(0.5 / per_second)
                await wait_until(is_done)
                clock.advance(0.5)


def report_on(spark: SparkSession, folder: Path) -> Report:
    lake = Lake(str(folder / "lake"))
    ingest(spark, str(folder / "data"), lake)
    inputs = open_inputs(spark, lake, Selection(), Options(), auto_window=True)
    inputs.events.cache()
    return make(spark, inputs, lake)


@pytest.mark.slow  # test_findings.py has the same with a generated log
def test_a_quiet_broker_yields_no_finding(spark: SparkSession, tmp_path: Path) -> None:
    asyncio.run(steady_load(Settings(port=0, data=tmp_path / "data", event_log="all"), PER_SECOND))
    report = report_on(spark, tmp_path)
    assert report.findings == []
    assert sum(row["n"] for row in report.answers["hot_keys"]) == SECONDS * PER_SECOND
    (taken,) = report.answers["fairness"]
    assert (taken["consumers"], taken["deliveries"]) == (2, SECONDS * PER_SECOND)


@pytest.mark.slow
def test_nor_does_one_that_logs_as_by_default(spark: SparkSession, tmp_path: Path) -> None:
    """Of most messages it tells nothing; what they passed through is not unused."""
    asyncio.run(steady_load(Settings(port=0, data=tmp_path / "data"), PER_SECOND_SAMPLED))
    report = report_on(spark, tmp_path)
    assert report.findings == []
    assert set(report.scope.samples.values()) == {0.01}
    assert {row["name"] for row in report.answers["unused"]} >= {"events", "steady"}
