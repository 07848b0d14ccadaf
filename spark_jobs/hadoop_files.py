"""Small files on whatever file system Hadoop reaches: a folder, HDFS, an object store.

For the few texts that analytics read and write by themselves, beside what Spark does: a lock, and
Spark's own notes in a checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession


def names_in(spark: SparkSession, folder: str) -> list[str]:
    """Names of what is in a folder; none if it is not there."""
    file_system, location = _locate(spark, folder)
    if not file_system.exists(location):
        return []
    return [status.getPath().getName() for status in file_system.listStatus(location)]


def read_text(spark: SparkSession, path: str) -> str | None:
    """None if the file is not there."""
    file_system, location = _locate(spark, path)
    try:
        stream = file_system.open(location)
    except Py4JJavaError as error:
        if "java.io.FileNotFoundException" in _kinds(error):
            return None
        raise
    try:
        jvm: Any = spark.sparkContext._jvm
        return str(jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
    finally:
        stream.close()


def create(spark: SparkSession, path: str, text: str) -> bool:
    """Write a file that must not be there yet; false if it is.

    Of two that try at once one succeeds: on HDFS, by Hadoop's promise, and on this machine's disks,
    where Hadoop looks first and writes later, by the operating system's.
    """
    file_system, location = _locate(spark, path)
    if file_system.getScheme() == "file":
        local = Path(file_system.makeQualified(location).toUri().getPath())
        local.parent.mkdir(parents=True, exist_ok=True)
        try:
            with local.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            return False
        return True
    try:
        stream = file_system.create(location, False)
    except Py4JJavaError as error:
        if any(kind.endswith("FileAlreadyExistsException") for kind in _kinds(error)):
            return False
        raise
    try:
        stream.write(bytearray(text.encode()))
    finally:
        stream.close()
    return True


def is_there(spark: SparkSession, uri: str) -> bool:
    """Is there a file at an address as Spark notes it, with odd characters as %20 and so on?"""
    jvm: Any = spark.sparkContext._jvm
    location = jvm.org.apache.hadoop.fs.Path(jvm.java.net.URI(uri))
    return bool(_file_system(spark, location).exists(location))


def _locate(spark: SparkSession, path: str) -> tuple[Any, Any]:
    jvm: Any = spark.sparkContext._jvm
    location = jvm.org.apache.hadoop.fs.Path(path)
    return _file_system(spark, location), location


def _file_system(spark: SparkSession, location: Any) -> Any:
    context: Any = spark.sparkContext._jsc
    return location.getFileSystem(context.hadoopConfiguration())


def _kinds(error: Py4JJavaError) -> list[str]:
    """Names of the Java exception's class and of those it is a kind of."""
    kinds = []
    kind = error.java_exception.getClass()
    while kind is not None:
        kinds.append(str(kind.getName()))
        kind = kind.getSuperclass()
    return kinds
