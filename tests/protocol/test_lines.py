"""Lines of the event log: both twins give the same, for any pieces and numbers."""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
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
def entries(draw: st.DrawFn) -> Any:
    if draw(st.booleans()):
        return draw(PIECES)
    count = draw(st.integers(0, COUNT_MAX))
    width = draw(st.integers(0, pure.COLUMNS_MAX))
    pieces = tuple(draw(PIECES) for _ in range(width + 1))
    numbers = tuple(draw(columns(count)) for _ in range(width))
    depth = draw(st.integers(-1, 2**40))
    return draw(INT64), depth, draw(st.integers(0, 2**62)), pieces, numbers, count


def expected_lines(now_us: int, depth: int, seq: int, pieces: Any, numbers: Any, count: int) -> str:
    lines = ""
    for at in range(count):
        lines += f'{{"ts":{now_us},' + (f'"depth":{depth},' if depth >= 0 else "")
        lines += f'"seq":{seq + at}' + pieces[0].decode("latin-1")
        for column, piece in zip(numbers, pieces[1:], strict=True):
            number = column + at if isinstance(column, int) else column[at]
            lines += str(number) + piece.decode("latin-1")
    return lines


@given(st.lists(st.lists(entries(), max_size=4), max_size=3))
def test_format_lines(batches: list[list[Any]]) -> None:
    """Batch after batch in the same memory, which grows and is never cut."""
    buffers = {pure: bytearray(), compiled: bytearray()}
    for batch in batches:
        expected = b""
        for entry in batch:
            whole = isinstance(entry, bytes)
            expected += entry if whole else expected_lines(*entry).encode("latin-1")
        for twin, buffer in buffers.items():
            size = twin.format_lines(batch, buffer)
            assert bytes(buffer[:size]) == expected


@pytest.mark.parametrize("twin", [pure, compiled], ids=["pure", "compiled"])
@pytest.mark.parametrize(
    ("pieces", "numbers", "count"),
    [
        pytest.param((b"a",), (1,), 1, id="a-piece-is-missing"),
        pytest.param((b"a",) * 10, (1,) * 9, 1, id="too-many-columns"),
        pytest.param((b"a", b"b"), (array("q", [1]),), 2, id="a-column-is-too-short"),
    ],
)
def test_what_does_not_fit(twin: Any, pieces: Any, numbers: Any, count: int) -> None:
    with pytest.raises(ValueError, match="column"):
        twin.format_lines([(1, 0, 1, pieces, numbers, count)], bytearray())


