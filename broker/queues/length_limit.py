"""x-max-length and x-max-length-bytes: what a queue takes, and what is too much [77, 82].

Decisions only, over numbers; the actor owns the messages. Ready messages count, unacked ones do
not, and of a message its body.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leveret.broker.queues.effective import QueueOptions
    from leveret.protocol.message import Message


class LengthLimit:
    __slots__ = ("_max_bytes", "_max_length", "dead_letters_refused", "drops_head", "refuses")

    def __init__(self, options: QueueOptions) -> None:
        self._max_length = options.max_length
        self._max_bytes = options.max_length_bytes
        has_limit = self._max_length is not None or self._max_bytes is not None
        # What is published to a full queue goes back, or takes the place of the oldest.
        self.refuses = has_limit and options.overflow != "drop-head"
        self.drops_head = has_limit and options.overflow == "drop-head"
        self.dead_letters_refused = options.overflow == "reject-publish-dlx"

    def is_over(self, length: int, size: int) -> bool:
        return (self._max_length is not None and length > self._max_length) or (
            self._max_bytes is not None and size > self._max_bytes
        )

    def accepted(self, messages: Sequence[Message], length: int, size: int) -> int:
        """How many from the front fit into a queue of that length and size."""
        if self._max_length is not None:
            count = max(0, min(len(messages), self._max_length - length))
        else:
            count = len(messages)
        if self._max_bytes is not None:
            for at in range(count):
                size += len(messages[at].body)
                if size > self._max_bytes:
                    return at
        return count

    def fitting(self, messages: Sequence[Message], length: int, size: int) -> list[Message]:
        """Those that fit if they come one after the other: a small one may behind a large one."""
        taken: list[Message] = []
        for message in messages:
            if self.accepted((message,), length, size):
                taken.append(message)
                length += 1
                size += len(message.body)
        return taken

    def refused(self, messages: Sequence[Message], length: int, size: int) -> int:
        """How many from the front do not fit, each for itself."""
        for at, message in enumerate(messages):
            if self.accepted((message,), length, size):
                return at
        return len(messages)

    def surplus(self, length: int, size: int) -> int:
        """How many must go from the head, at least one if there are too many bytes."""
        count = 0
        if self._max_length is not None:
            count = max(0, length - self._max_length)
        if not count and self._max_bytes is not None and size > self._max_bytes:
            return 1
        return count
