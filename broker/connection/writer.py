"""The only code that writes a connection's socket.

Channels write whole frames; the transport gathers what one turn of the loop produced. Above the
high mark the writer is *paused*: queues stop delivering (their windows stay shut) until the
socket takes again. Far above it, it is *stuck*: then the reader and the channels stop, because
what the client asks for and what it is sent has nowhere to go.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from leveret.broker.channel.context import Writable

if TYPE_CHECKING:
    from leveret.broker.clock import Clock, Timer
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
        self._stopped: list[asyncio.Future[None]] = []
        # The socket is gone; what is written from here on is nobody's.
        self._is_lost = False
        # Ends the wait of close().
        self._patience: Timer | None = None

    def write(self, data: bytes) -> None:
        if self._is_lost:
            return
        self.writes += 1
        self.bytes_sent += len(data)
        self._transport.write(data)

    @property
    def is_stuck(self) -> bool:
        return self.is_paused and self.backlog > STUCK_MARK

    @property
    def backlog(self) -> int:
        """Bytes handed over and not taken by the socket."""
        return 0 if self._is_lost else self._transport.get_write_buffer_size()

    def call_when_writable(self, mailbox: Mailbox) -> None:
        self._waiting.add(mailbox)

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False
        waiting, self._waiting = self._waiting, set()
        for mailbox in waiting:
            mailbox.put_urgent(Writable())
        stopped, self._stopped = self._stopped, []
        for future in stopped:
            if not future.done():
                future.set_result(None)

    async def wait_unstuck(self) -> None:
        """Return once there is room again, or nobody left to make some."""
        while self.is_stuck:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._stopped.append(future)
            await future

    def lose(self) -> None:
        """The transport has lost its socket: nobody is to wait for it any more."""
        self._is_lost = True
        self.resume()
        if self._patience is not None:
            self._patience.cancel()

    def close(self, clock: Clock, patience_s: float) -> None:
        """Close the socket once what is left is written, which a peer may never let happen."""
        if self.is_paused:
            self._transport.abort()
            return
        self._transport.close()
        if self.backlog:
            self._patience = clock.call_later(patience_s, self._transport.abort)
