"""The composition root: the one place that builds concrete objects; start and shutdown order.

``async with Broker(Settings(port=0)) as broker: broker.url`` runs a broker inside any program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING
from urllib.parse import quote

from leveret.broker.admin.control import ControlSocket
from leveret.broker.admin.handlers import Handlers
from leveret.broker.alarms import Alarms, DiskMonitor
from leveret.broker.auth.mechanisms import AmqPlain, Plain
from leveret.broker.auth.users import Users
from leveret.broker.boot import (
    NETWORKING,
    ROUTING_READY,
    STORAGE_READY,
    BootStep,
    run_boot_steps,
)
from leveret.broker.clock import Clock, RealClock
from leveret.broker.config import Settings
from leveret.broker.connection.listener import Listener
from leveret.broker.exchanges import register_builtins
from leveret.broker.interceptors.timestamp import TimestampInterceptor
from leveret.broker.live_vhost import LiveVhost
from leveret.broker.memory_monitor import MemoryMonitor, Probes
from leveret.broker.registry import Registries
from leveret.storage.folder_lock import FolderLock
from leveret.storage.vhost_store import StoreSettings, VhostStore

if TYPE_CHECKING:
    from leveret.broker.mailbox import Mailbox
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
        probes: Probes | None = None,
    ) -> None:
        """``make_backing`` makes what keeps each queue's messages, instead of the files in the
        data folder: ``MemoryQueue`` for a broker that writes nothing. ``probes`` tell how
        much memory and disk there is, instead of this machine."""
        self.settings = settings if settings is not None else Settings()
        self.clock = clock if clock is not None else RealClock()
        self.registries = Registries()
        self._register_builtins()
        self.users = Users()
        self.vhosts: dict[str, LiveVhost] = {}
        self.listeners: list[Listener] = []
        self._make_backing = make_backing
        self._probes = probes if probes is not None else Probes()
        self.alarms = Alarms()
        self.memory: MemoryMonitor | None = None
        self.disk: DiskMonitor | None = None
        self._lock = FolderLock(self.settings.data)
        self._control: ControlSocket | None = None
        self._is_stopped = False

    def _register_builtins(self) -> None:
        """Built-in kinds come through the same door as those of installed packages."""
        register_builtins(self.registries)
        self.registries.interceptors.register("message-timestamp", TimestampInterceptor)
        self.registries.auth_mechanisms.register("AMQPLAIN", AmqPlain)
        self.registries.auth_mechanisms.register("PLAIN", Plain)

    async def start(self) -> None:
        """Listeners come last: nobody connects to a broker that is not ready [7].

        Raises StoreError if the data folder cannot be used, OSError if the port cannot.
        """
        try:
            await run_boot_steps(self._boot_steps())
        except BaseException:
            # Nobody stops what has not started, and the threads of the stores would stay.
            await self.stop()
            raise

    def _boot_steps(self) -> Iterable[BootStep]:
        """What starting is made of; a virtual host brings back its own exchanges, queues and
        bindings, in that order."""
        yield BootStep("plug_ins", self._load_plug_ins, enables=(STORAGE_READY,))
        if self._make_backing is None:
            yield BootStep("data_folder", self._take_data_folder, enables=(STORAGE_READY,))
        yield BootStep(
            "default_user",
            self._add_default_user,
            requires=(STORAGE_READY,),
            enables=(ROUTING_READY,),
        )
        yield BootStep(
            "default_vhost",
            self._add_default_vhost,
            requires=(STORAGE_READY,),
            enables=(ROUTING_READY,),
        )
        yield BootStep(
            "monitors", self._begin_monitoring, requires=(ROUTING_READY,), enables=(NETWORKING,)
        )
        yield BootStep("listeners", self._start_listeners, requires=(NETWORKING,))
        if self._make_backing is None:
            yield BootStep("control_socket", self._start_control, requires=("listeners",))

    async def _load_plug_ins(self) -> None:
        self.registries.load_entry_points()

    async def _take_data_folder(self) -> None:
        self._lock.take()

    async def _add_default_user(self) -> None:
        self.users.add(self.settings.default_user, self.settings.default_pass)

    async def _add_default_vhost(self) -> None:
        await self.add_vhost(self.settings.default_vhost)

    async def _begin_monitoring(self) -> None:
        self._start_monitors()

    async def _start_listeners(self) -> None:
        listener = Listener(self, "amqp", self.settings.host, self.settings.port)
        self.listeners.append(listener)
        await listener.start()

    async def _start_control(self) -> None:
        self._control = ControlSocket(self.settings.data, Handlers(self).by_command)
        await self._control.start()

    async def stop(self) -> None:
        """Control socket and listeners first, then connections (closed with 320), then queues.

        Twice is fine.
        """
        if self._is_stopped:
            return
        self._is_stopped = True
        if self._control is not None:
            await self._control.stop()
        for listener in self.listeners:
            listener.stop_accepting()
        for listener in self.listeners:
            await listener.close_connections(CLOSE_CONNECTIONS_S)
        for vhost in self.vhosts.values():
            await vhost.stop()
        self.stop_monitors()
        self._lock.release()
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

    def _start_monitors(self) -> None:
        """Memory and disk are looked at before the first client comes, and from then on."""
        settings, probes = self.settings, self._probes
        if self._make_backing is None:
            self.disk = DiskMonitor(
                self.clock, settings.data, settings.disk_free_limit, probes.free_disk, self.alarms
            )
            self.disk.start()
        self.memory = MemoryMonitor(
            self.clock, settings.memory_high_watermark, probes, self._queue_mailboxes, self.alarms
        )
        self.memory.start()

    def stop_monitors(self) -> None:
        """Look no more; alarms stay as they are."""
        for monitor in (self.memory, self.disk):
            if monitor is not None:
                monitor.stop()

    def _queue_mailboxes(self) -> Iterator[Mailbox]:
        for vhost in self.vhosts.values():
            for queue in vhost.topology.queues.values():
                yield queue.mailbox

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
                on_trouble=partial(self.alarms.on_trouble, name),
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
            "alarms": self.alarms.statistics(),
            "memory": {} if self.memory is None else self.memory.statistics(),
            "disk": {} if self.disk is None else self.disk.statistics(),
        }
