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
from leveret.broker.auth.users import Users, make_user
from leveret.broker.boot import (
    NETWORKING,
    ROUTING_READY,
    STORAGE_READY,
    BootStep,
    run_boot_steps,
)
from leveret.broker.clock import Clock, RealClock
from leveret.broker.config import Settings
from leveret.broker.connection.listener import Listener, wait_or_cut
from leveret.broker.event_log.journal import Journal
from leveret.broker.event_log.messages import MessageLog
from leveret.broker.event_log.objects import ObjectEvents
from leveret.broker.events import Events
from leveret.broker.exchanges import register_builtins
from leveret.broker.interceptors.timestamp import TimestampInterceptor
from leveret.broker.limits import Limits
from leveret.broker.live_vhost import LiveVhost
from leveret.broker.loop_monitor import LoopMonitor
from leveret.broker.memory_monitor import MemoryMonitor, Probes
from leveret.broker.policies.store import Policies
from leveret.broker.registry import Registries
from leveret.broker.vhosts import OnDamage, VhostError, Vhosts
from leveret.storage.broker_store import BrokerState, BrokerStore
from leveret.storage.data_folder import found_vhosts
from leveret.storage.folder_lock import FolderLock
from leveret.storage.vhost_store import StoreSettings, VhostStore

if TYPE_CHECKING:
    from leveret.broker.mailbox import Mailbox
    from leveret.storage.backing_queue import BackingQueue
    from leveret.storage.database import Database

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
        self.events = Events(self.clock)
        self.registries = Registries()
        self._register_builtins()
        # What is known of virtual hosts and users; None where nothing is to be written.
        self._store = BrokerStore(self.settings.data) if make_backing is None else None
        self._stored = BrokerState(True, [], [], [], {})
        self.users = Users(self._store, self._evict_user, self.events)
        # What happens, on disk; None where that is not wanted, or nothing is to be written.
        self.event_log: Journal | None = None
        if make_backing is None and self.settings.event_log != "off":
            self.event_log = Journal(self.settings, self.clock)
        # What happens to messages; None if the event log is not to tell of any.
        self.message_log: MessageLog | None = None
        if self.event_log is not None and self.event_log.sample > 0:
            self.message_log = MessageLog(self.event_log)
        self.vhosts = Vhosts(self._make_vhost, self._evict_vhost, self._store, self.events)
        self.policies = Policies(self.vhosts)
        self.operator_policies = Policies(self.vhosts, "operator_policy")
        self.limits = Limits(self.vhosts, self.users, self._store, self.events)
        self.listeners: list[Listener] = []
        self._make_backing = make_backing
        self._probes = probes if probes is not None else Probes()
        self.alarms = Alarms(self.events)
        self.loop_monitor = LoopMonitor()
        self.memory: MemoryMonitor | None = None
        self.disk: DiskMonitor | None = None
        self._lock = FolderLock(self.settings.data)
        self._control: ControlSocket | None = None
        self._is_stopped = False
        self._connections_accepted = 0

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
        if self._store is not None:
            yield BootStep("data_folder", self._take_data_folder)
            yield BootStep(
                "broker_store",
                self._open_broker_store,
                requires=("data_folder",),
                enables=(STORAGE_READY,),
            )
        if self.event_log is not None:
            yield BootStep(
                "event_log",
                self._start_event_log,
                requires=("data_folder",),
                enables=(STORAGE_READY,),
            )
        yield BootStep("defaults", self._make_defaults, requires=(STORAGE_READY,))
        yield BootStep("users", self._load_users, ("defaults",), enables=(ROUTING_READY,))
        yield BootStep("vhosts", self._start_vhosts, ("defaults",), enables=(ROUTING_READY,))
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

    async def _open_broker_store(self) -> None:
        assert self._store is not None
        self._stored = await self._store.open()

    async def _start_event_log(self) -> None:
        assert self.event_log is not None
        await self.event_log.start()
        self.events.subscribe(ObjectEvents(self.event_log))

    async def _make_defaults(self) -> None:
        """At the first start only: a default user that was deleted must not come back."""
        if not self._stored.is_new:
            return
        settings = self.settings
        user = make_user(settings.default_user, settings.default_pass, ("administrator",))
        vhosts = [settings.default_vhost]
        if self._store is not None:
            # Files without a broker.db: of an older version, or it was moved aside.
            vhosts += [name for name in found_vhosts(settings.data) if name not in vhosts]
            await self._store.make_defaults(vhosts, user)
        self._stored = self._stored._replace(is_new=False, vhosts=vhosts, users=[user])

    async def _load_users(self) -> None:
        self.users.load(self._stored.users)
        self.limits.load(self._stored.parameters)

    async def _start_vhosts(self) -> None:
        await self.vhosts.start_all(self._stored.vhosts, self._stored.vhosts_to_delete)

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
        await self.vhosts.stop()
        if self._store is not None:
            await self._store.close()
        self.stop_monitors()
        self.loop_monitor.stop()
        if self.event_log is not None:
            await self.event_log.stop()
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
        """Loop, memory and disk are looked at before the first client comes, and from then on."""
        settings, probes = self.settings, self._probes
        self.loop_monitor.start()
        self.clock.before_round = self.loop_monitor.note_work
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

    # --- virtual hosts: calls return when it is on disk; raise VhostError or StoreError -----------

    async def add_vhost(self, name: str) -> LiveVhost:
        """Make and start a virtual host; a file of its name that is there is taken over."""
        return await self.vhosts.add(name)

    async def delete_vhost(self, name: str) -> None:
        """With everything in it; its connections are closed."""
        await self.vhosts.delete(name)

    async def restart_vhost(self, name: str) -> LiveVhost:
        """Start one that is down, once its file was put right or moved aside."""
        return await self.vhosts.restart(name)

    def _make_vhost(self, name: str, on_damage: OnDamage) -> LiveVhost:
        make, settings = self._make_backing, self.settings
        has_event_exchange = settings.event_exchange == "on" and name == (
            settings.event_exchange_vhost or settings.default_vhost
        )
        if make is not None:
            factory = make
            return LiveVhost(
                name,
                self.registries,
                self.clock,
                settings,
                make_backing=lambda queue, wake, spend: factory(wake),
                events=self.events,
                has_event_exchange=has_event_exchange,
            )
        store = VhostStore(
            settings.data / "vhosts",
            name,
            StoreSettings(
                settings.synchronous,
                settings.queue_index_embed_msgs_below,
                settings.store_close_timeout_s,
            ),
            now=self.clock.monotonic,
            sleep=self.clock.sleep,
            on_trouble=partial(self.alarms.on_trouble, name),
            on_damage=on_damage,
        )
        return LiveVhost(
            name,
            self.registries,
            self.clock,
            settings,
            store=store,
            events=self.events,
            event_log=self.event_log,
            message_log=self.message_log,
            has_event_exchange=has_event_exchange,
        )

    def trace_on(self, vhost: str) -> None:
        """Turn the firehose on, until it is turned off or the broker stops."""
        self._running_vhost(vhost).trace(is_on=True)

    def trace_off(self, vhost: str) -> None:
        self._running_vhost(vhost).trace(is_on=False)

    def _running_vhost(self, name: str) -> LiveVhost:
        vhost = self.vhosts.get(name)
        if vhost is None:
            raise VhostError(f"there is no vhost '{name}', or it is down")
        return vhost

    async def _evict_vhost(self, vhost: LiveVhost, text: str) -> None:
        tasks = [
            task
            for listener in self.listeners
            for task in listener.evict(text, lambda reader: reader.vhost is vhost)
        ]
        await wait_or_cut(tasks, CLOSE_CONNECTIONS_S)

    def take_connection_number(self) -> int:
        """A number no other connection of this broker had, or will have."""
        self._connections_accepted += 1
        return self._connections_accepted

    def _evict_user(self, name: str) -> None:
        self.limits.forget_user(name)
        for listener in self.listeners:
            listener.evict(f"user '{name}' is deleted", lambda reader: reader.user == name)

    @property
    def databases(self) -> list[Database]:
        """The files a backup has to copy; those of virtual hosts that are down are in nobody's
        hands."""
        found = [] if self._store is None else [self._store.database]
        return found + [v.database for v in self.vhosts.values() if v.database is not None]

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
            "vhosts_down": dict(self.vhosts.down),
            "timers": self.clock.statistics(),
            "loop": self.loop_monitor.statistics(),
            "alarms": self.alarms.statistics(),
            "event_log": {} if self.event_log is None else self.event_log.statistics(),
            "memory": {} if self.memory is None else self.memory.statistics(),
            "disk": {} if self.disk is None else self.disk.statistics(),
        }
