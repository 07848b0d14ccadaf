"""A client that does what it is told, also what no client should: for tests of bad manners.

It is a bare socket and our own codec. Nothing is read unless the test asks for it, nothing is
answered by itself, and what is sent are bytes. It has no transport and no task of its own, so that
what a test counts in this process is the broker's.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from types import TracebackType
from typing import NamedTuple, TypeVar

from pamqp import commands
from pamqp.base import Frame

from leveret.protocol.codec import content_frames, decode_method, make, method_frame
from leveret.protocol.framing import BODY, HEAD_SIZE, HEADER, HEARTBEAT, METHOD
from leveret.protocol.message import Message

PROTOCOL_HEADER = b"AMQP\x00\x00\x09\x01"
FRAME_MAX = 131072
DEADLINE_S = 20.0
NO_PROPERTIES = b"\x00\x00"
PERSISTENT = b"\x10\x00\x02"

_CHUNK = 1 << 18
_HEAD = struct.Struct(">BHI")
_CONTENT = {commands.Basic.Deliver, commands.Basic.GetOk, commands.Basic.Return}

F = TypeVar("F", bound=Frame)


class Hangup(Exception):
    """The broker has closed the socket."""


class Received(NamedTuple):
    """A method, with the content it carries if it is one that does."""

    channel: int
    method: Frame
    # From the property flags on.
    header: bytes = b""
    body: bytes = b""


def publish(
    channel: int,
    key: str,
    body: bytes,
    *,
    exchange: str = "",
    header: bytes = NO_PROPERTIES,
    mandatory: bool = False,
) -> bytes:
    """A publish as whole frames."""
    method = make(commands.Basic.Publish, exchange=exchange, routing_key=key, mandatory=mandatory)
    message = Message(b"", exchange, key, header, body, 0, False)
    return content_frames(channel, method, message, FRAME_MAX)


def handshake(*, heartbeat: int = 0, vhost: str = "/") -> list[bytes]:
    """All a client says to open a connection; each part is due when the last was answered."""
    start_ok = make(
        commands.Connection.StartOk,
        mechanism="PLAIN",
        response="\x00guest\x00guest",
        locale="en_US",
    )
    tune_ok = make(
        commands.Connection.TuneOk, channel_max=2047, frame_max=FRAME_MAX, heartbeat=heartbeat
    )
    opening = make(commands.Connection.Open, virtual_host=vhost)
    return [
        PROTOCOL_HEADER,
        method_frame(0, start_ok),
        method_frame(0, tune_ok) + method_frame(0, opening),
    ]


class RawClient:
    """One socket to a broker on this machine. ``async with`` closes it, whatever happened."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        # Received and not yet taken.
        self._data = b""
        self.heartbeats = 0

    @classmethod
    async def connect(cls, port: int, *, receive_buffer: int | None = None) -> RawClient:
        """A small ``receive_buffer`` makes a client that does not read be felt soon."""
        sock = socket.socket()
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if receive_buffer is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        except BaseException:
            sock.close()
            raise
        return cls(sock)

    @classmethod
    async def open(
        cls,
        port: int,
        *,
        channels: int = 1,
        heartbeat: int = 0,
        receive_buffer: int | None = None,
    ) -> RawClient:
        """An open connection with channels 1, 2, ..."""
        client = await cls.connect(port, receive_buffer=receive_buffer)
        try:
            await client.shake_hands(heartbeat=heartbeat)
            for number in range(1, channels + 1):
                await client.open_channel(number)
        except BaseException:
            client.close()
            raise
        return client

    @property
    def port(self) -> int:
        """This end's, by which the broker knows the connection."""
        return int(self._socket.getsockname()[1])

    async def shake_hands(self, *, heartbeat: int = 0) -> None:
        for part, answer in zip(
            handshake(heartbeat=heartbeat),
            (commands.Connection.Start, commands.Connection.Tune, commands.Connection.OpenOk),
            strict=True,
        ):
            await self.send(part)
            await self.expect(answer)

    async def open_channel(self, number: int) -> None:
        await self.call(number, make(commands.Channel.Open), commands.Channel.OpenOk)

    # --- out -------------------------------------------------------------------------------------

    async def send(self, data: bytes) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.get_running_loop().sock_sendall(self._socket, data)

    def send_some(self, data: bytes) -> int:
        """As much as the socket takes at once, maybe nothing; returns how much."""
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0

    async def tell(self, channel: int, method: Frame) -> None:
        """Send a method and do not wait for anything."""
        await self.send(method_frame(channel, method))

    async def call(self, channel: int, method: Frame, answer: type[F]) -> F:
        await self.tell(channel, method)
        return await self.expect(answer)

    # --- in --------------------------------------------------------------------------------------

    async def receive(self, deadline_s: float = DEADLINE_S) -> Received:
        """The next method; heartbeats are counted. Raises Hangup, or TimeoutError."""
        async with asyncio.timeout(deadline_s):
            channel, payload = await self._frame(METHOD)
            method = decode_method(payload)
            if type(method) not in _CONTENT:
                return Received(channel, method)
            _, head = await self._frame(HEADER)
            left = int.from_bytes(head[4:12])
            parts = []
            while left:
                _, part = await self._frame(BODY)
                parts.append(part)
                left -= len(part)
            return Received(channel, method, head[12:], b"".join(parts))

    async def expect(self, kind: type[F]) -> F:
        """The next method, which must be of this kind."""
        method = (await self.receive()).method
        assert isinstance(method, kind), f"{method.name} {dict(method)} instead of {kind.name}"
        return method

    async def expect_hangup(self) -> None:
        """The broker closes the socket; what it says before does not matter."""
        while True:
            try:
                await self.receive()
            except Hangup:
                return

    async def _frame(self, wanted: int) -> tuple[int, bytes]:
        while True:
            kind, channel, size = _HEAD.unpack(await self._take(HEAD_SIZE))
            payload = await self._take(size)
            assert await self._take(1) == b"\xce"
            if kind != HEARTBEAT:
                assert kind == wanted, f"a frame of type {kind}"
                return channel, payload
            self.heartbeats += 1

    async def _take(self, size: int) -> bytes:
        loop = asyncio.get_running_loop()
        if len(self._data) < size:
            parts, have = [self._data], len(self._data)
            while have < size:
                try:
                    chunk = await loop.sock_recv(self._socket, _CHUNK)
                except ConnectionError:
                    chunk = b""
                if not chunk:
                    raise Hangup
                parts.append(chunk)
                have += len(chunk)
            self._data = b"".join(parts)
        taken, self._data = self._data[:size], self._data[size:]
        return taken

    # --- the end ---------------------------------------------------------------------------------

    async def say_goodbye(self) -> None:
        """connection.close, as a client should."""
        await self.tell(0, make(commands.Connection.Close, reply_code=200, reply_text="bye"))
        while not isinstance((await self.receive()).method, commands.Connection.CloseOk):
            pass
        self.close()

    def close(self) -> None:
        """End of stream for the broker."""
        self._socket.close()

    def reset(self) -> None:
        """As a crash or a middlebox ends a connection: RST, and what was under way is lost."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    async def __aenter__(self) -> RawClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
