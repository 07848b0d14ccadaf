"""Large bodies, once each, however many queues hold the message (hop 8) [133].

Bodies below ``embed_below`` stand in the queue index, beside their position. Larger ones are
written here when the first of their index rows is, and go with the last. References of bodies
written since the start are known in memory; those of recovered ones only in the database.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from leveret.protocol.message import Message
    from leveret.storage.database import Batch


class MessageStore:
    # One row of numbers for all stores: a message has one id, but may be written to several
    # files (a durable queue holds it, and a transient one has paged it out).
    _next_id: ClassVar[int] = 1

    def __init__(self, embed_below: int, next_id: int = 1) -> None:
        """``next_id``: no body in the file has this id or a higher one."""
        self.embed_below = embed_below
        MessageStore._next_id = max(MessageStore._next_id, next_id)
        # Rows in the index that name a body, as far as they were written since the start.
        # One that is named here is in the file, or will be with the commit being gathered.
        self._refs: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._refs)

    def is_separate(self, message: Message) -> bool:
        """Too large to stand in the index [107]."""
        return len(message.body) + len(message.header) >= self.embed_below

    def reserve(self, message: Message) -> None:
        """Give a large body its id, before it is written anywhere."""
        if not message.body_id:
            message.body_id = MessageStore._next_id
            MessageStore._next_id += 1

    def add_reference(self, message: Message, batch: Batch) -> None:
        """An index row that names the body is inserted in this commit."""
        body_id = message.body_id
        if body_id in self._refs:
            self._refs[body_id] += 1
            if body_id in batch.bodies:
                batch.bodies[body_id][0] += 1
            else:
                batch.body_refs[body_id] = batch.body_refs.get(body_id, 0) + 1
            return
        # Not known to be there; should it be, from before the start, its references go up.
        self._refs[body_id] = 1
        batch.bodies[body_id] = [1, message.body]
        batch.bytes += len(message.body)

    def drop_reference(self, body_id: int, batch: Batch) -> None:
        """An index row that names the body is deleted in this commit."""
        self._forget(body_id, 1)
        batch.body_refs[body_id] = batch.body_refs.get(body_id, 0) - 1

    def released(self, changes: dict[int, int]) -> None:
        """A range of index rows was deleted, and with it so many references (negative)."""
        for body_id, change in changes.items():
            self._forget(body_id, -change)

    def _forget(self, body_id: int, count: int) -> None:
        left = self._refs.get(body_id, 0) - count
        if left > 0:
            self._refs[body_id] = left
        else:
            self._refs.pop(body_id, None)
