"""Commits that a test can hold up, fail, and look into."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from leveret.storage import database as module
from leveret.storage.commit import Batch


class Gate:
    """Holds commits in the writer's thread, or lets them fail; remembers their batches."""

    def __init__(self) -> None:
        self.commits: list[Batch] = []
        self.failures: list[Exception] = []
        self._open = threading.Event()
        self._open.set()
        self._commit = module.commit

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def commit(self, connection: sqlite3.Connection, batch: Batch) -> float:
        self.commits.append(batch)
        assert self._open.wait(20)
        if self.failures:
            raise self.failures.pop(0)
        return self._commit(connection, batch)


@contextmanager
def commit_gate() -> Iterator[Gate]:
    """For all databases of this process; open at first, and in the end."""
    gate = Gate()
    with mock.patch.object(module, "commit", gate.commit):
        try:
            yield gate
        finally:
            gate.open()
