"""Cutting a stream: messages, runs of them, runs of acks, and the budget."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands
from pamqp import frame as pamqp_frame

from leveret.protocol.codec import read_properties
from leveret.protocol.field_table import MAX_DEPTH, to_python
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
    Twin,
    cut_all,
    describe,
    header_payload,
    nested,
    plain_tables,
    publish,
    publish_payload,
    raw_frames,
    settle,
    short_text,
)

NAMES = st.text("abcXYZ019-_.:@#,/ ", max_size=20)


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


@pytest.mark.parametrize("tag", [b"F", b"A"])
def test_header_tables_are_hot_up_to_the_allowed_depth(twin: Twin, tag: bytes) -> None:
    def data(depth: int) -> bytes:
        properties = b"\x20\x00" + nested(depth, tag)
        return frame(1, 1, publish_payload()) + frame(2, 1, header_payload(0, properties))

    [run], _ = cut_all(twin, data(MAX_DEPTH))
    assert run.needs == NEEDS_HEADERS
    items, _ = cut_all(twin, data(MAX_DEPTH + 1))
    assert raw_frames(items) == [(1, 1), (2, 1)]


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


def test_each_message_of_a_run_has_its_own_properties(twin: Twin) -> None:
    """Headers of equal length are not taken for equal."""
    data = b"".join(publish(priority=n, delivery_mode=mode) for n in (3, 4, 3) for mode in (1, 2))
    [run], _ = cut_all(twin, data)
    assert [(message.header, message.persistent) for message in run.messages] == [
        (b"\x18\x00" + bytes((mode, n)), mode == 2) for n in (3, 4, 3) for mode in (1, 2)
    ]
    assert run.persistent == 3


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
