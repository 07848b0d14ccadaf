"""Start-up steps: a graph that must fit together before anything runs."""

from __future__ import annotations

import pytest

from leveret.broker.boot import (
    MARKERS,
    NETWORKING,
    ROUTING_READY,
    STORAGE_READY,
    BootError,
    BootStep,
    in_order,
    run_boot_steps,
)


def names(*steps: BootStep) -> list[str]:
    return [step.name for step in in_order((*MARKERS, *steps))]


def test_markers_stand_in_order() -> None:
    assert names() == [STORAGE_READY, ROUTING_READY, NETWORKING]


def test_a_step_runs_behind_what_it_requires_and_before_what_it_enables() -> None:
    order = names(
        BootStep("listeners", requires=(NETWORKING,)),
        BootStep("queues", requires=("exchanges",), enables=(ROUTING_READY,)),
        BootStep("exchanges", requires=(STORAGE_READY,), enables=(ROUTING_READY,)),
    )
    assert order.index(STORAGE_READY) < order.index("exchanges") < order.index("queues")
    assert order.index("queues") < order.index(ROUTING_READY)
    assert order[-1] == "listeners"


@pytest.mark.parametrize(
    ("steps", "complaint"),
    [
        pytest.param([BootStep("a", requires=("b",))], "'b', which is missing", id="missing"),
        pytest.param([BootStep("a", enables=("b",))], "'b', which is missing", id="enables"),
        pytest.param(
            [BootStep("a", requires=("b",)), BootStep("b", requires=("a",))],
            "wait for each other",
            id="cycle",
        ),
        pytest.param(
            [BootStep("a", requires=(NETWORKING,), enables=(STORAGE_READY,))],
            "wait for each other",
            id="cycle-through-markers",
        ),
        pytest.param([BootStep("a"), BootStep("a")], "two start-up steps", id="twice"),
    ],
)
def test_steps_that_do_not_fit_are_refused(steps: list[BootStep], complaint: str) -> None:
    with pytest.raises(BootError, match=complaint):
        in_order((*MARKERS, *steps))


async def test_nothing_runs_if_the_steps_do_not_fit() -> None:
    ran: list[str] = []

    async def run() -> None:
        ran.append("a")

    with pytest.raises(BootError):
        await run_boot_steps([BootStep("a", run), BootStep("b", run, requires=("c",))])
    assert not ran


async def test_a_step_that_fails_ends_the_start() -> None:
    ran: list[str] = []

    async def fail() -> None:
        raise OSError("no disk")

    async def run() -> None:
        ran.append("later")

    with pytest.raises(OSError, match="no disk"):
        await run_boot_steps([BootStep("a", fail), BootStep("b", run, requires=("a",))])
    assert not ran
