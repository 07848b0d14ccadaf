"""Words of the messages in a queue, counted by Spark as they arrive, and sent to another queue.

    pip install 'leveret[spark]'
    python examples/spark_stream.py          # counts; end with Ctrl-C
    python examples/spark_stream.py send hello world hello

A message is acknowledged when the batch it was in is done. If the program dies, what it had not
finished comes again. The broker is taken from AMQP_URL, else it is the one on this machine.
"""

import os
import sys

import pika  # type: ignore[import-untyped]
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from leveret.spark_jobs.datasource import LeveretDataSource
from leveret.spark_jobs.session import build_session

URL = os.environ.get("AMQP_URL", "amqp://guest:guest@localhost:5672/%2F")


def send_counts(batch: DataFrame, number: int) -> None:
    words = batch.select(F.explode(F.split(F.col("body").cast("string"), r"\s+")).alias("word"))
    counts = words.groupBy("word").count()
    # Columns of the data source: a body, and what else a message may have.
    messages = counts.select(F.to_json(F.struct("word", "count")).alias("body"))
    target = messages.write.format("leveret").mode("append")
    target.option("url", URL).option("routingKey", "counts").save()


def count() -> None:
    # Any session will do; this one finds a Java for itself.
    spark = build_session("example")
    spark.dataSource.register(LeveretDataSource)
    messages = spark.readStream.format("leveret").option("url", URL).option("queue", "words").load()
    query = (
        messages.writeStream.foreachBatch(send_counts)
        .option("checkpointLocation", "words-checkpoint")
        .start()
    )
    query.awaitTermination()


def main() -> None:
    connection = pika.BlockingConnection(pika.URLParameters(URL))
    channel = connection.channel()
    for queue in ("words", "counts"):
        channel.queue_declare(queue, durable=True)
    if sys.argv[1:2] == ["send"]:
        channel.basic_publish("", "words", " ".join(sys.argv[2:]).encode())
    connection.close()
    if sys.argv[1:2] != ["send"]:
        count()


main()
