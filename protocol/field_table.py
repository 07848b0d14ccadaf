"""Field tables: method arguments and message headers, with the type of every value kept.

A value is a ``Field``: the one-letter type as it stands on the wire, and the value in Python.
Types are kept because clients see them again and because reply texts name them. Accepted are
the types RabbitMQ accepts; its reading of them wins over the specification's ('l' and 'L' are
both signed 64 bit).

Upstream: codec.py (arguments, properties) and hot.py (structure of a header table).
Invariants: no read leaves the table it belongs to, and nesting is limited, so that a hostile
table costs neither memory nor the stack. Keys and strings are UTF-8 with surrogateescape:
any bytes survive. Of equal keys the first counts, as RabbitMQ's look-ups find that one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import NamedTuple, cast


class Field(NamedTuple):
    """One typed value: 'S' str, 'x' bytes, 'F' Table, 'A' list of Field, 'D' (scale, value)..."""

    tag: str
    value: object


Table = dict[str, Field]

# Tables and arrays within each other, the outermost table being the first level.
MAX_DEPTH = 128

_TYPE_NAMES = {
    "S": "longstr",
    "I": "signedint",
    "i": "unsignedint",
    "l": "long",
    "L": "long",
    "D": "decimal",
    "T": "timestamp",
    "F": "table",
    "b": "byte",
    "B": "unsignedbyte",
    "s": "short",
    "u": "unsignedshort",
    "d": "double",
    "f": "float",
    "t": "bool",
    "x": "binary",
    "V": "void",
    "A": "array",
}

_SCALARS = {
    "b": struct.Struct(">b"),
    "B": struct.Struct(">B"),
    "s": struct.Struct(">h"),
    "u": struct.Struct(">H"),
    "I": struct.Struct(">i"),
    "i": struct.Struct(">I"),
    "l": struct.Struct(">q"),
    "L": struct.Struct(">q"),
    "f": struct.Struct(">f"),
    "d": struct.Struct(">d"),
    "T": struct.Struct(">Q"),
}
_DECIMAL = struct.Struct(">BI")
_SIZE = struct.Struct(">I")

# Bytes behind the tag, by tag; tags that are followed by a length are not in here.
_FIXED_SIZES = {
    ord(tag): size
    for tag, size in {
        **{tag: scalar.size for tag, scalar in _SCALARS.items()},
        "t": 1,
        "D": _DECIMAL.size,
        "V": 0,
    }.items()
}
_STRING_TAGS = frozenset(b"Sx")
_TABLE_TAG, _ARRAY_TAG = b"FA"
_MAX_KEY = 255


class TableError(ValueError):
    """A table that is malformed, too deep, or holds a type nobody knows."""


def type_name(tag: str) -> str:
    """RabbitMQ's name of a field type, as its reply texts use it."""
    return _TYPE_NAMES[tag]


def decode_table(data: bytes, at: int, end: int | None = None) -> tuple[Table, int]:
    """Read the table whose 4-byte length is at ``at``; also return where it ends.

    Nothing from ``end`` on is read. Raises TableError.
    """
    start, stop = _extent(data, at, len(data) if end is None else end)
    return _decode_entries(data, start, stop, 1), stop


def check_table(data: bytes, at: int, end: int) -> int:
    """What ``decode_table`` checks, without building the table. Returns where it ends."""
    start, stop = _extent(data, at, end)
    _check_entries(data, start, stop, _TABLE_TAG, 1)
    return stop


def encode_table(table: Table) -> bytes:
    """The table with its 4-byte length. Raises TableError for what the wire cannot hold."""
    return _encode_table(table, 1)


