"""Field values as RabbitMQ compares and prints them.

RabbitMQ compares Erlang terms: a number equals a number of any width, a long string and a byte
array are both binaries, an empty table and an empty array are both the empty list. Within
arrays and tables the types are part of the value and tables are ordered. Reply texts print
values the way Erlang does. ``headers.py`` and ``base.py`` need both.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import cast

from leveret.broker.resource import Resource
from leveret.protocol.errors import precondition_failed
from leveret.protocol.field_table import Field, Table, type_name

# What Erlang takes for printable in a binary: Latin-1 without the control characters but these.
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


def comparable(field: Field) -> Hashable:
    """A value that equals another exactly when RabbitMQ calls the two equal."""
    tag, value = field
    if tag == "S":
        return cast(str, value).encode("utf-8", "surrogateescape")
    if tag == "t":
        return ("bool", value)  # Python's True would equal 1
    if tag == "V":
        return ("void",)
    if tag == "D":
        return ("decimal", value)
    if tag == "A":
        return tuple((type_name(item.tag), comparable(item)) for item in cast(list[Field], value))
    if tag == "F":
        return tuple(
            (key, type_name(item.tag), comparable(item)) for key, item in cast(Table, value).items()
        )
    return value


def term(field: Field) -> str:
    """The value in Erlang's notation."""
    tag, value = field
    if tag == "S":
        return _binary(cast(str, value).encode("utf-8", "surrogateescape"))
    if tag == "x":
        return _binary(cast(bytes, value))
    if tag == "t":
        return "true" if value else "false"
    if tag == "V":
        return "undefined"
    if tag == "D":
        scale, number = cast(tuple[int, int], value)
        return f"{{{scale},{number}}}"
    if tag == "A":
        items = (f"{{{type_name(i.tag)},{term(i)}}}" for i in cast(list[Field], value))
        return f"[{','.join(items)}]"
    if tag == "F":
        entries = (
            f"{{{term(Field('S', key))},{type_name(i.tag)},{term(i)}}}"
            for key, i in cast(Table, value).items()
        )
        return f"[{','.join(entries)}]"
    return str(value)


def check_same(name: Resource, what: str, current: str, received: str) -> None:
    """Raises 406 unless a redeclaration names what is there."""
    if received != current:
        raise _inequivalent(name, what, f"'{received}'", f"'{current}'")


def check_same_flag(name: Resource, what: str, *, current: bool, received: bool) -> None:
    check_same(name, what, "true" if current else "false", "true" if received else "false")


def check_same_argument(
    name: Resource, what: str, current: Field | None, received: Field | None
) -> None:
    if current is None and received is None:
        return
    if current is None or received is None:
        raise _inequivalent(name, what, _with_type(received), _with_type(current))
    if comparable(current) != comparable(received):
        raise _inequivalent(name, what, f"'{_text(received)}'", f"'{_text(current)}'")


def _inequivalent(name: Resource, what: str, received: str, current: str) -> Exception:
    return precondition_failed(
        f"inequivalent arg '{what}' for {name}: received {received} but current is {current}"
    )


def _with_type(field: Field | None) -> str:
    if field is None:
        return "none"
    return f"the value '{_text(field)}' of type '{type_name(field.tag)}'"


def _text(field: Field) -> str:
    """Strings as they are, all else as Erlang prints it."""
    if field.tag == "S":
        return cast(str, field.value)
    if field.tag == "x":
        return cast(bytes, field.value).decode("utf-8", "surrogateescape")
    return term(field)


def _binary(data: bytes) -> str:
    if not data:
        return "<<>>"
    if all(0x20 <= octet <= 0x7E or octet >= 0xA0 or octet in _ESCAPES for octet in data):
        text = data.decode("utf-8", "surrogateescape")
        return f'<<"{"".join(_ESCAPES.get(ord(letter), letter) for letter in text)}">>'
    return f"<<{','.join(map(str, data))}>>"
