"""What becomes of commands that a queue will never handle: it was deleted, or has crashed.

Upstream: ``actor.py`` for what it leaves behind, ``supervisor.py`` for a queue that has no actor
because it cannot be started. Whoever waits for an answer gets one, or its channel would wait for
ever, and its connection with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from leveret.broker.queues import commands as c

if TYPE_CHECKING:
    from leveret.broker.event_log.queue_log import QueueLog
    from leveret.broker.mailbox import Mailbox


def refuse(
    left: Iterable[object], mailbox: Mailbox, log: QueueLog | None, *, crashed: bool
) -> set[Mailbox]:
    """Answer the commands ``left`` in a queue's ``mailbox``; the channels that know it by them."""
    senders: set[Mailbox] = set()
    reason = "queue_crashed" if crashed else "queue_deleted"
    for command in left:
        if isinstance(command, c.Delivery):
            if log is not None:
                log.dropped(command.messages, 0, reason)
            command.sender.put_urgent(c.Unreceived(mailbox, command, crashed))
            senders.add(command.sender)
        elif isinstance(command, c.Prepare):
            if command.is_optional:
                if command.not_taken is not None:
                    command.not_taken(command.messages, reason)
                command.unit.leave_out()
            else:
                command.unit.refuse()
                senders.add(command.sender)
        elif isinstance(command, (c.Get, c.Count, c.Purge, c.Delete, c.Consume, c.Cancel)):
            command.channel.put_urgent(c.Gone())
            senders.add(command.channel)
    return senders


def deletion_in(left: Iterable[object]) -> c.Delete | c.DeleteNow | None:
    """What asks for the end of the queue, whatever it holds."""
    for command in left:
        if isinstance(command, c.DeleteNow) or (
            # A queue that does not run has no consumers, but may well have messages.
            isinstance(command, c.Delete) and not command.if_empty
        ):
            return command
    return None
