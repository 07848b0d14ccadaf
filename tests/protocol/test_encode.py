"""Deliveries and acks that we write, as pamqp and our own codec read them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands
from pamqp import frame as pamqp_frame
from pamqp.body import ContentBody
from pamqp.header import ContentHeader

from leveret.protocol.codec import content_frames
from leveret.protocol.framing import HEARTBEAT_FRAME
from tests.protocol.streams import Twin, cut_all, describe, publish, short_text


def unmarshal(data: bytes) -> list[tuple[int, Any]]:
    frames = []
    while data:
        consumed, channel, one = pamqp_frame.unmarshal(data)
        frames.append((channel, one))
        data = data[consumed:]
    return frames


def wire(text: str) -> bytes:
    raw = text.encode()
    return bytes((len(raw),)) + raw


@st.composite
def messages(draw: st.DrawFn) -> tuple[str, str, int, bytes]:
    return (
        draw(st.text("ab.", max_size=5)),
        draw(short_text),
        draw(st.integers(0, 255)),
        draw(st.binary(max_size=60)),
    )


@given(
    st.integers(1, 65535),
    short_text,
    st.integers(1, (1 << 63) - 100),
    st.booleans(),
    st.lists(messages(), max_size=5),
    st.sampled_from((0, 18, 4096)),
)
def test_pamqp_reads_deliveries(
    twin: Twin,
    channel: int,
    consumer_tag: str,
    first_tag: int,
    redelivered: bool,
    given_messages: list[tuple[str, str, int, bytes]],
    frame_max: int,
) -> None:
    data = twin.codec.encode_deliveries(
        channel,
        wire(consumer_tag),
        first_tag,
        redelivered,
        [
            twin.Message(
                wire(exchange) + wire(key),
                exchange,
                key,
                b"\x08\x00" + bytes((priority,)),
                body,
                0,
                False,
            )
            for exchange, key, priority, body in given_messages
        ],
        frame_max,
    )
    frames = unmarshal(data)
    assert {one for one, _ in frames} <= {channel}
    found = iter([one for _, one in frames])
    for tag, (exchange, key, priority, body) in enumerate(given_messages, first_tag):
        deliver = next(found)
        assert isinstance(deliver, commands.Basic.Deliver)
        assert dict(deliver) == {
            "consumer_tag": consumer_tag,
            "delivery_tag": tag,
            "redelivered": redelivered,
            "exchange": exchange,
            "routing_key": key,
        }
        header = next(found)
        assert type(header) is ContentHeader
        assert (header.body_size, header.properties.priority) == (len(body), priority)
        received = b""
        while len(received) < len(body):
            part = next(found)
            assert isinstance(part, ContentBody)
            assert not frame_max or len(part) <= frame_max - 8
            received += part.value
        assert received == body
    assert next(found, None) is None


@given(st.integers(1, 65535), st.lists(st.integers(0, (1 << 63) - 1), max_size=20), st.booleans())
def test_acks_are_read_by_pamqp_and_by_ourselves(
    twin: Twin, channel: int, tags: list[int], multiple: bool
) -> None:
    data = twin.codec.encode_acks(channel, tags, multiple)
    for (on, ack), tag in zip(unmarshal(data), tags, strict=True):
        assert isinstance(ack, commands.Basic.Ack)
        assert (on, ack.delivery_tag, ack.multiple) == (channel, tag, multiple)
    items, end = cut_all(twin, data)
    assert end == len(data)
    expected = [("acks", channel, 80, multiple, False, tags)] if tags else []
    assert [describe(item) for item in items] == expected


@pytest.mark.parametrize("size", [0, 1, 4087, 4088, 4089, 8176, 8177])
def test_deliveries_equal_content_frames(twin: Twin, size: int) -> None:
    """The hot and the general way to send content give the same bytes."""
    [run], _ = cut_all(twin, publish(bytes(size), exchange="e", headers={"a": 1}), frame_max=0)
    command = commands.Basic.Deliver("ctag", 5, True, "e", "key")
    assert twin.codec.encode_deliveries(
        2, b"\x04ctag", 5, True, run.messages, 4096
    ) == content_frames(2, command, run.messages[0], 4096)


def test_tags_are_unsigned(twin: Twin) -> None:
    top = (1 << 64) - 1
    [run], _ = cut_all(twin, twin.codec.encode_acks(1, [top], False))
    assert run.tags == [top]


def test_a_frame_max_without_room_is_refused(twin: Twin) -> None:
    with pytest.raises(ValueError, match="frame_max"):
        twin.codec.encode_deliveries(1, b"\x00", 1, False, [], 8)


def test_nothing_to_encode(twin: Twin) -> None:
    assert twin.codec.encode_deliveries(1, b"\x00", 1, False, [], 4096) == b""
    assert twin.codec.encode_acks(1, [], False) == b""


def test_a_rewritten_message_is_encoded_as_it_is_now(twin: Twin) -> None:
    [run], _ = cut_all(twin, publish(b"abc"))
    message = run.messages[0]
    message.header = b"\x08\x00\x07"
    message.extra_keys = ("cc",)
    message.needs = 2
    data = twin.codec.encode_deliveries(1, b"\x00", 1, False, [message], 4096)
    assert unmarshal(data)[1][1].properties.priority == 7
    assert (message.extra_keys, message.needs) == (("cc",), 2)


def test_incomplete_messages_do_no_harm(twin: Twin) -> None:
    with pytest.raises((TypeError, AttributeError)):
        twin.codec.encode_deliveries(1, b"\x00", 1, False, [None], 4096)
    unfinished = twin.Message.__new__(twin.Message)
    with pytest.raises((TypeError, AttributeError)):
        twin.codec.encode_deliveries(1, b"\x00", 1, False, [unfinished], 4096)


def test_items_can_be_made_by_hand(twin: Twin) -> None:
    message = twin.Message(b"\x00\x01k", "", "k", b"\x00\x00", b"x", 3, True)
    run = twin.PublishRun(1, b"\x00\x01k", "", "k", 2, [message], 1, 1, 1 << 63, 3, 1)
    assert describe(run) == (
        "publishes",
        1,
        b"\x00\x01k",
        "",
        "k",
        2,
        [(b"\x00\x01k", "", "k", b"\x00\x00", b"x", 3, True, ())],
        1,
        1,
        1 << 63,
        3,
        1,
    )
    assert describe(twin.AckRun(1, 120, True, False, [1])) == ("acks", 1, 120, True, False, [1])
    assert describe(twin.RawFrame(8, 0, b"")) == ("raw", 8, 0, b"")


def test_the_heartbeat_frame() -> None:
    [(channel, one)] = unmarshal(HEARTBEAT_FRAME)
    assert (channel, one.name) == (0, "Heartbeat")
