"""Both twins on the same bytes, sane or not: the same items, the same rest or the same error."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from pamqp import commands

from leveret.protocol.codec import Properties, method_frame, write_properties
from leveret.protocol.framing import HEARTBEAT_FRAME, frame
from tests.protocol.streams import (
    Twin,
    any_text,
    header_payload,
    outcome,
    publish_payload,
    replay,
    settle,
    tables,
)

FRAME_MAXES = st.sampled_from((0, 64, 4096, 131072))
CHANNELS = st.integers(0, 3)
PAYLOADS = st.binary(max_size=30)


@st.composite
def properties(draw: st.DrawFn) -> bytes:
    return write_properties(
        Properties(
            content_type=draw(st.none() | any_text),
            headers=draw(st.none() | tables),
            delivery_mode=draw(st.none() | st.integers(0, 3)),
            priority=draw(st.none() | st.integers(0, 9)),
            reply_to=draw(st.none() | any_text),
            expiration=draw(st.none() | any_text),
            timestamp=draw(st.none() | st.just(7)),
            user_id=draw(st.none() | any_text),
        )
    )


@st.composite
def contents(draw: st.DrawFn) -> bytes:
    """A publish with its content, nearly always in order."""
    channel = draw(CHANNELS)
    key = draw(st.sampled_from((b"", b"key", b"\xff")))
    bodies = draw(st.lists(st.binary(max_size=40), max_size=3))
    parts = [
        frame(1, channel, publish_payload(b"", key, draw(st.integers(0, 7)))),
        frame(
            2,
            channel,
            header_payload(
                sum(map(len, bodies)) + draw(st.sampled_from((0, 0, 0, 0, 1, -1, 1 << 20)))
                & (1 << 64) - 1,
                draw(st.just(b"\x00\x00") | properties() | PAYLOADS),
                class_id=draw(st.sampled_from((60, 60, 60, 60, 50))),
                weight=draw(st.sampled_from((0, 0, 0, 0, 1))),
            ),
        ),
        *(frame(3, channel, body) for body in bodies),
    ]
    return b"".join(parts) * draw(st.integers(1, 3))


PIECES = st.one_of(
    contents(),
    contents(),
    st.builds(
        settle,
        st.sampled_from((80, 90, 120)),
        st.integers(0, (1 << 64) - 1),
        st.integers(0, 255),
        CHANNELS,
    ),
    st.just(HEARTBEAT_FRAME),
    st.builds(lambda channel: method_frame(channel, commands.Basic.Qos()), CHANNELS),
    st.builds(frame, st.sampled_from((1, 2, 3, 8)), CHANNELS, PAYLOADS),
)
STREAMS = st.lists(PIECES, max_size=8).map(b"".join)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A stream with bytes changed, cut out or put in."""
    data = bytearray(draw(STREAMS))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(("change", "cut", "insert", "end"))):
            case "change" if data:
                data[at] = draw(st.integers(0, 255))
            case "cut":
                del data[at : at + draw(st.integers(1, 9))]
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=9))
            case "end":
                del data[at:]
    return bytes(data)


@settings(max_examples=400)
@given(damaged(), FRAME_MAXES, st.integers(-1, 6) | st.just(1000))
def test_on_damaged_streams(
    both_twins: tuple[Twin, Twin], data: bytes, frame_max: int, budget: int
) -> None:
    pure, compiled = both_twins
    expected = outcome(pure, data, frame_max=frame_max, budget=budget)
    assert outcome(compiled, data, frame_max=frame_max, budget=budget) == expected


@settings(max_examples=150)
@given(st.binary(max_size=200), FRAME_MAXES)
def test_on_random_bytes(both_twins: tuple[Twin, Twin], data: bytes, frame_max: int) -> None:
    pure, compiled = both_twins
    assert outcome(compiled, data, frame_max=frame_max) == outcome(pure, data, frame_max=frame_max)


@settings(max_examples=200)
@given(PAYLOADS)
def test_on_random_properties(both_twins: tuple[Twin, Twin], properties: bytes) -> None:
    """Both take a header for well-formed, with the same needs, or both leave it raw."""
    pure, compiled = both_twins
    data = frame(1, 1, publish_payload()) + frame(2, 1, header_payload(0, properties))
    assert outcome(compiled, data, frame_max=0) == outcome(pure, data, frame_max=0)


@settings(max_examples=100)
@given(STREAMS, st.lists(st.integers(1, 60), max_size=12))
def test_a_stream_reads_the_same_however_it_is_split(
    both_twins: tuple[Twin, Twin], data: bytes, sizes: list[int]
) -> None:
    """Valid or not: methods, messages and the error at the end do not depend on chunks."""
    chunks = []
    at = 0
    for size in sizes:
        chunks.append(data[at : at + size])
        at += size
    chunks.append(data[at:])
    pure, compiled = both_twins
    expected = replay(pure, [data])
    assert replay(pure, chunks) == expected
    assert replay(compiled, chunks) == expected
