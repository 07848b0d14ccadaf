"""What ``leveret analytics`` does, command by command.

The only place that opens sessions and reads options; errors that a user can do something about
become a line on stderr and exit status 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Final, TextIO

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from leveret.spark_jobs import demo, report, table, tail
from leveret.spark_jobs.amqp_link import LinkError
from leveret.spark_jobs.cli import fail
from leveret.spark_jobs.demo_actors import DemoError
from leveret.spark_jobs.ingest import FILES_PER_BATCH, Ingested, ingest
from leveret.spark_jobs.java import NoJava
from leveret.spark_jobs.jobs import JOBS
from leveret.spark_jobs.jobs.base import Inputs, Job, Options
from leveret.spark_jobs.lake import Lake, LakeError, Selection
from leveret.spark_jobs.progress import progress
from leveret.spark_jobs.runner import at_once, keep, open_inputs
from leveret.spark_jobs.session import build_session

# As shells report a program that Ctrl-C ended.
INTERRUPTED: Final = 130


def run(options: argparse.Namespace) -> int:
    """Run the command that was asked for; returns the exit status."""
    try:
        with progress("starting Spark"):
            spark = build_session(options.command, master=options.master, conf=dict(options.conf))
        try:
            return execute(spark, options)
        finally:
            spark.stop()
    except KeyboardInterrupt:
        fail("interrupted")
        return INTERRUPTED
    except (DemoError, LakeError, LinkError, NoJava, OSError) as error:
        return fail(str(error))
    except PySparkException as error:
        # The first lines say it; what follows is a trace through the JVM.
        return fail("Spark: " + str(error).strip().split("\n\n")[0])
    except Py4JJavaError as error:
        # As of a file system that cannot be reached, or may not be written to.
        return fail("Spark: " + str(error.java_exception.toString()).split("\n")[0])


def execute(spark: SparkSession, options: argparse.Namespace) -> int:
    """The command itself, in a session that is there already. Raises what ``run`` catches."""
    return _COMMANDS[options.command](spark, options)


def _ingest(spark: SparkSession, options: argparse.Namespace) -> int:
    _take_in(
        spark,
        options.log,
        Lake(options.lake),
        files_per_batch=options.batch_files or FILES_PER_BATCH,
        rebuild=options.rebuild,
        accept_gone=options.accept_gone,
    )
    return 0


def _run(spark: SparkSession, options: argparse.Namespace) -> int:
    lake = Lake(options.lake)
    inputs = _inputs(spark, lake, options)
    for number, name in enumerate(options.jobs, 1):
        job = JOBS[name]
        with progress(f"{number}/{len(options.jobs)} {name}", spark):
            answer = keep(spark, job, inputs, lake)
        if options.output is not None:
            _write_file(answer, name, options)
        elif options.format == "parquet":
            print(lake.result(job.layer, name))
        else:
            if options.format == "table":
                print(f"\n{name}: {job.question}")
            _write(answer, options, sys.stdout)
    return 0


def _all(spark: SparkSession, options: argparse.Namespace) -> int:
    lake = Lake(options.lake)
    if options.log is not None:
        _take_in(spark, options.log, lake)
    inputs = _inputs(spark, lake, options)
    with progress("jobs", spark) as shown:

        def row(job: Job) -> tuple[str, int, float, str]:
            shown.say(f"{job.name}, one of {len(JOBS)}")
            started = time.monotonic()
            count = keep(spark, job, inputs, lake).count()
            return job.name, count, time.monotonic() - started, lake.result(job.layer, job.name)

        rows = list(at_once(spark, JOBS.values(), row).values())
    table.write_table(("job", "rows", "seconds", "in"), rows, sys.stdout, limit=len(rows))
    return 0


def _report(spark: SparkSession, options: argparse.Namespace) -> int:
    lake = Lake(options.lake)
    target = Path(options.output)
    if options.pdf:
        # Before the work, not after it.
        report.pdf_of(target)
    if options.log is not None:
        _take_in(spark, options.log, lake)
    inputs = _inputs(spark, lake, options)
    with progress("report", spark) as shown:
        written = report.write(
            spark, inputs, lake, target, on_job=lambda name: shown.say(f"report: {name}")
        )
    print(written.scope.words())
    for finding in written.findings:
        print(table.printable(f"{finding.severity}: {finding.text}"))
    if not written.findings:
        print("nothing out of the ordinary was found")
    print(f"written: {target}")
    if options.pdf:
        print(f"written: {report.print_pdf(target)}")
    return 0


def _demo(spark: SparkSession, options: argparse.Namespace) -> int:
    folder = demo.new_folder(options.folder)
    print(f"clients give a broker {options.seconds} s of work and trouble; its data is in {folder}")
    truth = demo.perform(folder, options.seconds)
    published, delivered = truth.so_far()
    print(f"{published:,} messages were published, {delivered:,} deliveries made")
    options.log, options.lake = str(folder / "data"), str(folder / "lake")
    options.output = str(folder / "report.html")
    _report(spark, options)
    lake = Lake(options.lake)
    # The one job that is not in the report.
    with progress("lifecycle", spark):
        keep(spark, JOBS["lifecycle"], _inputs(spark, lake, options), lake)
    if options.open and demo.show_page(Path(options.output), os.environ):
        print("it is open in your browser")
    print(f"for more: leveret analytics run lifecycle --limit 50 --lake {lake.root}")
    print(f"delete {folder} when you are done")
    return 0


_COMMANDS = {
    "ingest": _ingest,
    "run": _run,
    "all": _all,
    "report": _report,
    "tail": tail.run,
    "demo": _demo,
}


def _inputs(spark: SparkSession, lake: Lake, options: argparse.Namespace) -> Inputs:
    selection = Selection(options.since, options.until, options.vhost, options.queue)
    given = {
        "window_s": options.window,
        "capacity": options.capacity,
        "poison_deliveries": options.poison_deliveries,
    }
    tuning = replace(Options(), **{key: value for key, value in given.items() if value is not None})
    return open_inputs(spark, lake, selection, tuning, auto_window=options.window is None)


def _take_in(
    spark: SparkSession,
    log: str,
    lake: Lake,
    *,
    files_per_batch: int = FILES_PER_BATCH,
    rebuild: bool = False,
    accept_gone: bool = False,
) -> None:
    started = time.monotonic()

    with progress(f"taking in {log}", spark) as shown:

        def show(so_far: Ingested) -> None:
            shown.say(f"taking in {log}: {so_far.events:,} events in, batch {so_far.batches + 1}")

        done = ingest(
            spark,
            log,
            lake,
            files_per_batch=files_per_batch,
            rebuild=rebuild,
            accept_gone=accept_gone,
            on_batch=show,
        )
    text = f"{done.events:,} events taken in from {log} in {time.monotonic() - started:.1f} s"
    if done.malformed:
        text += f"; {done.malformed:,} malformed lines are in {lake.quarantine}"
    if done.gone:
        text += f"; {done.gone:,} segments were deleted before they were read"
    print(text if done.batches else f"nothing new in {log}")


def _write_file(answer: DataFrame, name: str, options: argparse.Namespace) -> None:
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.{'txt' if options.format == 'table' else options.format}"
    if options.format == "parquet":
        answer.write.mode("overwrite").parquet(str(path))
    else:
        with path.open("w", encoding="utf-8", newline="") as file:
            _write(answer, options, file)
    print(f"written: {path}")


def _write(answer: DataFrame, options: argparse.Namespace, out: TextIO) -> None:
    if options.format == "table":
        rows = answer.limit(options.limit + 1).collect()
        table.write_table(answer.columns, rows, out, limit=options.limit)
    elif options.format == "csv":
        table.write_csv(answer.columns, answer.toLocalIterator(), out)
    else:
        table.write_json(answer.columns, answer.toLocalIterator(), out)
