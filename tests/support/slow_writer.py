"""A disk that is as slow as the test wants: commits wait in the writer's thread, one by one."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from leveret.storage import database as module
from leveret.storage.commit import Batch

DEADLINE_S = 20.0


class SlowWriter:
    """Once held, each commit waits for its permit."""

    def __init__(self) -> None:
        self._is_held = False
        self._permits = threading.Semaphore(0)
        self._commit = module.commit

    def commit(self, connection: sqlite3.Connection, batch: Batch) -> float:
        if self._is_held:
            assert self._permits.acquire(timeout=DEADLINE_S)
        return self._commit(connection, batch)

    def hold(self) -> None:
        self._is_held = True

    def permit_one(self) -> None:
        self._permits.release()

    def release(self) -> None:
        self._is_held = False
        self._permits.release()


@contextmanager
def slow_writer() -> Iterator[SlowWriter]:
    """For all databases of this process; not held at first, nor in the end."""
    writer = SlowWriter()
    with mock.patch.object(module, "commit", writer.commit):
        try:
            yield writer
        finally:
            writer.release()
