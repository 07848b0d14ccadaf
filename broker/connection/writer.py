"""The only code that writes a connection's socket.

Channels write whole frames; the transport gathers what one turn of the loop produced. Above the
high mark the writer is *paused*: queues stop delivering (their windows stay shut) until the
socket takes again. Far above it, it is *stuck*: then the reader stops, too, because answers to
what the client asks can no longer be delivered.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from leveret.broker.channel.context import Writable

if TYPE_CHECKING:
    from leveret.broker.mailbox import Mailbox

HIGH_MARK = 256 << 10
LOW_MARK = 64 << 10
STUCK_MARK = 4 << 20


class SocketWriter:
    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        transport.set_write_buffer_limits(HIGH_MARK, LOW_MARK)
        # Set and cleared by the transport, through pause() and resume().
        self.is_paused = False
        # Counts up with every write: heartbeats are due only when it stands still.
        self.writes = 0
        self.bytes_sent = 0
        # Who wants to hear that the socket takes again.
        self._waiting: set[Mailbox] = set()

    def write(self, data: bytes) -> None:
        self.writes += 1
        self.bytes_sent += len(data)
        self._transport.write(data)

    @property
    def is_stuck(self) -> bool:
        return self.is_paused and self.backlog > STUCK_MARK

    @property
    def backlog(self) -> int:
        """Bytes handed over and not taken by the socket."""
        return self._transport.get_write_buffer_size()

    def call_when_writable(self, mailbox: Mailbox) -> None:
        self._waiting.add(mailbox)

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False
        waiting, self._waiting = self._waiting, set()
        for mailbox in waiting:
            mailbox.put_urgent(Writable())
