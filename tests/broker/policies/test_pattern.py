"""Patterns as RabbitMQ reads them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leveret.broker.policies.pattern import BadPattern, compile_pattern, is_match


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        pytest.param("ord", "my.orders", True, id="anywhere"),
        pytest.param("^ord", "my.orders", False, id="anchored-at-the-start"),
        pytest.param("ers$", "my.orders", True, id="anchored-at-the-end"),
        pytest.param("", "anything", True, id="empty-matches-everything"),
        pytest.param(".*", "", True, id="the-empty-name"),
        pytest.param("^(?!amq\\.).*", "amq.topic", False, id="lookahead"),
        pytest.param("^(?!amq\\.).*", "orders", True, id="lookahead-passes"),
        pytest.param("(?i)ORD", "orders", True, id="without-case"),
        pytest.param(r"a\z", "a", True, id="very-end"),
        pytest.param(r"a\z", "a\n", False, id="very-end-is-not-before-a-newline"),
        pytest.param(r"a\Z", "a\n", True, id="end-may-be-before-a-newline"),
        pytest.param(r"^(?<team>\w+)\.x$", "a.x", True, id="named-group"),
        pytest.param(r"(?<=a)b", "ab", True, id="lookbehind-is-no-named-group"),
        pytest.param(r"^\Qa.b\E$", "a.b", True, id="quoted"),
        pytest.param(r"^\Qa.b\E$", "axb", False, id="quoted-dot"),
        pytest.param("^[[:alpha:]]+$", "abc", True, id="posix-class"),
        pytest.param("^[[:alpha:]]+$", "ab1", False, id="posix-class-is-not-more"),
        pytest.param("^[^[:digit:]_]+$", "a:", True, id="posix-class-negated-set"),
        pytest.param("^[]a]+$", "]a", True, id="bracket-first-in-a-class"),
        pytest.param("^[^]a]+$", "bc", True, id="bracket-first-in-a-negated-class"),
        pytest.param("^[a[]$", "[", True, id="open-bracket-in-a-class"),
        pytest.param("^[a[]b]$", "[b]", True, id="class-ends-at-the-first-bracket"),
        pytest.param("^[a&&b]$", "&", True, id="ampersands-in-a-class"),
        pytest.param(r"^[\h]$", "\t", True, id="blank-in-a-class"),
        pytest.param(r"a\hb", "a b", True, id="blank"),
        pytest.param("é", "caf\u00e9", True, id="utf-8"),
        pytest.param("^.{5}$", "caf\u00e9", True, id="bytes-not-characters"),
        pytest.param("^.$", "\udcff", True, id="not-utf-8"),
    ],
)
def test_pattern(pattern: str, name: str, expected: bool) -> None:
    assert is_match(pattern, name) is expected


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        pytest.param("*", '{"nothing to repeat",0}', id="star"),
        pytest.param("a(", '{"missing ), unterminated subpattern",1}', id="open"),
        pytest.param("[[:nonsense:]]", '{"unknown or misplaced POSIX class",1}', id="class"),
        pytest.param("[:alpha:]", '{"unknown or misplaced POSIX class",0}', id="bare-class"),
        pytest.param(r"\K", r'{"bad escape \K",0}', id="what-python-does-not-know"),
    ],
)
def test_refused(pattern: str, reason: str) -> None:
    with pytest.raises(BadPattern) as refused:
        compile_pattern(pattern)
    assert str(refused.value) == reason


@given(st.text(st.characters(codec="utf-8", exclude_characters="\\["), max_size=20))
def test_what_needs_no_rewriting_is_left_alone(pattern: str) -> None:
    try:
        expected = re.compile(pattern.replace("(?<a", "(?P<a").encode())
    except (re.error, OverflowError):
        return
    assert compile_pattern(pattern).pattern == expected.pattern


@given(st.text(max_size=20))
def test_no_pattern_is_worse_than_refused(pattern: str) -> None:
    try:
        compile_pattern(pattern)
    except BadPattern:
        pass


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_quoted_text_means_itself(text: str) -> None:
    if "\\E" not in text and not text.endswith("\\"):
        assert is_match(rf"\A\Q{text}\E\z", text)
