"""What a message looks like once it is dead: its headers, its address, and where it must not go.

Pure functions and a small cache; nothing is sent here. Upstream: ``dead_lettering.py``, which
routes and hands over the copies. Downstream: ``protocol/field_table.py``, for headers as bytes.

A copy says in ``x-death`` where the message died, why, when and how often, the latest death
first: dying once more in the same queue for the same reason raises a count. The first death is
told in headers of its own. All else stays byte for byte as it was published, but that headers
are sorted by name, as RabbitMQ sorts them, and that the expiration has moved into x-death, or
the copy would die of it again. Clients may send ``x-death`` themselves: it is counted on if it
is an array, whatever stands in it, and replaced if it is anything else.

RabbitMQ 3.10 turns round the older entries of x-death whenever it adds one; here they stay in
the order it documents. Its check for cycles relies on that order, too.

Thousands may die at once, so what they share is made once: see ``Burial``.
"""

from __future__ import annotations

import struct
from typing import Literal, NamedTuple

from leveret.protocol.codec import headers_span, without_expiration
from leveret.protocol.field_table import (
    decode_value,
    join_array,
    join_table,
    split_array,
    split_table,
)
from leveret.protocol.message import NEEDS_EXPIRATION, NEEDS_HEADERS
from leveret.protocol.twin import Message

Reason = Literal["rejected", "expired", "maxlen", "delivery_limit"]

# A header as bytes: name, and value with its type tag.
Pair = tuple[bytes, bytes]

_DEATHS = b"x-death"
_CC = b"CC"
_BCC = b"BCC"
_SIZE = struct.Struct(">I")
_LONG = struct.Struct(">q")
_TIMESTAMP = struct.Struct(">Q")
_COUNT_MAX = (1 << 63) - 1
_INTEGER_TAGS = frozenset("bBsuIilLT")
_SHORT_MAX = 255
# Headers that are no longer than this are likely to be shared by many messages.
_SHARED_MAX = 512


class _Address(NamedTuple):
    """What copies of messages with one envelope have in common."""

    envelope: bytes
    routing_key: str
    # Of the original: the name of its exchange, and its key as an item of routing-keys.
    exchange: bytes
    key: bytes


class Burial:
    """Makes copies of messages that die in one queue at one time.

    Equal headers under equal envelopes become equal headers: they are made once and are then one
    object, for as long as a Burial is kept.
    """

    def __init__(self, queue: str, exchange: str, routing_key: str | None, now_s: int) -> None:
        """Dead letters go to ``exchange``, with ``routing_key`` or, if None, the one they had."""
        self._queue = _string(_raw(queue))
        self._exchange = exchange
        self._routing_key = routing_key
        self._time = b"T" + _TIMESTAMP.pack(now_s)
        # By envelope of the original.
        self._addresses: dict[bytes, _Address] = {}
        # By header, envelope and reason.
        self._headers: dict[tuple[bytes, bytes, Reason], bytes] = {}
        # Header tables of those that had none, nor an expiration.
        self._bare: dict[tuple[_Address, Reason], bytes] = {}

    def bury(self, message: Message, reason: Reason) -> Message:
        """The copy that goes to the dead-letter exchange."""
        header, envelope = message.header, message.envelope
        address = self._addresses.get(envelope) or self._add_address(message)
        if len(header) > _SHARED_MAX:
            changed = self._header(header, address, reason)
        else:
            known = (header, envelope, reason)
            changed = self._headers.get(known) or self._headers.setdefault(
                known, self._header(header, address, reason)
            )
        copy = Message(
            address.envelope,
            self._exchange,
            address.routing_key,
            changed,
            message.body,
            (message.needs | NEEDS_HEADERS) & ~NEEDS_EXPIRATION,
            message.persistent,
        )
        if self._routing_key is None:
            copy.extra_keys = message.extra_keys
        # A large body is stored once, for both.
        copy.body_id = message.body_id
        return copy

    def _add_address(self, message: Message) -> _Address:
        key = _short(message.routing_key if self._routing_key is None else self._routing_key)
        address = _Address(
            _short(self._exchange) + key,
            key[1:].decode("utf-8", "surrogateescape"),
            _string(_raw(message.exchange)),
            _string(_raw(message.routing_key)),
        )
        self._addresses[message.envelope] = address
        return address

    def _header(self, header: bytes, address: _Address, reason: Reason) -> bytes:
        """Property flags and properties, with the death noted in the headers."""
        header, expiration = without_expiration(header)
        flags, start, end = headers_span(header)
        if start < end or expiration is not None:
            pairs = split_table(header, start) if start < end else []
            table = join_table(self._noted(pairs, address, reason, expiration))
        else:
            table = self._bare.get((address, reason)) or self._bare.setdefault(
                (address, reason), join_table(self._noted([], address, reason, None))
            )
        return flags + header[2:start] + table + header[end:]

    def _noted(
        self, pairs: list[Pair], address: _Address, reason: Reason, expiration: bytes | None
    ) -> list[Pair]:
        death = self._death(pairs, address, reason, expiration)
        deaths = _value(pairs, _DEATHS)
        if deaths is None:
            pairs = _with(pairs, b"x-first-death-reason", _string(reason.encode()))
            pairs = _with(pairs, b"x-first-death-queue", self._queue)
            pairs = _with(pairs, b"x-first-death-exchange", address.exchange)
            value = _array([_table(death)])
        elif deaths[:1] == b"A":
            value = _array(_added(split_array(deaths, 1), death))
        else:
            # Some clients send it back as a string: nobody can add to that.
            value = _array([_table(death)])
        pairs = _with(pairs, _DEATHS, value)
        if self._routing_key is not None:
            pairs = [pair for pair in pairs if pair[0] != _CC and pair[0] != _BCC]
        return sorted(pairs, key=_name)

    def _death(
        self, pairs: list[Pair], address: _Address, reason: Reason, expiration: bytes | None
    ) -> list[Pair]:
        keys = [address.key]
        copies = _value(pairs, _CC)
        if copies is not None and copies[:1] == b"A":
            keys += [item for item in split_array(copies, 1) if item[:1] == b"S"]
        death = [
            (b"count", b"l" + _LONG.pack(1)),
            (b"reason", _string(reason.encode())),
            (b"queue", self._queue),
            (b"time", self._time),
            (b"exchange", address.exchange),
            (b"routing-keys", _array(keys)),
        ]
        if expiration is not None:
            death.append((b"original-expiration", _string(expiration)))
        return death


