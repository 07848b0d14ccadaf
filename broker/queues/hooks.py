"""What may stand between a message and its queue, in the seeds' order [76-83].

``deliver_or_enqueue`` asks these at the points where RabbitMQ checks length limits, duplicates
and expiry. A queue without any such argument has ``NoLimits``, which costs one attribute test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from leveret.broker.queues.commands import Delivery


class QueueHooks(Protocol):
    # False: none of the methods below need be called.
    is_active: bool

    def refuses(self, delivery: Delivery) -> bool:
        """Before anything else: reject-publish and a full queue [77]."""
        ...

    def discards_undelivered(self, delivery: Delivery) -> bool:
        """No consumer took it: is it worth keeping [81]?"""
        ...

    def published(self) -> None:
        """After messages were added: drop from the head what is too much or too old [82, 83]."""
        ...


class NoLimits:
    is_active = False

    def refuses(self, delivery: Delivery) -> bool:
        return False

    def discards_undelivered(self, delivery: Delivery) -> bool:
        return False

    def published(self) -> None:
        pass
