"""What can be asked of a broker that runs: its state, statistics, a backup, a vhost's restart.

Upstream: ``admin/control.py``. Each handler takes a request and what to call with news of its
progress, and returns what becomes JSON.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leveret import __version__
from leveret.broker.admin.control import Handler, Progress, Refused
from leveret.broker.admin.parameters import ParameterHandlers
from leveret.broker.vhosts import VhostError
from leveret.protocol.twin import COMPILED
from leveret.storage.backup import WAL_MAX_BYTES, BackupError, back_up
from leveret.storage.vhost_store import StoreError

if TYPE_CHECKING:
    from leveret.broker.live_vhost import LiveVhost
    from leveret.broker.server import Broker

_SUMS = ("messages", "messages_ready", "messages_unacknowledged", "consumers")


class Handlers:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._started_at = broker.clock.monotonic()
        self._backup = asyncio.Lock()

    @property
    def by_command(self) -> dict[str, Handler]:
        return {
            "status": self._status,
            "statistics": self._statistics,
            "backup": self._back_up,
            "restart_vhost": self._restart_vhost,
            "trace_on": partial(self._trace, is_on=True),
            "trace_off": partial(self._trace, is_on=False),
            **ParameterHandlers(self._broker).by_command,
        }

    async def _status(self, request: Mapping[str, Any], tell: Progress) -> object:
        broker = self._broker
        readers = [reader for listener in broker.listeners for reader in listener.readers]
        return {
            "version": __version__,
            "pid": os.getpid(),
            "uptime_s": round(broker.clock.monotonic() - self._started_at, 3),
            "codec": "compiled" if COMPILED else "pure",
            "data": str(broker.settings.data.absolute()),
            "listeners": [listener.statistics() for listener in broker.listeners],
            "connections": len(readers),
            "loop": broker.loop_monitor.statistics(),
            "vhosts": [_vhost_status(vhost) for vhost in broker.vhosts.values()],
            "vhosts_down": dict(broker.vhosts.down),
            "event_log": {} if broker.event_log is None else broker.event_log.statistics(),
        }

    async def _statistics(self, request: Mapping[str, Any], tell: Progress) -> object:
        """``Broker.statistics``; with ``forget_longest`` the longest turn is sought anew."""
        statistics = _without_infinity(self._broker.statistics())
        if request.get("forget_longest"):
            self._broker.loop_monitor.forget()
        return statistics

    async def _back_up(self, request: Mapping[str, Any], tell: Progress) -> object:
        file = request.get("file")
        wal_max_bytes = request.get("wal_max_bytes", WAL_MAX_BYTES)
        if not isinstance(file, str) or not os.path.isabs(file) or "\0" in file:
            raise Refused("a backup needs a file, with its whole path")
        if not isinstance(wal_max_bytes, int) or wal_max_bytes <= 0:
            raise Refused("wal_max_bytes must be a number of bytes")
        if self._backup.locked():
            raise Refused("another backup is being made")
        async with self._backup:
            left_out = sorted(self._broker.vhosts.down)
            try:
                made = await back_up(
                    self._broker.databases,
                    self._broker.settings.data,
                    Path(file),
                    created_at=self._broker.clock.now(),
                    tell=lambda progress: tell(progress._asdict()),
                    wal_max_bytes=wal_max_bytes,
                )
            except BackupError as error:
                raise Refused(str(error)) from error
        return {**made._asdict(), "left_out": left_out}

    async def _restart_vhost(self, request: Mapping[str, Any], tell: Progress) -> object:
        name = request.get("vhost")
        if not isinstance(name, str):
            raise Refused("a vhost to restart is missing")
        try:
            vhost = await self._broker.restart_vhost(name)
        except (VhostError, StoreError) as error:
            raise Refused(str(error)) from error
        return _vhost_status(vhost)

    async def _trace(self, request: Mapping[str, Any], tell: Progress, *, is_on: bool) -> object:
        name = request.get("vhost")
        if not isinstance(name, str):
            raise Refused("a vhost to trace is missing")
        try:
            if is_on:
                self._broker.trace_on(name)
            else:
                self._broker.trace_off(name)
        except VhostError as error:
            raise Refused(str(error)) from error
        return {"vhost": name, "tracing": is_on}


def _without_infinity(value: Any) -> Any:
    """JSON has no infinity: what is not limited is null."""
    if isinstance(value, dict):
        return {key: _without_infinity(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_infinity(each) for each in value]
    return None if value == math.inf else value


def _vhost_status(vhost: LiveVhost) -> dict[str, object]:
    statistics: dict[str, Any] = vhost.statistics()
    queues = statistics["queues"].values()
    return {
        "name": vhost.name,
        "exchanges": len(statistics["exchanges"]),
        "queues": len(queues),
        **{name: sum(queue[name] for queue in queues) for name in _SUMS},
        "store": statistics["store"],
    }
