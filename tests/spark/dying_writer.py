"""A driver whose first attempt to write is killed on the way, with its worker or its executor.

python -m tests.spark.dying_writer URL MASTER worker|executor ROWS
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceWriter
from pyspark.sql.types import Row, StructType

from leveret.spark_jobs.datasource import LeveretDataSource
from leveret.spark_jobs.datasource_options import WriteOptions, write_options
from leveret.spark_jobs.datasource_write import BatchWriter, Written
from leveret.spark_jobs.session import build_session
from tests.spark.conftest import SESSION

AT_ROW = 300


class DyingWriter(BatchWriter):
    """The writer itself, and a row in the middle that is fatal to the process it is in."""

    def __init__(self, options: WriteOptions, victim: str) -> None:
        super().__init__(options)
        self._victim = victim

    def write(self, iterator: Iterator[Row]) -> Written:
        return super().write(self._rows(iterator))

    def _rows(self, rows: Iterator[Row]) -> Iterator[Row]:
        task = TaskContext.get()
        assert task is not None
        for number, row in enumerate(rows):
            if number == AT_ROW and task.attemptNumber() == 0:
                # A worker is forked by a daemon, which the executor's JVM has started.
                executor = _parent(os.getppid())
                os.kill(os.getpid() if self._victim == "worker" else executor, signal.SIGKILL)
                signal.pause()
            yield row


class DyingDataSource(LeveretDataSource):
    @classmethod
    def name(cls) -> str:
        return "dying"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # type: ignore[override]
        options = {name: value for name, value in self.options.items() if name != "victim"}
        return DyingWriter(write_options(options, schema.names), self.options["victim"])


def _parent(pid: int) -> int:
    status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    # The second field is a name in brackets, which may hold anything.
    return int(status.rpartition(")")[2].split()[1])


def main(url: str, master: str, victim: str, rows: int) -> None:
    spark = build_session("dying", master=master, conf={**SESSION, "spark.executor.memory": "512m"})
    spark.dataSource.register(DyingDataSource)
    numbers = spark.range(0, rows, 1, 1).selectExpr("cast(id as string) as body")
    target = numbers.write.format("dying").mode("append").option("victim", victim)
    target.option("url", url).option("routingKey", "out").option("confirmWindow", "50").save()
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
