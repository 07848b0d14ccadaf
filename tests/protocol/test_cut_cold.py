"""Cutting a stream: what stays raw, what waits, what is refused, and splitting it anywhere."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pamqp import commands
from pamqp import frame as pamqp_frame

from leveret.protocol.errors import ConnectionException
from leveret.protocol.framing import HEARTBEAT_FRAME, frame
from tests.protocol.streams import (
    NO_PROPERTIES,
    Twin,
    cut_all,
    header_payload,
    publish,
    publish_payload,
    raw_frames,
    replay,
    settle,
)


def test_nothing_is_hot_on_channel_0(twin: Twin) -> None:
    items, _ = cut_all(twin, publish(channel=0) + settle(80, 1, channel=0))
    assert raw_frames(items) == [(1, 0), (2, 0), (3, 0), (1, 0)]


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"\x00\x3c\x00\x28", id="no-arguments"),
        pytest.param(publish_payload()[:-1], id="cut-short"),
        pytest.param(publish_payload() + b"\x00", id="left-over"),
        pytest.param(b"\x00\x3c\x00\x28\x00\x00\x00\xff\x00", id="key-too-long"),
        pytest.param(b"\x00\x3c\x00\x28\x00\x00\xff\x00\x00", id="exchange-too-long"),
    ],
)
def test_malformed_publishes_stay_raw(twin: Twin, payload: bytes) -> None:
    data = frame(1, 1, payload) + frame(2, 1, header_payload(0))
    items, end = cut_all(twin, data)
    assert raw_frames(items) == [(1, 1), (2, 1)]
    assert end == len(data)


METHOD = frame(1, 1, publish_payload())


@pytest.mark.parametrize(
    ("content", "kinds"),
    [
        pytest.param([(1, 1, b"\x00\x3c\x00\x0a")], [(1, 1)], id="method-instead-of-header"),
        pytest.param([(3, 1, b"abc")], [(3, 1)], id="body-instead-of-header"),
        pytest.param([(2, 2, header_payload(0))], [(2, 2)], id="header-of-another-channel"),
        pytest.param([(2, 1, header_payload(0, class_id=50))], [(2, 1)], id="class"),
        pytest.param([(2, 1, header_payload(0, weight=1))], [(2, 1)], id="weight"),
        pytest.param([(2, 1, header_payload(0)[:12])], [(2, 1)], id="no-property-flags"),
        pytest.param([(2, 1, header_payload(0, b"\x80\x00\x09a"))], [(2, 1)], id="properties"),
        pytest.param([(2, 1, header_payload(0, b"\x00\x00a"))], [(2, 1)], id="left-over"),
        pytest.param(
            [(2, 1, header_payload(0, b"\x20\x00\x00\x00\x00\x03\x01aZ"))],
            [(2, 1)],
            id="field-type",
        ),
        pytest.param([(2, 1, header_payload(2)), (3, 1, b"abc")], [(2, 1), (3, 1)], id="too-long"),
        pytest.param(
            [(2, 1, header_payload(2)), (3, 2, b"ab")], [(2, 1), (3, 2)], id="body-elsewhere"
        ),
        pytest.param(
            [(2, 1, header_payload(2)), (8, 0, b"")], [(2, 1), (8, 0)], id="heartbeat-between"
        ),
    ],
)
def test_content_out_of_order_stays_raw(
    twin: Twin, content: list[tuple[int, int, bytes]], kinds: list[tuple[int, int]]
) -> None:
    data = METHOD + b"".join(frame(*one) for one in content)
    items, end = cut_all(twin, data)
    assert raw_frames(items) == [(1, 1), *kinds]
    assert end == len(data)


def test_a_cold_publish_behind_hot_ones(twin: Twin) -> None:
    data = publish() * 2 + METHOD + frame(3, 1, b"x") + publish() * 2
    items, end = cut_all(twin, data)
    assert [type(item).__name__ for item in items] == [
        "PublishRun",
        "RawFrame",
        "RawFrame",
        "PublishRun",
    ]
    assert end == len(data)


def test_empty_body_frames_are_fine(twin: Twin) -> None:
    bodies = frame(3, 1, b"") + frame(3, 1, b"ab") + frame(3, 1, b"") + frame(3, 1, b"c")
    [run], _ = cut_all(twin, METHOD + frame(2, 1, header_payload(3)) + bodies)
    assert run.messages[0].body == b"abc"


def test_small_content_that_is_incomplete_waits(twin: Twin) -> None:
    """Wherever the stream ends, nothing of the second message is taken."""
    first = publish(b"first")
    second = publish(bytes(1000), part=400, headers={"a": 1})
    for end in range(len(second)):
        [run], at = cut_all(twin, first + second[:end])
        assert (at, len(run.messages)) == (len(first), 1)


def test_large_content_that_is_incomplete_comes_raw(twin: Twin) -> None:
    data = publish(bytes(300_000), part=100_000)
    last = len(data) - 100_008
    items, end = cut_all(twin, data[:-1])
    assert raw_frames(items) == [(1, 1), (2, 1), (3, 1), (3, 1)]
    assert end == last
    [run], _ = cut_all(twin, data)
    assert run.largest == 300_000


def test_a_huge_announcement_does_not_wait(twin: Twin) -> None:
    data = METHOD + frame(2, 1, header_payload((1 << 64) - 1))
    items, end = cut_all(twin, data)
    assert raw_frames(items) == [(1, 1), (2, 1)]
    assert end == len(data)


def test_many_tiny_frames_do_not_wait(twin: Twin) -> None:
    """Or each chunk that comes would have us walk all of them again."""
    few = METHOD + frame(2, 1, header_payload(1000)) + frame(3, 1, b"x") * 64
    assert cut_all(twin, few) == ([], 0)
    items, end = cut_all(twin, few + frame(3, 1, b""))
    assert len(items) == 67
    assert end == len(few) + 8


def test_a_flood_of_empty_frames_does_not_wait(twin: Twin) -> None:
    data = METHOD + frame(2, 1, header_payload(1)) + frame(3, 1, b"") * 65
    items, end = cut_all(twin, data)
    assert len(items) == 67
    assert end == len(data)


@pytest.mark.parametrize(
    ("data", "frame_max", "text"),
    [
        pytest.param(
            frame(1, 1, b"\x00\x3c\x00\x0a\x00\x00\x00\x00\x00\x00\x00")[:-1] + b"\x00",
            4096,
            "type 1, all octets = <<0,60,0,10,0,0,0,0,0,0,0>>: {invalid_frame_end_marker,0}",
            id="frame-end",
        ),
        pytest.param(
            frame(7, 0, b"abc"),
            4096,
            'type 7, all octets = <<"abc">>: unknown_frame',
            id="frame-type",
        ),
        pytest.param(
            frame(3, 1, bytes(4097))[:7],
            4096,
            "type 3, all octets = <<>>: {frame_too_large,4097,4088}",
            id="too-large-by-its-head-alone",
        ),
        pytest.param(
            b"\xff" * 64,
            131072,
            "type 255, all octets = <<>>: {frame_too_large,4294967295,131064}",
            id="garbage",
        ),
        pytest.param(
            frame(9, 0, bytes(range(20)))[:-1] + b"\x01",
            0,
            "type 9, first 16 octets = <<0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15>>: "
            "{invalid_frame_end_marker,1}",
            id="long-payload",
        ),
    ],
)
def test_errors_of_the_frame_layer(twin: Twin, data: bytes, frame_max: int, text: str) -> None:
    """What was cut before the error is there."""
    found: list[Any] = []
    with pytest.raises(ConnectionException) as caught:
        twin.codec.cut(publish() * 2 + data, 0, frame_max, 100, found)
    assert (caught.value.code, caught.value.text, caught.value.method) == (501, text, (0, 0))
    [run] = found
    assert (len(run.messages), run.cost, run.size) == (2, 2, 8)


@pytest.mark.parametrize("data", [METHOD, METHOD + frame(2, 1, header_payload(5000))])
def test_errors_within_content(twin: Twin, data: bytes) -> None:
    """The frames before it come raw."""
    found: list[Any] = []
    with pytest.raises(ConnectionException):
        twin.codec.cut(data + frame(3, 1, bytes(4097)), 0, 4096, 100, found)
    assert {kind for kind, _ in raw_frames(found)} <= {1, 2}
    with pytest.raises(ConnectionException):
        twin.codec.cut(data + frame(3, 1, b"x")[:-1] + b"\x00", 0, 4096, 100, [])


def test_a_frame_of_just_frame_max_is_forgiven(twin: Twin) -> None:
    [run], _ = cut_all(twin, publish(bytes(4096)), frame_max=4096)
    assert run.largest == 4096
    [run], _ = cut_all(twin, publish(bytes(8192), part=4096), frame_max=4096)
    assert run.largest == 8192
    [item], _ = cut_all(twin, frame(3, 1, bytes(4096)), frame_max=4096)
    assert item.kind == 3


def test_without_frame_max_any_size_goes(twin: Twin) -> None:
    [run], _ = cut_all(twin, publish(bytes(200_000)), frame_max=0)
    assert run.largest == 200_000


def test_cutting_from_the_middle(twin: Twin) -> None:
    [run], end = cut_all(twin, b"junk" + publish() + b"\x01", at=4)
    assert (len(run.messages), end) == (1, 4 + len(publish()))


@pytest.mark.parametrize("at", [-1, 4])
def test_positions_outside_of_the_data_are_refused(twin: Twin, at: int) -> None:
    with pytest.raises(ValueError, match="position"):
        cut_all(twin, b"abc", at=at)


STREAM = b"".join(
    [
        publish(b"first"),
        publish(b"second", delivery_mode=2),
        settle(80, 1) + settle(80, 2),
        publish(b"", channel=2, exchange="e", mandatory=True),
        pamqp_frame.marshal(commands.Queue.Declare(queue="q"), 2),
        publish(b"in many frames", part=3, headers={"a": [1, {"b": "c"}]}),
        HEARTBEAT_FRAME,
        # Content of two channels, interleaved.
        frame(1, 1, publish_payload()),
        frame(1, 2, publish_payload()),
        frame(2, 2, header_payload(2)),
        frame(2, 1, header_payload(2)),
        frame(3, 1, b"1a") + frame(3, 2, b"2a"),
        settle(120, 3, 2),
    ]
)


@pytest.mark.parametrize("budget", [1, 2, 1000])
def test_a_stream_may_be_split_anywhere(twin: Twin, budget: int) -> None:
    whole = replay(twin, [STREAM])
    assert [event[0] for event in whole] == [
        *["message"] * 2,
        *["ack"] * 2,
        "message",
        "method",
        *["message"] * 3,
        "ack",
    ]
    for at in range(len(STREAM)):
        assert replay(twin, [STREAM[:at], STREAM[at:]], budget=budget) == whole


def test_a_stream_may_come_byte_by_byte(twin: Twin) -> None:
    chunks = [STREAM[at : at + 1] for at in range(len(STREAM))]
    assert replay(twin, chunks) == replay(twin, [STREAM])


@settings(max_examples=30)
@given(st.integers(0, 400_000), st.integers(1, 131_064), st.integers(1, 70_000))
def test_large_messages_in_chunks(twin: Twin, size: int, part: int, chunk: int) -> None:
    """However a message is framed and read, it is the same message."""
    body = bytes(range(256)) * (size // 256)
    part = max(part, size // 500 + 1)
    data = publish(body, part=part) + publish(b"next")
    chunks = [data[at : at + chunk] for at in range(0, len(data), chunk)]
    events = replay(twin, chunks)
    assert [event[7] for event in events] == [body, b"next"]


def test_no_properties_are_two_bytes(twin: Twin) -> None:
    [run], _ = cut_all(twin, publish())
    assert run.messages[0].header == NO_PROPERTIES
