"""Content frame by frame: what completes, what is refused and in which words."""

from __future__ import annotations

import sys

import pytest
from pamqp import commands

from leveret.protocol.assembler import Assembler
from leveret.protocol.codec import UnknownMethod, encode_method
from leveret.protocol.errors import ConnectionException
from leveret.protocol.message import NEEDS_PRIORITY
from leveret.protocol.twin import PublishRun, RawFrame
from tests.protocol.streams import describe, header_payload, publish_payload

PUBLISH = RawFrame(1, 1, publish_payload(b"e", b"k", 3))
QOS = RawFrame(1, 1, encode_method(commands.Basic.Qos(prefetch_count=5)))

NO_HEADER = "expected content header for class 60, got non content header frame instead"
NO_BODY = "expected content body, got non content body frame instead"
NO_METHOD = "expected method frame, got non method frame instead"


def header(size: int, properties: bytes = b"\x00\x00", channel: int = 1) -> RawFrame:
    return RawFrame(2, channel, header_payload(size, properties))


def body(data: bytes, channel: int = 1) -> RawFrame:
    return RawFrame(3, channel, data)


def feed_all(assembler: Assembler, *frames: RawFrame) -> object:
    """What the last frame gives; those before it must give nothing."""
    *first, last = frames
    for frame in first:
        assert assembler.feed(frame) is None
    return assembler.feed(last)


def refusal(*frames: RawFrame) -> tuple[int, str, tuple[int, int]]:
    """The error that the last frame gives."""
    assembler = Assembler(1000)
    *first, last = frames
    for frame in first:
        assembler.feed(frame)
    with pytest.raises(ConnectionException) as caught:
        assembler.feed(last)
    return caught.value.code, caught.value.text, caught.value.method


def test_method_header_and_bodies_make_a_message() -> None:
    assembler = Assembler(1000)
    run = feed_all(
        assembler,
        PUBLISH,
        header(6, b"\x18\x00\x02\x05"),
        body(b"ab"),
        body(b""),
        body(b"cdef"),
    )
    envelope = b"\x01e\x01k"
    message = (envelope, "e", "k", b"\x18\x00\x02\x05", b"abcdef", NEEDS_PRIORITY, True, ())
    assert describe(run) == (
        "publishes",
        1,
        envelope,
        "e",
        "k",
        3,
        [message],
        1,
        6,
        6,
        NEEDS_PRIORITY,
        1,
    )
    assert not assembler.is_pending(1)


def test_an_empty_body_is_complete_with_its_header() -> None:
    run = feed_all(Assembler(1000), PUBLISH, header(0))
    assert isinstance(run, PublishRun)
    assert run.messages[0].body == b""


def test_large_and_small_parts_are_joined_in_order() -> None:
    parts = [b"a" * 5000, b"b", b"c" * 10, b"d" * 5000, b"e" * 4096, b"f"]
    whole = b"".join(parts)
    run = feed_all(Assembler(1 << 20), PUBLISH, header(len(whole)), *map(body, parts))
    assert isinstance(run, PublishRun)
    assert run.messages[0].body == whole
    assert type(run.messages[0].body) is bytes


def test_cost_grows_with_the_body() -> None:
    run = feed_all(Assembler(1 << 20), PUBLISH, header(40_000), body(bytes(40_000)))
    assert isinstance(run, PublishRun)
    assert run.cost == 3


def test_contents_of_two_channels_interleave() -> None:
    assembler = Assembler(1000)
    other = RawFrame(1, 2, publish_payload(b"", b"other"))
    assert feed_all(assembler, PUBLISH, other, header(1, channel=2), header(1)) is None
    second = feed_all(assembler, body(b"2", channel=2))
    first = feed_all(assembler, body(b"1"))
    assert isinstance(first, PublishRun)
    assert isinstance(second, PublishRun)
    assert (first.channel, first.messages[0].body) == (1, b"1")
    assert (second.channel, second.messages[0].body) == (2, b"2")


def test_other_methods_pass() -> None:
    method = Assembler(1000).feed(QOS)
    assert isinstance(method, commands.Basic.Qos)
    assert method.prefetch_count == 5


def test_methods_of_other_channels_pass_while_content_is_pending() -> None:
    assembler = Assembler(1000)
    assembler.feed(PUBLISH)
    assert isinstance(assembler.feed(RawFrame(1, 2, QOS.payload)), commands.Basic.Qos)


