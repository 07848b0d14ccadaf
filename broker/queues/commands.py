"""What a queue's mailbox accepts, and what a queue sends back to a channel's.

The publish lane keeps the order between one channel and one queue: deliveries, and whatever
must see the sender's earlier ones (get, purge, delete, cancel, count). The control lane is
taken first: acks, requeues, credit, consume, timers, channels that are gone.

Everything names channels by mailbox and messages by ids: no references into anybody's state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leveret.broker.events import NOBODY, Actor
from leveret.broker.mailbox import Mailbox

if TYPE_CHECKING:
    from leveret.broker.queues.effective import QueueOptions
    from leveret.broker.queues.limiter import Limiter
    from leveret.broker.queues.units import QueuePart
    from leveret.protocol.errors import ChannelException
    from leveret.protocol.message import Message
    from leveret.storage.unit import Unit


class Delivery:
    """A run of messages on its way to one or more queues: the seeds' ``#delivery``, for a run."""

    __slots__ = (
        "confirm_first",
        "cost",
        "is_mandatory",
        "largest",
        "messages",
        "needs",
        "persistent",
        "sender",
        "size",
        "targets",
        "unreceived",
    )

    def __init__(
        self,
        messages: Sequence[Message],
        sender: Mailbox,
        confirm_first: int,
        cost: int,
        size: int,
        largest: int,
        persistent: int,
        *,
        is_mandatory: bool,
        needs: int = 0,
    ) -> None:
        self.messages = messages
        self.sender = sender
        # Publisher's sequence number of the first message; 0 if no confirm is wanted.
        self.confirm_first = confirm_first
        # Credit the run costs; 0 for a delivery that does not take part in credit flow.
        self.cost = cost
        self.size = size
        self.largest = largest
        # How many of the messages are persistent.
        self.persistent = persistent
        self.is_mandatory = is_mandatory
        # All that any of the messages needs (protocol/message.py).
        self.needs = needs
        # Written by the sender alone: queues it went to, and queues that handed it back.
        self.targets = 0
        self.unreceived = 0


# --- publish lane ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prepare:
    """Take part in a unit: publish these, forget those deliveries of the sender's."""

    unit: Unit
    sender: Mailbox
    messages: Sequence[Message]
    settled: Sequence[int]
    # A queue that cannot take part is left out; False: nothing of the unit happens without it.
    is_optional: bool = False
    # For the event log, where it wants to know: which of the messages are not taken, and why.
    not_taken: Callable[[Sequence[Message], str], object] | None = None


@dataclass(frozen=True, slots=True)
class Get:
    channel: Mailbox
    no_ack: bool


@dataclass(frozen=True, slots=True)
class Count:
    """How many messages are ready, how many consumers there are."""

    channel: Mailbox


@dataclass(frozen=True, slots=True)
class Purge:
    channel: Mailbox
    # On whose behalf and through which channel, for the event log.
    user: str = ""
    actor: Actor = NOBODY


@dataclass(frozen=True, slots=True)
class Delete:
    channel: Mailbox
    if_unused: bool
    if_empty: bool
    # On whose behalf, for the event that tells of it, and through which channel.
    user: str | None = None
    actor: Actor = NOBODY


@dataclass(frozen=True, slots=True)
class Cancel:
    """In this lane, so that the consumer gets what its channel published before."""

    channel: Mailbox
    tag: str


@dataclass(frozen=True, slots=True)
class Terminate:
    """The broker stops: finish what came before; the queue will be back."""


# --- control lane ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReportRamDuration:
    """How long do the messages in memory last? Answered with RamDuration."""

    monitor: Mailbox


@dataclass(frozen=True, slots=True)
class PolicyChanged:
    """Another policy applies, or the same says something else: this is what counts from now on."""

    options: QueueOptions


@dataclass(frozen=True, slots=True)
class SetRamDuration:
    """So long may messages in memory last; infinity: as long as they like."""

    duration_s: float


class Ack:
    __slots__ = ("channel", "seq_ids")

    def __init__(self, channel: Mailbox, seq_ids: Sequence[int]) -> None:
        self.channel = channel
        self.seq_ids = seq_ids


@dataclass(frozen=True, slots=True)
class Reject:
    """Discard; or dead-letter, where there is a dead-letter exchange."""

    channel: Mailbox
    seq_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Requeue:
    """Back to their places, before anybody is given what stands behind them."""

    channel: Mailbox
    seq_ids: Sequence[int]


