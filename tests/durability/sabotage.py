"""``python sabotage.py FAULT serve ...``: a broker with a fault that the tests must notice."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

from leveret.broker.cli.main import main
from leveret.protocol.message import Message
from leveret.storage.queue_index import QueueIndex


def confirm_before_commit() -> None:
    """Say that a message is on disk as soon as it was handed over."""
    write = QueueIndex.write

    def write_and_lie(
        self: QueueIndex,
        seq_ids: Sequence[int],
        messages: Iterable[Message],
        expires_at_ms: int | None,
        committed: Callable[[], None] | None,
    ) -> None:
        write(self, seq_ids, messages, expires_at_ms, None)
        if committed is not None:
            committed()

    setattr(QueueIndex, "write", write_and_lie)  # noqa: B010


def forget_acks() -> None:
    """Never delete what was acked."""
    setattr(QueueIndex, "remove", lambda self, removed: None)  # noqa: B010


FAULTS = {fault.__name__: fault for fault in (confirm_before_commit, forget_acks)}

if __name__ == "__main__":
    FAULTS[sys.argv.pop(1)]()
    sys.exit(main())