def test_lines_are_made_while_others_run() -> None:
    """The compiled twin lets go of the GIL: another thread gets its turns in the middle of it."""
    batch: list[Any] = [(1, 0, 1, (b"x" * 100, b"y" * 100), (1,), 200_000)]
    buffer = bytearray()
    ticks: deque[float] = deque(maxlen=100_000)
    is_done = threading.Event()

    def tick() -> None:
        while not is_done.wait(0.0001):
            ticks.append(time.perf_counter())

    ticker = threading.Thread(target=tick)
    ticker.start()
    try:
        # Once is enough; a machine that is busy may not let the other thread run each time.
        for _ in range(50):
            begin = time.perf_counter()
            compiled.format_lines(batch, buffer)
            quarter = (time.perf_counter() - begin) / 4
            if any(begin + quarter < at < begin + 2 * quarter for at in tuple(ticks)):
                break
        else:
            pytest.fail("nobody else ran")
    finally:
        is_done.set()
        ticker.join()


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
        assert twin.is_told(messages) == (found is not None)
        sizes = twin.stamp(messages, first, now_us)
        numbers = [(message.log_id, message.stamp_us) for message in messages]
        answers.append((found, sizes, numbers))
        assert twin.is_told(messages) == (len(messages) > 0)
    assert answers[0] == answers[1]
    # A number that is ahead of the clock does not tell when its message came.
    is_ahead = first >> pure.ID_BITS > now_us
    stamps = [now_us if is_ahead else stamp_us for _, _, stamp_us, _ in drawn]
    assert answers[0][2] == [(first + at, stamp_us) for at, stamp_us in enumerate(stamps)]


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
                held.add(given_tags, array("q", ids), len(ids), now_us, sources[source])
            for tag, each in zip(tags, ids, strict=True):
                model[tag] = (sources[source], each, now_us)
            continue
        if step == "settle":
            # It may only err on one side.
            is_held = any(tag in model for tag in what)
            assert all(held.may_hold(what) for held in twins) or not is_held
            found = [held.settle(what, now_us) for held in twins]
            expected = [(tag, model.pop(tag)) for tag in dict.fromkeys(what) if tag in model]
        else:
            found = [held.settle_all(now_us) for held in twins]
            expected = sorted(model.items())
            model.clear()
        flat = [
            (tag, (source, each, now_us - hold))
            for source, count, *columns_ in found[0]
            for tag, each, hold in zip(*[pure.each_of(one, count) for one in columns_], strict=True)
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
    held.add(1, 5, 1, 0, "a")
    for tag in range(2, 5_000):
        held.add(tag, tag, 1, 0, "a")
        assert len(held.settle([tag], 1)) == 1
    assert len(held) == 1
    (source, count, *found), *others = held.settle_all(3)
    assert (source, count, *(list(pure.each_of(one, 1)) for one in found)) == (
        "a",
        1,
        [1],
        [5],
        [3],
    )
    assert others == []
    assert held.settle_all(4) == []


@pytest.mark.parametrize("twin", [pure, compiled], ids=["pure", "compiled"])
def test_tags_that_are_surely_not_held(twin: Any) -> None:
    held = twin.Held()
    assert not held.may_hold([1])
    held.add(10, 1, 1, 0, "a")
    held.add(array("q", [12, 15]), array("q", [2, 3]), 2, 0, "a")
    assert not held.may_hold([])
    assert not held.may_hold([1, 9])
    assert not held.may_hold([16, 17])
    assert held.may_hold([9, 10])
    assert held.may_hold([15])
    # In any order.
    assert held.may_hold([99, 10, 1])
    assert held.may_hold([1, 10, 2])
    assert not held.may_hold([99, 1, 16])
    held.settle_all(1)
    assert not held.may_hold([10, 15])


@pytest.mark.parametrize("twin", [pure, compiled], ids=["pure", "compiled"])
def test_a_buffer_tells_of_its_batches(twin: Any) -> None:
    told: list[object] = []

    def full() -> None:
        told.append(("full", buffer.size, buffer.take()))

    template = twin.Template((b',"msg":', b"}\n"))
    size = pure.LINE_BYTES + 2 * pure.NUMBER_BYTES + len(b',"msg":}\n')
    assert template.size == size
    run = pure.ENTRY_BYTES + 3 * size
    buffer = twin.LineBuffer(2 * run, lambda at: told.append(at), full, told.append)
    buffer.add(5, template, (7,), 3)
    buffer.add_line(6, b"{}\n")
    assert (told, buffer.size, buffer.next_seq) == ([5], run + 3, 5)
    buffer.add(7, template, (9,), 3, 2)
    entries = [(5, -1, 1, template.pieces, (7,), 3), b"{}\n", (7, 2, 5, template.pieces, (9,), 3)]
    assert told == [5, ("full", 2 * run + 3, entries)]
    assert (buffer.entries, buffer.size, buffer.next_seq) == ([], 0, 8)
    buffer.is_shut = True
    buffer.add(8, template, (1,), 4)
    assert told[2:] == [4]
    assert (buffer.entries, buffer.next_seq) == ([], 8)
    buffer.is_shut = False
    buffer.add_line(9, b"x" * (2 * run))
    assert told[3:] == [9, ("full", 2 * run, [b"x" * (2 * run)])]
