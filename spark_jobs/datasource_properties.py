"""A message's properties as they are on the wire, where pika would change them or give up.

pika cuts doubles in headers to whole numbers and cannot write them, and raises at a NaN or at a
time beyond the calendar: inside its own loop, so that a reader could not even pass over the
message. Here every value of a header has its type, and nothing that a broker hands out raises.

Upstream and downstream: pika's connections, whose frames these are; ``amqp_rows.py`` makes rows of
them. Invariant: what is read here can be written here.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final

from pika import BasicProperties, frame, spec  # type: ignore[import-untyped]
from pika.data import encode_short_string  # type: ignore[import-untyped]
from pika.exceptions import InvalidFrameError  # type: ignore[import-untyped]

from leveret.protocol.field_table import Field, TableError, decode_table, encode_table

# By the bits of the flags, from the highest down.
_NAMES: Final = (
    "content_type",
    "content_encoding",
    "headers",
    "delivery_mode",
    "priority",
    "correlation_id",
    "reply_to",
    "expiration",
    "message_id",
    "timestamp",
    "type",
    "user_id",
    "app_id",
    "cluster_id",
)
_HIGHEST: Final = 15
_NUMBERS: Final = {
    "delivery_mode": struct.Struct(">B"),
    "priority": struct.Struct(">B"),
    "timestamp": struct.Struct(">Q"),
}
_FRAME: Final = struct.Struct(">BHL")
_HEADER: Final = struct.Struct(">HxxQ")


@dataclass(frozen=True, slots=True)
class FarTime:
    """A time that the calendar does not reach: somebody counted milliseconds."""

    seconds: int


class Properties(BasicProperties):  # type: ignore[misc]
    """pika's, with headers of every type."""

    def decode(self, encoded: bytes, offset: int = 0) -> Properties:
        (flags,) = struct.unpack_from(">H", encoded, offset)
        at = offset + 2
        more = flags
        while more & 1:
            # Flags of properties that do not exist yet.
            (more,) = struct.unpack_from(">H", encoded, at)
            at += 2
        for bit, name in enumerate(_NAMES):
            if flags & 1 << _HIGHEST - bit:
                value, at = _decode(name, encoded, at)
                setattr(self, name, value)
        return self

    def encode(self) -> list[bytes]:
        """Raises TableError if headers have what AMQP has no type for."""
        flags = 0
        pieces: list[bytes] = []
        for bit, name in enumerate(_NAMES):
            value = getattr(self, name)
            if value is None:
                continue
            flags |= 1 << _HIGHEST - bit
            if name == "headers":
                pieces.append(encode_table(_fields(value)))
            elif name in _NUMBERS:
                pieces.append(_NUMBERS[name].pack(value))
            else:
                encode_short_string(pieces, value)
        return [struct.pack(">H", flags), *pieces]


def read_own_properties(connection: Any) -> None:
    """Make a connection of pika's read ``Properties``.

    pika has no way to ask for that. This one connection is changed, and not pika, which the
    program may use for something else as well.
    """
    connection._read_frame = lambda: _read_frame(connection._frame_buffer)


def text_of(raw: bytes) -> str:
    """As text; a question mark for what is no UTF-8, which never makes it longer."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode(errors="replace").replace("\ufffd", "?")


def moment_of(seconds: int) -> datetime | None:
    """None beyond the calendar."""
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def _read_frame(buffer: bytes) -> tuple[int, Any]:
    """As pika's ``decode_frame``: how many bytes, and the frame; none if it is not there yet."""
    if len(buffer) < _FRAME.size or buffer[0] != spec.FRAME_HEADER:
        result: tuple[int, Any] = frame.decode_frame(buffer)
        return result
    _, channel, size = _FRAME.unpack_from(buffer)
    end = _FRAME.size + size
    if len(buffer) <= end:
        return 0, None
    if buffer[end] != spec.FRAME_END:
        raise InvalidFrameError("Invalid FRAME_END marker")
    _, body_size = _HEADER.unpack_from(buffer, _FRAME.size)
    properties = Properties().decode(buffer[_FRAME.size + _HEADER.size : end])
    return end + 1, frame.Header(channel, body_size, properties)


def _decode(name: str, encoded: bytes, at: int) -> tuple[Any, int]:
    """A property, and where it ends."""
    if name in _NUMBERS:
        return _NUMBERS[name].unpack_from(encoded, at)[0], at + _NUMBERS[name].size
    if name == "headers":
        (size,) = struct.unpack_from(">I", encoded, at)
        try:
            table = decode_table(encoded, at)[0]
        except TableError:
            # Of a kind that no broker should let through; the message counts for more.
            return None, at + 4 + size
        return _values(table), at + 4 + size
    end = at + 1 + encoded[at]
    return text_of(encoded[at + 1 : end]), end


def _values(table: Mapping[str, Field]) -> dict[str, Any]:
    return {_key(key): _value(field) for key, field in table.items()}


def _key(key: str) -> str:
    return text_of(key.encode(errors="surrogateescape"))


def _value(field: Field) -> Any:
    tag, value = field
    match value:
        case dict():
            return _values(value)
        case list():
            return [_value(one) for one in value]
        case str():
            # Clients put bytes into strings.
            return value if _is_text(value) else value.encode(errors="surrogateescape")
        case (int(scale), int(unsigned)):
            # Clients read and write it with a sign, whatever the specification says.
            number = unsigned - (1 << 32) if unsigned >= 1 << 31 else unsigned
            return Decimal(number).scaleb(-scale)
        case int() if tag == "T":
            return moment_of(value) or FarTime(value)
        case _:
            return value


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _fields(headers: Mapping[str, Any]) -> dict[str, Field]:
    return {key: _field(value) for key, value in headers.items()}


def _field(value: object) -> Field:
    """Raises TableError if there is no type for it."""
    match value:
        case None:
            return Field("V", None)
        case bool():
            return Field("t", value)
        case int():
            return Field("I" if -(1 << 31) <= value < 1 << 31 else "l", value)
        case float():
            return Field("d", value)
        case str():
            return Field("S", value)
        case bytes() | bytearray():
            return Field("x", bytes(value))
        case Decimal():
            return Field("D", _scaled(value))
        case datetime():
            return Field("T", int(value.timestamp()))
        case FarTime():
            return Field("T", value.seconds)
        case dict():
            return Field("F", _fields(value))
        case list():
            return Field("A", [_field(one) for one in value])
    raise TableError(f"headers cannot have a {type(value).__name__}")


def fits_decimal(value: Decimal) -> bool:
    """Whether AMQP's decimal can be this number: nine digits, and up to 255 of them broken."""
    try:
        _scaled(value)
    except TableError:
        return False
    return True


def _scaled(value: Decimal) -> tuple[int, int]:
    """The places behind the point, and the number without it. Raises TableError."""
    sign, digits, exponent = value.normalize().as_tuple()
    if isinstance(exponent, int) and -255 <= exponent <= 10:
        scale = max(-exponent, 0)
        number = int("".join(map(str, digits))) * 10 ** max(exponent, 0) * (-1 if sign else 1)
        if -(1 << 31) <= number < 1 << 31:
            return scale, number % (1 << 32)
    raise TableError(f"{value} is no decimal of AMQP")
