"""Methods: every one of them, both ways against pamqp; the errors of BEHAVIOUR for bad ones."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pamqp import commands
from pamqp import frame as pamqp_frame
from pamqp.base import Frame
from pamqp.body import ContentBody
from pamqp.header import ContentHeader

from leveret.protocol.codec import (
    UnknownMethod,
    content_frames,
    decode_method,
    encode_method,
    make,
    method_frame,
)
from leveret.protocol.errors import ConnectionException
from leveret.protocol.field_table import Field, table_from_python, to_python
from leveret.protocol.message import Message
from tests.protocol.streams import plain_tables, short_text

METHODS: list[Any] = list(commands.INDEX_MAPPING.values())

# Arguments that the specification reserves, with what pamqp wants them to be.
RESERVED: dict[str, Any] = {
    "ticket": 0,
    "capabilities": "",
    "channel_id": "0",
    "cluster_id": "",
    "insist": False,
    "known_hosts": "",
    "out_of_band": "0",
}
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "bit": st.booleans(),
    "octet": st.integers(0, 255),
    "short": st.integers(0, 65535),
    "long": st.integers(0, 0xFFFFFFFF),
    "longlong": st.integers(0, (1 << 63) - 1),
    "shortstr": st.text("abcXYZ019-_.:@#,/ ", max_size=30),
    "longstr": short_text,
    "table": plain_tables,
}


@st.composite
def arguments(draw: st.DrawFn, cls: Any) -> dict[str, Any]:
    return {
        name: RESERVED[name] if name in RESERVED else draw(VALUES[cls.amqp_type(name)], label=name)
        for name in cls.attributes()
    }


def build(cls: Any, values: dict[str, Any], *, typed: bool) -> Any:
    """The method with plain tables, as pamqp has them, or with typed ones, as we do."""
    method = cls.__new__(cls)
    for name, value in values.items():
        is_table = typed and cls.amqp_type(name) == "table"
        setattr(method, name, table_from_python(value) if is_table else value)
    return method


def plain(method: Frame) -> dict[str, Any]:
    return {
        name: {key: to_python(field) for key, field in value.items()}
        if isinstance(value, dict)
        else value
        for name, value in ((name, getattr(method, name)) for name in method.attributes())
    }


@pytest.mark.parametrize("cls", METHODS, ids=lambda cls: cls.name)
@settings(max_examples=15)
@given(data=st.data())
def test_every_method_both_ways(cls: Any, data: st.DataObject) -> None:
    values = data.draw(arguments(cls))

    ours = method_frame(7, build(cls, values, typed=True))
    with warnings.catch_warnings():
        # pamqp calls some methods deprecated; clients send them all the same.
        warnings.simplefilter("ignore", DeprecationWarning)
        theirs: Any
        consumed, channel, theirs = pamqp_frame.unmarshal(ours)
    assert (consumed, channel) == (len(ours), 7)
    assert type(theirs) is cls
    assert dict(theirs) == values

    whole = pamqp_frame.marshal(build(cls, values, typed=False), 7)
    decoded = decode_method(whole[7:-1])
    assert type(decoded) is cls
    assert plain(decoded) == values


@pytest.mark.parametrize("cls", METHODS, ids=lambda cls: cls.name)
def test_methods_are_made_empty(cls: Any) -> None:
    made = make(cls)
    assert plain(decode_method(encode_method(made))) == plain(made)


def test_methods_are_made_with_names_of_any_kind() -> None:
    made = make(commands.Queue.DeclareOk, queue="x" * 200 + "\udcff!", message_count=3)
    assert (made.queue, made.message_count, made.consumer_count) == ("x" * 200 + "\udcff!", 3, 0)
    assert plain(decode_method(encode_method(made))) == plain(made)


def test_methods_have_no_other_arguments() -> None:
    with pytest.raises(TypeError, match="requeue"):
        make(commands.Basic.Ack, delivery_tag=1, requeue=True)


def test_names_may_be_any_bytes() -> None:
    payload = b"\x00\x32\x00\x1e\x00\x00\x02\xff\xc3\x00"
    method = decode_method(payload)
    assert isinstance(method, commands.Queue.Purge)
    assert method.queue == "\udcff\udcc3"
    assert encode_method(method) == payload


def test_delivery_tags_are_unsigned() -> None:
    method = decode_method(b"\x00\x3c\x00\x50" + b"\xff" * 8 + b"\xff")
    assert isinstance(method, commands.Basic.Ack)
    assert (method.delivery_tag, method.multiple) == ((1 << 64) - 1, True)


def test_bits_share_an_octet() -> None:
    method = decode_method(b"\x00\x32\x00\x0a\x00\x00\x01q\x15\x00\x00\x00\x00")
    assert isinstance(method, commands.Queue.Declare)
    assert (
        method.passive,
        method.durable,
        method.exclusive,
        method.auto_delete,
        method.nowait,
    ) == (True, False, True, False, True)


def test_table_values_keep_their_types() -> None:
    command: Any = commands.Queue.Declare(queue="q")
    command.arguments = {"a": Field("s", 1), "b": Field("L", 1), "c": Field("x", b"\xff")}
    decoded: Any = decode_method(encode_method(command))
    assert decoded.arguments == command.arguments


@pytest.mark.parametrize(
    ("payload", "text", "method"),
    [
        pytest.param(b"\x00\x32\x00\x0a\x00\x00\x06a", "<<0,0,6,97>>", (50, 10), id="cut-short"),
        pytest.param(b"\x00\x32\x00\x0a", "<<>>", (50, 10), id="nothing-at-all"),
        pytest.param(b"\x00\x14\x00\x14\x01xyz", "<<1,120,121,122>>", (20, 20), id="left-over"),
        pytest.param(b"\x00\x14\x00\x14", "<<>>", (20, 20), id="no-bits"),
        pytest.param(
            b"\x00\x32\x00\x0a\x00\x00\x01q\x00\x00\x00\x00\x63",
            "<<0,0,1,113,0,0,0,0,99>>",
            (50, 10),
            id="table-longer-than-the-frame",
        ),
        pytest.param(
            b"\x00\x0a\x00\x14\x00\x00\x00\x02a", "<<0,0,0,2,97>>", (10, 20), id="long-string"
        ),
    ],
)
def test_arguments_that_do_not_fit_close_the_connection(
    payload: bytes, text: str, method: tuple[int, int]
) -> None:
    with pytest.raises(ConnectionException) as caught:
        decode_method(payload)
    assert caught.value.code == 501
    assert caught.value.text == f"cannot decode {text}"
    assert caught.value.method == method


def test_a_large_frame_is_quoted_in_part() -> None:
    with pytest.raises(ConnectionException) as caught:
        decode_method(b"\x00\x14\x00\x14" + b"\x01" * 100_000)
    assert 255 <= len(caught.value.text) < 1000


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"\x00\x63\x00\x0a", id="class"),
        pytest.param(b"\x00\x3c\x00\x63", id="method"),
        pytest.param(b"\x00\x32\x00\x0a\x00\x00\x01q\x00\x00\x00\x00\x03\x01aZ", id="field-type"),
        pytest.param(
            b"\x00\x32\x00\x0a\x00\x00\x01q\x00\x00\x00\x00\x03\x01aI", id="inside-a-table"
        ),
    ],
)
def test_what_nobody_knows(payload: bytes) -> None:
    with pytest.raises(UnknownMethod) as caught:
        decode_method(payload)
    assert caught.value.class_id << 16 | caught.value.method_id == int.from_bytes(payload[:4])


@given(st.sampled_from(METHODS), st.binary(max_size=40))
def test_any_bytes_decode_or_are_refused(cls: Any, raw: bytes) -> None:
    """What decodes also encodes, to something that decodes to the same."""
    try:
        method = decode_method(cls.index.to_bytes(4) + raw)
    except (ConnectionException, UnknownMethod):
        return
    assert plain(decode_method(encode_method(method))) == plain(method)


def test_values_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="255"):
        encode_method(commands.Basic.ConsumeOk("x" * 256))
    with pytest.raises(ValueError, match="short"):
        encode_method(commands.Connection.Tune(65536, 0, 0))


@pytest.mark.parametrize(
    ("body", "frame_max", "parts"),
    [
        pytest.param(b"", 4096, [], id="empty-body-has-no-frame"),
        pytest.param(b"abcdef", 4096, [b"abcdef"], id="one"),
        pytest.param(b"abcdef", 12, [b"abcd", b"ef"], id="split-by-frame-max"),
        pytest.param(b"abcdef", 14, [b"abcdef"], id="just-fits"),
        pytest.param(b"abcdef", 0, [b"abcdef"], id="no-limit"),
    ],
)
def test_content_frames(body: bytes, frame_max: int, parts: list[bytes]) -> None:
    message = Message(b"\x00\x01k", "", "k", b"\x08\x00\x05", body, 0, False)
    data = content_frames(3, commands.Basic.GetOk(9, True, "", "k", 4), message, frame_max)
    found: list[Any] = []
    while data:
        consumed, channel, one = pamqp_frame.unmarshal(data)
        assert channel == 3
        found.append(one)
        data = data[consumed:]
    method, header, *bodies = found
    assert isinstance(method, commands.Basic.GetOk)
    assert dict(method) == {
        "delivery_tag": 9,
        "redelivered": True,
        "exchange": "",
        "routing_key": "k",
        "message_count": 4,
    }
    assert type(header) is ContentHeader
    assert [header.class_id, header.weight, header.body_size] == [60, 0, len(body)]
    assert header.properties.priority == 5
    assert [one.value for one in bodies if isinstance(one, ContentBody)] == parts
