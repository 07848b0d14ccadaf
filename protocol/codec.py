"""Methods and content properties: everything that is not hot, on pamqp's definitions.

pamqp says which methods there are and which arguments they have; reading and writing the
arguments is ours, because pamqp stops at neither truncated nor left-over bytes, loses the types
of table values and cannot hold names that are not UTF-8. Names are ``str`` (surrogateescape),
tables are typed (field_table.py), delivery tags are unsigned.

The second half reads properties out of the raw content header that a Message carries: all of
them (``read_properties``), or one of them without looking at the rest (``pick_...``).

Upstream: assembler.py (methods in), broker/ (methods out, properties). Downstream: framing.py.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TypeVar, cast

from pamqp import commands
from pamqp.base import Frame

from leveret.protocol import access
from leveret.protocol.errors import ConnectionException, frame_error
from leveret.protocol.field_table import Table, TableError, decode_table, encode_table
from leveret.protocol.framing import BODY, HEADER, METHOD, body_limit, frame, octets
from leveret.protocol.message import Message

_IDS = struct.Struct(">HH")
_SIZE = struct.Struct(">I")
_CONTENT_HEADER = struct.Struct(">HHQ")
_FLAGS = struct.Struct(">H")
_INTEGERS = {
    "octet": struct.Struct(">B"),
    "short": struct.Struct(">H"),
    "long": struct.Struct(">I"),
    "longlong": struct.Struct(">Q"),
    "timestamp": struct.Struct(">Q"),
}
_BASIC_CLASS = 60
_SHORT_MAX = 255
# A reply text holds 255 bytes; there is no use in printing more of a frame than that.
_QUOTED_MAX = 128

# Method index (class id and method id in one number) -> class, arguments as (name, type).
_METHODS: dict[int, tuple[type[Frame], tuple[tuple[str, str], ...]]] = {
    index: (cls, tuple((name, cls.amqp_type(name)) for name in cls.attributes()))
    for index, cls in (
        *cast(dict[int, type[Frame]], commands.INDEX_MAPPING).items(),
        *access.METHODS.items(),
    )
}


_ZERO: dict[str, object] = {"shortstr": "", "longstr": "", "table": {}, "bit": False}

F = TypeVar("F", bound=Frame)


class UnknownMethod(Exception):
    """A method, or a value in its tables, that nobody knows.

    RabbitMQ's reader has no answer to it and just closes the socket.
    """

    def __init__(self, class_id: int, method_id: int, reason: str) -> None:
        super().__init__(f"method {class_id}.{method_id}: {reason}")
        self.class_id = class_id
        self.method_id = method_id


class _Truncated(Exception):
    """The arguments ended before they should."""


def check_known(payload: bytes) -> int:
    """The index of a method frame's method. Raises UnknownMethod if there is none.

    The payload is at least 4 bytes long.
    """
    index = int(_SIZE.unpack_from(payload)[0])
    if index not in _METHODS:
        raise UnknownMethod(index >> 16, index & 0xFFFF, "no such method")
    return index


def decode_method(payload: bytes) -> Frame:
    """The method in a method frame; its table arguments are ``Table``.

    Raises UnknownMethod, or ConnectionException 501 that names the method. The payload is at
    least 4 bytes long.
    """
    index = check_known(payload)
    cls, arguments = _METHODS[index]
    # Not through __init__, which checks the arguments as a client would.
    method = cls.__new__(cls)
    try:
        end = _read_arguments(method, arguments, payload, _IDS.size)
    except _Truncated:
        raise _cannot_decode(payload) from None
    except TableError as error:
        raise UnknownMethod(index >> 16, index & 0xFFFF, str(error)) from error
    if end != len(payload):
        raise _cannot_decode(payload)
    return method


def make(cls: type[F], **arguments: object) -> F:
    """A method for the wire. Not through __init__, which refuses names that RabbitMQ allows.

    Arguments that are not given are zero, empty or false.
    """
    method = cls.__new__(cls)
    for name, kind in _METHODS[cls.index][1]:
        setattr(method, name, arguments.pop(name, _ZERO.get(kind, 0)))
    if arguments:
        raise TypeError(f"{cls.name} has no {', '.join(arguments)}")
    return method


def encode_method(command: Frame) -> bytes:
    """The payload of a method frame. Raises ValueError for arguments the wire cannot hold."""
    arguments = _METHODS[command.index][1]
    parts = [_SIZE.pack(command.index)]
    bits, bit = 0, 0
    for name, kind in arguments:
        value: object = getattr(command, name)
        if kind == "bit":
            if bit == 8:
                parts.append(bytes((bits,)))
                bits, bit = 0, 0
            bits |= bool(value) << bit
            bit += 1
            continue
        if bit:
            parts.append(bytes((bits,)))
            bits, bit = 0, 0
        parts.append(_write_argument(kind, value))
    if bit:
        parts.append(bytes((bits,)))
    return b"".join(parts)


def method_frame(channel: int, command: Frame) -> bytes:
    """A whole method frame."""
    return frame(METHOD, channel, encode_method(command))


def content_frames(channel: int, command: Frame, message: Message, frame_max: int) -> bytes:
    """A method and the message it carries (get-ok, return), as whole frames."""
    body, limit = message.body, body_limit(frame_max)
    header = _CONTENT_HEADER.pack(_BASIC_CLASS, 0, len(body)) + message.header
    parts = [method_frame(channel, command), frame(HEADER, channel, header)]
    parts += (
        frame(BODY, channel, body[start : start + limit]) for start in range(0, len(body), limit)
    )
    return b"".join(parts)


def _cannot_decode(payload: bytes) -> ConnectionException:
    error = frame_error(f"cannot decode {octets(payload[_IDS.size :][:_QUOTED_MAX])}")
    class_id, method_id = _IDS.unpack_from(payload)
    error.method = (class_id, method_id)
    return error


def _read_arguments(
    method: Frame, arguments: tuple[tuple[str, str], ...], payload: bytes, at: int
) -> int:
    """Set the attributes of ``method``; return where its arguments end."""
    bit = 8
    for name, kind in arguments:
        if kind != "bit":
            bit = 8
            value, at = _read_argument(kind, payload, at)
            setattr(method, name, value)
            continue
        if bit == 8:
            if at >= len(payload):
                raise _Truncated
            at += 1
            bit = 0
        setattr(method, name, bool(payload[at - 1] >> bit & 1))
        bit += 1
    return at


def _read_argument(kind: str, payload: bytes, at: int) -> tuple[object, int]:
    end = len(payload)
    if kind == "shortstr":
        start = at + 1
        stop = start + payload[at] if at < end else end + 1
    elif kind in _INTEGERS:
        start, stop = at, at + _INTEGERS[kind].size
    else:
        start = at + _SIZE.size
        stop = start + int(_SIZE.unpack_from(payload, at)[0]) if start <= end else end + 1
    if stop > end:
        raise _Truncated
    if kind == "table":
        return decode_table(payload, at, stop)
    if kind in _INTEGERS:
        return _INTEGERS[kind].unpack_from(payload, at)[0], stop
    return payload[start:stop].decode("utf-8", "surrogateescape"), stop


def _write_argument(kind: str, value: object) -> bytes:
    """One argument that is no bit; None, pamqp's default for some, is the empty value."""
    if kind == "table":
        return encode_table(cast(Table, value or {}))
    if kind == "shortstr":
        return _short(cast(str, value or ""))
    if kind == "longstr":
        raw = cast(str, value or "").encode("utf-8", "surrogateescape")
        return _SIZE.pack(len(raw)) + raw
    try:
        return _INTEGERS[kind].pack(value or 0)
    except struct.error as error:
        raise ValueError(f"{value!r} is no {kind}") from error


