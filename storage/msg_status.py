"""A message at its place in a variable queue, the delta, and merging by position.

Used by ``variable_queue.py`` alone: the pieces it is made of, without its rules.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from operator import attrgetter

from leveret.protocol.message import Message


class MsgStatus:
    """One message at its place: the seeds' ``#msg_status``."""

    __slots__ = (
        "body_id",
        "expires_at_ms",
        "is_on_disk",
        "is_persistent",
        "message",
        "seq_id",
        "size",
    )

    # Positional, since one is made for each message.
    def __init__(
        self,
        seq_id: int,
        message: Message | None,
        size: int,
        expires_at_ms: int | None,
        is_persistent: bool,
        is_on_disk: bool,
        body_id: int = 0,
    ) -> None:
        self.seq_id = seq_id
        # None: a beta, to be read from disk.
        self.message = message
        self.size = size
        self.expires_at_ms = expires_at_ms
        # The queue is durable and the message was published as persistent.
        self.is_persistent = is_persistent
        # Its row was handed to an index (of the persistent or the transient file).
        self.is_on_disk = is_on_disk
        # What that row names as body; 0 if the body is in the row. The message's own number may
        # have been given since, by a queue it was routed to later.
        self.body_id = body_id

    def __repr__(self) -> str:
        return f"<{self.seq_id}{'' if self.message is not None else ' on disk'}>"


class Delta:
    """Messages that are on disk alone: a range and how many there are in it."""

    __slots__ = ("bytes", "count", "end", "start", "transient")

    def __init__(self) -> None:
        # No message of the delta is before start, or at or after end.
        self.start = 0
        self.end = 0
        self.count = 0
        # How many of them are in the transient file.
        self.transient = 0
        self.bytes = 0

    def add(self, status: MsgStatus) -> None:
        if not self.count:
            self.start, self.end = status.seq_id, status.seq_id + 1
        else:
            self.start = min(self.start, status.seq_id)
            self.end = max(self.end, status.seq_id + 1)
        self.count += 1
        self.bytes += status.size
        self.transient += not status.is_persistent

    def clear(self) -> None:
        self.start = self.end = self.count = self.transient = self.bytes = 0

    def __repr__(self) -> str:
        return f"<Delta {self.start}..{self.end} count {self.count}>"


def next_segment_boundary(seq_id: int, segment_size: int) -> int:
    return (seq_id // segment_size + 1) * segment_size


def merge_into(queue: deque[MsgStatus], statuses: list[MsgStatus]) -> None:
    """Both ascend by position; so does what comes of it. Cheap if that is near the head."""
    if not statuses:
        return
    # All that changes lies between these two places: mostly none, at the head.
    start = place_of(statuses[0].seq_id, queue)
    end = place_of(statuses[-1].seq_id, queue)
    queue.rotate(-start)
    if end > start:
        between = [queue.popleft() for _ in range(end - start)]
        statuses = sorted([*between, *statuses], key=attrgetter("seq_id"))
    queue.extendleft(reversed(statuses))
    queue.rotate(start)


def place_of(seq_id: int, queue: Sequence[MsgStatus]) -> int:
    """How many stand before ``seq_id``; cheap if they are few."""
    length = len(queue)
    # A deque is slow in its middle: go there only if the head says so.
    end = 1
    while end <= length and queue[end - 1].seq_id < seq_id:
        end <<= 1
    return bisect_left(queue, seq_id, end >> 1, min(end, length), key=attrgetter("seq_id"))
