"""The composition root: the one place that builds concrete objects; start and shutdown order.

``async with Broker(Settings(port=0)) as broker: broker.url`` runs a broker inside any program.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING
from urllib.parse import quote

from leveret.broker.auth.mechanisms import AmqPlain, Plain
from leveret.broker.auth.users import Users
from leveret.broker.clock import Clock, RealClock
from leveret.broker.config import Settings
from leveret.broker.connection.listener import Listener
from leveret.broker.exchanges import register_builtins
from leveret.broker.interceptors.timestamp import TimestampInterceptor
from leveret.broker.live_vhost import LiveVhost
from leveret.broker.registry import Registries
from leveret.storage.vhost_store import StoreSettings, VhostStore

if TYPE_CHECKING:
    from leveret.storage.backing_queue import BackingQueue

# How long clients may take to agree to a shutdown.
CLOSE_CONNECTIONS_S = 2.0


class Broker:
    """Settings in, a running broker out. Not to be started twice."""

    def __init__(
        self,
        settings: Settings | None = None,
        clock: Clock | None = None,
        make_backing: Callable[[Callable[[], None]], BackingQueue] | None = None,
    ) -> None:
        """``make_backing`` makes what keeps each queue's messages, instead of the files in the
        data folder: ``MemoryQueue`` for a broker that writes nothing."""
        self.settings = settings if settings is not None else Settings()
        self.clock = clock if clock is not None else RealClock()
        self.registries = Registries()
        self._register_builtins()
        self.users = Users()
        self.vhosts: dict[str, LiveVhost] = {}
        self.listeners: list[Listener] = []
        self._make_backing = make_backing
        self._is_stopped = False

    def _register_builtins(self) -> None:
        """Built-in kinds come through the same door as those of installed packages."""
        register_builtins(self.registries)
        self.registries.interceptors.register("message-timestamp", TimestampInterceptor)
        self.registries.auth_mechanisms.register("AMQPLAIN", AmqPlain)
        self.registries.auth_mechanisms.register("PLAIN", Plain)

    async def start(self) -> None:
        """Listeners come last: nobody connects to a broker that is not ready [7]."""
        settings = self.settings
        self.registries.load_entry_points()
        self.users.add(settings.default_user, settings.default_pass)
        await self.add_vhost(settings.default_vhost)
        listener = Listener(self, "amqp", settings.host, settings.port)
        self.listeners.append(listener)
        try:
            await listener.start()
        except BaseException:
            # Nobody stops what has not started, and the threads of the stores would stay.
            await self.stop()
            raise

    async def stop(self) -> None:
        """Listeners first, then connections (closed with 320), then queues. Twice is fine."""
        if self._is_stopped:
            return
        self._is_stopped = True
        for listener in self.listeners:
            listener.stop_accepting()
        for listener in self.listeners:
            await listener.close_connections(CLOSE_CONNECTIONS_S)
        for vhost in self.vhosts.values():
            await vhost.stop()
        self.clock.close()

    async def __aenter__(self) -> Broker:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def add_vhost(self, name: str) -> LiveVhost:
        """Start a virtual host, with what its files have of it."""
        make, settings = self._make_backing, self.settings
        if make is not None:
            factory = make
            vhost = LiveVhost(
                name,
                self.registries,
                self.clock,
                settings,
                make_backing=lambda queue, wake, spend: factory(wake),
            )
        else:
            store = VhostStore(
                settings.data / "vhosts",
                name,
                StoreSettings(settings.synchronous, settings.queue_index_embed_msgs_below),
                now=self.clock.monotonic,
                sleep=self.clock.sleep,
                on_trouble=lambda error: None,
            )
            vhost = LiveVhost(name, self.registries, self.clock, settings, store=store)
        await vhost.start()
        self.vhosts[name] = vhost
        return vhost

    @property
    def port(self) -> int:
        """The port it listens on, also where a free one was asked for."""
        return self.listeners[0].port

    @property
    def url(self) -> str:
        """For clients on this machine, with the default user's password."""
        user, password = (
            quote(text, safe="")
            for text in (self.settings.default_user, self.settings.default_pass)
        )
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.settings.host, self.settings.host)
        host = f"[{host}]" if ":" in host else host
        vhost = quote(self.settings.default_vhost, safe="")
        return f"amqp://{user}:{password}@{host}:{self.port}/{vhost}"

    def statistics(self) -> dict[str, object]:
        return {
            "listeners": [listener.statistics() for listener in self.listeners],
            "connections": [
                reader.statistics() for listener in self.listeners for reader in listener.readers
            ],
            "vhosts": [vhost.statistics() for vhost in self.vhosts.values()],
            "timers": self.clock.statistics(),
        }