class Sent:
    """The channel has written deliveries worth ``cost`` to a socket that takes them."""

    __slots__ = ("channel", "cost")

    def __init__(self, channel: Mailbox, cost: int) -> None:
        self.channel = channel
        self.cost = cost


@dataclass(frozen=True, slots=True)
class Consume:
    channel: Mailbox
    limiter: Limiter
    tag: str
    no_ack: bool
    exclusive: bool
    prefetch: int
    priority: int


@dataclass(frozen=True, slots=True)
class Resume:
    """The channel's shared prefetch limit has room again."""

    channel: Mailbox


@dataclass(frozen=True, slots=True)
class ChannelDown:
    """The channel is gone: its consumers leave, what it held comes back."""

    channel: Mailbox


@dataclass(frozen=True, slots=True)
class DeleteNow:
    """Owner gone, virtual host deleted: no questions asked, nobody to answer."""


@dataclass(frozen=True, slots=True)
class PartCommitted:
    """This queue's part of a unit is on disk."""

    part: QueuePart


@dataclass(frozen=True, slots=True)
class PartVoided:
    """The unit came to nothing."""

    part: QueuePart


@dataclass(frozen=True, slots=True)
class DropExpired:
    """The message at the head is due, or more is to be dropped than one turn has taken."""


@dataclass(frozen=True, slots=True)
class ExpireQueue:
    """Nobody has used the queue for as long as it lives without."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the backing queue answered LOADING for has been read."""


# --- from a queue to a channel -------------------------------------------------------------------


class Deliver:
    """A run for one consumer; ``seq_ids`` is None where no ack is expected."""

    __slots__ = ("cost", "depth", "messages", "queue", "redelivered", "seq_ids", "tag")

    def __init__(
        self,
        queue: Mailbox,
        tag: str,
        messages: list[Message],
        seq_ids: list[int] | None,
        cost: int,
        depth: int = 0,
        *,
        redelivered: bool,
    ) -> None:
        self.queue = queue
        self.tag = tag
        # Messages that were ready when it was made; told only where the event log wants to know.
        self.depth = depth
        self.messages = messages
        self.seq_ids = seq_ids
        self.cost = cost
        self.redelivered = redelivered


class Confirmed:
    """Sequence numbers first..last are as safe in this queue as they were asked to be."""

    __slots__ = ("first", "last", "queue")

    def __init__(self, queue: Mailbox, first: int, last: int) -> None:
        self.queue = queue
        self.first = first
        self.last = last


@dataclass(frozen=True, slots=True)
class Refused:
    """This queue did not take first..last (length limit with reject-publish)."""

    queue: Mailbox
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Unreceived:
    """A queue that ended hands back a delivery it never took.

    ``crashed``: what that means for confirms is said by the QueueDown that follows.
    """

    queue: Mailbox
    delivery: Delivery
    crashed: bool = False


@dataclass(frozen=True, slots=True)
class QueueDown:
    """The queue is gone. ``crashed``: its answers are lost, too."""

    queue: Mailbox
    crashed: bool


@dataclass(frozen=True, slots=True)
class Reply:
    """Messages for a reply consumer, from the channel they were published on."""

    messages: Sequence[Message]


@dataclass(frozen=True, slots=True)
class UnitEnded:
    """To who began it: all of the unit has happened, or nothing."""

    is_committed: bool


@dataclass(frozen=True, slots=True)
class ConsumerCancelled:
    """The queue ended the consumer, not the client."""

    tag: str


# Answers to Get, Count, Purge, Delete, Consume and Cancel; a channel has one question at a time.


@dataclass(frozen=True, slots=True)
class GetOk:
    queue: Mailbox
    message: Message
    seq_id: int | None
    redelivered: bool
    ready: int


@dataclass(frozen=True, slots=True)
class GetEmpty:
    pass


@dataclass(frozen=True, slots=True)
class CountOk:
    ready: int
    consumers: int


@dataclass(frozen=True, slots=True)
class Done:
    """Purged, deleted (``ready`` messages went), consuming, cancelled."""

    ready: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """The question could not be answered: the error to raise in the channel."""

    error: ChannelException


@dataclass(frozen=True, slots=True)
class Gone:
    """The queue ended before it came to the question."""


# --- to the memory monitor ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RamDuration:
    queue: Mailbox
    duration_s: float
