"""What a channel knows of the connection it belongs to, and may ask of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from leveret.broker.limits import Tenancy
from leveret.broker.node import make_pid

if TYPE_CHECKING:
    from leveret.broker.auth.access import Access
    from leveret.broker.clock import Clock
    from leveret.broker.config import Settings
    from leveret.broker.live_vhost import LiveVhost
    from leveret.broker.mailbox import Mailbox
    from leveret.broker.queues.record import Queue
    from leveret.broker.registry import Registries
    from leveret.protocol.errors import ConnectionException


class Writer(Protocol):
    """The connection's one writer, as channels see it."""

    @property
    def is_paused(self) -> bool:
        """The socket does not take what it is given."""

    @property
    def is_stuck(self) -> bool:
        """It has been given far more than it takes: nothing more must come."""

    def write(self, data: bytes) -> None: ...

    async def wait_unstuck(self) -> None: ...

    def call_when_writable(self, mailbox: Mailbox) -> None:
        """Put Writable into the mailbox once the socket takes again."""


class ReplyPort(NamedTuple):
    """Where replies to one requester go."""

    channel: Mailbox
    writer: Writer

    def put(self, reply: object) -> bool:
        """A requester that does not read loses replies; it must not hold up who replies.

        False if this one is lost.
        """
        return not self.writer.is_stuck and self.channel.put_urgent(reply)


@dataclass(eq=False, slots=True)
class ConnectionContext:
    """One open connection; made when connection.open has been answered."""

    # "127.0.0.1:50000 -> 127.0.0.1:5672", for logs.
    name: str
    access: Access
    vhost: LiveVhost
    settings: Settings
    clock: Clock
    writer: Writer
    # The reader's address.
    reader: Mailbox
    frame_max: int
    wants_cancel_notices: bool
    registries: Registries
    # What events call it.
    pid: str = field(default_factory=make_pid)
    # What the event log calls it: its number among those of this start of the broker, from 1.
    log_number: int = 0
    # Its part in what its virtual host and its user may have.
    tenancy: Tenancy = field(default_factory=Tenancy)
    # Queues that end with this connection.
    exclusive_queues: set[Queue] = field(default_factory=set)


# What a channel tells its reader.


class ChannelClosing(NamedTuple):
    """channel.close is about to be sent: what the client sends on it means nothing any more."""

    number: int
    channel: Mailbox


class ChannelEnded(NamedTuple):
    """The client has closed it and all it asked for before is done: its number is free."""

    number: int


class ConnectionFailed(NamedTuple):
    """A channel met an error that ends the whole connection."""

    error: ConnectionException


class Stop(NamedTuple):
    """The reader tells a channel that nothing will follow: finish what came before, then end."""


class Writable(NamedTuple):
    """The socket takes again."""
