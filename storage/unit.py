"""Changes of several queues that stand or fall together: a transaction, a dead letter.

Upstream: whoever begins one (a channel's tx.commit, a queue that dead-letters). Each queue that
takes part is asked through its mailbox and *joins* with its part, or refuses. When the last has
answered, the unit is put into the database's log as one operation: one commit takes all of it or
none, and no SQLite transaction is open while somebody waits for a mailbox.

Nothing of a part has happened until the commit that takes it begins (``gather``): until then any
queue that ends, or is started anew, makes the whole unit void. From there on only the disk is
waited for. A part's messages get their positions when the commit begins and are seen by consumers
when it has ended, so the queue takes no other publishes in between; ``Part.gather`` tells it so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from leveret.storage.commit import Batch, Operation


class Part(Protocol):
    """What a unit does to one queue."""

    @property
    def is_void(self) -> bool:
        """The queue has ended since it joined."""

    def gather(self, batch: Batch) -> None:
        """The commit begins: take positions, add what is to be written."""

    def committed(self) -> None:
        """It is on disk: let it be seen."""

    def voided(self) -> None:
        """Nothing of it happens: undo what was reserved."""


class Unit:
    """Made by one, joined by several; ``ended`` is called once, with whether it was committed."""

    __slots__ = ("_ended", "_is_refused", "_parts", "_put", "_waiting")

    def __init__(self, put: Callable[[Operation], None], ended: Callable[[bool], object]) -> None:
        """``put`` takes the whole when all have answered."""
        self._put = put
        self._ended = ended
        self._parts: list[Part] = []
        # Answers that are still to come, and one for who begins: ``answered`` by begin().
        self._waiting = 1
        self._is_refused = False

    def expect(self) -> None:
        """One more queue was asked."""
        self._waiting += 1

    def begin(self) -> None:
        """All that take part were asked: when the last answers, it is committed or void."""
        self._answered()

    def join(self, part: Part) -> None:
        self._parts.append(part)
        self._answered()

    def refuse(self) -> None:
        """A queue that was asked does not want to, or is gone: nothing of the unit happens."""
        self._is_refused = True
        self._answered()

    def leave_out(self) -> None:
        """A queue that was asked takes no part, and the others do without it."""
        self._answered()

    def withdraw(self) -> None:
        """Whoever made it has gone: if it is not on its way to the disk yet, it is void."""
        self._is_refused = True

    def _answered(self) -> None:
        self._waiting -= 1
        if self._waiting:
            return
        if self._is_refused:
            self._void()
        else:
            self._put(self)

    def gather(self, batch: Batch) -> None:
        if self._is_refused or any(part.is_void for part in self._parts):
            batch.after.append(self._void)
            return
        for part in self._parts:
            part.gather(batch)
        batch.after.append(self._commit)

    def _commit(self) -> None:
        for part in self._parts:
            part.committed()
        self._finish(is_committed=True)

    def _void(self) -> None:
        for part in self._parts:
            part.voided()
        self._finish(is_committed=False)

    def _finish(self, *, is_committed: bool) -> None:
        self._parts.clear()
        self._ended(is_committed)


def commit_in_memory(operation: Operation) -> None:
    """What takes a unit where nothing is kept on disk."""
    batch = Batch()
    operation.gather(batch)
    for call in batch.after:
        call()
