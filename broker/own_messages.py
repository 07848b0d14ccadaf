"""Messages the broker itself makes: events and copies for the firehose.

They reach queues as a publisher's do, but nobody waits for them: no confirm, no return. A queue
whose mailbox is as full of deliveries as a mailbox may get without anybody's credit is left out, so
that what the broker tells never costs it its memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from leveret.broker.mailbox import Mailbox
from leveret.broker.queues.commands import Delivery
from leveret.protocol.codec import Properties, write_properties
from leveret.protocol.hot import scan_properties
from leveret.protocol.twin import Message

if TYPE_CHECKING:
    from leveret.broker.queues.record import Queue

# Commands that may wait in a queue's mailbox before it gets no more of ours.
MAILBOX_MAX = 1_000

# Nobody: closed, so that queues neither answer nor remember it.
_NOBODY = Mailbox("nobody")
_NOBODY.close()


@lru_cache(maxsize=1024)
def _envelope(exchange: str, routing_key: str) -> bytes:
    names = [name.encode("utf-8", "surrogateescape") for name in (exchange, routing_key)]
    return b"".join(bytes((len(name),)) + name for name in names)


def make_message(exchange: str, routing_key: str, properties: Properties, body: bytes) -> Message:
    header = write_properties(properties)
    needs, persistent = scan_properties(header, 0, len(header))
    envelope = _envelope(exchange, routing_key)
    return Message(envelope, exchange, routing_key, header, body, needs, persistent)


def hand_over(queues: Iterable[Queue], messages: Sequence[Message]) -> int:
    """Put them into the queues; returns how many copies were left out."""
    sizes = [len(message.body) for message in messages]
    needs = 0
    for message in messages:
        needs |= message.needs
    left_out = 0
    for queue in queues:
        if len(queue.mailbox.ordinary) >= MAILBOX_MAX:
            left_out += len(messages)
            continue
        queue.mailbox.put(
            Delivery(
                messages,
                _NOBODY,
                0,
                0,
                sum(sizes),
                max(sizes),
                sum([message.persistent for message in messages]),
                is_mandatory=False,
                needs=needs,
            )
        )
    return left_out
