"""Timers: order, cancelling, failing callbacks; on the virtual clock and on the real one."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leveret.broker.clock import RealClock, Timer, VirtualClock

LIMIT_S = 5.0


@pytest.fixture
def real() -> Iterator[RealClock]:
    clock = RealClock()
    yield clock
    clock.close()


def test_virtual_time_stands_still(clock: VirtualClock) -> None:
    before = (clock.now(), clock.monotonic())
    clock.advance(0)
    assert (clock.now(), clock.monotonic()) == before


def test_virtual_time_starts_where_it_is_told() -> None:
    clock = VirtualClock(start=1000.0)
    clock.advance(2.5)
    assert (clock.now(), clock.monotonic()) == (1002.5, 2.5)


def test_timers_run_in_order_of_due_time_each_at_its_own(clock: VirtualClock) -> None:
    ran: list[tuple[str, float]] = []
    for name, delay_s in (("c", 3), ("a", 1), ("b", 2)):
        clock.call_later(delay_s, lambda name: ran.append((name, clock.monotonic())), name)
    clock.advance(2.5)
    assert ran == [("a", 1), ("b", 2)]
    clock.advance(0.5)
    assert ran[2:] == [("c", 3)]


def test_equal_times_run_in_the_order_they_were_asked_for(clock: VirtualClock) -> None:
    ran: list[int] = []
    for number in range(20):
        clock.call_at(1.0, ran.append, number)
    clock.advance(1)
    assert ran == list(range(20))


def test_callback_may_ask_for_more_within_the_span(clock: VirtualClock) -> None:
    ticks: list[float] = []

    def tick() -> None:
        ticks.append(clock.monotonic())
        clock.call_later(1, tick)

    clock.call_later(1, tick)
    clock.advance(3.5)
    assert ticks == [1, 2, 3]
    assert clock.monotonic() == 3.5


def test_what_was_due_in_the_past_runs_now(clock: VirtualClock) -> None:
    clock.advance(10)
    ran: list[float] = []
    clock.call_at(3, lambda: ran.append(clock.monotonic()))
    assert ran == []
    clock.advance(0)
    assert ran == [10]


def test_cancelled_timer_never_runs(clock: VirtualClock) -> None:
    ran: list[str] = []
    kept = clock.call_later(1, ran.append, "kept")
    dropped = clock.call_later(1, ran.append, "dropped")
    dropped.cancel()
    dropped.cancel()
    clock.advance(2)
    assert ran == ["kept"]
    assert (kept.is_waiting, dropped.is_waiting) == (False, False)
    kept.cancel()
    assert clock.statistics() == {"timers": 0, "cancelled": 0}


def test_callback_may_cancel_one_that_is_due_at_the_same_time(clock: VirtualClock) -> None:
    ran: list[str] = []
    timers: list[Timer] = []
    clock.call_at(1, lambda: timers[0].cancel())
    timers.append(clock.call_at(1, ran.append, "second"))
    clock.advance(1)
    assert ran == []


def test_failing_callback_is_logged_and_stops_nobody(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[str] = []
    clock.call_later(1, "not a number".index, "missing")
    clock.call_later(2, ran.append, "next")
    with caplog.at_level(logging.ERROR):
        clock.advance(2)
    assert ran == ["next"]
    assert [record.exc_info is not None for record in caplog.records] == [True]


def test_cancelled_timers_do_not_pile_up(clock: VirtualClock) -> None:
    """A heartbeat that is put off a hundred thousand times needs the room of one."""
    for _ in range(10):
        clock.call_later(1000, print)
    for _ in range(100_000):
        clock.call_later(60, print).cancel()
    held = clock.statistics()
    assert held["timers"] == 10
    assert held["cancelled"] <= held["timers"]


@given(
    delays=st.lists(st.integers(0, 50), max_size=60),
    seed=st.integers(0, 2**32),
    steps=st.lists(st.integers(0, 30), min_size=1, max_size=10),
)
def test_cancelling_any_leaves_the_others_in_order(
    delays: list[int], seed: int, steps: list[int]
) -> None:
    clock = VirtualClock()
    ran: list[tuple[float, int]] = []
    timers = [
        clock.call_later(delay, lambda index: ran.append((clock.monotonic(), index)), index)
        for index, delay in enumerate(delays)
    ]
    chance = random.Random(seed)
    cancelled = {index for index in range(len(timers)) if chance.random() < 0.6}
    for index in chance.sample(sorted(cancelled), len(cancelled)):
        timers[index].cancel()
    for step in steps:
        clock.advance(step)
    expected = [
        (delay, index)
        for index, delay in enumerate(delays)
        if index not in cancelled and delay <= sum(steps)
    ]
    assert ran == sorted(expected)


def test_time_does_not_go_back(clock: VirtualClock) -> None:
    with pytest.raises(ValueError, match="-1"):
        clock.advance(-1)


def test_callback_cannot_advance_the_clock(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    clock.call_later(1, clock.advance, 1)
    clock.advance(1)
    assert "cannot advance the clock" in caplog.text
    assert clock.monotonic() == 1


async def test_sleeper_wakes_when_its_time_has_come(clock: VirtualClock) -> None:
    sleeper = asyncio.ensure_future(clock.sleep(10))
    await asyncio.sleep(0)
    clock.advance(9.9)
    await asyncio.sleep(0)
    assert not sleeper.done()
    clock.advance(0.1)
    async with asyncio.timeout(LIMIT_S):
        await sleeper


async def test_cancelled_sleeper_leaves_no_timer(clock: VirtualClock) -> None:
    sleeper = asyncio.ensure_future(clock.sleep(10))
    await asyncio.sleep(0)
    assert clock.statistics()["timers"] == 1
    sleeper.cancel()
    await asyncio.wait([sleeper], timeout=LIMIT_S)
    assert sleeper.cancelled()
    assert clock.statistics()["timers"] == 0


async def test_closing_cancels_timers_and_sleepers(clock: VirtualClock) -> None:
    ran: list[str] = []
    timer = clock.call_later(1, ran.append, "timer")
    sleeper = asyncio.ensure_future(clock.sleep(1))
    await asyncio.sleep(0)
    clock.close()
    await asyncio.wait([sleeper], timeout=LIMIT_S)
    assert sleeper.cancelled()
    assert not timer.is_waiting
    assert not clock.call_later(0, ran.append, "late").is_waiting
    clock.advance(2)
    assert ran == []


async def test_real_timers_run_in_order_and_not_early(real: RealClock) -> None:
    started = time.monotonic()
    ran: list[tuple[str, float]] = []
    done = asyncio.Event()

    def note(name: str) -> None:
        ran.append((name, time.monotonic() - started))
        if len(ran) == 3:
            done.set()

    # The second replaces the first as the earliest; the third does not.
    for name, delay_s in (("b", 0.02), ("a", 0.001), ("c", 0.03)):
        real.call_later(delay_s, note, name)
    async with asyncio.timeout(LIMIT_S):
        await done.wait()
    assert [name for name, _ in ran] == ["a", "b", "c"]
    due = {"a": 0.001, "b": 0.02, "c": 0.03}
    assert [name for name, after_s in ran if after_s < due[name]] == []


async def test_real_clock_arms_the_loop_once(
    real: RealClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand timers, one of the loop's."""
    armed: list[float] = []
    arm = RealClock._arm

    def counting(clock: RealClock) -> None:
        before = clock._handle
        arm(clock)
        if clock._handle is not before and clock._handle is not None:
            armed.append(clock._armed_for)

    monkeypatch.setattr(RealClock, "_arm", counting)
    timers = [real.call_later(1000 + number, print) for number in range(1000)]
    assert armed == [timers[0].due]
    real.call_later(1, print)
    assert len(armed) == 2