def _short(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogateescape")
    if len(raw) > _SHORT_MAX:
        raise ValueError("a short string holds 255 bytes")
    return bytes((len(raw),)) + raw


@dataclass(slots=True)
class Properties:
    """The properties of a message; None for one that is absent. In wire order."""

    content_type: str | None = None
    content_encoding: str | None = None
    headers: Table | None = None
    delivery_mode: int | None = None
    priority: int | None = None
    correlation_id: str | None = None
    reply_to: str | None = None
    expiration: str | None = None
    message_id: str | None = None
    timestamp: int | None = None
    message_type: str | None = None
    user_id: str | None = None
    app_id: str | None = None
    cluster_id: str | None = None


# Name, type and bit of each property, in wire order. Bit 15 comes first; bits 1 and 0 have no
# property, and RabbitMQ looks at neither (bit 0 should say that more flags follow).
PROPERTY_LAYOUT = tuple(
    (name, kind, 1 << (15 - place))
    for place, (name, kind) in enumerate(
        (name, commands.Basic.Properties.amqp_type(name))
        for name in commands.Basic.Properties.attributes()
    )
)
_BITS = {name: bit for name, _, bit in PROPERTY_LAYOUT}


def read_properties(header: bytes) -> Properties:
    """All properties. Raises ValueError (TableError) if ``header`` is malformed."""
    if len(header) < _FLAGS.size:
        raise ValueError("no property flags")
    properties = Properties()
    flags, at = int(_FLAGS.unpack_from(header)[0]), _FLAGS.size
    for name, kind, bit in PROPERTY_LAYOUT:
        if flags & bit:
            try:
                value, at = _read_argument(kind, header, at)
            except _Truncated:
                raise ValueError(f"property {name} is cut short") from None
            setattr(properties, name, value)
    if at != len(header):
        raise ValueError("bytes left over behind the properties")
    return properties


def write_properties(properties: Properties) -> bytes:
    """The inverse: property flags and list. Raises ValueError for what the wire cannot hold."""
    flags = 0
    parts = [b""]
    for name, kind, bit in PROPERTY_LAYOUT:
        value = getattr(properties, name)
        if value is not None:
            flags |= bit
            parts.append(_write_argument(kind, value))
    parts[0] = _FLAGS.pack(flags)
    return b"".join(parts)


# The pickers are for headers that the codec has already checked, as those of every Message are.


def pick_headers(header: bytes) -> Table | None:
    at = _find(header, _BITS["headers"])
    return decode_table(header, at)[0] if at else None


def pick_delivery_mode(header: bytes) -> int | None:
    at = _find(header, _BITS["delivery_mode"])
    return header[at] if at else None


def pick_priority(header: bytes) -> int | None:
    # Queues with priorities ask for each message: by hand this is faster than _find.
    flags = header[0]
    if not flags & 0x08:
        return None
    at = headers_span(header)[2]
    return header[at + 1] if flags & 0x10 else header[at]


def pick_reply_to(header: bytes) -> str | None:
    return _pick_short(header, _BITS["reply_to"])


def pick_expiration(header: bytes) -> str | None:
    return _pick_short(header, _BITS["expiration"])


def pick_user_id(header: bytes) -> str | None:
    return _pick_short(header, _BITS["user_id"])


def _pick_short(header: bytes, bit: int) -> str | None:
    at = _find(header, bit)
    if not at:
        return None
    return header[at + 1 : at + 1 + header[at]].decode("utf-8", "surrogateescape")


# And these are for who changes such a header and leaves the rest of it as it is.


def headers_span(header: bytes) -> tuple[bytes, int, int]:
    """Where the headers are, or would be (an empty span); and the flags that say they are there."""
    flags = header[0]
    at = _FLAGS.size
    if flags & 0x80:
        at += 1 + header[at]
    if flags & 0x40:
        at += 1 + header[at]
    if not flags & 0x20:
        return bytes((flags | 0x20, header[1])), at, at
    return header[:2], at, at + _SIZE.size + int(_SIZE.unpack_from(header, at)[0])


def without_expiration(header: bytes) -> tuple[bytes, bytes | None]:
    """The header without its expiration, and what that was."""
    bit = _BITS["expiration"]
    at = _find(header, bit)
    if not at:
        return header, None
    end = at + 1 + header[at]
    flags = int(_FLAGS.unpack_from(header)[0])
    return _FLAGS.pack(flags & ~bit) + header[_FLAGS.size : at] + header[end:], header[at + 1 : end]


def _find(header: bytes, wanted: int) -> int:
    """Where the property with the flag ``wanted`` begins; 0 if it is absent."""
    flags = header[0] << 8 | header[1]
    if not flags & wanted:
        return 0
    at = _FLAGS.size
    # Only properties before the wanted one have to be walked over.
    before = flags & ~(wanted * 2 - 1)
    for _, kind, bit in PROPERTY_LAYOUT:
        if not before:
            break
        if before & bit:
            before ^= bit
            if kind == "shortstr":
                at += 1 + header[at]
            elif kind == "table":
                at += _SIZE.size + int(_SIZE.unpack_from(header, at)[0])
            else:
                at += _INTEGERS[kind].size
    return at
