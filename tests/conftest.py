"""Fixtures for every test: uvloop as the event loop, a broker in it, a broker process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import uvloop

from leveret.broker.clock import VirtualClock
from leveret.broker.config import Settings
from tests.support.broker_process import BrokerProcess, running_broker

if TYPE_CHECKING:
    from leveret.broker.server import Broker


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(port=0, data=tmp_path / "data")


@pytest.fixture
def clock() -> Iterator[VirtualClock]:
    """Time that the test moves by hand."""
    virtual = VirtualClock()
    yield virtual
    virtual.close()


@pytest.fixture
async def broker(settings: Settings) -> AsyncIterator[Broker]:
    """A broker in the test's own event loop, on a free port."""
    # Here, so that the codec's tests do not load the broker.
    from leveret.broker.server import Broker

    running = Broker(settings)
    await running.start()
    yield running
    await running.stop()


@pytest.fixture(scope="session")
def broker_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """One real broker process for all tests of a worker: use names of your own.

    What needs one to itself (to kill it, to give it flags) uses ``running_broker``.
    """
    with running_broker(tmp_path_factory.mktemp("broker")) as process:
        yield process
