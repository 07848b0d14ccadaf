"""How tasks talk: a mailbox with two lanes, drained in batches by its one owner.

A mailbox is also its owner's address: what other tasks hold of a queue, a channel or a reader
is its mailbox, and all they can do with it is put. Nothing here is bounded: what bounds a lane
is the credit of those who put into it (``flow.py``).

``turn`` gives the event loop one turn each time, also when something waits: while one task
handles a batch the others gather the next, so that one wake-up serves many messages.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Generator


class _Turn:
    """Awaiting it lets every other ready task run once (what ``sleep(0)`` does, with less)."""

    def __await__(self) -> Generator[None, None, None]:
        yield


_TURN = _Turn()


class Mailbox:
    """Two lanes: ``urgent`` is taken first and whole, ``ordinary`` as the owner sees fit."""

    __slots__ = ("_urgent_only", "_waiter", "is_closed", "log_name", "ordinary", "owner", "urgent")

    def __init__(self, owner: str = "", log_name: str = "") -> None:
        # Who takes from it, for logs and statistics; and as the event log names it.
        self.owner = owner
        self.log_name = log_name
        self.urgent: list[object] = []
        self.ordinary: deque[object] = deque()
        # Set once by close(): later puts are refused.
        self.is_closed = False
        # The owner's future while it waits for something to come.
        self._waiter: asyncio.Future[None] | None = None
        # While true, only the urgent lane wakes the owner.
        self._urgent_only = False

    def __repr__(self) -> str:
        return f"<Mailbox of {self.owner}>"

    def put(self, item: object) -> bool:
        """Append to the ordinary lane; False if nobody will ever take it."""
        if self.is_closed:
            return False
        self.ordinary.append(item)
        if self._waiter is not None and not self._urgent_only:
            self.wake()
        return True

    def put_urgent(self, item: object) -> bool:
        """Append to the urgent lane; False if nobody will ever take it."""
        if self.is_closed:
            return False
        self.urgent.append(item)
        if self._waiter is not None:
            self.wake()
        return True

    def take_urgent(self) -> list[object]:
        taken = self.urgent
        self.urgent = []
        return taken

    async def turn(self, *, urgent_only: bool = False) -> None:
        """Return once something waits (in the urgent lane, if only that is asked for)."""
        if self.urgent or (self.ordinary and not urgent_only):
            await _TURN
            return
        self._urgent_only = urgent_only
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        try:
            await waiter
        finally:
            self._waiter = None

    async def wait_more(self) -> None:
        """Return once something was put in addition to what waits, or ``wake`` was called."""
        self._urgent_only = False
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        try:
            await waiter
        finally:
            self._waiter = None

    async def pause(self) -> None:
        """Give the loop one turn, whether anything waits or not."""
        await _TURN

    def close(self) -> list[object]:
        """Refuse what comes from now on; return what was not taken, in order."""
        self.is_closed = True
        left = [*self.urgent, *self.ordinary]
        self.urgent = []
        self.ordinary = deque()
        return left

    def __len__(self) -> int:
        return len(self.urgent) + len(self.ordinary)

    def wake(self) -> None:
        """Let the owner go on, if it waits."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
