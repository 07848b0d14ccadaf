"""``python sabotage.py FAULT serve ...``: a broker with a fault that the tests must notice."""

from __future__ import annotations

import sqlite3
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from leveret.broker.cli.main import main
from leveret.protocol.message import Message
from leveret.storage import database
from leveret.storage.commit import Batch
from leveret.storage.database import COMMIT_ROWS
from leveret.storage.queue_index import QueueIndex
from leveret.storage.unit import Part, Unit
from leveret.storage.variable_queue import VariableQueue


def confirm_before_commit() -> None:
    """Say that a message is on disk as soon as it was handed over."""
    write = QueueIndex.write

    def write_and_lie(
        self: QueueIndex,
        seq_ids: Sequence[int],
        messages: Iterable[Message],
        expires_at_ms: int | None,
        committed: Callable[[], None] | None,
        cost: int = 0,
    ) -> None:
        write(self, seq_ids, messages, expires_at_ms, None, cost)
        if committed is not None:
            committed()

    setattr(QueueIndex, "write", write_and_lie)  # noqa: B010


def forget_acks() -> None:
    """Never delete what was acked."""
    setattr(QueueIndex, "remove", lambda self, removed: None)  # noqa: B010


def release_at_first_ack() -> None:
    """On a slow disk, take a run for committed when the first of its messages was acked."""
    ack, commit = VariableQueue.ack, database.commit

    def release_too_much(self: QueueIndex, seq_ids: Collection[int]) -> None:
        for write in self._awaited:
            if any(write.seq_ids[0] <= seq_id <= write.seq_ids[-1] for seq_id in seq_ids):
                write.left = 0
        self._tell_committed()

    def ack_and_release(self: VariableQueue, seq_ids: Collection[int]) -> None:
        if self._index is not None:
            self._index.release(seq_ids)
        ack(self, seq_ids)

    def commit_slowly(connection: sqlite3.Connection, batch: Batch) -> float:
        time.sleep(0.5)
        return commit(connection, batch)

    setattr(QueueIndex, "release", release_too_much)  # noqa: B010
    setattr(VariableQueue, "ack", ack_and_release)  # noqa: B010
    setattr(database, "commit", commit_slowly)  # noqa: B010


class _PartAlone:
    """The parts of a unit that are left, each in a commit of its own."""

    def __init__(self, unit: Unit, parts: Sequence[Part]) -> None:
        self._unit = unit
        self._parts = parts

    def gather(self, batch: Batch) -> None:
        self._parts[0].gather(batch)
        batch.rows += COMMIT_ROWS
        batch.after.append(self._on_disk)

    def _on_disk(self) -> None:
        done, *rest = self._parts
        done.committed()
        if rest:
            self._unit._put(_PartAlone(self._unit, rest))
        else:
            self._unit._finish(is_committed=True)


def split_units() -> None:
    """What several queues do together is written queue by queue."""
    gather = Unit.gather

    def gather_first(self: Unit, batch: Batch) -> None:
        if self._parts:
            _PartAlone(self, list(self._parts)).gather(batch)
        else:
            gather(self, batch)

    setattr(Unit, "gather", gather_first)  # noqa: B010


FAULTS = {
    fault.__name__: fault
    for fault in (confirm_before_commit, forget_acks, release_at_first_ack, split_units)
}

if __name__ == "__main__":
    FAULTS[sys.argv.pop(1)]()
    sys.exit(main())
