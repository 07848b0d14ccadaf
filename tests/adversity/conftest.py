"""For every test of adversity: whatever clients do, it is no error of ours.

An error in the log, or a traceback, fails the test: also those of tasks and callbacks that nobody
waits for, which the event loop reports to the log.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest

from leveret.broker.clock import VirtualClock
from leveret.broker.config import Settings
from leveret.broker.server import Broker


class _Complaints(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or record.exc_info:
            self.texts.append(self.format(record))


@pytest.fixture(autouse=True)
def no_complaints() -> Iterator[list[str]]:
    """What was logged as an error, so far; must be empty at the end."""
    handler = _Complaints()
    make_record = logging.getLogRecordFactory()

    def make_plain_record(*args: Any, **named: Any) -> logging.LogRecord:
        # pytest keeps all records, and with their arguments whatever a logged exception holds.
        record = make_record(*args, **named)
        record.msg, record.args = record.getMessage(), None
        return record

    logging.setLogRecordFactory(make_plain_record)
    root = logging.getLogger()
    root.addHandler(handler)
    yield handler.texts
    # Exceptions that were never looked at are reported when they are collected.
    gc.collect()
    root.removeHandler(handler)
    logging.setLogRecordFactory(make_record)
    assert not handler.texts, "\n".join(handler.texts)


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """A channel that had deliveries looks for late ones a last time before its timer goes: soon
    enough for a census. The event log has timers of its own."""
    return replace(settings, consumer_timeout=60_000, event_log="off")


@pytest.fixture
async def timeless_broker(settings: Settings, clock: VirtualClock) -> AsyncIterator[Broker]:
    """A broker whose time stands still until the test moves ``clock``."""
    async with Broker(settings, clock) as running:
        # The timers that are left are those of connections.
        running.stop_monitors()
        yield running
