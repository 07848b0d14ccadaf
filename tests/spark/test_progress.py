"""How far a command is: what people are told while they wait."""

from __future__ import annotations

import io
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from pyspark.sql import SparkSession

from leveret.spark_jobs.progress import Progress, progress, tasks
from tests.spark.amqp import wait_until


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_shown_how_far_it_is() -> None:
    screen = Screen()
    shown = Progress("taking in log", lambda: "3 of 8 tasks", screen, every_s=0.01)
    shown.start()
    shown.say("batch 2")
    wait_until(lambda: "batch 2, 3 of 8 tasks" in screen.getvalue())
    shown.close()
    assert screen.getvalue().startswith("\r\x1b[Ktaking in log, 3 of 8 tasks")
    assert screen.getvalue().endswith("\r\x1b[K")


def test_elsewhere_there_is_a_line_now_and_then() -> None:
    out = io.StringIO()
    shown = Progress("taking in log", str, out, every_s=0.01)
    shown.start()
    wait_until(lambda: out.getvalue().count("\n") >= 2)
    shown.close()
    for line in out.getvalue().splitlines():
        assert re.fullmatch(r"leveret: taking in log … \(\d+ s so far\)", line)


def test_what_is_over_soon_needs_no_line(
    spark_alone: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress("counting", spark_alone):
        assert spark_alone.range(5).count() == 5
        wait_until(lambda: tasks(spark_alone) == "")
    assert capsys.readouterr().err == ""


def test_tasks_of_stages_that_run_are_counted(spark_alone: SparkSession) -> None:
    seen: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        # Spark tells of a stage a moment after it began.
        slow = spark_alone.range(0, 2, 1, 2).selectExpr(
            "java_method('java.lang.Thread', 'sleep', 300L)"
        )
        counting = pool.submit(slow.collect)
        while not counting.done():
            seen.append(tasks(spark_alone))
        counting.result()
    assert any(one.endswith(" of 2 tasks") for one in seen)
