"""The one seam between a channel and queues (hop 5) [61].

Today every queue is a task of this process and is reached through its mailbox; queues in other
processes will be reached here, too. Nothing else may assume where a queue lives: what goes
through are messages, ids and mailboxes as addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from leveret.broker.queues.commands import Unreceived

if TYPE_CHECKING:
    from leveret.broker.flow import CreditFlow
    from leveret.broker.queues.commands import Delivery
    from leveret.broker.queues.record import Queue


def deliver(queues: Sequence[Queue], delivery: Delivery, flow: CreditFlow) -> None:
    """One credit link and one put per queue; a message for many is bound by the slowest [31]."""
    delivery.targets = len(queues)
    cost = delivery.cost
    for queue in queues:
        mailbox = queue.mailbox
        if mailbox.put(delivery):
            if cost:
                flow.send(mailbox, cost)
        else:
            delivery.sender.put_urgent(Unreceived(mailbox, delivery))
