"""The virtual hosts of a broker: which there are, which run, and why one does not [11].

Upstream: ``server.py`` (start, stop, the calls of whoever manages the broker), the handshake, which
asks where a client may go. Downstream: ``live_vhost.py``, one object for each that runs, and
``storage/broker_store.py``, which remembers what there is.

Virtual hosts stand and fall alone. One whose file is damaged or gone is taken down: its connections
are closed, its queues end, nothing more is written; the reason stays here for whoever asks, and
``restart`` tries again. One that cannot be started is down from the beginning. The others go on.

As a mapping it holds those that run. Adding, deleting and restarting take turns, and what was begun
is finished, also where the caller is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from leveret.broker.events import acting
from leveret.broker.node import NODE_NAME
from leveret.storage.vhost_store import StoreError

if TYPE_CHECKING:
    from leveret.broker.events import Events
    from leveret.broker.live_vhost import LiveVhost
    from leveret.storage.broker_store import BrokerStore

log = logging.getLogger(__name__)

T = TypeVar("T")

OnDamage = Callable[[Path, Exception], None]

# A virtual host's name travels as a short string (connection.open).
_NAME_MAX = 255

# What RabbitMQ's event tells of a new one beside its name, in two parts.
_NOTHING: Mapping[str, object] = {}
_NEW: Mapping[str, object] = {
    "default_queue_type": "undefined",
    "metadata": "#{description => <<>>,tags => <<>>}",
    "tracing": False,
    "cluster_state": {NODE_NAME: "running"},
}
_DESCRIBED: Mapping[str, object] = {"description": "", "tags": ""}


class VhostError(Exception):
    """What was asked for a virtual host cannot be done; the text tells a person why."""


class Vhosts(Mapping[str, "LiveVhost"]):
    def __init__(
        self,
        make: Callable[[str, OnDamage], LiveVhost],
        evict: Callable[[LiveVhost, str], Awaitable[None]],
        store: BrokerStore | None,
        events: Events,
    ) -> None:
        """``evict`` closes all connections to a virtual host, with a text for their clients."""
        self._make = make
        self._evict = evict
        self._store = store
        self._events = events
        self._running: dict[str, LiveVhost] = {}
        # Those that do not run, and why.
        self._down: dict[str, str] = {}
        # Those that are being started, and what was found damaged before they ran.
        self._starting: dict[str, str | None] = {}
        # Those that are deleted but for their files.
        self._to_delete: set[str] = set()
        self._changing = asyncio.Lock()
        # Changes and take-downs under way.
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_stopping = False

    # --- which there are --------------------------------------------------------------------------

    def __getitem__(self, name: str) -> LiveVhost:
        return self._running[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._running)

    def __len__(self) -> int:
        return len(self._running)

    @property
    def down(self) -> Mapping[str, str]:
        """Those that do not run, and why."""
        return self._down

    # --- start and stop ---------------------------------------------------------------------------

    async def start_all(self, names: Iterable[str], to_delete: Iterable[str]) -> None:
        """Start what there is; one that cannot be started is down, and keeps nobody else."""
        for name in to_delete:
            self._to_delete.add(name)
            try:
                await self._delete_files(name)
            except OSError as error:
                log.error("vhost '%s' is deleted, but not its files: %s", name, error)
        for name in names:
            try:
                await self._start(name)
            except Exception as error:
                self._note_down(name, error)

    async def stop(self) -> None:
        """What is under way ends first; then they stop in order."""
        self._is_stopping = True
        while self._tasks:
            await asyncio.wait(self._tasks)
        for vhost in self._running.values():
            await vhost.stop()

    # --- changes: each returns when it is on disk; raise VhostError or StoreError -----------------

    async def add(self, name: str) -> LiveVhost:
        """Make one and start it; a file of its name that is there already is taken over."""
        return await self._to_the_end(self._add(name))

    async def delete(self, name: str) -> None:
        """With everything in it; clients that use it are told."""
        await self._to_the_end(self._delete(name))

    async def restart(self, name: str) -> LiveVhost:
        """Start one that is down, once its file was put right or moved aside."""
        return await self._to_the_end(self._restart(name))

    async def _to_the_end(self, change: Coroutine[Any, Any, T]) -> T:
        async def in_turn() -> T:
            async with self._changing:
                return await change

        return await asyncio.shield(self._begin(in_turn(), "change of virtual hosts"))

    def _begin(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # Retrieved: where the caller was cancelled, nobody else does.
            task.exception()

    async def _add(self, name: str) -> LiveVhost:
        _check_name(name)
        if name in self._running or name in self._down:
            raise VhostError(f"vhost '{name}' exists already")
        if name in self._to_delete:
            # What was in the old one must not come back in the new one.
            await self._delete_files(name)
        vhost = await self._start(name, is_new=True)
        self._tell("vhost.created", name, _NEW, _DESCRIBED)
        return vhost

    async def _restart(self, name: str) -> LiveVhost:
        if name in self._running:
            raise VhostError(f"vhost '{name}' is running")
        if name not in self._down:
            raise VhostError(f"vhost '{name}' does not exist")
        await self._wait_taken_down(name)
        try:
            vhost = await self._start(name)
        except Exception as error:
            self._note_down(name, error)
            raise
        del self._down[name]
        log.warning("vhost '%s' is up again", name)
        return vhost

    async def _delete(self, name: str) -> None:
        if name not in self._running and name not in self._down:
            raise VhostError(f"vhost '{name}' does not exist")
        if self._store is not None:
            # First: whatever happens from here on, the next start goes on with it.
            await self._store.begin_deleting_vhost(name)
        self._to_delete.add(name)
        vhost = self._running.pop(name, None)
        if vhost is not None:
            await self._evict(vhost, f"vhost '{name}' is deleted")
            vhost.delete_everything()
            await vhost.abandon()
        else:
            await self._wait_taken_down(name)
            self._down.pop(name, None)
        self._tell("vhost.deleted", name)
        try:
            await self._delete_files(name)
        except OSError as error:
            raise VhostError(
                f"vhost '{name}' is deleted, but not its files ({error}): they are at the next"
                " start, or when one of that name is added"
            ) from error

    async def _delete_files(self, name: str) -> None:
        await self._make(name, lambda path, error: None).delete_files()
        if self._store is not None:
            await self._store.forget_vhost(name)
        self._to_delete.discard(name)

    async def _start(self, name: str, *, is_new: bool = False) -> LiveVhost:
        """Raises StoreError if its files cannot be used."""
        vhost = self._make(name, partial(self._on_damage, name))
        self._starting[name] = None
        try:
            await vhost.start()
            if is_new and self._store is not None:
                await self._store.save_vhost(name)
            damage = self._starting[name]
            if damage is not None:
                raise VhostError(damage)
        except BaseException:
            await vhost.abandon()
            raise
        finally:
            del self._starting[name]
        self._running[name] = vhost
        return vhost

    def _tell(
        self,
        kind: str,
        name: str,
        first: Mapping[str, object] = _NOTHING,
        last: Mapping[str, object] = _NOTHING,
    ) -> None:
        if self._events.is_heard:
            self._events.notify(kind, {"name": name, **first, **acting(), **last})

    # --- going down -------------------------------------------------------------------------------

    def _on_damage(self, name: str, path: Path, error: Exception) -> None:
        """Called by a store that nothing more comes of."""
        reason = (
            f"{path} is damaged or gone: {error}. Nothing more is written to it. Restore a backup,"
            " or move it aside to start without what it holds"
        )
        if name in self._starting:
            self._starting[name] = reason
            return
        vhost = self._running.get(name)
        if vhost is None:
            return  # the other of its files came first
        log.error("vhost '%s' goes down: %s", name, reason)
        if not self._is_stopping:
            del self._running[name]
            self._down[name] = reason
            self._begin(self._take_down(name, vhost), _taking_down(name))

    async def _take_down(self, name: str, vhost: LiveVhost) -> None:
        await self._evict(vhost, f"vhost '{name}' is down")
        await vhost.abandon()
        log.error("vhost '%s' is down; everything else goes on", name)
        self._tell("vhost.down", name, {"node": NODE_NAME})

    async def _wait_taken_down(self, name: str) -> None:
        tasks = [task for task in self._tasks if task.get_name() == _taking_down(name)]
        if tasks:
            await asyncio.wait(tasks)

    def _note_down(self, name: str, error: Exception) -> None:
        self._down[name] = str(error) or repr(error)
        # What is no StoreError was not foreseen: somebody will want to see where it came from.
        trace = None if isinstance(error, StoreError | VhostError) else error
        reason = self._down[name]
        log.error("vhost '%s' cannot be started and is down: %s", name, reason, exc_info=trace)


def _check_name(name: str) -> None:
    try:
        length = len(name.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError as error:
        raise VhostError(f"{name!r} cannot be written as UTF-8") from error
    if not 0 < length <= _NAME_MAX:
        raise VhostError(f"the name of a vhost must have 1 to {_NAME_MAX} bytes")


def _taking_down(name: str) -> str:
    return f"taking down vhost {name}"
