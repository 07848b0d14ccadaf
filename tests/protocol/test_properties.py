"""Properties of a message, read from and written to the raw content header."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands
from pamqp.header import ContentHeader

from leveret.protocol.codec import (
    Properties,
    headers_span,
    pick_delivery_mode,
    pick_expiration,
    pick_headers,
    pick_priority,
    pick_reply_to,
    pick_user_id,
    read_properties,
    without_expiration,
    write_properties,
)
from leveret.protocol.field_table import Table, encode_table, to_python
from leveret.protocol.hot import scan_properties
from leveret.protocol.message import (
    NEEDS_EXPIRATION,
    NEEDS_HEADERS,
    NEEDS_MODE,
    NEEDS_PRIORITY,
    NEEDS_REPLY_TO,
    NEEDS_USER_ID,
)
from tests.protocol.streams import any_text, plain_tables, short_text, tables

NAMES = [field.name for field in fields(Properties)]


def is_refused(read: Callable[..., object], *args: object) -> bool:
    """Whether it raises ValueError; anything else it raises fails the test."""
    try:
        read(*args)
    except ValueError:
        return True
    return False


@st.composite
def properties(draw: st.DrawFn) -> Properties:
    kinds: dict[str, st.SearchStrategy[Any]] = {
        "headers": tables,
        "delivery_mode": st.integers(0, 255),
        "priority": st.integers(0, 255),
        "timestamp": st.integers(0, (1 << 64) - 1),
    }
    return Properties(**{name: draw(st.none() | kinds.get(name, any_text)) for name in NAMES})


@given(properties())
def test_properties_survive_both_ways(wanted: Properties) -> None:
    assert read_properties(write_properties(wanted)) == wanted


@given(properties())
def test_pickers_agree_with_reading_everything(wanted: Properties) -> None:
    header = write_properties(wanted)
    assert pick_headers(header) == wanted.headers
    assert pick_delivery_mode(header) == wanted.delivery_mode
    assert pick_priority(header) == wanted.priority
    assert pick_reply_to(header) == wanted.reply_to
    assert pick_expiration(header) == wanted.expiration
    assert pick_user_id(header) == wanted.user_id


@given(properties())
def test_an_expiration_is_cut_out(wanted: Properties) -> None:
    header, expiration = without_expiration(write_properties(wanted))
    cut = None if expiration is None else expiration.decode("utf-8", "surrogateescape")
    assert cut == wanted.expiration
    assert read_properties(header) == replace(wanted, expiration=None)


@given(properties(), tables)
def test_headers_are_put_in_place_of_others_or_where_there_were_none(
    wanted: Properties, headers: Table
) -> None:
    header = write_properties(wanted)
    flags, start, end = headers_span(header)
    changed = flags + header[2:start] + encode_table(headers) + header[end:]
    assert read_properties(changed) == replace(wanted, headers=headers)


@given(properties())
def test_scanning_finds_what_needs_a_look(wanted: Properties) -> None:
    header = write_properties(wanted)
    needs = sum(
        need
        for need, is_needed in {
            NEEDS_HEADERS: wanted.headers is not None,
            NEEDS_PRIORITY: wanted.priority is not None,
            NEEDS_REPLY_TO: wanted.reply_to is not None,
            NEEDS_EXPIRATION: wanted.expiration is not None,
            NEEDS_USER_ID: wanted.user_id is not None,
            NEEDS_MODE: wanted.delivery_mode not in (None, 1, 2),
        }.items()
        if is_needed
    )
    assert scan_properties(header, 0, len(header)) == (needs, wanted.delivery_mode == 2)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "content_type": short_text.filter(bool),
            "headers": plain_tables,
            "delivery_mode": st.sampled_from((1, 2)),
            "priority": st.integers(0, 255),
            "correlation_id": short_text.filter(bool),
            "expiration": st.integers(0, 10**9).map(str),
            "timestamp": st.integers(0, 1 << 31),
            "message_type": short_text.filter(bool),
            "app_id": short_text.filter(bool),
        },
    )
)
def test_pamqp_agrees(values: dict[str, Any]) -> None:
    theirs = dict(values)
    if "timestamp" in theirs:
        theirs["timestamp"] = datetime.fromtimestamp(values["timestamp"], tz=UTC)
    raw = ContentHeader(properties=commands.Basic.Properties(**theirs)).marshal()[12:]
    ours = {
        name: value for name, value in asdict(read_properties(raw)).items() if value is not None
    }
    read_headers = read_properties(raw).headers
    if read_headers is not None:
        ours["headers"] = {key: to_python(field) for key, field in read_headers.items()}
    assert ours == values

    again = ContentHeader()
    again.unmarshal(b"\x00\x3c\x00\x00" + bytes(8) + write_properties(read_properties(raw)))
    assert {name: value for name, value in again.properties if value not in (None, "")} == theirs


@given(st.binary(max_size=40))
def test_reading_and_scanning_agree_on_any_bytes(raw: bytes) -> None:
    """Well-formed for both, or a ValueError for both."""
    assert is_refused(read_properties, raw) == is_refused(scan_properties, raw, 0, len(raw))


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"\x00", id="no-flags"),
        pytest.param(b"\x00\x00\x00", id="left-over"),
        pytest.param(b"\x80\x00", id="string-missing"),
        pytest.param(b"\x80\x00\x02a", id="string-cut-short"),
        pytest.param(b"\x10\x00", id="octet-missing"),
        pytest.param(b"\x08\x00", id="priority-missing"),
        pytest.param(b"\x00\x40" + bytes(7), id="timestamp-cut-short"),
        pytest.param(b"\x20\x00\x00\x00\x00\x09", id="table-longer-than-the-header"),
        pytest.param(b"\x20\x00\x00\x00\x00\x03\x01aZ", id="unknown-field-type"),
    ],
)
def test_malformed_properties_are_refused(raw: bytes) -> None:
    assert is_refused(read_properties, raw)
    assert is_refused(scan_properties, raw, 0, len(raw))


def test_flags_without_a_property_are_ignored() -> None:
    """Bit 1 is unused; RabbitMQ does not look at bit 0 either."""
    assert read_properties(b"\x80\x03\x01a") == Properties(content_type="a")
    assert scan_properties(b"\x80\x03\x01a", 0, 4) == (0, False)


def test_a_string_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="255"):
        write_properties(Properties(reply_to="x" * 256))
