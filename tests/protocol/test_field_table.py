"""Typed tables: both ways, against pamqp, and what is refused."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import decode, encode

from leveret.protocol.field_table import (
    MAX_DEPTH,
    Field,
    Table,
    TableError,
    check_table,
    decode_table,
    decode_value,
    encode_table,
    join_array,
    join_table,
    split_array,
    split_table,
    table_from_python,
    to_python,
    type_name,
)
from tests.protocol.streams import entry, nested, plain_tables, sized, tables


@given(tables)
def test_a_table_survives_both_ways(table: Table) -> None:
    raw = encode_table(table)
    assert decode_table(raw, 0) == (table, len(raw))
    assert check_table(raw, 0, len(raw)) == len(raw)


@given(tables)
def test_a_table_is_split_and_joined(table: Table) -> None:
    raw = b"??" + encode_table(table)
    pairs = split_table(raw, 2)
    assert join_table(pairs) == raw[2:]
    names = [name.decode("utf-8", "surrogateescape") for name, _ in pairs]
    assert dict(zip(names, [decode_value(value) for _, value in pairs], strict=True)) == table
    for field, (_, value) in zip(table.values(), pairs, strict=True):
        if field.tag == "A":
            items = split_array(value, 1)
            assert [decode_value(item) for item in items] == field.value
            assert b"A" + join_array(items) == value


@given(tables, st.data())
def test_a_table_that_is_cut_short_cannot_be_split(table: Table, data: st.DataObject) -> None:
    """Nor is anything read beyond its end."""
    raw = encode_table(table)
    if len(raw) == 4:
        return
    size = data.draw(st.integers(1, len(raw) - 5)) if len(raw) > 5 else 0
    cut = sized(raw[4 : 4 + size])
    try:
        pairs = split_table(cut, 0)
    except TableError:
        return
    assert join_table(pairs) == cut


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"\x00\x00\x00\x09\x01k", id="length"),
        pytest.param(b"\x00\x00\x00\x02\x01k", id="key"),
        pytest.param(b"\x00\x00\x00\x04\x01kI\x00" + bytes(8), id="integer"),
        pytest.param(b"\x00\x00\x00\x03\x01kb", id="octet"),
        pytest.param(b"\x00\x00\x00\x07\x01kS\x00\x00\x00\x01" + bytes(8), id="string"),
        pytest.param(b"\x00\x00\x00\x03\x01k?", id="unknown-type"),
    ],
)
def test_what_cannot_be_split(raw: bytes) -> None:
    with pytest.raises(TableError):
        split_table(raw, 0)


@given(plain_tables)
def test_pamqp_reads_what_we_write(mapping: dict[str, Any]) -> None:
    raw = encode_table(table_from_python(mapping))
    assert decode.field_table(raw) == (len(raw), mapping)


@given(plain_tables)
def test_we_read_what_pamqp_writes(mapping: dict[str, Any]) -> None:
    raw = encode.field_table(mapping)
    table, end = decode_table(raw, 0)
    assert end == len(raw)
    assert {key: to_python(field) for key, field in table.items()} == mapping


@given(st.binary(max_size=60))
def test_decoding_and_checking_agree_on_any_bytes(raw: bytes) -> None:
    """Whatever comes is a table or a TableError, nothing else."""
    raw = sized(raw)
    try:
        _, end = decode_table(raw, 0)
    except TableError:
        with pytest.raises(TableError):
            check_table(raw, 0, len(raw))
    else:
        assert check_table(raw, 0, len(raw)) == end == len(raw)


@pytest.mark.parametrize(
    ("tag", "raw", "value"),
    [
        pytest.param("t", b"\x02", True, id="any-octet-but-0-is-true"),
        pytest.param("b", b"\xff", -1, id="signed-8"),
        pytest.param("B", b"\xff", 255, id="unsigned-8"),
        pytest.param("s", b"\xff\xfe", -2, id="signed-16"),
        pytest.param("u", b"\xff\xfe", 65534, id="unsigned-16"),
        pytest.param("I", b"\xff\xff\xff\xff", -1, id="signed-32"),
        pytest.param("i", b"\xff\xff\xff\xff", 0xFFFFFFFF, id="unsigned-32"),
        pytest.param("l", b"\xff" * 8, -1, id="signed-64"),
        pytest.param("L", b"\xff" * 8, -1, id="large-l-is-signed-too"),
        pytest.param("f", struct.pack(">f", 1.5), 1.5, id="float"),
        pytest.param("d", struct.pack(">d", 0.1), 0.1, id="double"),
        pytest.param("D", b"\x02\x00\x00\x01\x00", (2, 256), id="decimal"),
        pytest.param("T", b"\xff" * 8, (1 << 64) - 1, id="timestamp-is-unsigned"),
        pytest.param("S", sized(b"\xc3\xa9\xff"), "é\udcff", id="string-of-any-bytes"),
        pytest.param("x", sized(b"\x00\xff"), b"\x00\xff", id="byte-array"),
        pytest.param("V", b"", None, id="void"),
        pytest.param("F", sized(entry(b"t", b"\x01")), {"k": Field("t", True)}, id="table"),
        pytest.param("A", sized(b"t\x00V"), [Field("t", False), Field("V", None)], id="array"),
    ],
)
def test_every_type(tag: str, raw: bytes, value: object) -> None:
    whole = sized(entry(tag.encode(), raw))
    table, end = decode_table(whole, 0)
    assert end == len(whole)
    assert table == {"k": Field(tag, value)}
    assert check_table(whole, 0, len(whole)) == len(whole)
    if tag != "t":
        assert encode_table(table) == whole


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"\x00\x00\x00", id="no-room-for-the-length"),
        pytest.param(b"\x00\x00\x00\x05abcd", id="longer-than-the-data"),
        pytest.param(sized(b"\x05abc"), id="key-longer-than-the-table"),
        pytest.param(sized(b"\x03abc"), id="key-without-a-value"),
        pytest.param(sized(entry(b"Z", b"")), id="unknown-type"),
        pytest.param(sized(entry(b"I", b"\x00\x00\x00")), id="integer-cut-short"),
        pytest.param(sized(entry(b"t", b"")), id="bool-cut-short"),
        pytest.param(sized(entry(b"S", b"\x00\x00")), id="string-length-cut-short"),
        pytest.param(sized(entry(b"S", b"\x00\x00\x00\x02a")) + b"b", id="string-leaves-table"),
        pytest.param(sized(entry(b"F", b"\x00\x00\x00\x03\x01aI")), id="inner-value-cut-short"),
        pytest.param(sized(entry(b"F", b"\x00\x00\x00\x09\x01aV")), id="inner-leaves-outer"),
        pytest.param(sized(entry(b"A", sized(b"I\x00"))), id="array-value-cut-short"),
        pytest.param(nested(MAX_DEPTH + 1, b"F"), id="tables-too-deep"),
        pytest.param(nested(MAX_DEPTH + 1, b"A"), id="arrays-too-deep"),
    ],
)
def test_malformed_tables_are_refused(raw: bytes) -> None:
    with pytest.raises(TableError):
        decode_table(raw, 0)
    with pytest.raises(TableError):
        check_table(raw, 0, len(raw))


@pytest.mark.parametrize("tag", [b"F", b"A"])
def test_the_deepest_allowed_table_is_read(tag: bytes) -> None:
    raw = nested(MAX_DEPTH, tag)
    table, _ = decode_table(raw, 0)
    assert encode_table(table) == raw
    assert check_table(raw, 0, len(raw)) == len(raw)


def test_a_table_must_end_where_it_is_told_to() -> None:
    raw = sized(entry(b"t", b"\x01"))
    with pytest.raises(TableError):
        decode_table(raw, 0, len(raw) - 1)


def test_of_equal_keys_the_first_counts() -> None:
    raw = sized(entry(b"b", b"\x01") + entry(b"b", b"\x02"))
    assert decode_table(raw, 0)[0] == {"k": Field("b", 1)}


def test_a_table_in_the_middle_of_data() -> None:
    raw = sized(entry(b"b", b"\x07"))
    assert decode_table(b"xx" + raw + b"yy", 2) == ({"k": Field("b", 7)}, 2 + len(raw))


@pytest.mark.parametrize(
    "field",
    [
        pytest.param(Field("B", 256), id="too-large"),
        pytest.param(Field("I", "1"), id="wrong-kind"),
        pytest.param(Field("f", 1e300), id="too-large-for-a-float"),
        pytest.param(Field("Q", 1), id="unknown-type"),
    ],
)
def test_values_that_do_not_fit_their_type_are_refused(field: Field) -> None:
    with pytest.raises(TableError):
        encode_table({"k": field})


def test_a_key_holds_255_bytes() -> None:
    assert decode_table(encode_table({"k" * 255: Field("V", None)}), 0)[0].keys() == {"k" * 255}
    with pytest.raises(TableError):
        encode_table({"é" * 128: Field("V", None)})


def test_plain_values_get_types() -> None:
    values = {"i": 1, "l": 1 << 40, "d": 1.5, "s": "x", "t": True, "x": b"x", "n": None}
    table = table_from_python({**values, "f": {"a": 1}, "a": ["x"]})
    assert "".join(field.tag for field in table.values()) == "IldStxVFA"
    assert {key: to_python(field) for key, field in table.items()} == {
        **values,
        "f": {"a": 1},
        "a": ["x"],
    }


def test_values_without_a_type_are_refused() -> None:
    with pytest.raises(TableError):
        table_from_python({"k": object()})


def test_type_names_are_those_of_rabbitmq() -> None:
    names = {tag: type_name(tag) for tag in "SIilLDTFbBsudftxVA"}
    assert names == {
        "S": "longstr",
        "I": "signedint",
        "i": "unsignedint",
        "l": "long",
        "L": "long",
        "D": "decimal",
        "T": "timestamp",
        "F": "table",
        "b": "byte",
        "B": "unsignedbyte",
        "s": "short",
        "u": "unsignedshort",
        "d": "double",
        "f": "float",
        "t": "bool",
        "x": "binary",
        "V": "void",
        "A": "array",
    }
