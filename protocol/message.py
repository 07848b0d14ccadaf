"""The Message value: what a publish carries, kept as raw as it came.

Properties stay the bytes of the content header; what the broker must look at is marked in
``needs`` by the codec, so that a message with nothing to check is never looked into. Equal
exchange and routing key pairs share one ``envelope`` object: comparing them is ``is``.

This is the pure-Python class; ``_hot.pyx`` has its compiled twin with the same attributes.
"""

from __future__ import annotations

# Bits of Message.needs: what the publish pipeline has to look at. 0 for most messages.
NEEDS_HEADERS = 1  # a header table is there: CC, BCC, headers exchange
NEEDS_PRIORITY = 2
NEEDS_REPLY_TO = 4
NEEDS_EXPIRATION = 8
NEEDS_USER_ID = 16
NEEDS_MODE = 32  # delivery-mode is given and is neither 1 nor 2


class Message:
    """One published message; shared by all queues it was routed to, so never changed there."""

    __slots__ = (
        "body",
        "body_id",
        "envelope",
        "exchange",
        "extra_keys",
        "header",
        "log_id",
        "needs",
        "persistent",
        "routing_key",
        "stamp_us",
    )

    def __init__(
        self,
        envelope: bytes,
        exchange: str,
        routing_key: str,
        header: bytes,
        body: bytes,
        needs: int,
        persistent: bool,
    ) -> None:
        # Exchange and routing key as two short strings, as publish and deliver frames hold them.
        self.envelope = envelope
        self.exchange = exchange
        self.routing_key = routing_key
        # The content header from its property flags on: flags and property list.
        self.header = header
        self.body = body
        self.needs = needs
        # delivery-mode is 2.
        self.persistent = persistent
        # Further routing keys (CC, then BCC); set by the publish pipeline before routing.
        self.extra_keys: tuple[str, ...] = ()
        # Where a large body is kept in the message store; 0 until it is written there.
        self.body_id = 0
        # Its number in the event log, 0 if it is not told there; and when it came into its queue
        # (microseconds), 0 if that was when it was published: the number tells.
        self.log_id = 0
        self.stamp_us = 0
