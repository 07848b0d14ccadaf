"""Large bodies, once each, however many queues hold the message (hop 8) [133].

Bodies below ``embed_below`` stand in the queue index, beside their position. Larger ones are
written here when the first of their index rows is, and go with the last. How many rows name a
body is known in the file alone: in memory it would be a number for each large message on disk.
So a body is handed over with each commit that adds a reference; SQLite stores the first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from leveret.protocol.message import Message
    from leveret.storage.commit import Batch


class MessageStore:
    # One row of numbers for all stores: a message has one id, but may be written to several
    # files (a durable queue holds it, and a transient one has paged it out).
    _next_id: ClassVar[int] = 1

    def __init__(self, embed_below: int, next_id: int = 1) -> None:
        """``next_id``: no body in the file has this id or a higher one."""
        # From this size on, body and header together, a body is kept here [107].
        self.embed_below = embed_below
        MessageStore._next_id = max(MessageStore._next_id, next_id)

    def reserve(self, message: Message) -> None:
        """Give a large body its id, before it is written anywhere."""
        if not message.body_id:
            message.body_id = MessageStore._next_id
            MessageStore._next_id += 1

    def add_reference(self, message: Message, batch: Batch) -> None:
        """An index row that names the body is inserted in this commit."""
        known = batch.bodies.get(message.body_id)
        if known is not None:
            known[0] += 1
        else:
            batch.bodies[message.body_id] = [1, message.body]
            batch.bytes += len(message.body)

    def drop_reference(self, body_id: int, batch: Batch) -> None:
        """An index row that names the body is deleted in this commit."""
        batch.body_refs[body_id] = batch.body_refs.get(body_id, 0) - 1
