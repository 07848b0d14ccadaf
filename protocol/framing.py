"""Frames: their layout, their limits, and what is said when they are wrong.

Every frame is type (1), channel (2), payload size (4), payload, end octet (1), big-endian. The
cutting itself is in hot.py and _hot.pyx, which share the constants and errors below; codec.py
builds single frames from here.

The texts are RabbitMQ's, down to its way of printing bytes, because operators search for them.
One difference: RabbitMQ breaks a line in a text of more than 80 columns, we do not.
"""

from __future__ import annotations

import struct

from leveret.protocol.errors import ConnectionException, frame_error, unexpected_frame

METHOD = 1
HEADER = 2
BODY = 3
HEARTBEAT = 8

END = 0xCE
HEAD_SIZE = 7
# What a frame has beside its payload.
OVERHEAD = 8

# A publish that is not all there yet is left in the buffer up to this size (frames included)
# and this many body frames, so that it can be cut in one go; past either the assembler takes
# over. The second bound keeps one-byte frames, arriving one by one, from being walked for ever.
WAIT_BYTES = 256 * 1024
WAIT_FRAMES = 64

# Messages of one PublishRun.
RUN_MAX = 500
# A message costs 1, and 1 more for every 16 KiB of its body.
COST_SHIFT = 14

# Equal exchange and routing key pairs are one object; past this many we start afresh.
ENVELOPES_MAX = 4096

HEARTBEAT_FRAME = b"\x08\x00\x00\x00\x00\x00\x00\xce"

_HEAD = struct.Struct(">BHI")
_SNIPPET = 16
_MAX_PAYLOAD = 0xFFFFFFFF
_ESCAPES = {
    0x08: "\\b",
    0x09: "\\t",
    0x0A: "\\n",
    0x0B: "\\v",
    0x0C: "\\f",
    0x0D: "\\r",
    0x1B: "\\e",
    0x22: '\\"',
    0x5C: "\\\\",
}


def frame(kind: int, channel: int, payload: bytes) -> bytes:
    """One whole frame."""
    return _HEAD.pack(kind, channel, len(payload)) + payload + b"\xce"


def body_limit(frame_max: int) -> int:
    """The most bytes one body frame that we send may carry; ``frame_max`` 0 is no limit."""
    if frame_max == 0:
        return _MAX_PAYLOAD
    if frame_max <= OVERHEAD:
        raise ValueError(f"frame_max {frame_max} leaves no room for a payload")
    return frame_max - OVERHEAD


def octets(data: bytes) -> str:
    """Bytes as Erlang's ``~w`` prints a binary: decimals."""
    return f"<<{','.join(map(str, data))}>>"


def frame_too_large(kind: int, size: int, frame_max: int) -> ConnectionException:
    return frame_error(
        f"type {kind}, all octets = <<>>: {{frame_too_large,{size},{frame_max - OVERHEAD}}}"
    )


def bad_frame_end(kind: int, payload: bytes, end: int) -> ConnectionException:
    return frame_error(f"{_describe(kind, payload)}: {{invalid_frame_end_marker,{end}}}")


def unknown_frame(kind: int, payload: bytes) -> ConnectionException:
    """Type unknown, or a payload too short for its type."""
    return frame_error(f"{_describe(kind, payload)}: unknown_frame")


def misplaced_frame(kind: int, payload: bytes) -> ConnectionException:
    """A well-formed frame on a channel, or at a moment, that has no use for it."""
    return unexpected_frame(_describe(kind, payload))


def _describe(kind: int, payload: bytes) -> str:
    quantity = "all" if len(payload) <= _SNIPPET else f"first {_SNIPPET}"
    return f"type {kind}, {quantity} octets = {_pretty_octets(payload[:_SNIPPET])}"


def _pretty_octets(data: bytes) -> str:
    """Bytes as Erlang's ``~p`` prints a binary: a quoted string if they could be Latin-1 text."""
    if not data or not all(32 <= byte < 127 or byte >= 160 or byte in _ESCAPES for byte in data):
        return octets(data)
    text = data.decode("utf-8", "surrogateescape")
    return f'<<"{"".join(_ESCAPES.get(ord(char), char) for char in text)}">>'
