"""Alarms: what is short (memory, disk), and who waits for it to be over [22-24].

Whoever watches a resource sets and clears its alarm here; readers look at ``active`` when they hand
on what was published, and wait for ``AlarmsCleared``. Only connections that publish are ever held
back, so that consumers can take what fills memory or disk.

A write that fails counts as a disk that is short: only acks confirm until it works, and more
of what cannot be written would only fill the memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from leveret.broker.node import NODE_NAME

if TYPE_CHECKING:
    from pathlib import Path

    from leveret.broker.clock import Clock, Timer
    from leveret.broker.events import Events
    from leveret.broker.mailbox import Mailbox

log = logging.getLogger(__name__)

MEMORY = "memory"
DISK = "disk"

# At most this long between two looks at the disk; sooner where it may be full sooner.
DISK_CHECK_S = 5.0
_DISK_CHECK_MIN_S = 0.1
# What a fast disk takes, in bytes per second.
_FAST_DISK = 250_000_000


class AlarmsCleared(NamedTuple):
    """To those who wait: no alarm is active, or none was for a moment."""


class Alarms:
    def __init__(self, events: Events | None = None) -> None:
        self._events = events
        # What is wrong -> what it is short of. Empty, and so false, when all is well.
        self.active: dict[str, str] = {}
        self._waiting: set[Mailbox] = set()

    @property
    def reason(self) -> str:
        """As RabbitMQ words it for connection.blocked."""
        resources = sorted(set(self.active.values()), key=(MEMORY, DISK).index)
        return f"low on {' & '.join(resources)}"

    def has(self, resource: str) -> bool:
        return resource in self.active.values()

    def set(self, cause: str, resource: str, details: str = "") -> None:
        """``cause`` tells alarms about one resource apart. Twice is fine."""
        if cause in self.active:
            return
        is_new = not self.has(resource)
        self.active[cause] = resource
        if is_new:
            self._tell("alarm.set", resource)
        log.warning("alarm: %s%s; publishers are blocked", cause, details and f" ({details})")

    def clear(self, cause: str) -> None:
        """Those who wait are told when the last one is cleared."""
        resource = self.active.pop(cause, None)
        if resource is None:
            return
        if not self.has(resource):
            self._tell("alarm.cleared", resource)
        log.warning("alarm cleared: %s", cause)
        if self.active:
            return
        log.warning("no alarms are left; publishers go on")
        waiting, self._waiting = self._waiting, set()
        for mailbox in waiting:
            mailbox.put_urgent(AlarmsCleared())

    def _tell(self, kind: str, resource: str) -> None:
        """Of a resource, whatever the causes: as RabbitMQ does."""
        if self._events is not None and self._events.is_heard:
            self._events.notify(kind, {"source": resource, "node": NODE_NAME})

    def call_when_cleared(self, mailbox: Mailbox) -> None:
        self._waiting.add(mailbox)

    def forget(self, mailbox: Mailbox) -> None:
        self._waiting.discard(mailbox)

    def on_trouble(self, vhost: str, error: Exception | None) -> None:
        """The store of a virtual host cannot write, or (None) can again."""
        cause = f"writes fail in vhost '{vhost}'"
        if error is None:
            self.clear(cause)
        else:
            self.set(cause, DISK, str(error))

    def statistics(self) -> list[dict[str, str]]:
        return [{"resource": resource, "cause": cause} for cause, resource in self.active.items()]


class DiskMonitor:
    """Looks how much room the data folder has, the more often the less it is."""

    CAUSE = "disk is nearly full"

    def __init__(
        self,
        clock: Clock,
        folder: Path,
        limit: int,
        read_free: Callable[[Path], int],
        alarms: Alarms,
    ) -> None:
        self._clock = clock
        self._folder = folder
        self._limit = limit
        self._read_free = read_free
        self._alarms = alarms
        self._free: int | None = None
        self._timer: Timer | None = None

    def start(self) -> None:
        if self._limit:
            self._check()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        wait_s = DISK_CHECK_S
        try:
            free = self._free = self._read_free(self._folder)
        except OSError as error:
            # Unknown is no reason to change anything: a disk that is gone fails writes as well.
            log.warning("the room in %s cannot be told: %s", self._folder, error)
        else:
            if free < self._limit:
                details = f"{free} bytes free, {self._limit} wanted"
                self._alarms.set(self.CAUSE, DISK, details)
            else:
                self._alarms.clear(self.CAUSE)
                # The time in which half of what is left could be written.
                soon_s = (free - self._limit) / (2 * _FAST_DISK)
                wait_s = min(DISK_CHECK_S, max(_DISK_CHECK_MIN_S, soon_s))
        self._timer = self._clock.call_later(wait_s, self._check)

    def statistics(self) -> dict[str, object]:
        return {"free": self._free, "limit": self._limit}
