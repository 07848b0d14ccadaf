"""A connection with one channel, as fast as Python allows: for load, not for manners.

Publishes, deliveries, acks and confirms are read and written here byte by byte; everything else
goes through the product's codec. Nothing waits but ``call``.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from typing import TypeVar, cast

from pamqp import commands
from pamqp.base import Frame

from leveret.protocol.codec import decode_method, make, method_frame, read_properties
from leveret.protocol.framing import BODY, HEADER, HEARTBEAT, METHOD, frame
from tests.support.raw_client import FRAME_MAX, handshake

DEADLINE_S = 30.0
CHANNEL = 1

_HEAD = struct.Struct(">BHI")
_DELIVER = b"\x00\x3c\x00\x3c"
_ACK = b"\x00\x3c\x00\x50"
_NACK = b"\x00\x3c\x00\x78"
_TAG_AND_BITS = struct.Struct(">QB")
# A publish's content header: class, weight, size, then delivery-mode 2 and a message id.
_CONTENT = struct.Struct(">HHQHB")
_DELIVERY_MODE_AND_ID = 0x1080
_ID_AT = _CONTENT.size
_FLAGS_AT = 12

F = TypeVar("F", bound=Frame)


class Severed(Exception):
    """The connection is gone, or the broker closed it."""


class Link(asyncio.Protocol):
    def __init__(self) -> None:
        # Called with tag, redelivered, message id, body; and with tag, multiple, is an ack.
        self.on_delivery: Callable[[int, bool, str, bytes], None] = lambda *_: None
        self.on_confirm: Callable[[int, bool, bool], None] = lambda *_: None
        # Called when the broker takes what is sent again.
        self.on_resume: Callable[[], None] = lambda: None
        # Something that was sent has not left this process.
        self.is_paused = False
        # Why the broker closed channel or connection, if it said so.
        self.reason = ""
        self.lost = asyncio.get_running_loop().create_future()
        # What comes may have got headers.
        self.takes_dead_letters = False
        self._transport: asyncio.Transport | None = None
        self._data = b""
        # Answers that are waited for, in order.
        self._calls: deque[Callable[[Frame | None], None]] = deque()
        # The delivery whose content is being read.
        self._delivery: tuple[int, bool] | None = None
        self._message_id = ""
        self._parts: list[bytes] = []
        self._missing = 0

    @classmethod
    async def open(cls, port: int) -> Link:
        loop = asyncio.get_running_loop()
        try:
            _, link = await loop.create_connection(cls, "127.0.0.1", port)
        except OSError as error:
            raise Severed(str(error)) from error
        parts = handshake()
        await link.ask(parts[0], commands.Connection.Start)
        await link.ask(parts[1], commands.Connection.Tune)
        await link.ask(parts[2], commands.Connection.OpenOk)
        await link.call(make(commands.Channel.Open), commands.Channel.OpenOk)
        return link

    # --- out -------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def tell(self, method: Frame) -> None:
        self.write(method_frame(CHANNEL, method))

    def ack(self, tag: int, *, multiple: bool = False) -> None:
        self.write(frame(METHOD, CHANNEL, _ACK + _TAG_AND_BITS.pack(tag, multiple)))

    def reject(self, tag: int) -> None:
        self.write(frame(METHOD, CHANNEL, _NACK + _TAG_AND_BITS.pack(tag, 0)))

    def requeue(self, tag: int) -> None:
        self.write(frame(METHOD, CHANNEL, _NACK + _TAG_AND_BITS.pack(tag, 2)))

    async def call(self, method: Frame, answer: type[F]) -> F:
        """Raises Severed if the answer is another one, or none."""
        return await self.ask(method_frame(CHANNEL, method), answer)

    async def ask(self, data: bytes, answer: type[F]) -> F:
        future = asyncio.get_running_loop().create_future()

        def settle(method: Frame | None) -> None:
            if not future.done():
                future.set_result(method)

        self._expect(settle)
        self.write(data)
        async with asyncio.timeout(DEADLINE_S):
            method = await future
        if not isinstance(method, answer):
            raise Severed(self.reason or f"{answer.name} was not answered")
        return method

    async def round_trip(self) -> None:
        """Returns when the broker's channel has come past all that was sent."""
        await self.call(make(commands.Basic.Qos, prefetch_count=0), commands.Basic.QosOk)

    def after(self, method: Frame, call: Callable[[], None]) -> None:
        """Send a method and do not wait; ``call`` when it was answered, never if it was not."""
        self._expect(lambda answer: None if answer is None else call())
        self.tell(method)

    def _expect(self, settle: Callable[[Frame | None], None]) -> None:
        if self.lost.done():
            settle(None)
        else:
            self._calls.append(settle)

    async def close(self) -> None:
        if self._transport is not None and not self.lost.done():
            close = make(commands.Connection.Close, reply_code=200, reply_text="bye")
            try:
                await self.ask(method_frame(0, close), commands.Connection.CloseOk)
            except Severed:
                pass
            self._transport.close()
            await self.lost

    # --- in --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are of no class that asyncio knows.
        self._transport = cast(asyncio.Transport, transport)
        # Paused as soon as anything stays here: what was sent is then at the broker, or its kernel.
        self._transport.set_write_buffer_limits(high=0)

    def pause_writing(self) -> None:
        self.is_paused = True

    def resume_writing(self) -> None:
        self.is_paused = False
        self.on_resume()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)
        calls, self._calls = self._calls, deque()
        for settle in calls:
            settle(None)

    def data_received(self, data: bytes) -> None:
        data = self._data + data if self._data else data
        at, end = 0, len(data)
        while end - at >= 8:
            kind, _, size = _HEAD.unpack_from(data, at)
            after = at + 8 + size
            if after > end:
                break
            assert data[after - 1] == 0xCE
            self._take(kind, data[at + 7 : after - 1])
            at = after
        self._data = data[at:]

    def _take(self, kind: int, payload: bytes) -> None:
        if kind == METHOD:
            start = payload[:4]
            if start == _DELIVER:
                at = 5 + payload[4]
                tag, bits = _TAG_AND_BITS.unpack_from(payload, at)
                self._delivery = (tag, bool(bits))
            elif start in (_ACK, _NACK):
                tag, bits = _TAG_AND_BITS.unpack_from(payload, 4)
                self.on_confirm(tag, bool(bits & 1), start == _ACK)
            else:
                self._take_method(decode_method(payload))
        elif kind == HEADER:
            _, _, size, flags, mode = _CONTENT.unpack_from(payload)
            if self.takes_dead_letters:
                self._message_id = read_properties(payload[_FLAGS_AT:]).message_id or ""
            else:
                assert flags == _DELIVERY_MODE_AND_ID, "properties were changed"
                assert mode in (1, 2), "properties were changed"
                self._message_id = payload[_ID_AT + 1 : _ID_AT + 1 + payload[_ID_AT]].decode()
            self._missing = size
            if not size:
                self._deliver(b"")
        elif kind == BODY:
            self._missing -= len(payload)
            if self._parts or self._missing:
                self._parts.append(payload)
                if not self._missing:
                    body, self._parts = b"".join(self._parts), []
                    self._deliver(body)
            else:
                self._deliver(payload)
        else:
            assert kind == HEARTBEAT

    def _deliver(self, body: bytes) -> None:
        assert self._delivery is not None
        (tag, redelivered), self._delivery = self._delivery, None
        self.on_delivery(tag, redelivered, self._message_id, body)

    def _take_method(self, method: Frame) -> None:
        if isinstance(method, commands.Channel.Close | commands.Connection.Close):
            self.reason = f"{method.reply_code} {method.reply_text}"
            if self._transport is not None:
                self._transport.close()
        elif self._calls:
            self._calls.popleft()(method)


def publish_frames(
    exchange: str, key: str, message_id: str, body: bytes, *, is_persistent: bool = True
) -> bytes:
    """A message with an id."""
    route = bytes((len(exchange),)) + exchange.encode() + bytes((len(key),)) + key.encode()
    method = frame(METHOD, CHANNEL, b"\x00\x3c\x00\x28\x00\x00" + route + b"\x00")
    content = _CONTENT.pack(60, 0, len(body), _DELIVERY_MODE_AND_ID, 2 if is_persistent else 1)
    raw_id = message_id.encode()
    parts = [method, frame(HEADER, CHANNEL, content + bytes((len(raw_id),)) + raw_id)]
    limit = FRAME_MAX - 8
    for at in range(0, len(body), limit):
        parts.append(frame(BODY, CHANNEL, body[at : at + limit]))
    return b"".join(parts)
