"""Streams for the codec's tests: made by pamqp or by hand, cut, and described as plain values."""

from __future__ import annotations

import importlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from pamqp import body as pamqp_body
from pamqp import commands, header
from pamqp import frame as pamqp_frame
from pamqp.base import Frame

from leveret.protocol import hot, items, message
from leveret.protocol.assembler import Assembler
from leveret.protocol.codec import UnknownMethod, encode_method
from leveret.protocol.errors import ConnectionException
from leveret.protocol.field_table import Field, Table
from leveret.protocol.framing import frame

FRAME_MAX = 131072
PLENTY = 1 << 30
NO_PROPERTIES = b"\x00\x00"


@dataclass(frozen=True)
class Twin:
    """One of the two hot codecs."""

    codec: Any
    Message: Any
    RawFrame: Any
    PublishRun: Any
    AckRun: Any


def _compiled() -> Twin | None:
    try:
        codec = importlib.import_module("leveret.protocol._hot")
    except ImportError:
        return None
    return Twin(codec, codec.Message, codec.RawFrame, codec.PublishRun, codec.AckRun)


PURE = Twin(hot, message.Message, items.RawFrame, items.PublishRun, items.AckRun)
COMPILED = _compiled()


def publish(
    body: bytes = b"body",
    *,
    channel: int = 1,
    exchange: str = "",
    routing_key: str = "key",
    mandatory: bool = False,
    part: int = 0,
    **properties: Any,
) -> bytes:
    """A publish as pamqp writes it, its body in frames of ``part`` bytes (0: in one)."""
    command = commands.Basic.Publish(
        exchange=exchange, routing_key=routing_key, mandatory=mandatory
    )
    content = header.ContentHeader(
        body_size=len(body), properties=commands.Basic.Properties(**properties)
    )
    part = part or max(1, len(body))
    bodies = [
        pamqp_frame.marshal(pamqp_body.ContentBody(body[at : at + part]), channel)
        for at in range(0, len(body), part)
    ]
    return b"".join(
        [pamqp_frame.marshal(command, channel), pamqp_frame.marshal(content, channel), *bodies]
    )


def publish_payload(exchange: bytes = b"", key: bytes = b"key", bits: int = 0) -> bytes:
    """The payload of a publish's method frame, for names that are not UTF-8."""
    names = bytes((len(exchange),)) + exchange + bytes((len(key),)) + key
    return struct.pack(">HHH", 60, 40, 0) + names + bytes((bits,))


def header_payload(
    body_size: int, properties: bytes = NO_PROPERTIES, *, class_id: int = 60, weight: int = 0
) -> bytes:
    return struct.pack(">HHQ", class_id, weight, body_size) + properties


def sized(raw: bytes) -> bytes:
    """With its 4-byte length, as tables, arrays and long strings are."""
    return struct.pack(">I", len(raw)) + raw


def entry(tag: bytes, value: bytes, key: bytes = b"k") -> bytes:
    """One entry of a table."""
    return bytes((len(key),)) + key + tag + value


def nested(depth: int, tag: bytes) -> bytes:
    """A table of ``depth`` levels, the inner ones being tables or arrays."""
    inner = sized(b"")
    for _ in range(depth - 2):
        inner = sized((b"\x00F" if tag == b"F" else b"A") + inner)
    return sized(entry(tag, inner))


def settle(method: int, tag: int, bits: int = 0, channel: int = 1) -> bytes:
    """basic.ack (80), basic.reject (90) or basic.nack (120)."""
    return frame(1, channel, struct.pack(">HHQB", 60, method, tag, bits))


def cut_all(
    twin: Twin, data: bytes, *, frame_max: int = FRAME_MAX, budget: int = PLENTY, at: int = 0
) -> tuple[list[Any], int]:
    found: list[Any] = []
    return found, twin.codec.cut(data, at, frame_max, budget, found)


def describe_message(one: Any) -> tuple[object, ...]:
    return (
        one.envelope,
        one.exchange,
        one.routing_key,
        one.header,
        one.body,
        one.needs,
        one.persistent,
        one.extra_keys,
    )


def describe(item: Any) -> tuple[object, ...]:
    """An item of either twin as a plain value that can be compared."""
    match type(item).__name__:
        case "RawFrame":
            return ("raw", item.kind, item.channel, item.payload)
        case "AckRun":
            return ("acks", item.channel, item.method, item.multiple, item.requeue, item.tags)
        case "PublishRun":
            return (
                "publishes",
                item.channel,
                item.envelope,
                item.exchange,
                item.routing_key,
                item.flags,
                [describe_message(one) for one in item.messages],
                item.cost,
                item.size,
                item.largest,
                item.needs,
                item.persistent,
            )
    raise AssertionError(f"{item!r} is no item")


