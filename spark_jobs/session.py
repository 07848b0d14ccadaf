"""The Spark session: which cluster, which settings, and the Java underneath.

Only commands and tests build sessions; jobs are given DataFrames. Nothing names a cluster: without
``--master`` it is ``spark-submit``'s choice, or all cores of this machine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

from leveret.spark_jobs import java

# What results depend on. Everything is computed in UTC; a session elsewhere would shift windows.
_FIXED: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.compression.codec": "zstd",
    # Parts of a partition are replaced as a whole: how ingest stays exactly-once.
    "spark.sql.sources.partitionOverwriteMode": "dynamic",
    "spark.sql.catalogImplementation": "in-memory",
    # Writers for several dates at once, instead of a sort by date of what is sorted anyway.
    "spark.sql.maxConcurrentOutputFileWriters": "64",
    # Names and numbers in a lake's paths are what they were in the log.
    "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
}

# What an operator's terminal is spared, and defaults that --conf may change.
_QUIET: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Empty marker files that nobody reads.
    "spark.hadoop.mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
    "spark.sql.shuffle.partitions": "8",
    # Where in a program each expression was written: six calls into Java for every one of them.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
}

_LOCAL: Final = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # Started once for seconds, on the machine the operator works at.
    "spark.driver.memory": "2g",
}


def build_session(
    name: str, *, master: str | None = None, conf: Mapping[str, str] | None = None
) -> SparkSession:
    """A session for a command. Raises java.NoJava if this process has to start Spark and cannot."""
    builder = SparkSession.builder.appName(f"leveret {name}")
    settings = {**_QUIET}
    # Under spark-submit there is a JVM already, and a master unless the user says otherwise.
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        found = java.find_java(os.environ)
        home = java.prepare(found, java.cache_folder(os.environ))
        os.environ["JAVA_HOME"] = str(home)
        # Workers run the Python that is running, not the first one on PATH.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        if "SPARK_HOME" not in os.environ:
            # Spark from the Python package has no settings of its own: give it quiet logging.
            os.environ.setdefault("SPARK_CONF_DIR", str(Path(__file__).parent / "conf"))
        master = master or "local[*]"
    if master is not None:
        builder = builder.master(master)
        if master.startswith("local"):
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
            settings |= _LOCAL
    settings |= conf or {}
    for key, value in {**settings, **_FIXED}.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    if "spark.log.level" not in settings:
        session.sparkContext.setLogLevel("ERROR")
    return session
