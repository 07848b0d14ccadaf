"""``python sabotage.py FAULT serve ...``: a broker with a fault that the tests must notice."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

from leveret.broker.cli.main import main
from leveret.protocol.message import Message
from leveret.storage.commit import Batch
from leveret.storage.database import COMMIT_ROWS
from leveret.storage.queue_index import QueueIndex
from leveret.storage.unit import Part, Unit


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


FAULTS = {fault.__name__: fault for fault in (confirm_before_commit, forget_acks, split_units)}

if __name__ == "__main__":
    FAULTS[sys.argv.pop(1)]()
    sys.exit(main())
