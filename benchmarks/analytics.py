"""What the analytics cost: CPU per event, beside DuckDB on the same files.

    python benchmarks/analytics.py [--events N] [--master local[2]] [--all] [--folder DIR]

Generates a log and does four things with it, each in Spark and in DuckDB: percentiles of waiting
per queue from Parquet, the same from JSON lines, publishes joined with acks, and taking the log in.
``--all`` also runs every job once. Figures are CPU seconds (driver and JVM; DuckDB's process) and
seconds by the clock, of warm programs: of taking in the second run, of each question the median of
five after five that do not count, for both alike (until then Java's compilers take more CPU than
the query). Files stay in DIR if one is given.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
from pyspark.sql import DataFrame, SparkSession

from leveret.spark_jobs.generator import Plan, generate
from leveret.spark_jobs.ingest import forget, ingest
from leveret.spark_jobs.jobs import JOBS
from leveret.spark_jobs.jobs.base import Inputs, Options
from leveret.spark_jobs.jobs.lifecycle import acked
from leveret.spark_jobs.jobs.queue_latency import end_to_end, waits
from leveret.spark_jobs.lake import Lake, Selection, read_events, read_quarantine
from leveret.spark_jobs.schema import EVENT
from leveret.spark_jobs.session import build_session

# Everyday messages make this many events each.
EVENTS_PER_MESSAGE = 3.3
# How often a question is asked before it counts, and then again.
TIMES = 5
# One window for the whole log.
WHOLE = Options(window_s=86_400)

WAITS = """SELECT vhost, queue, count(*), quantile_disc(wait_us, [0.5, 0.95, 0.99]), max(wait_us)
    FROM {source} WHERE ev IN ('deliver', 'get') AND coalesce(delivery_count, 0) = 0
    GROUP BY ALL"""
JOIN = """SELECT vhost, queue, count(*), quantile_disc(a.ts - p.ts, [0.5, 0.95, 0.99])
    FROM {source} p JOIN {source} a USING (vhost, queue, msg)
    WHERE a.ev = 'ack' AND p.ev IN ('publish', 'enqueue') GROUP BY ALL"""


class Meter:
    """CPU of this process and of Spark's JVM."""

    def __init__(self, spark: SparkSession) -> None:
        jvm: Any = spark.sparkContext._jvm
        self._jvm = int(jvm.java.lang.ProcessHandle.current().pid())

    def cpu_s(self) -> float:
        return sum(_cpu_s(pid) for pid in (os.getpid(), self._jvm))

    def run(self, work: Callable[[], object], *, times: int = 1) -> tuple[float, float]:
        """CPU and clock seconds, medians of so many times after as many that do not count."""
        for _ in range(times):
            work()
        figures = [self._once(work) for _ in range(times)]
        cpu, clock = zip(*figures, strict=True)
        return statistics.median(cpu), statistics.median(clock)

    def _once(self, work: Callable[[], object]) -> tuple[float, float]:
        cpu, clock = self.cpu_s(), time.monotonic()
        work()
        return self.cpu_s() - cpu, time.monotonic() - clock


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def columns() -> str:
    """The fields for DuckDB's reader, so that neither side has to guess."""
    names = {"int": "INT", "bigint": "BIGINT", "string": "VARCHAR", "boolean": "BOOLEAN"}
    types = (
        f"\"{field.name}\": '{names.get(field.dataType.simpleString(), 'MAP(VARCHAR, VARCHAR)')}'"
        for field in EVENT.fields
    )
    return "{" + ", ".join(types) + "}"


def measure(spark: SparkSession, folder: Path, events: int, *, everything: bool) -> None:
    meter = Meter(spark)
    log, lake = folder / "log", Lake(str(folder / "lake"))
    pattern = f"{log}/events/*/*.jsonl"
    lines = f"read_json('{pattern}', columns={columns()}, format='newline_delimited')"
    parquet = f"'{lake.bronze}/*/*/*.parquet'"
    duck = duckdb.connect()
    duck.execute("SET threads = 2")

    def take_in() -> None:
        forget(spark, lake)
        ingest(spark, str(log), lake)

    def ask(sql: str) -> object:
        return duck.execute(sql).fetchall()

    def compact() -> None:
        target = folder / "duck"
        shutil.rmtree(target, ignore_errors=True)
        duck.execute(
            f"COPY (SELECT *, strftime(make_timestamp(ts), '%Y-%m-%d') AS date FROM {lines}) "
            f"TO '{target}' (FORMAT parquet, COMPRESSION zstd, PARTITION_BY (date))"
        )

    rows = [("take in", meter.run(take_in), meter.run(compact))]
    from_lake = read_events(spark, lake, Selection())
    from_lines = spark.read.schema(EVENT).json(f"{log}/events/*").fillna(0, ["delivery_count"])
    # Made anew for each run: Spark would use the last one's shuffled rows again.
    questions: tuple[tuple[str, Callable[[], DataFrame], str], ...] = (
        ("waits, Parquet", lambda: waits(from_lake, WHOLE), WAITS.format(source=parquet)),
        ("waits, JSON lines", lambda: waits(from_lines, WHOLE), WAITS.format(source=lines)),
        (
            "publish to ack",
            lambda: end_to_end(acked(from_lake), WHOLE),
            JOIN.format(source=parquet),
        ),
    )
    for name, build, sql in questions:
        spark_figures = meter.run(partial(_collect, build), times=TIMES)
        rows.append((name, spark_figures, meter.run(partial(ask, sql), times=TIMES)))
    print(f"{events:,} events; CPU s (clock s)")
    for name, (cpu, clock), (duck_cpu, duck_clock) in rows:
        print(
            f"  {name:20} Spark {cpu:7.2f} ({clock:6.2f})  DuckDB {duck_cpu:6.2f} "
            f"({duck_clock:6.2f})  ratio {cpu / duck_cpu:5.1f}  {events / cpu / 1000:7.0f} k "
            f"events per CPU s"
        )
    if everything:
        every_job(spark, meter, Inputs(from_lake, read_quarantine(spark, lake)), events)


def _collect(build: Callable[[], DataFrame]) -> object:
    return build().collect()


def every_job(spark: SparkSession, meter: Meter, inputs: Inputs, events: int) -> None:
    total = 0.0
    for name, job in JOBS.items():
        cpu, clock = meter.cpu_s(), time.monotonic()
        job.run(inputs).write.format("noop").mode("overwrite").save()
        used = meter.cpu_s() - cpu
        total += used
        print(f"  {name:20} Spark {used:7.2f} ({time.monotonic() - clock:6.2f})")
    print(f"  all jobs: {total:.1f} CPU s, {1e6 * total / events:.1f} µs an event")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="leveret-analytics-"))
    messages = round(options.events / EVENTS_PER_MESSAGE)
    log = folder / "log" / "events"
    if log.exists():
        shutil.rmtree(log)
    started = time.process_time()
    truth = generate(log, Plan(messages=messages, seconds=max(120, messages // 2000)))
    print(f"generated {truth.events:,} events in {time.process_time() - started:.1f} CPU s")
    spark = build_session("benchmark", master=options.master)
    try:
        measure(spark, folder, truth.events, everything=options.all)
    finally:
        spark.stop()
        if options.folder is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
