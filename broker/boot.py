"""Start-up as a small graph of steps [1-7].

A step has a name, what it ``requires`` to have run before, and what it ``enables``, which waits
for it. A step without an action is a marker: others are put before and after it. A missing step,
a cycle or a name used twice is refused before anything runs; a step that fails ends the start.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

log = logging.getLogger(__name__)

# Markers, in this order: the store is open; everything that was declared is there again;
# clients may come.
STORAGE_READY = "storage_ready"
ROUTING_READY = "routing_ready"
NETWORKING = "networking"


class BootError(Exception):
    """The steps do not fit together; the text names the one that does not."""


@dataclass(frozen=True, slots=True)
class BootStep:
    name: str
    action: Callable[[], Awaitable[None]] | None = None
    requires: tuple[str, ...] = ()
    enables: tuple[str, ...] = ()


MARKERS = (
    BootStep(STORAGE_READY),
    BootStep(ROUTING_READY, requires=(STORAGE_READY,)),
    BootStep(NETWORKING, requires=(ROUTING_READY,)),
)


def in_order(steps: Iterable[BootStep]) -> list[BootStep]:
    """The steps, each behind what it needs; those that are free keep the order they came in."""
    by_name: dict[str, BootStep] = {}
    for step in steps:
        if step.name in by_name:
            raise BootError(f"two start-up steps are called '{step.name}'")
        by_name[step.name] = step
    before: dict[str, list[str]] = {name: list(step.requires) for name, step in by_name.items()}
    for step in by_name.values():
        for other in (*step.requires, *step.enables):
            if other not in by_name:
                raise BootError(f"start-up step '{step.name}' names '{other}', which is missing")
        for enabled in step.enables:
            before[enabled].append(step.name)
    try:
        names = list(TopologicalSorter(before).static_order())
    except CycleError as error:
        raise BootError(f"start-up steps wait for each other: {' -> '.join(error.args[1])}") from (
            error
        )
    return [by_name[name] for name in names]


async def run_boot_steps(steps: Iterable[BootStep]) -> None:
    for step in in_order((*MARKERS, *steps)):
        if step.action is not None:
            log.debug("start-up: %s", step.name)
            await step.action()
