"""A broker on real sockets whose time stands still until the test moves the clock."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from leveret.broker.clock import VirtualClock
from leveret.broker.config import Settings
from leveret.broker.server import Broker
from leveret.storage.memory_queue import MemoryQueue


@pytest.fixture
async def timeless(settings: Settings, clock: VirtualClock) -> AsyncIterator[Broker]:
    async with Broker(settings, clock, MemoryQueue) as running:
        # The timers that are left are those of connections.
        running.stop_monitors()
        yield running