def cycles(copy: Message, queue: str) -> bool:
    """Would the copy enter a queue where it has died, and was no client's reject on the way?

    Then it is dropped there, or it would go round for ever [86].
    """
    name = _string(_raw(queue))
    header = copy.header
    # Most have never been there: their headers need not be taken apart.
    if b"\x05queue" + name not in header:
        return False
    _, start, end = headers_span(header)
    deaths = _value(split_table(header, start), _DEATHS) if start < end else None
    if deaths is None or deaths[:1] != b"A":
        return False
    for item in split_array(deaths, 1):
        # What is no table was put there by a client, which so had its hand in this.
        if item[:1] != b"F":
            return False
        death = split_table(item, 1)
        if _value(death, b"reason") == _string(b"rejected"):
            return False
        if _value(death, b"queue") == name:
            return True
    return False


# --- x-death -----------------------------------------------------------------------------------


def _added(items: list[bytes], death: list[Pair]) -> list[bytes]:
    """One more death among those that are known: its entry comes first."""
    queue, reason = _text(death, b"queue"), _text(death, b"reason")
    seen = 0
    entry: list[Pair] | None = None
    others = []
    for item in items:
        if item[:1] == b"F":
            pairs = split_table(item, 1)
            if (_text(pairs, b"queue"), _text(pairs, b"reason")) == (queue, reason):
                # Old brokers made an entry for each death: the first stands for all of them.
                seen += 1
                entry = entry or pairs
                continue
        others.append(item)
    if entry is not None:
        # When and how it died the first time stays as it was.
        count = b"l" + _LONG.pack(min(_count(entry, seen) + 1, _COUNT_MAX))
        death = _with(entry, b"count", count)
    return [_table(sorted(death, key=_name)), *others]


def _count(entry: list[Pair], seen: int) -> int:
    value = _value(entry, b"count")
    if value is None:
        return seen
    field = decode_value(value)
    if field.tag not in _INTEGER_TAGS or not isinstance(field.value, int):
        return seen
    return field.value


# --- headers as bytes --------------------------------------------------------------------------


def _name(pair: Pair) -> bytes:
    return pair[0]


def _value(pairs: list[Pair], name: bytes) -> bytes | None:
    """With its tag; of equal names the first counts."""
    for key, value in pairs:
        if key == name:
            return value
    return None


def _text(pairs: list[Pair], name: bytes) -> bytes | None:
    """A string, whether it is marked as text or as binary."""
    value = _value(pairs, name)
    return value[1:] if value is not None and value[:1] in (b"S", b"x") else None


def _with(pairs: list[Pair], name: bytes, value: bytes) -> list[Pair]:
    """Set in its place, or added."""
    for at, (key, _) in enumerate(pairs):
        if key == name:
            return [*pairs[:at], (name, value), *pairs[at + 1 :]]
    return [*pairs, (name, value)]


def _string(raw: bytes) -> bytes:
    return b"S" + _SIZE.pack(len(raw)) + raw


def _table(pairs: list[Pair]) -> bytes:
    return b"F" + join_table(pairs)


def _array(values: list[bytes]) -> bytes:
    return b"A" + join_array(values)


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _short(text: str) -> bytes:
    # A routing key given as an argument may be longer than any that can be sent.
    raw = _raw(text)[:_SHORT_MAX]
    return bytes((len(raw),)) + raw
