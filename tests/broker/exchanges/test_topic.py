"""Topic patterns: RabbitMQ's answers to each kind of pattern, and a naive matcher as a witness."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leveret.broker.exchanges.base import Binding
from leveret.broker.exchanges.topic import TopicExchange
from leveret.broker.resource import Resource

KEYS = ["", "a", "b", "a.b", "a.b.c", "b.a", ".", "a.", ".a", "a..b", "a.b.c.d", "*", "#"]


def bound(pattern: str, queue: str = "q") -> Binding:
    return Binding.of("x", Resource("/", "queue", queue), pattern, {})


def topic(*patterns: str) -> TopicExchange:
    """An exchange in which each pattern leads to a queue of the pattern's name."""
    exchange = TopicExchange()
    for pattern in patterns:
        exchange.add_binding(bound(pattern, pattern))
    return exchange


def matched(exchange: TopicExchange, *keys: str) -> list[str]:
    return sorted({where.name for where in exchange.route(keys, dict)})


def naive(pattern: list[str], words: list[str]) -> bool:
    if not pattern:
        return not words
    if pattern[0] == "#":
        return any(naive(pattern[1:], words[skip:]) for skip in range(len(words) + 1))
    return bool(words) and pattern[0] in ("*", words[0]) and naive(pattern[1:], words[1:])


def words(key: str) -> list[str]:
    return key.split(".") if key else []


@pytest.mark.parametrize(
    ("pattern", "keys", "matching"),
    [
        pytest.param("a.b", KEYS, ["a.b"], id="literal"),
        pytest.param("A.*", ["a.b", "A.b"], ["A.b"], id="case-matters"),
        pytest.param("*", KEYS, ["a", "b", "*", "#"], id="star-is-one-word"),
        pytest.param(
            "a.*.c",
            [*KEYS, "a.x.c", "a.c", "a.x.y.c", "a..c"],
            ["a.b.c", "a.x.c", "a..c"],
            id="star-in-the-middle",
        ),
        pytest.param("#", KEYS, KEYS, id="hash-is-everything"),
        pytest.param(
            "a.#", KEYS, ["a", "a.b", "a.b.c", "a.", "a..b", "a.b.c.d"], id="hash-at-the-end"
        ),
        pytest.param("#.b", KEYS, ["b", "a.b", "a..b"], id="hash-in-front"),
        pytest.param(
            "a.#.c",
            [*KEYS, "a.c", "a.x.y.c", "a.c.d", "c"],
            ["a.b.c", "a.c", "a.x.y.c"],
            id="hash-in-the-middle",
        ),
        pytest.param("*.#", KEYS, [key for key in KEYS if key], id="star-hash-needs-a-word"),
        pytest.param("#.*.#", KEYS, [key for key in KEYS if key], id="hash-star-hash"),
        pytest.param(
            "#.a.#",
            [*KEYS, "x.a.y", "x.y", "a.a"],
            ["a", "a.b", "a.b.c", "b.a", "a.", ".a", "a..b", "a.b.c.d", "x.a.y", "a.a"],
            id="two-hashes",
        ),
        pytest.param("", KEYS, [""], id="empty-pattern-is-the-empty-key"),
        pytest.param(".", KEYS, ["."], id="dot-is-two-empty-words"),
        pytest.param("a*", ["a*", "ab"], ["a*"], id="star-within-a-word-is-a-letter"),
        pytest.param("a.b", ["a.*", "a.#", "#", "a.b"], ["a.b"], id="no-wildcards-in-keys"),
        pytest.param("#.#", KEYS, KEYS, id="hash-hash"),
    ],
)
def test_pattern(pattern: str, keys: list[str], matching: list[str]) -> None:
    exchange = topic(pattern)
    assert [key for key in keys if matched(exchange, key)] == matching


def test_wildcard_letters_in_keys_do_not_reach_wildcard_patterns_twice() -> None:
    exchange = topic("*", "#")
    assert sorted(where.name for where in exchange.route(["*"], dict)) == ["#", "*"]


def test_any_of_several_keys() -> None:
    assert matched(topic("a.*", "b", "c"), "a.x", "c") == ["a.*", "c"]


def test_same_destination_stays_until_its_last_binding_goes() -> None:
    exchange = TopicExchange()
    first, second = bound("a.*"), bound("a.#")
    exchange.add_binding(first)
    exchange.add_binding(second)
    exchange.remove_binding(second)
    assert matched(exchange, "a.b") == ["q"]
    assert matched(exchange, "a.b.c") == []


def test_many_hashes_do_not_explode() -> None:
    """A backtracking matcher would need 10^20 steps here."""
    exchange = topic("#." * 20 + "end")
    began = time.process_time()
    assert matched(exchange, ".".join(["a"] * 120)) == []
    assert time.process_time() - began < 1


words_st = st.sampled_from(["a", "b", "", "*", "#"])
patterns_st = st.lists(words_st, max_size=5).map(".".join)
keys_st = st.lists(words_st, max_size=6).map(".".join)


@given(st.lists(patterns_st, max_size=8, unique=True), keys_st)
def test_agrees_with_a_naive_matcher(patterns: list[str], key: str) -> None:
    expected = sorted(p for p in patterns if naive(words(p), words(key)))
    assert matched(topic(*patterns), key) == expected


@given(
    st.lists(patterns_st, max_size=8, unique=True), st.lists(patterns_st, max_size=8, unique=True)
)
def test_removal_leaves_the_rest_and_no_empty_nodes(kept: list[str], removed: list[str]) -> None:
    fresh = topic(*kept)
    exchange = topic(*kept)
    extra = [bound(pattern, "extra") for pattern in removed]
    for binding in extra:
        exchange.add_binding(binding)
    for binding in extra:
        exchange.remove_binding(binding)
    assert exchange.info() == fresh.info()
    for key in KEYS:
        assert matched(exchange, key) == matched(fresh, key)