def test_a_heartbeat_says_nothing() -> None:
    assert Assembler(1000).feed(RawFrame(8, 0, b"")) is None


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        pytest.param([PUBLISH, QOS], NO_HEADER, id="method-instead-of-header"),
        pytest.param([PUBLISH, PUBLISH], NO_HEADER, id="publish-instead-of-header"),
        pytest.param([PUBLISH, body(b"x")], NO_HEADER, id="body-instead-of-header"),
        pytest.param(
            [PUBLISH, RawFrame(2, 1, header_payload(0, weight=1))], NO_HEADER, id="weight"
        ),
        pytest.param(
            [PUBLISH, RawFrame(2, 1, header_payload(0, class_id=50))],
            "expected content header for class 60, got one for class 50 instead",
            id="class",
        ),
        pytest.param([PUBLISH, header(2), QOS], NO_BODY, id="method-instead-of-body"),
        pytest.param([PUBLISH, header(2), header(2)], NO_BODY, id="header-instead-of-body"),
        pytest.param(
            [PUBLISH, header(2), body(b"abc"), QOS], NO_BODY, id="method-after-too-long-a-body"
        ),
    ],
)
def test_content_out_of_order(frames: list[RawFrame], text: str) -> None:
    assert refusal(*frames) == (505, text, (60, 40))


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        pytest.param([header(0)], NO_METHOD, id="header-without-publish"),
        pytest.param([body(b"")], NO_METHOD, id="body-without-publish"),
        pytest.param([PUBLISH, header(0), body(b"x")], NO_METHOD, id="body-after-empty-message"),
        pytest.param([RawFrame(8, 1, b"")], "type 8, all octets = <<>>", id="heartbeat-elsewhere"),
        pytest.param(
            [RawFrame(3, 0, b"\x01")], "type 3, all octets = <<1>>", id="content-on-channel-0"
        ),
    ],
)
def test_frames_out_of_place(frames: list[RawFrame], text: str) -> None:
    assert refusal(*frames) == (505, text, (0, 0))


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        pytest.param(RawFrame(1, 1, b"\x00\x3c\x00"), "1, all octets = <<0,60,0>>", id="method"),
        pytest.param(RawFrame(2, 1, b"\x00\x3c"), "2, all octets = <<0,60>>", id="header"),
        pytest.param(RawFrame(8, 1, b"a"), '8, all octets = <<"a">>', id="heartbeat"),
    ],
)
def test_frames_that_do_not_fit_their_type(frame: RawFrame, text: str) -> None:
    assert refusal(frame) == (501, f"type {text}: unknown_frame", (0, 0))


def test_the_type_comes_before_the_order() -> None:
    """As RabbitMQ does: a header that is too short is no header at all."""
    assert refusal(PUBLISH, RawFrame(2, 1, b"\x00"))[0] == 501


def test_unknown_methods_are_not_an_amqp_error() -> None:
    assembler = Assembler(1000)
    with pytest.raises(UnknownMethod):
        assembler.feed(RawFrame(1, 1, b"\x00\x63\x00\x01"))
    assembler.feed(PUBLISH)
    with pytest.raises(UnknownMethod):
        assembler.feed(RawFrame(1, 1, b"\x00\x63\x00\x01"))


def test_malformed_arguments_name_the_method() -> None:
    code, text, method = refusal(RawFrame(1, 1, publish_payload() + b"\x00"))
    assert (code, method) == (501, (60, 40))
    assert text.startswith("cannot decode <<0,0,")


@pytest.mark.parametrize(
    "properties",
    [
        pytest.param(b"", id="no-flags"),
        pytest.param(b"\x20\x00\x00\x00\x00\x03\x01aZ", id="unknown-field-type"),
        pytest.param(b"\x20\x00\x00\x00\x00\x09", id="table-longer-than-the-frame"),
        pytest.param(b"\x80\x00\x05a", id="string-cut-short"),
    ],
)
def test_malformed_properties(properties: bytes) -> None:
    assert refusal(PUBLISH, header(0, properties)) == (541, "", (0, 0))


def test_a_body_longer_than_announced_never_completes() -> None:
    assembler = Assembler(1000)
    assert feed_all(assembler, PUBLISH, header(2), body(b"a"), body(b"bc"), body(b"")) is None
    assert feed_all(assembler, body(b"d" * 100)) is None
    assert assembler.is_pending(1)


def test_a_body_longer_than_announced_is_not_kept() -> None:
    assembler = Assembler(10_000)
    part = bytes(5000)
    unused = sys.getrefcount(part)
    feed_all(assembler, PUBLISH, header(6000), body(part))
    assert sys.getrefcount(part) > unused
    feed_all(assembler, body(bytes(1001)))
    assert sys.getrefcount(part) == unused


def test_a_body_beyond_the_limit_is_dropped_as_it_comes() -> None:
    assembler = Assembler(10)
    run = feed_all(assembler, PUBLISH, header(11), body(b"123456"), body(b"12345"))
    assert isinstance(run, PublishRun)
    assert (run.largest, run.size, run.cost, run.messages[0].body) == (11, 0, 1, b"")
    just_fits = feed_all(assembler, PUBLISH, header(10), body(b"1234567890"))
    assert isinstance(just_fits, PublishRun)
    assert just_fits.messages[0].body == b"1234567890"


def test_discarded_content_is_forgotten() -> None:
    assembler = Assembler(1000)
    assembler.feed(PUBLISH)
    assert assembler.is_pending(1)
    assembler.discard(1)
    assembler.discard(2)
    assert not assembler.is_pending(1)
    assert isinstance(assembler.feed(QOS), commands.Basic.Qos)


@pytest.mark.parametrize(
    ("frames", "text"), [([PUBLISH], NO_HEADER), ([PUBLISH, header(1)], NO_BODY)]
)
def test_runs_are_refused_while_content_is_pending(frames: list[RawFrame], text: str) -> None:
    assembler = Assembler(1000)
    feed_all(assembler, *frames)
    assembler.expect_method(2)
    with pytest.raises(ConnectionException) as caught:
        assembler.expect_method(1)
    assert (caught.value.code, caught.value.text, caught.value.method) == (505, text, (60, 40))


def test_channel_0_has_no_content() -> None:
    """Its methods go to the connection, which refuses them."""
    assembler = Assembler(1000)
    assert isinstance(assembler.feed(RawFrame(1, 0, PUBLISH.payload)), commands.Basic.Publish)
    assert not assembler.is_pending(0)
