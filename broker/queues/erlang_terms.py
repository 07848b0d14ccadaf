"""Field values as RabbitMQ's reply texts show them: in the notation of Erlang.

Clients and their tests read these texts, so a refused argument looks here as it does there:
``{value_negative,-1}``, ``"unsupported queue mode 'fast'"``, ``[{longstr,<<"a">>}]``.
Used by argument_checks.py and arguments.py.
"""

from __future__ import annotations

from decimal import Decimal
from math import isfinite
from typing import cast

from leveret.protocol.field_table import Field, Table, type_name

_ESCAPES = {
    ord('"'): '\\"',
    ord("\\"): "\\\\",
    8: "\\b",
    9: "\\t",
    10: "\\n",
    11: "\\v",
    12: "\\f",
    13: "\\r",
    27: "\\e",
}


def _quoted(raw: bytes) -> str | None:
    """The bytes as an Erlang string literal; None if Erlang would not show them as one."""
    if not all(0x20 <= byte < 0x7F or byte >= 0xA0 or byte in _ESCAPES for byte in raw):
        return None
    escaped = b"".join(_ESCAPES.get(byte, "").encode() or bytes([byte]) for byte in raw)
    return '"' + escaped.decode("utf-8", "surrogateescape") + '"'


def _codes(raw: bytes) -> str:
    return ",".join(map(str, raw))


def _bytes_of(value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    return cast(str, value).encode("utf-8", "surrogateescape")


def string_notation(text: str) -> str:
    raw = _bytes_of(text)
    return _quoted(raw) or f"[{_codes(raw)}]"


def _binary_notation(raw: bytes) -> str:
    if not raw:
        return "<<>>"
    return f"<<{_quoted(raw) or _codes(raw)}>>"


def _float_notation(number: float) -> str:
    """The fewest digits that read back equal, in whichever of the two forms is shorter."""
    if not isfinite(number):
        return repr(number)
    decimal = Decimal(repr(number)).normalize()
    fixed = f"{decimal:f}"
    if "." not in fixed:
        fixed += ".0"
    sign = "-" if decimal.is_signed() else ""
    first, *rest = map(str, decimal.as_tuple().digits)
    scientific = f"{sign}{first}.{''.join(rest) or '0'}e{decimal.adjusted()}"
    return min(fixed, scientific, key=len)


def notation(field: Field) -> str:
    """A value as Erlang prints it. Two values are equal terms if their notations are equal:
    the width of an integer is lost, its difference from a double or a boolean is not."""
    tag, value = field
    if tag == "t":
        return "true" if value else "false"
    if tag == "V":
        return "undefined"
    if tag in "fd":
        return _float_notation(cast(float, value))
    if tag in "Sx":
        return _binary_notation(_bytes_of(value))
    if tag == "D":
        scale, number = cast("tuple[int, int]", value)
        return f"{{{scale},{number}}}"
    if tag == "A":
        items = cast("list[Field]", value)
        return f"[{','.join(f'{{{type_name(i.tag)},{notation(i)}}}' for i in items)}]"
    if tag == "F":
        entries = (
            f"{{{_binary_notation(_bytes_of(key))},{type_name(entry.tag)},{notation(entry)}}}"
            for key, entry in cast(Table, value).items()
        )
        return f"[{','.join(entries)}]"
    return str(value)


def plain(field: Field) -> str:
    """A value inside quotes: strings as they are, everything else in Erlang's notation."""
    if field.tag in "Sx":
        return _bytes_of(field.value).decode("utf-8", "surrogateescape")
    return notation(field)
