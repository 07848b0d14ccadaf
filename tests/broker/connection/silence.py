"""What a client sees of a connection that ends without a word, at the time it is due."""

from __future__ import annotations

import asyncio

import pytest

from leveret.broker.clock import VirtualClock
from leveret.broker.server import Broker
from tests.support.raw_client import Hangup, RawClient
from tests.support.waiting import wait_until


async def is_still_open(broker: Broker, client: RawClient) -> bool:
    """Whether the broker, having had its turns, still has the one connection there is."""
    for _ in range(50):
        await asyncio.sleep(0)
    return len(broker.listeners[0].readers) == 1


async def expect_silent_close(
    broker: Broker, client: RawClient, clock: VirtualClock, after_s: float
) -> None:
    """Nothing is said, and the socket is closed after so long, not before."""
    due = clock.monotonic() + after_s
    # The deadline of this wait is the only timer there is.
    await wait_until(lambda: clock._next_due() == due)
    clock.advance(after_s - 0.1)
    assert await is_still_open(broker, client)
    clock.advance(0.1)
    with pytest.raises(Hangup):
        await client.receive()
    await wait_until(lambda: not broker.listeners[0].readers)
    assert clock.statistics()["timers"] == 0
