"""Lines of the event log: both twins give the same, for any pieces and numbers."""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leveret.protocol import lines as pure
from leveret.protocol import message as pure_message

if TYPE_CHECKING:
    compiled = pure
    CompiledMessage = pure_message.Message
else:
    compiled = pytest.importorskip("leveret.protocol._hot")
    CompiledMessage = compiled.Message

INT64 = st.integers(-(2**63), 2**63 - 1)
PIECES = st.binary(max_size=12) | st.sampled_from([b"%", b"%d", b"%%s", b'{"ts":', b"}\n"])
COUNT_MAX = 6


def columns(count: int) -> st.SearchStrategy[Any]:
    listed = st.lists(INT64, min_size=count, max_size=count + 2).map(lambda each: array("q", each))
    return listed | st.integers(-(2**63), 2**63 - 1 - count)


@st.composite
def fillings(draw: st.DrawFn) -> tuple[list[bytes], list[Any], int]:
    count = draw(st.integers(0, COUNT_MAX))
    width = draw(st.integers(0, pure.COLUMNS_MAX))
    pieces = [draw(PIECES) for _ in range(width + 1)]
    return pieces, [draw(columns(count)) for _ in range(width)], count


@given(fillings())
def test_fill_lines(filling: tuple[list[bytes], list[Any], int]) -> None:
    pieces, numbers, count = filling
    expected = b""
    for at in range(count):
        expected += pieces[0]
        for column, piece in zip(numbers, pieces[1:], strict=True):
            number = column + at if isinstance(column, int) else column[at]
            expected += str(number).encode() + piece
    assert pure.fill_lines(pieces, numbers, count) == expected
    assert compiled.fill_lines(pieces, numbers, count) == expected


@pytest.mark.parametrize("twin", [pure, compiled], ids=["pure", "compiled"])
@pytest.mark.parametrize(
    ("pieces", "numbers", "count"),
    [
        pytest.param([b"a"], [1], 1, id="a-piece-is-missing"),
        pytest.param([b"a"] * 10, [1] * 9, 1, id="too-many-columns"),
        pytest.param([b"a", b"b"], [array("q", [1])], 2, id="a-column-is-too-short"),
    ],
)
def test_what_does_not_fit(twin: Any, pieces: Any, numbers: Any, count: int) -> None:
    with pytest.raises(ValueError, match="column"):
        twin.fill_lines(pieces, numbers, count)


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 2**51), st.integers(0, 2**51), st.integers(0, 9)),
        max_size=8,
    ),
    st.integers(0, 2**52),
    st.integers(1, 2**62),
)
def test_messages_and_their_numbers(
    drawn: list[tuple[bool, int, int, int]], now_us: int, first: int
) -> None:
    answers = []
    for twin, kind in ((pure, pure_message.Message), (compiled, CompiledMessage)):
        messages = []
        for is_told, born_us, stamp_us, size in drawn:
            message = kind(b"", "", "", b"\0\0", b"x" * size, 0, False)
            message.log_id = born_us << pure.ID_BITS if is_told else 0
            message.stamp_us = stamp_us
            messages.append(message)
        found = twin.logged(messages, now_us)
        sizes = twin.stamp(messages, first)
        answers.append((found, sizes, [message.log_id for message in messages]))
    assert answers[0] == answers[1]
    assert answers[0][2] == [first + at for at in range(len(drawn))]


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[str, Any]]:
    """Deliveries and answers to them, to some twice, and to some that never were."""
    taken: list[tuple[str, Any]] = []
    tag = 1
    for _ in range(draw(st.integers(1, 12))):
        if draw(st.booleans()):
            gaps = draw(st.lists(st.integers(0, 3), min_size=1, max_size=5))
            tags = []
            for gap in gaps:
                tag += gap
                tags.append(tag)
                tag += 1
            taken.append(("add", (tags, draw(st.integers(0, 2)), draw(st.booleans()))))
        else:
            tags = draw(st.lists(st.integers(0, tag + 2) | st.just(2**64 - 1), max_size=8))
            taken.append(("settle", tags))
    if draw(st.booleans()):
        taken.append(("settle_all", None))
    return taken


@given(steps())
def test_what_is_held(taken: list[tuple[str, Any]]) -> None:
    """Both twins, and a dictionary, answer alike."""
    sources = ["a", "b", "c"]
    twins = [pure.Held(), compiled.Held()]
    model: dict[int, tuple[str, int, int]] = {}
    now_us, msg = 1_000, 1
    for step, what in taken:
        now_us += 7
        if step == "add":
            tags, source, may_be_first = what
            ids = list(range(msg, msg + len(tags)))
            msg += len(tags)
            is_consecutive = tags == list(range(tags[0], tags[0] + len(tags)))
            given_tags = tags[0] if is_consecutive and may_be_first else array("q", tags)
            for held in twins:
                held.add(given_tags, array("q", ids), now_us, sources[source])
            for tag, each in zip(tags, ids, strict=True):
                model[tag] = (sources[source], each, now_us)
            continue
        if step == "settle":
            found = [held.settle(what, now_us) for held in twins]
            expected = [(tag, model.pop(tag)) for tag in dict.fromkeys(what) if tag in model]
        else:
            found = [held.settle_all(now_us) for held in twins]
            expected = sorted(model.items())
            model.clear()
        flat = [
            (tag, (source, each, now_us - hold))
            for source, tags, ids, holds in found[0]
            for tag, each, hold in zip(tags, ids, holds, strict=True)
        ]
        assert flat == expected
        assert found[0] == found[1]
        runs = [source for source, *_ in found[0]]
        assert all(one != other for one, other in pairwise(runs))
    assert [len(held) for held in twins] == [len(model)] * 2


@pytest.mark.parametrize("twin", [pure, compiled], ids=["pure", "compiled"])
def test_one_that_is_never_answered_holds_up_nothing(twin: Any) -> None:
    """Runs that are done go, though the oldest stays."""
    held = twin.Held()
    held.add(1, array("q", [5]), 0, "a")
    for tag in range(2, 5_000):
        held.add(tag, array("q", [tag]), 0, "a")
        assert len(held.settle([tag], 1)) == 1
    assert len(held) == 1
    assert held.settle_all(3) == [("a", array("q", [1]), array("q", [5]), array("q", [3]))]
    assert held.settle_all(4) == []
