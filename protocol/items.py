"""What the codec cuts a stream into: runs of publishes, runs of acks, and raw frames.

These are the pure-Python classes; ``_hot.pyx`` has compiled ones with the same attributes. Take
them from twin.py, so that what is made elsewhere is of the kind that the codec makes.
"""

from __future__ import annotations

from typing import final

from leveret.protocol.message import Message


@final
class RawFrame:
    """A frame that is not hot, for codec.py and assembler.py."""

    __slots__ = ("channel", "kind", "payload")

    def __init__(self, kind: int, channel: int, payload: bytes) -> None:
        self.kind = kind
        self.channel = channel
        self.payload = payload


@final
class PublishRun:
    """Consecutive publishes of one channel with the same exchange, routing key and flags."""

    __slots__ = (
        "channel",
        "cost",
        "envelope",
        "exchange",
        "flags",
        "largest",
        "messages",
        "needs",
        "persistent",
        "routing_key",
        "size",
    )

    def __init__(
        self,
        channel: int,
        envelope: bytes,
        exchange: str,
        routing_key: str,
        flags: int,
        messages: list[Message],
        cost: int,
        size: int,
        largest: int,
        needs: int,
        persistent: int,
    ) -> None:
        self.channel = channel
        self.envelope = envelope
        self.exchange = exchange
        self.routing_key = routing_key
        # Bit 0 is mandatory, bit 1 immediate.
        self.flags = flags
        self.messages = messages
        # Of all messages together: what they cost in credit, the bytes of their bodies, ...
        self.cost = cost
        self.size = size
        # ... the largest body, the union of their needs, and how many are persistent.
        self.largest = largest
        self.needs = needs
        self.persistent = persistent


@final
class AckRun:
    """Consecutive acks, rejects or nacks of one channel that differ in their tags alone."""

    __slots__ = ("channel", "method", "multiple", "requeue", "tags")

    def __init__(
        self, channel: int, method: int, multiple: bool, requeue: bool, tags: list[int]
    ) -> None:
        self.channel = channel
        # 80 ack, 90 reject, 120 nack.
        self.method = method
        self.multiple = multiple
        self.requeue = requeue
        self.tags = tags


Item = RawFrame | PublishRun | AckRun
