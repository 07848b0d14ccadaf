"""One ingest at a time on a lake.

A file beside the checkpoint says who is at it. Spark refuses a second stream on a checkpoint by
itself, but only at the end of a batch, when both have written it. The file is there before anything
is read.

A process that was killed leaves its file behind. If it ran on this machine, whether it still does
can be seen; of another machine's only a person can know, and is told what to delete.
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Final

from pyspark.sql import SparkSession

from leveret.spark_jobs.hadoop_files import create, read_text
from leveret.spark_jobs.lake import Lake, LakeError, delete

# Tells this process from an earlier one with its number, as every container has.
_PROCESS: Final = uuid.uuid4().hex


def lock_of(lake: Lake) -> str:
    return f"{lake.root}/_checkpoints/ingest.lock"


@contextmanager
def alone(spark: SparkSession, lake: Lake) -> Iterator[None]:
    """No other ingest works on the lake within the block. Raises LakeError if one does."""
    path = lock_of(lake)
    mine = _mine()
    if not create(spark, path, mine):
        theirs = read_text(spark, path)
        if theirs is not None:
            _refuse_unless_dead(theirs, path, lake)
            delete(spark, path)
        if not create(spark, path, mine):
            raise LakeError(f"another ingest on {lake.root} began at this moment")
    try:
        yield
    finally:
        # Somebody may have removed it by hand, and another ingest have begun.
        if read_text(spark, path) == mine:
            delete(spark, path)


def _mine() -> str:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    mine = {"host": socket.gethostname(), "pid": os.getpid(), "since": since, "process": _PROCESS}
    return json.dumps(mine) + "\n"


def _refuse_unless_dead(text: str, path: str, lake: Lake) -> None:
    try:
        holder: dict[str, Any] = json.loads(text)
        host, pid, since = str(holder["host"]), int(holder["pid"]), str(holder["since"])
    except (ValueError, KeyError, TypeError):
        # Killed before it had written its name.
        raise LakeError(
            f"an ingest on {lake.root} may be under way: if there is none, delete {path}"
        ) from None
    if host == socket.gethostname():
        is_this = pid == os.getpid() and holder.get("process") == _PROCESS
        if not is_this and (pid == os.getpid() or not _lives(pid)):
            return
    raise LakeError(
        f"another ingest works on {lake.root}: process {pid} on {host}, since {since}. If it is "
        f"gone, delete {path}"
    )


def _lives(pid: int) -> bool:
    if os.name != "posix":
        # There, asking would end it.
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