async def test_real_timer_whose_predecessor_was_cancelled_still_runs(real: RealClock) -> None:
    done = asyncio.Event()
    real.call_later(0.005, done.set)
    first = real.call_later(0.001, print)
    first.cancel()
    async with asyncio.timeout(LIMIT_S):
        await done.wait()


async def test_real_callback_that_wants_to_run_at_once_again_lets_the_loop_turn(
    real: RealClock,
) -> None:
    rounds = 0
    done = asyncio.Event()

    def again() -> None:
        nonlocal rounds
        rounds += 1
        if not done.is_set():
            real.call_later(0, again)

    real.call_later(0, again)
    asyncio.get_running_loop().call_later(0.005, done.set)
    async with asyncio.timeout(LIMIT_S):
        await done.wait()
    assert rounds > 1


async def test_real_failing_callback_stops_nobody(
    real: RealClock, caplog: pytest.LogCaptureFixture
) -> None:
    done = asyncio.Event()
    real.call_later(0, "not a number".index, "missing")
    real.call_later(0, done.set)
    async with asyncio.timeout(LIMIT_S):
        await done.wait()
    assert "substring not found" in caplog.text


async def test_real_sleep_takes_its_time(real: RealClock) -> None:
    started = time.monotonic()
    async with asyncio.timeout(LIMIT_S):
        await real.sleep(0.02)
    assert time.monotonic() - started >= 0.02


async def test_real_clock_waits_for_ever_if_asked(real: RealClock) -> None:
    """Further away than event loops can count, and other timers still run."""
    done = asyncio.Event()
    never = real.call_later(float("inf"), print)
    real.call_later(0.001, done.set)
    async with asyncio.timeout(LIMIT_S):
        await done.wait()
    assert never.is_waiting


async def test_real_clock_is_idle_once_closed(real: RealClock) -> None:
    real.call_later(1000, print)
    real.close()
    assert real._handle is None


def test_wall_clock_is_the_machines(real: RealClock) -> None:
    assert abs(real.now() - time.time()) < LIMIT_S
    assert abs(real.monotonic() - time.monotonic()) < LIMIT_S