def split_table(data: bytes, at: int) -> list[tuple[bytes, bytes]]:
    """The table whose 4-byte length is at ``at``: keys, and values as they are, tag and all.

    For who changes one value and leaves the others byte for byte. Of equal keys all are here.
    """
    start, stop = _extent(data, at, len(data))
    entries = []
    while start < stop:
        key_end = start + 1 + data[start]
        if key_end >= stop:
            raise TableError("key without a value")
        end = _value_end(data, key_end, stop)
        entries.append((data[start + 1 : key_end], data[key_end:end]))
        start = end
    return entries


def split_array(data: bytes, at: int) -> list[bytes]:
    """The array whose 4-byte length is at ``at``: its values as they are, tag and all."""
    start, stop = _extent(data, at, len(data))
    values = []
    while start < stop:
        end = _value_end(data, start, stop)
        values.append(data[start:end])
        start = end
    return values


def join_table(entries: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The inverse of ``split_table``: a table with its length. Keys have 255 bytes at most."""
    return _with_size(b"".join([bytes((len(key),)) + key + value for key, value in entries]))


def join_array(values: Iterable[bytes]) -> bytes:
    """The inverse of ``split_array``: an array with its length."""
    return _with_size(b"".join(values))


def decode_value(raw: bytes) -> Field:
    """A value that was split off. Raises TableError."""
    return _decode_value(raw, 0, len(raw), 1)[0]


def table_from_python(mapping: Mapping[str, object]) -> Table:
    """Give plain values the types a person would expect: for tables that we make ourselves."""
    return {key: _field_from_python(value) for key, value in mapping.items()}


def to_python(field: Field) -> object:
    """The value without its type; tables and arrays likewise, all the way down."""
    if field.tag == "F":
        return {key: to_python(value) for key, value in cast(Table, field.value).items()}
    if field.tag == "A":
        return [to_python(value) for value in cast(list[Field], field.value)]
    return field.value


def _extent(data: bytes, at: int, end: int) -> tuple[int, int]:
    """First byte and end of what a 4-byte length at ``at`` announces."""
    if end > len(data) or end - at < _SIZE.size:
        raise TableError("no room for a length")
    start = at + _SIZE.size
    stop = start + int(_SIZE.unpack_from(data, at)[0])
    if stop > end:
        raise TableError(f"{stop - start} bytes announced, {end - start} there")
    return start, stop


def _decode_entries(data: bytes, at: int, end: int, depth: int) -> Table:
    if depth > MAX_DEPTH:
        raise TableError("nested too deeply")
    table: Table = {}
    while at < end:
        key_end = at + 1 + data[at]
        if key_end >= end:
            raise TableError("key without a value")
        key = data[at + 1 : key_end].decode("utf-8", "surrogateescape")
        field, at = _decode_value(data, key_end, end, depth)
        table.setdefault(key, field)
    return table


def _decode_array(data: bytes, at: int, end: int, depth: int) -> list[Field]:
    if depth > MAX_DEPTH:
        raise TableError("nested too deeply")
    values = []
    while at < end:
        field, at = _decode_value(data, at, end, depth)
        values.append(field)
    return values


def _decode_value(data: bytes, at: int, end: int, depth: int) -> tuple[Field, int]:
    """The value whose tag is at ``at``, and where it ends. ``at`` is below ``end``."""
    tag = data[at]
    at += 1
    size = _FIXED_SIZES.get(tag)
    if size is not None:
        if size > end - at:
            raise TableError("value cut short")
        return Field(chr(tag), _decode_fixed(chr(tag), data, at)), at + size
    if tag in _STRING_TAGS:
        start, stop = _extent(data, at, end)
        raw = data[start:stop]
        if tag == ord("x"):
            return Field("x", raw), stop
        return Field("S", raw.decode("utf-8", "surrogateescape")), stop
    if tag == _TABLE_TAG:
        start, stop = _extent(data, at, end)
        return Field("F", _decode_entries(data, start, stop, depth + 1)), stop
    if tag == _ARRAY_TAG:
        start, stop = _extent(data, at, end)
        return Field("A", _decode_array(data, start, stop, depth + 1)), stop
    raise TableError(f"unknown field type {tag}")


def _value_end(data: bytes, at: int, end: int) -> int:
    """Where the value ends whose tag is at ``at``, which is below ``end``; not looked into."""
    tag = data[at]
    size = _FIXED_SIZES.get(tag)
    if size is None:
        if tag not in _STRING_TAGS and tag != _TABLE_TAG and tag != _ARRAY_TAG:
            raise TableError(f"unknown field type {tag}")
        return _extent(data, at + 1, end)[1]
    if size >= end - at:
        raise TableError("value cut short")
    return at + 1 + size


def _decode_fixed(tag: str, data: bytes, at: int) -> object:
    if tag == "t":
        return data[at] != 0
    if tag == "V":
        return None
    if tag == "D":
        return _DECIMAL.unpack_from(data, at)
    value: object = _SCALARS[tag].unpack_from(data, at)[0]
    return value


def _check_entries(data: bytes, at: int, end: int, kind: int, depth: int) -> None:
    """Walk a table (``kind`` 'F') or an array ('A') by offsets alone."""
    if depth > MAX_DEPTH:
        raise TableError("nested too deeply")
    while at < end:
        if kind == _TABLE_TAG:
            at += 1 + data[at]
            if at >= end:
                raise TableError("key without a value")
        tag = data[at]
        at += 1
        size = _FIXED_SIZES.get(tag)
        if size is not None:
            if size > end - at:
                raise TableError("value cut short")
            at += size
        elif tag in _STRING_TAGS:
            at = _extent(data, at, end)[1]
        elif tag == _TABLE_TAG or tag == _ARRAY_TAG:
            start, at = _extent(data, at, end)
            _check_entries(data, start, at, tag, depth + 1)
        else:
            raise TableError(f"unknown field type {tag}")


def _encode_table(table: Table, depth: int) -> bytes:
    if depth > MAX_DEPTH:
        raise TableError("nested too deeply")
    parts: list[bytes] = []
    for key, field in table.items():
        raw = key.encode("utf-8", "surrogateescape")
        if len(raw) > _MAX_KEY:
            raise TableError("key longer than 255 bytes")
        parts += (bytes((len(raw),)), raw, _encode_value(field, depth))
    return _with_size(b"".join(parts))


def _encode_array(values: list[Field], depth: int) -> bytes:
    if depth > MAX_DEPTH:
        raise TableError("nested too deeply")
    return _with_size(b"".join([_encode_value(value, depth) for value in values]))


def _encode_value(field: Field, depth: int) -> bytes:
    tag, value = field
    if tag not in _TYPE_NAMES:
        raise TableError(f"unknown field type {tag!r}")
    return tag.encode() + _encode_bare(tag, value, depth)


def _encode_bare(tag: str, value: object, depth: int) -> bytes:
    """A value without its tag; ``tag`` is known."""
    try:
        match tag:
            case "S":
                return _with_size(cast(str, value).encode("utf-8", "surrogateescape"))
            case "x":
                return _with_size(cast(bytes, value))
            case "F":
                return _encode_table(cast(Table, value), depth + 1)
            case "A":
                return _encode_array(cast(list[Field], value), depth + 1)
            case "t":
                return b"\x01" if value else b"\x00"
            case "V":
                return b""
            case "D":
                return _DECIMAL.pack(*cast(tuple[int, int], value))
            case _:
                return _SCALARS[tag].pack(value)
    except (struct.error, OverflowError) as error:
        raise TableError(f"{value!r} is no {type_name(tag)}") from error


def _with_size(raw: bytes) -> bytes:
    return _SIZE.pack(len(raw)) + raw


def _field_from_python(value: object) -> Field:
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
        case bytes():
            return Field("x", value)
        case dict():
            return Field("F", table_from_python(value))
        case list() | tuple():
            return Field("A", [_field_from_python(item) for item in value])
    raise TableError(f"{type(value).__name__} has no field type")
