"""A driver of its own that copies queue ``in`` to ``out``, and can be caught in the middle.

    python -m tests.spark.copying_driver URL CHECKPOINT STUCK_AT MARKER

In batch STUCK_AT it writes a part of the rows, makes the file MARKER and waits to be killed.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from pyspark.sql import DataFrame

from leveret.spark_jobs.datasource import LeveretDataSource
from leveret.spark_jobs.session import build_session
from tests.spark.conftest import SESSION

PART = 3


def main(url: str, checkpoint: str, stuck_at: int, marker: Path) -> None:
    spark = build_session("copy", master="local[1]", conf=SESSION)
    spark.dataSource.register(LeveretDataSource)

    def copy(batch: DataFrame, number: int) -> None:
        rows = batch.limit(PART) if number == stuck_at else batch
        target = rows.select("body").write.format("leveret").mode("append")
        target.option("url", url).option("routingKey", "out").save()
        if number == stuck_at:
            marker.touch()
            signal.pause()

    source = spark.readStream.format("leveret").option("url", url).option("queue", "in")
    query = (
        source.option("batchSize", "10")
        .load()
        .writeStream.foreachBatch(copy)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
