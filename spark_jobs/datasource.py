"""The data source ``leveret``: a broker's queues and exchanges, for users of Spark.

    from leveret.spark_jobs.datasource import LeveretDataSource

    spark.dataSource.register(LeveretDataSource)
    messages = spark.readStream.format("leveret").option("url", …).option("queue", …).load()

It speaks plain AMQP 0-9-1 and works with RabbitMQ as well. Options are checked here, in the driver;
what they mean is in ``datasource_options.py``, how messages look as rows in ``amqp_rows.py``.
Executors import this package: ``leveret[spark]`` must be installed where they run.
"""

from __future__ import annotations

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from leveret.spark_jobs.amqp_rows import MESSAGE, check_columns, row_maker
from leveret.spark_jobs.datasource_options import OptionError, read_options, write_options
from leveret.spark_jobs.datasource_read import BatchReader, StreamReader
from leveret.spark_jobs.datasource_write import BatchWriter, StreamWriter


class LeveretDataSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "leveret"

    def schema(self) -> StructType:
        # Asked for by load() alone, which is when a reader wants to hear of mistakes.
        read_options(self.options)
        return MESSAGE

    def reader(self, schema: StructType) -> BatchReader:
        row_maker(schema)
        return BatchReader(read_options(self.options), schema)

    def simpleStreamReader(self, schema: StructType) -> StreamReader:
        return StreamReader(read_options(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        if overwrite:
            raise OptionError("messages can only be added: write with mode append")
        check_columns(schema)
        return BatchWriter(write_options(self.options, schema.names))

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:
        if overwrite:
            raise OptionError("messages can only be added: use output mode append")
        check_columns(schema)
        return StreamWriter(write_options(self.options, schema.names))
