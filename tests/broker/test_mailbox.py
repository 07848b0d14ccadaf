"""Two lanes, one owner: who is woken by what, and what is left at the end."""

from __future__ import annotations

import asyncio

import pytest

from leveret.broker.mailbox import Mailbox


@pytest.fixture
def mailbox() -> Mailbox:
    return Mailbox("somebody")


async def start_turn(mailbox: Mailbox, *, urgent_only: bool = False) -> asyncio.Task[None]:
    """A task that has begun to wait."""
    task = asyncio.create_task(mailbox.turn(urgent_only=urgent_only))
    await asyncio.sleep(0)
    return task


async def is_awake(task: asyncio.Task[None]) -> bool:
    """Whether the task ends in the turns of the loop that follow."""
    for _ in range(3):
        await asyncio.sleep(0)
    return task.done()


async def cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def test_lanes_keep_their_order(mailbox: Mailbox) -> None:
    for item in (1, 2, 3):
        assert mailbox.put(item)
        assert mailbox.put_urgent(-item)
    assert len(mailbox) == 6
    assert mailbox.take_urgent() == [-1, -2, -3]
    assert mailbox.take_urgent() == []
    assert list(mailbox.ordinary) == [1, 2, 3]
    assert len(mailbox) == 3


@pytest.mark.parametrize("lane", ["put", "put_urgent"])
async def test_either_lane_wakes_the_owner(mailbox: Mailbox, lane: str) -> None:
    task = await start_turn(mailbox)
    assert not await is_awake(task)
    getattr(mailbox, lane)("news")
    assert await is_awake(task)


async def test_two_items_wake_once(mailbox: Mailbox) -> None:
    """The second one finds nobody waiting."""
    task = await start_turn(mailbox)
    mailbox.put(1)
    mailbox.put_urgent(2)
    mailbox.put(3)
    assert await is_awake(task)
    assert len(mailbox) == 3


async def test_an_owner_that_waits_for_urgent_news_sleeps_through_the_rest(
    mailbox: Mailbox,
) -> None:
    mailbox.put("already there")
    task = await start_turn(mailbox, urgent_only=True)
    mailbox.put("comes")
    assert not await is_awake(task)
    mailbox.put_urgent("wakes")
    assert await is_awake(task)


async def test_waiting_for_urgent_news_is_forgotten_afterwards(mailbox: Mailbox) -> None:
    task = await start_turn(mailbox, urgent_only=True)
    mailbox.put_urgent("wakes")
    await task
    mailbox.take_urgent()
    task = await start_turn(mailbox)
    mailbox.put("wakes as well")
    assert await is_awake(task)


@pytest.mark.parametrize("urgent_only", [False, True])
async def test_a_turn_lets_others_run_even_if_something_waits(
    mailbox: Mailbox, urgent_only: bool
) -> None:
    """Or a busy task would starve those that feed it, and batches would hold one item each."""
    seen: list[str] = []

    async def owner() -> None:
        for _ in range(3):
            await mailbox.turn(urgent_only=urgent_only)
            seen.append("owner")

    async def other() -> None:
        for _ in range(3):
            seen.append("other")
            await asyncio.sleep(0)

    mailbox.put_urgent("waits")
    await asyncio.gather(owner(), other())
    assert seen[:4] == ["other", "owner", "other", "owner"]


async def test_a_pause_is_one_turn_whatever_waits(mailbox: Mailbox) -> None:
    task = asyncio.create_task(mailbox.pause())
    assert await is_awake(task)


async def test_a_wait_that_is_cancelled_leaves_nothing_behind(mailbox: Mailbox) -> None:
    await cancel(await start_turn(mailbox, urgent_only=True))
    mailbox.put_urgent("nobody is there")
    task = await start_turn(mailbox)
    assert await is_awake(task)
    assert mailbox.take_urgent() == ["nobody is there"]


async def test_news_between_cancellation_and_the_end_of_the_wait(mailbox: Mailbox) -> None:
    """The owner's future is cancelled already: waking it must not raise."""
    task = await start_turn(mailbox)
    task.cancel()
    assert mailbox.put("late")
    await asyncio.wait([task])
    assert task.cancelled()
    assert list(mailbox.ordinary) == ["late"]


def test_a_closed_mailbox_returns_what_was_left_and_refuses_the_rest(mailbox: Mailbox) -> None:
    mailbox.put("a")
    mailbox.put("b")
    mailbox.put_urgent("first")
    assert mailbox.close() == ["first", "a", "b"]
    assert mailbox.is_closed
    assert not mailbox.put("c")
    assert not mailbox.put_urgent("d")
    assert len(mailbox) == 0
    assert mailbox.close() == []


def test_it_says_whose_it_is(mailbox: Mailbox) -> None:
    assert repr(mailbox) == "<Mailbox of somebody>"


async def test_waiting_for_more_is_not_ended_by_what_is_there(mailbox: Mailbox) -> None:
    mailbox.put(1)
    mailbox.put_urgent(2)
    task = asyncio.create_task(mailbox.wait_more())
    assert not await is_awake(task)
    mailbox.put(3)
    assert await is_awake(task)
    task = asyncio.create_task(mailbox.wait_more())
    await asyncio.sleep(0)
    mailbox.wake()
    assert await is_awake(task)
    assert len(mailbox) == 3
