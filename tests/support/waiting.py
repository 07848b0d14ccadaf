"""Waiting for what a broker in the test's own loop will do, with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

DEADLINE_S = 20.0
STEP_S = 0.005


async def wait_until(condition: Callable[[], object]) -> None:
    """Return once the condition holds; raises TimeoutError where it does not in good time."""
    async with asyncio.timeout(DEADLINE_S):
        # Nothing tells a test of such changes, and nothing in the product should only for its sake.
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(STEP_S)


async def wait_until_quiet(observe: Callable[[], object], quiet_s: float) -> None:
    """Return once what is observed has stayed the same for so long."""
    async with asyncio.timeout(DEADLINE_S):
        last, same_s = observe(), 0.0
        while same_s < quiet_s:
            await asyncio.sleep(STEP_S)
            now = observe()
            same_s = same_s + STEP_S if now == last else 0.0
            last = now
