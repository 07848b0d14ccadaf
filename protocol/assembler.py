"""Method, header and bodies of one message, frame by frame, into a PublishRun (cold path).

Content that the hot codec could not cut in one go comes here as raw frames: large messages,
content of several channels interleaved, and everything that is wrong. Upstream: the reader, with
every raw frame; downstream: codec.py for methods, then the channel.

Invariants: per channel, at most one content is pending, and between its frames nothing else is
allowed on that channel; what is kept never exceeds ``body_max`` a channel, whatever was announced
or sent.
"""

from __future__ import annotations

import struct

from pamqp import commands
from pamqp.base import Frame

from leveret.protocol.codec import check_known, decode_method
from leveret.protocol.errors import ConnectionException, internal_error, unexpected_frame
from leveret.protocol.framing import (
    BODY,
    COST_SHIFT,
    HEADER,
    HEARTBEAT,
    METHOD,
    misplaced_frame,
    unknown_frame,
)
from leveret.protocol.hot import scan_properties
from leveret.protocol.twin import Message, PublishRun, RawFrame

_CONTENT = struct.Struct(">HHQ")
_IDS_SIZE = 4
_BASIC = 60
_WITH_CONTENT = (
    commands.Basic.Publish,
    commands.Basic.Return,
    commands.Basic.Deliver,
    commands.Basic.GetOk,
)
# Ids and ticket, which stand before the two names of a publish.
_NAMES_AT = 6
# Smaller parts of a body are gathered in one buffer: a million tiny objects would cost far more
# memory than the body they make up.
_SMALL_PART = 4096


class _Pending:
    """A method whose content is not complete: a publish, or one that only a server may send."""

    __slots__ = (
        "body_size",
        "envelope",
        "exchange",
        "flags",
        "header",
        "left",
        "method",
        "needs",
        "parts",
        "persistent",
        "routing_key",
    )

    def __init__(self, method: Frame, payload: bytes) -> None:
        self.method = method
        self.envelope = b""
        self.exchange = self.routing_key = ""
        self.flags = 0
        if isinstance(method, commands.Basic.Publish):
            self.envelope = payload[_NAMES_AT:-1]
            self.exchange, self.routing_key = method.exchange, method.routing_key
            self.flags = int(method.mandatory) | int(method.immediate) << 1
        # None until the content header has come.
        self.header: bytes | None = None
        self.needs = 0
        self.persistent = False
        # Announced, and of that still to come; below 0 once there was more than announced.
        self.body_size = 0
        self.left = 0
        # What came of the body; stays empty if it is too large or too long.
        self.parts: list[bytes | bytearray] = []

    def add(self, payload: bytes) -> None:
        if len(payload) >= _SMALL_PART:
            self.parts.append(payload)
        elif self.parts and isinstance(self.parts[-1], bytearray):
            self.parts[-1] += payload
        else:
            self.parts.append(bytearray(payload))


class Assembler:
    """The pending content of one connection's channels."""

    def __init__(self, body_max: int) -> None:
        self._body_max = body_max
        self._pending: dict[int, _Pending] = {}

    def is_pending(self, channel: int) -> bool:
        """Whether a publish on this channel waits for frames."""
        return channel in self._pending

    def discard(self, channel: int) -> None:
        """Forget what is pending on a channel, if anything."""
        self._pending.pop(channel, None)

    def expect_method(self, channel: int) -> None:
        """Raise ConnectionException 505 if content is pending on this channel.

        For methods that do not come through ``feed``: the runs that the hot codec cuts.
        """
        pending = self._pending.get(channel)
        if pending is not None:
            raise _unexpected_in(pending)

    def feed(self, frame: RawFrame) -> PublishRun | Frame | None:
        """Take a frame; return the method or the message that it completes, if any.

        A run has one message. One whose announced body is beyond ``body_max`` comes with an empty
        body and the announced size as ``largest``. Raises ConnectionException or UnknownMethod.
        """
        if frame.kind == METHOD:
            return self._on_method(frame)
        if frame.kind == HEARTBEAT:
            if frame.payload:
                raise unknown_frame(frame.kind, frame.payload)
            if frame.channel:
                raise misplaced_frame(frame.kind, frame.payload)
            return None
        if frame.kind not in (HEADER, BODY) or (
            frame.kind == HEADER and len(frame.payload) < _CONTENT.size
        ):
            raise unknown_frame(frame.kind, frame.payload)
        if frame.channel == 0:
            raise misplaced_frame(frame.kind, frame.payload)
        pending = self._pending.get(frame.channel)
        if pending is None:
            raise unexpected_frame("expected method frame, got non method frame instead")
        if frame.kind == HEADER:
            self._on_header(pending, frame.payload)
        else:
            self._on_body(pending, frame.payload)
        if pending.left:
            return None
        del self._pending[frame.channel]
        if not isinstance(pending.method, commands.Basic.Publish):
            # For the channel to refuse.
            return pending.method
        return _run(frame.channel, pending)

    def _on_method(self, frame: RawFrame) -> Frame | None:
        channel, payload = frame.channel, frame.payload
        if len(payload) < _IDS_SIZE:
            raise unknown_frame(METHOD, payload)
        # As in RabbitMQ, the ids are looked at first, the arguments only if a method is due.
        check_known(payload)
        self.expect_method(channel)
        method = decode_method(payload)
        if channel and isinstance(method, _WITH_CONTENT):
            self._pending[channel] = _Pending(method, payload)
            return None
        return method

    def _on_header(self, pending: _Pending, payload: bytes) -> None:
        class_id, weight, body_size = _CONTENT.unpack_from(payload)
        if pending.header is not None or weight:
            raise _unexpected_in(pending)
        if class_id != _BASIC:
            raise _blame(
                pending,
                f"expected content header for class 60, got one for class {class_id} instead",
            )
        try:
            pending.needs, pending.persistent = scan_properties(
                payload, _CONTENT.size, len(payload)
            )
        except ValueError as error:
            raise internal_error() from error
        pending.header = payload[_CONTENT.size :]
        pending.body_size = pending.left = body_size

    def _on_body(self, pending: _Pending, payload: bytes) -> None:
        if pending.header is None:
            raise _unexpected_in(pending)
        pending.left -= len(payload)
        if pending.left < 0:
            # It never completes now: the count only goes down.
            pending.parts.clear()
        elif payload and pending.body_size <= self._body_max:
            pending.add(payload)


def _unexpected_in(pending: _Pending) -> ConnectionException:
    """For a frame that is not what the pending content waits for."""
    if pending.header is None:
        return _blame(
            pending, "expected content header for class 60, got non content header frame instead"
        )
    return _blame(pending, "expected content body, got non content body frame instead")


def _blame(pending: _Pending, text: str) -> ConnectionException:
    error = unexpected_frame(text)
    error.method = divmod(pending.method.index, 1 << 16)
    return error


def _run(channel: int, pending: _Pending) -> PublishRun:
    assert pending.header is not None
    body = b"".join(pending.parts)
    message = Message(
        pending.envelope,
        pending.exchange,
        pending.routing_key,
        pending.header,
        body,
        pending.needs,
        pending.persistent,
    )
    return PublishRun(
        channel,
        pending.envelope,
        pending.exchange,
        pending.routing_key,
        pending.flags,
        [message],
        1 + (len(body) >> COST_SHIFT),
        len(body),
        pending.body_size,
        pending.needs,
        int(pending.persistent),
    )
