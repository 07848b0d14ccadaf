"""Cutting a stream: messages, runs, acks, budgets, what waits and what stays raw."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pamqp import commands
from pamqp import frame as pamqp_frame

from leveret.protocol.codec import read_properties
from leveret.protocol.errors import ConnectionException
from leveret.protocol.field_table import to_python
from leveret.protocol.framing import ENVELOPES_MAX, HEARTBEAT_FRAME, RUN_MAX, frame
from leveret.protocol.message import (
    NEEDS_EXPIRATION,
    NEEDS_HEADERS,
    NEEDS_MODE,
    NEEDS_PRIORITY,
    NEEDS_REPLY_TO,
    NEEDS_USER_ID,
)
from tests.protocol.streams import (
    NO_PROPERTIES,
    Twin,
    cut_all,
    describe,
    header_payload,
    plain_tables,
    publish,
    publish_payload,
    replay,
    settle,
    short_text,
)

NAMES = st.text("abcXYZ019-_.:@#,/ ", max_size=20)


def raw_frames(items: list[Any]) -> list[tuple[int, int]]:
    """Kind and channel of each item; all of them must be raw."""
    for item in items:
        assert type(item).__name__ == "RawFrame"
    return [(item.kind, item.channel) for item in items]


@given(
    st.binary(max_size=300),
    st.integers(1, 65535),
    NAMES,
    st.text(max_size=20),
    st.booleans(),
    st.integers(0, 100),
    st.fixed_dictionaries(
        {},
        optional={
            "content_type": short_text.filter(bool),
            "headers": plain_tables,
            "delivery_mode": st.sampled_from((1, 2)),
            "priority": st.integers(0, 255),
            "reply_to": short_text.filter(bool),
            "expiration": st.integers(0, 10**9).map(str),
            "timestamp": st.integers(0, 1 << 31).map(lambda s: datetime.fromtimestamp(s, tz=UTC)),
            "user_id": short_text.filter(bool),
        },
    ),
)
def test_publishes_of_pamqp_become_messages(
    twin: Twin,
    body: bytes,
    channel: int,
    exchange: str,
    routing_key: str,
    mandatory: bool,
    part: int,
    properties: dict[str, Any],
) -> None:
    data = publish(
        body,
        channel=channel,
        exchange=exchange,
        routing_key=routing_key,
        mandatory=mandatory,
        part=part,
        **properties,
    )
    items, end = cut_all(twin, data)
    assert end == len(data)
    [run] = items
    assert (run.channel, run.exchange, run.routing_key) == (channel, exchange, routing_key)
    assert run.flags == int(mandatory)
    assert (run.size, run.largest) == (len(body), len(body))
    [message] = run.messages
    assert message.body == body
    assert (message.exchange, message.routing_key) == (exchange, routing_key)
    assert message.envelope is run.envelope
    assert message.persistent is (properties.get("delivery_mode") == 2)
    assert run.persistent == int(message.persistent)
    assert run.needs == message.needs
    assert message.extra_keys == ()

    found = read_properties(message.header)
    headers = properties.pop("headers", None)
    stamp = properties.pop("timestamp", None)
    assert found.timestamp == (None if stamp is None else int(stamp.timestamp()))
    if headers is None:
        assert found.headers is None
    else:
        assert found.headers is not None
        assert {key: to_python(field) for key, field in found.headers.items()} == headers
    for name, value in properties.items():
        assert getattr(found, name) == value


@pytest.mark.parametrize(
    ("properties", "needs"),
    [
        pytest.param(b"\x00\x00", 0, id="none"),
        pytest.param(b"\x20\x00\x00\x00\x00\x00", NEEDS_HEADERS, id="headers"),
        pytest.param(b"\x10\x00\x01", 0, id="mode-1"),
        pytest.param(b"\x10\x00\x02", 0, id="mode-2"),
        pytest.param(b"\x10\x00\x00", NEEDS_MODE, id="mode-0"),
        pytest.param(b"\x10\x00\x03", NEEDS_MODE, id="mode-3"),
        pytest.param(b"\x08\x00\x00", NEEDS_PRIORITY, id="priority"),
        pytest.param(b"\x02\x00\x01a", NEEDS_REPLY_TO, id="reply-to"),
        pytest.param(b"\x01\x00\x011", NEEDS_EXPIRATION, id="expiration"),
        pytest.param(b"\x00\x10\x00", NEEDS_USER_ID, id="user-id"),
        pytest.param(b"\x84\xec" + b"\x01a" * 3 + bytes(8) + b"\x01a" * 3, 0, id="the-others"),
        pytest.param(b"\x00\x03", 0, id="flags-without-property"),
    ],
)
def test_needs(twin: Twin, properties: bytes, needs: int) -> None:
    data = frame(1, 1, publish_payload()) + frame(2, 1, header_payload(0, properties))
    [run], _ = cut_all(twin, data)
    assert (run.needs, run.messages[0].needs) == (needs, needs)
    assert run.messages[0].header == properties
    assert run.messages[0].persistent is (properties == b"\x10\x00\x02")


def test_names_may_be_any_bytes(twin: Twin) -> None:
    data = frame(1, 1, publish_payload(b"\xff", b"\xc3\xa9\xfe")) + frame(2, 1, header_payload(0))
    [run], _ = cut_all(twin, data)
    assert (run.exchange, run.routing_key) == ("\udcff", "é\udcfe")
    assert run.envelope == b"\x01\xff\x03\xc3\xa9\xfe"


def test_equal_publishes_join_a_run(twin: Twin) -> None:
    data = publish(b"one", delivery_mode=2) + publish(b"") + publish(b"three", priority=3)
    [run], end = cut_all(twin, data)
    assert end == len(data)
    assert [message.body for message in run.messages] == [b"one", b"", b"three"]
    assert (run.cost, run.size, run.largest, run.persistent) == (3, 8, 5, 1)
    assert run.needs == NEEDS_PRIORITY


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(publish(routing_key="other"), id="routing-key"),
        pytest.param(publish(exchange="e"), id="exchange"),
        pytest.param(publish(channel=2), id="channel"),
        pytest.param(publish(mandatory=True), id="flags"),
        pytest.param(settle(80, 1), id="ack"),
        pytest.param(HEARTBEAT_FRAME, id="heartbeat"),
        pytest.param(pamqp_frame.marshal(commands.Basic.Qos(), 1), id="method"),
    ],
)
def test_anything_else_ends_a_run(twin: Twin, other: bytes) -> None:
    items, _ = cut_all(twin, publish() + other + publish())
    assert len(items) == 3
    assert describe(items[0]) == describe(items[2])


def test_tickets_and_reserved_bits_do_not_end_a_run(twin: Twin) -> None:
    content = frame(2, 1, header_payload(0))
    plain = publish_payload(bits=1)
    with_ticket = plain[:4] + b"\x00\x07" + plain[6:]
    data = b"".join(
        frame(1, 1, payload) + content
        for payload in (plain, with_ticket, publish_payload(bits=0xFD), plain)
    )
    [run], _ = cut_all(twin, data)
    assert (len(run.messages), run.flags, run.cost) == (4, 1, 4)


def test_a_run_is_bounded(twin: Twin) -> None:
    items, _ = cut_all(twin, publish() * (RUN_MAX * 2 + 1))
    assert [len(run.messages) for run in items] == [RUN_MAX, RUN_MAX, 1]
    assert [run.cost for run in items] == [RUN_MAX, RUN_MAX, 1]


def test_equal_names_are_one_object(twin: Twin) -> None:
    items, _ = cut_all(twin, publish() + publish(routing_key="x") + publish())
    [again], _ = cut_all(twin, publish())
    for run in (items[2], again):
        assert run.envelope is items[0].envelope
        assert run.exchange is items[0].exchange
        assert run.routing_key is items[0].routing_key


def test_remembered_names_are_bounded(twin: Twin) -> None:
    """After many others, names are right all the same."""
    many = b"".join(publish(b"", routing_key=f"k{n}") for n in range(ENVELOPES_MAX + 10))
    items, _ = cut_all(twin, many)
    assert [run.routing_key for run in items] == [f"k{n}" for n in range(ENVELOPES_MAX + 10)]


@pytest.mark.parametrize(
    ("size", "cost"), [(0, 1), (16383, 1), (16384, 2), (32768, 3), (100_000, 7)]
)
def test_cost_of_a_message(twin: Twin, size: int, cost: int) -> None:
    [run], _ = cut_all(twin, publish(bytes(size)))
    assert run.cost == cost


def test_budget(twin: Twin) -> None:
    one = publish()
    assert cut_all(twin, one * 5, budget=0) == ([], 0)
    assert cut_all(twin, settle(80, 1), budget=0) == ([], 0)
    assert cut_all(twin, one * 5, budget=-1) == ([], 0)
    [run], end = cut_all(twin, one * 5, budget=3)
    assert (len(run.messages), end) == (3, 3 * len(one))


def test_the_last_message_may_overdraw_the_budget(twin: Twin) -> None:
    large = publish(bytes(50_000))
    [run], end = cut_all(twin, large * 2, budget=1)
    assert (len(run.messages), run.cost, end) == (1, 4, len(large))


def test_budget_stops_only_publishes(twin: Twin) -> None:
    data = publish() + settle(80, 1) + HEARTBEAT_FRAME
    items, end = cut_all(twin, data + publish(routing_key="x") + settle(80, 2), budget=1)
    assert [type(item).__name__ for item in items] == ["PublishRun", "AckRun", "RawFrame"]
    assert end == len(data)


@pytest.mark.parametrize("size", [4, 6, 8, 9, 20])
def test_budget_stops_malformed_publishes_too(twin: Twin, size: int) -> None:
    odd = frame(1, 1, publish_payload(key=b"x" * 30)[:size])
    items, end = cut_all(twin, publish() + odd, budget=1)
    assert (len(items), end) == (1, len(publish()))


def test_budget_counts_over_runs(twin: Twin) -> None:
    data = publish(routing_key="a") + publish(routing_key="b") + publish(routing_key="c")
    items, end = cut_all(twin, data, budget=2)
    assert [run.routing_key for run in items] == ["a", "b"]
    assert end == len(data) // 3 * 2


def test_acks_join_a_run(twin: Twin) -> None:
    tags = [1, 2, 7, (1 << 64) - 1]
    [run], end = cut_all(twin, b"".join(settle(80, tag) for tag in tags))
    assert describe(run) == ("acks", 1, 80, False, False, tags)
    assert end == 4 * 21


@pytest.mark.parametrize(
    ("method", "bits", "multiple", "requeue"),
    [
        (80, 0, False, False),
        (80, 1, True, False),
        (80, 0xFE, False, False),
        (90, 0, False, False),
        (90, 1, False, True),
        (90, 2, False, False),
        (120, 0, False, False),
        (120, 1, True, False),
        (120, 2, False, True),
        (120, 3, True, True),
    ],
)
def test_bits_of_acks(twin: Twin, method: int, bits: int, multiple: bool, requeue: bool) -> None:
    [run], _ = cut_all(twin, settle(method, 5, bits, channel=9))
    assert describe(run) == ("acks", 9, method, multiple, requeue, [5])
    assert (type(run.multiple), type(run.requeue)) == (bool, bool)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(settle(80, 2, 1), id="multiple"),
        pytest.param(settle(120, 2), id="method"),
        pytest.param(settle(80, 2, channel=2), id="channel"),
        pytest.param(publish(), id="publish"),
        pytest.param(HEARTBEAT_FRAME, id="heartbeat"),
    ],
)
def test_anything_else_ends_a_run_of_acks(twin: Twin, other: bytes) -> None:
    items, _ = cut_all(twin, settle(80, 1) + other + settle(80, 3))
    assert len(items) == 3
    assert (items[0].tags, items[2].tags) == ([1], [3])


def test_reserved_bits_do_not_end_a_run_of_acks(twin: Twin) -> None:
    [run], _ = cut_all(twin, settle(80, 1) + settle(80, 2, 0x10) + settle(80, 3))
    assert run.tags == [1, 2, 3]


@pytest.mark.parametrize("size", [4, 11, 12, 14])
def test_acks_of_another_length_stay_raw(twin: Twin, size: int) -> None:
    payload = (b"\x00\x3c\x00\x50" + bytes(20))[:size]
    [item], _ = cut_all(twin, frame(1, 1, payload))
    assert describe(item) == ("raw", 1, 1, payload)


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