def raw_frames(items: list[Any]) -> list[tuple[int, int]]:
    """Kind and channel of each item; all of them must be raw."""
    for item in items:
        assert type(item).__name__ == "RawFrame"
    return [(item.kind, item.channel) for item in items]


def outcome(
    twin: Twin, data: bytes, *, frame_max: int, budget: int = PLENTY
) -> tuple[list[tuple[object, ...]], object]:
    """The items, and then where the rest begins or the error."""
    found: list[Any] = []
    end: object
    try:
        end = twin.codec.cut(data, 0, frame_max, budget, found)
    except ConnectionException as error:
        end = (error.code, error.text, error.method)
    return [describe(item) for item in found], end


def replay(
    twin: Twin, chunks: Iterable[bytes], *, frame_max: int = FRAME_MAX, budget: int = PLENTY
) -> list[tuple[object, ...]]:
    """What a reader makes of a stream: one entry for each message, ack or method, in order."""
    assembler = Assembler(PLENTY)
    seen: list[tuple[object, ...]] = []
    rest = b""
    try:
        for chunk in chunks:
            rest += chunk
            while True:
                found: list[Any] = []
                at = twin.codec.cut(rest, 0, frame_max, budget, found)
                for item in found:
                    seen += _events(assembler, item)
                rest = rest[at:]
                if not at:
                    break
    except ConnectionException as error:
        seen.append(("closed", error.code, error.text, error.method))
    except UnknownMethod as error:
        seen.append(("closed", str(error)))
    return seen


def _events(assembler: Assembler, item: Any) -> list[tuple[object, ...]]:
    kind = type(item).__name__
    if kind == "RawFrame":
        channel = item.channel
        item = assembler.feed(item)
        if item is None:
            return []
        if isinstance(item, Frame):
            return [("method", channel, encode_method(item))]
    else:
        assembler.expect_method(item.channel)
    if kind == "AckRun":
        return [
            ("ack", item.channel, item.method, item.multiple, item.requeue, tag)
            for tag in item.tags
        ]
    return [("message", item.channel, item.flags, *describe_message(one)) for one in item.messages]


any_text = st.binary(max_size=20).map(lambda raw: raw.decode("utf-8", "surrogateescape"))
short_text = st.text("abc.#*é", max_size=12)


def _integers(bits: int, *, signed: bool) -> st.SearchStrategy[int]:
    if signed:
        return st.integers(-(1 << bits - 1), (1 << bits - 1) - 1)
    return st.integers(0, (1 << bits) - 1)


_scalars = st.one_of(
    st.tuples(st.just("t"), st.booleans()),
    st.tuples(st.just("b"), _integers(8, signed=True)),
    st.tuples(st.just("B"), _integers(8, signed=False)),
    st.tuples(st.just("s"), _integers(16, signed=True)),
    st.tuples(st.just("u"), _integers(16, signed=False)),
    st.tuples(st.just("I"), _integers(32, signed=True)),
    st.tuples(st.just("i"), _integers(32, signed=False)),
    st.tuples(st.sampled_from("lL"), _integers(64, signed=True)),
    st.tuples(st.just("f"), st.floats(width=32, allow_nan=False)),
    st.tuples(st.just("d"), st.floats(allow_nan=False)),
    st.tuples(st.just("D"), st.tuples(_integers(8, signed=False), _integers(32, signed=False))),
    st.tuples(st.just("T"), _integers(64, signed=False)),
    st.tuples(st.just("S"), any_text),
    st.tuples(st.just("x"), st.binary(max_size=20)),
    st.just(("V", None)),
).map(lambda pair: Field(*pair))

fields: st.SearchStrategy[Field] = st.recursive(
    _scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(lambda values: Field("A", values)),
        st.dictionaries(any_text, inner, max_size=4).map(lambda table: Field("F", table)),
    ),
    max_leaves=12,
)
tables: st.SearchStrategy[Table] = st.dictionaries(any_text, fields, max_size=5)

plain_tables: st.SearchStrategy[dict[str, Any]] = st.dictionaries(
    short_text,
    st.recursive(
        st.none() | st.booleans() | _integers(64, signed=True) | short_text,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(short_text, inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)
