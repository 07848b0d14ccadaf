"""The header x-delivery-count, which quorum queues put on everything they deliver.

Upstream: ``actor.py``; the count itself is the backing queue's.
"""

from __future__ import annotations

from leveret.protocol.codec import read_properties, write_properties
from leveret.protocol.field_table import Field
from leveret.protocol.message import NEEDS_HEADERS
from leveret.protocol.twin import Message


def with_delivery_count(message: Message, count: int) -> Message:
    """A copy that says how often the message has come back; the queue keeps its own."""
    properties = read_properties(message.header)
    properties.headers = {**(properties.headers or {}), "x-delivery-count": Field("l", count)}
    copy = Message(
        message.envelope,
        message.exchange,
        message.routing_key,
        write_properties(properties),
        message.body,
        message.needs | NEEDS_HEADERS,
        message.persistent,
    )
    copy.extra_keys = message.extra_keys
    copy.log_id, copy.stamp_us = message.log_id, message.stamp_us
    return copy
