"""Single frames, and bytes as Erlang prints them."""

from __future__ import annotations

import pytest

from leveret.protocol.framing import body_limit, frame, octets, unknown_frame


def test_frame_layout() -> None:
    assert frame(1, 258, b"ab") == b"\x01\x01\x02\x00\x00\x00\x02ab\xce"


@pytest.mark.parametrize(("frame_max", "limit"), [(4096, 4088), (9, 1), (0, 0xFFFFFFFF)])
def test_body_limit(frame_max: int, limit: int) -> None:
    assert body_limit(frame_max) == limit


def test_octets_are_decimals() -> None:
    assert octets(b"ab") == "<<97,98>>"


@pytest.mark.parametrize(
    ("payload", "printed"),
    [
        pytest.param(b"", "all octets = <<>>", id="empty"),
        pytest.param(b"abc", 'all octets = <<"abc">>', id="text"),
        pytest.param(b'a"\\\n\t\x1b b', r'all octets = <<"a\"\\\n\t\e b">>', id="escapes"),
        pytest.param(b"a\x00", "all octets = <<97,0>>", id="not-text"),
        pytest.param(b"\x7f", "all octets = <<127>>", id="delete-is-not-text"),
        pytest.param(b"\xe9", 'all octets = <<"\udce9">>', id="latin-1"),
        pytest.param(b"a" * 16, f'all octets = <<"{"a" * 16}">>', id="sixteen"),
        pytest.param(b"a" * 17, f'first 16 octets = <<"{"a" * 16}">>', id="seventeen"),
    ],
)
def test_payloads_in_texts(payload: bytes, printed: str) -> None:
    assert unknown_frame(7, payload).text == f"type 7, {printed}: unknown_frame"
