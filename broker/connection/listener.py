"""Accepts sockets and gives each a reader [10]."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, cast

from leveret.broker.connection.notices import EndOfStream, Evicted, Lost, Shutdown
from leveret.broker.connection.reader import Reader

if TYPE_CHECKING:
    from leveret.broker.server import Broker


class Connection(asyncio.Protocol):
    """The transport's side of a connection: everything goes into the reader's mailbox."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._reader: Reader | None = None
        self._loop_monitor = listener.loop_monitor

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self._reader = self._listener.start_reader(cast(asyncio.Transport, transport))

    def data_received(self, data: bytes) -> None:
        if not self._loop_monitor.is_ticking:
            self._loop_monitor.note_work()
        assert self._reader is not None
        self._reader.receive(data)

    def eof_received(self) -> bool:
        assert self._reader is not None
        self._reader.mailbox.put(EndOfStream())
        # The reader closes the socket when it is done with what came before.
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        assert self._reader is not None
        self._reader.writer.lose()
        self._reader.mailbox.put(EndOfStream())
        # Who is blocked by an alarm does not look into that lane, maybe for hours.
        self._reader.mailbox.put_urgent(Lost())

    def pause_writing(self) -> None:
        assert self._reader is not None
        self._reader.writer.pause()

    def resume_writing(self) -> None:
        assert self._reader is not None
        self._reader.writer.resume()


class Listener:
    """One listening socket, a row of the broker's table of listeners."""

    def __init__(self, broker: Broker, protocol: str, host: str, port: int) -> None:
        self._broker = broker
        self.loop_monitor = broker.loop_monitor
        self.protocol = protocol
        self.host = host
        # As asked for; the one that was given once it listens.
        self.port = port
        self.is_listening = False
        self.readers: dict[Reader, asyncio.Task[None]] = {}
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self), self.host, self.port, backlog=1024
        )
        self.port = self._server.sockets[0].getsockname()[1]
        self.is_listening = True

    def start_reader(self, transport: asyncio.Transport) -> Reader:
        reader = Reader(transport, self._broker)
        task = asyncio.create_task(reader.run(), name=reader.mailbox.owner)
        self.readers[reader] = task
        task.add_done_callback(lambda _: self.readers.pop(reader, None))
        return reader

    def stop_accepting(self) -> None:
        if self._server is not None:
            self._server.close()
        self.is_listening = False

    async def close_connections(self, timeout_s: float) -> None:
        """Close every connection with 320; those that do not answer in time are cut."""
        tasks = list(self.readers.values())
        for reader in list(self.readers):
            reader.mailbox.put_urgent(Shutdown())
        await wait_or_cut(tasks, timeout_s)
        if self._server is not None:
            await self._server.wait_closed()

    def evict(self, text: str, whom: Callable[[Reader], bool]) -> list[asyncio.Task[None]]:
        """Close some connections with 320 and this text; returns the tasks that end with them."""
        chosen = [reader for reader in self.readers if whom(reader)]
        for reader in chosen:
            reader.mailbox.put_urgent(Evicted(text))
        return [self.readers[reader] for reader in chosen]

    def statistics(self) -> dict[str, object]:
        return {
            "protocol": self.protocol,
            "ip_address": self.host,
            "port": self.port,
            "state": "listening" if self.is_listening else "stopped",
            "connections": len(self.readers),
        }


async def wait_or_cut(tasks: Collection[asyncio.Task[None]], timeout_s: float) -> None:
    """Wait for connections to end; those that take too long are cut."""
    if not tasks:
        return
    _, late = await asyncio.wait(tasks, timeout=timeout_s)
    for task in late:
        task.cancel()
    if late:
        await asyncio.wait(late)
