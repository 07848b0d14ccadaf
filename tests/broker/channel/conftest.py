"""A channel that runs, on a clock that stands still."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from leveret.broker.clock import VirtualClock
from tests.broker.channel.bench import ChannelBench


@pytest.fixture
async def bench(clock: VirtualClock) -> AsyncIterator[ChannelBench]:
    async with ChannelBench(clock) as bench:
        yield bench
