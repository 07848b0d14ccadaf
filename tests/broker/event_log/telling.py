"""A broker whose event log tells of messages, and what it has told once it has stopped."""

from __future__ import annotations

from dataclasses import replace
from types import TracebackType
from typing import Any

from leveret.broker.clock import Clock
from leveret.broker.config import Settings
from leveret.broker.event_log.schema import MESSAGE_KINDS, Event
from leveret.broker.server import Broker
from tests.broker.event_log.reading import assert_no_gaps, of_kind, only, read_events

_KINDS = {kind.name for kind in MESSAGE_KINDS}


class Telling:
    """``async with`` runs the broker; the log is to be read behind it."""

    def __init__(self, settings: Settings, clock: Clock | None = None, **changes: Any) -> None:
        self.settings = replace(settings, **{"event_log": "all", **changes})
        self.broker = Broker(self.settings, clock)
        # Of messages alone.
        self.events: list[Event] = []

    @property
    def url(self) -> str:
        return self.broker.url

    async def __aenter__(self) -> Telling:
        await self.broker.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.broker.stop()
        if error is None:
            boot = self.broker.event_log
            assert boot is not None
            every = read_events(self.settings.data / "events")
            its = [event for event in every if event.boot == boot.boot]
            assert_no_gaps(its)
            self.events = [event for event in its if event.ev in _KINDS]

    def kinds(self, *left_out: str) -> list[str]:
        return [event.ev for event in self.events if event.ev not in left_out]

    def of(self, ev: str) -> list[Event]:
        return of_kind(self.events, ev)

    def only(self, ev: str) -> Event:
        return only(self.events, ev)

    def only_msg(self) -> int:
        """The number of the one message there was."""
        numbers = {event.msg for event in self.events if event.msg}
        assert len(numbers) == 1, numbers
        return numbers.pop()
