"""A virtual host that runs: its topology, its queue tasks, its store, its reply consumers.

``vhost.py`` knows what is bound to what, ``queues/supervisor.py`` keeps the tasks, and
``storage/vhost_store.py`` what must last; here they meet. A queue is known from the moment it is
declared until its actor says it is deleted. Every change of the topology is passed on to the
store as it happens; whoever must not answer before it is on disk waits for ``call_when_saved``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, cast

from leveret.broker.event_exchange import EventExchange
from leveret.broker.event_log.credit import CreditLog
from leveret.broker.event_log.objects import tell_recovered
from leveret.broker.events import ACTING_USER, ACTOR, INTERNAL_USER, Events
from leveret.broker.exchanges.base import Binding, Exchange
from leveret.broker.flow import Bump
from leveret.broker.limits import VHOST_COMPONENT, VHOST_LIMITS, Usage, limits_from_json
from leveret.broker.parameters import ParameterError
from leveret.broker.policies.definition import PolicyKind
from leveret.broker.policies.live import LivePolicies, policy_facts
from leveret.broker.policies.policy import Policy
from leveret.broker.queues.actor_state import STORE
from leveret.broker.queues.arguments import QueueArguments
from leveret.broker.queues.record import Queue
from leveret.broker.queues.supervisor import BackingFactory, QueueSupervisor, with_priorities
from leveret.broker.resource import Kind, Resource
from leveret.broker.topology_events import TopologyEvents
from leveret.broker.tracing import Tracer
from leveret.broker.vhost import Event, Vhost, is_predeclared
from leveret.protocol.errors import AmqpError
from leveret.protocol.field_table import Table, decode_table, encode_table
from leveret.storage.definitions import (
    Definitions,
    StoredBinding,
    StoredExchange,
    StoredParameter,
)
from leveret.storage.queue_index import Counters
from leveret.storage.unit import Unit, commit_in_memory
from leveret.storage.vhost_store import StoreError

if TYPE_CHECKING:
    from leveret.broker.channel.context import ReplyPort
    from leveret.broker.clock import Clock
    from leveret.broker.config import Settings
    from leveret.broker.event_log.journal import Journal
    from leveret.broker.event_log.messages import MessageLog
    from leveret.broker.queues.decorators import QueueDecorator
    from leveret.broker.registry import Registries
    from leveret.storage.backing_queue import BackingQueue
    from leveret.storage.database import Database
    from leveret.storage.vhost_store import VhostStore

log = logging.getLogger(__name__)

# Why queues end with their virtual host, for the event log.
VHOST_DELETED = "vhost_deleted"
# How long queues may take to end where what they have is lost anyway; some wait for the store.
ABANDON_S = 1.0


class LiveVhost:
    def __init__(
        self,
        name: str,
        registries: Registries,
        clock: Clock,
        settings: Settings,
        *,
        store: VhostStore | None = None,
        make_backing: BackingFactory | None = None,
        events: Events | None = None,
        event_log: Journal | None = None,
        message_log: MessageLog | None = None,
        has_event_exchange: bool = False,
    ) -> None:
        """Queues are kept by ``store``, or by what ``make_backing`` makes where that is given."""
        self.name = name
        self.events = Events(clock) if events is None else events
        self.topology: Vhost[Queue] = Vhost(name, registries)
        # Direct reply-to: the name a requester's replies are sent to -> its channel.
        self.reply_consumers: dict[str, ReplyPort] = {}
        # The firehose, while it is on.
        self.tracer: Tracer | None = None
        self.policies = LivePolicies(self.topology)
        self.event_exchange = None
        if has_event_exchange:
            self.event_exchange = EventExchange(self.events, self.topology)
        # Its connections, channels and consumers, counted, and what it may have of them.
        self.usage = Usage()
        self._store = store
        self._event_log = event_log
        # Where it is told who waits for whose credit.
        self.credit_log = None if event_log is None else CreditLog(event_log, clock, name)
        # Where what happens to messages is told; None if nobody wants to know.
        self.message_log = message_log
        # What recovered queues have on disk, until their actors take over.
        self._recovered: dict[int, Counters] = {}
        # By name and factory: a name registered anew is another decorator.
        decorators: dict[tuple[str, Callable[[], QueueDecorator]], QueueDecorator] = {}

        def current_decorators() -> Iterable[QueueDecorator]:
            registry = registries.queue_decorators
            for known in registry.names():
                factory = registry.get(known)
                if factory is None:
                    continue
                try:
                    if (known, factory) not in decorators:
                        decorators[known, factory] = factory()
                except Exception:
                    # Foreign code: queues must start without it.
                    log.exception("queue decorator '%s' cannot be used", known)
                    continue
                yield decorators[known, factory]

        self._supervisor = QueueSupervisor(
            self._make_stored if make_backing is None else with_priorities(make_backing),
            self._on_deleted,
            clock,
            settings,
            current_decorators,
            self._wait_settled,
            self,
        )

    # --- start and stop --------------------------------------------------------------------------

    async def start(self) -> None:
        """Bring back what was declared. Raises StoreError if the files cannot be used."""
        if self._store is not None:
            definitions = await self._store.open()
            self._recover(definitions)
            self.topology.events.append(self._on_change)
        if self._event_log is not None:
            tell_recovered(self._event_log, self.name, self.topology, self._ready_in)
        self.topology.events.append(TopologyEvents(self.events, self.name))

    async def stop(self) -> None:
        await self._supervisor.stop()
        if self._store is not None:
            await self._store.close()
        self._close_topology()

    def delete_everything(self) -> None:
        """Queues, exchanges and bindings go, as whoever listens is told; then ``abandon`` it.

        What they have on disk goes with the files.
        """
        if self._on_change in self.topology.events:
            self.topology.events.remove(self._on_change)
        for name, queue in list(self.topology.queues.items()):
            queue.delete_reason = VHOST_DELETED
            queue.deleted_messages = self._ready_in(queue) or 0
            self.topology.remove_queue(name)
        for name in list(self.topology.exchanges):
            # Some go with their last binding.
            if name in self.topology.exchanges and not is_predeclared(name):
                self.topology.delete_exchange(name)

    def _ready_in(self, queue: Queue) -> int | None:
        """How many messages; None if it cannot be brought to life."""
        actor = self._supervisor.actors.get(queue)
        return None if actor is None else actor.ready

    async def abandon(self) -> None:
        """Stop without writing anything more, for one whose store is lost or to be deleted."""
        await self._supervisor.stop(ABANDON_S)
        if self._store is not None:
            await self._store.abandon()
        self._close_topology()

    def _close_topology(self) -> None:
        if self.credit_log is not None:
            self.credit_log.close()
        self.topology.close()
        if self.event_exchange is not None:
            self.event_exchange.close()

    async def delete_files(self) -> None:
        """Of one that does not run. Raises OSError."""
        if self._store is not None:
            await asyncio.to_thread(self._store.delete_files)

    def _recover(self, definitions: Definitions) -> None:
        """Policies, then exchanges, queues and bindings [6]."""
        self._recover_parameters(definitions.parameters)
        for exchange in definitions.exchanges:
            try:
                self.topology.create_exchange(
                    exchange.name,
                    exchange.type,
                    durable=True,
                    auto_delete=exchange.auto_delete,
                    internal=exchange.internal,
                    arguments=_table(exchange.arguments),
                )
            except AmqpError as error:
                # Its type came from a package that is gone: it is kept on disk.
                log.error("exchange '%s' cannot be brought back: %s", exchange.name, error.text)
        for stored in definitions.queues:
            arguments = _table(stored.arguments)
            queue = Queue(
                Resource(self.name, "queue", stored.name),
                True,
                stored.auto_delete,
                None,
                arguments,
                QueueArguments.of(arguments),
            )
            queue.declared_by = stored.declared_by
            queue.store_id = stored.id
            self._recovered[stored.id] = stored.counters
            self.start_queue(queue)
        for binding in definitions.bindings:
            destination = Resource(self.name, cast(Kind, binding.kind), binding.destination)
            try:
                self.topology.bind(
                    binding.source, destination, binding.key, _table(binding.arguments)
                )
            except AmqpError as error:
                log.error(
                    "binding from '%s' to %s cannot be brought back: %s",
                    binding.source,
                    destination,
                    error.text,
                )

    def _recover_parameters(self, parameters: Iterable[StoredParameter]) -> None:
        policies = []
        for component, name, value in parameters:
            try:
                if component in ("policy", "operator_policy"):
                    kind = cast(PolicyKind, component)
                    policies.append(Policy.from_json(self.name, name, kind, value))
                elif component == VHOST_COMPONENT:
                    self.usage.limits = limits_from_json(value, VHOST_LIMITS, name)
            except ParameterError as error:
                # Written by another version: it is kept on disk.
                log.error("%s '%s' cannot be brought back: %s", component, name, error)
        self.policies.set(policies)

    # --- queues ----------------------------------------------------------------------------------

    def start_queue(self, queue: Queue) -> None:
        """Make a declared queue known and start its task."""
        self.policies.apply_to_new(queue)
        self.topology.add_queue(queue)
        self._supervisor.start(queue)

    async def delete_queues(self, queues: Iterable[Queue]) -> None:
        """Delete whatever they hold; returns when they are gone."""
        await self._supervisor.wait_deleted(queues)

    def _on_deleted(self, queue: Queue) -> None:
        if self.topology.queues.get(queue.name.name) is queue:
            # The queue's task began as that of whoever declared it.
            ACTING_USER.set(queue.deleted_by or INTERNAL_USER)
            ACTOR.set(queue.deleted_through)
            self.topology.remove_queue(queue.name.name)
        if queue.owner is not None:
            queue.owner.exclusive_queues.discard(queue)

    def _make_stored(
        self, queue: Queue, wake: Callable[[], None], spend: Callable[[int], None]
    ) -> BackingQueue:
        assert self._store is not None
        recovered = self._recovered.pop(queue.store_id, None)
        mailbox = queue.mailbox

        def granted(cost: int) -> None:
            mailbox.put_urgent(Bump(STORE, cost))

        make: Callable[..., BackingQueue] = self._store.make_queue
        if queue.options.max_priority:
            make = partial(self._store.make_priority_queue, queue.options.max_priority)
        return make(
            queue.store_id,
            recovered if recovered is not None else Counters(),
            wake,
            spend,
            granted,
            is_durable=queue.durable,
            # A queue that comes back after a crash does not know what it had delivered.
            is_clean=recovered is not None and self._store.is_clean,
            is_lazy=queue.effective.queue_mode == "lazy",
        )

    # --- the store -------------------------------------------------------------------------------

    @property
    def has_unsaved(self) -> bool:
        """Something was changed, or published, that is not on disk yet."""
        return self._store is not None and self._store.has_unsaved

    def call_when_saved(self, call: Callable[[], object]) -> None:
        assert self._store is not None
        self._store.call_when_saved(call)

    def make_unit(self, ended: Callable[[bool], object]) -> Unit:
        """For changes of several queues that stand or fall together."""
        put = commit_in_memory if self._store is None else self._store.database.put
        return Unit(put, ended)

    async def save_parameter(self, component: str, name: str, value: str | None) -> None:
        """Keep it, or forget it (None); returns when that is on disk. Raises StoreError."""
        if self._store is None:
            return
        if value is None:
            self._store.definitions.delete_parameter(component, name)
        else:
            self._store.definitions.save_parameter(component, name, value)
        try:
            await self._wait_saved()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Not we were cancelled: the store is gone, and will never have it.
            raise StoreError(
                f"vhost '{self.name}' has stopped: whether {component} '{name}' was kept is not"
                " known"
            ) from None

    async def _wait_saved(self) -> None:
        if self._store is not None:
            await self._store.database.wait_committed()

    async def _wait_settled(self, queue: Queue) -> None:
        if self._store is not None:
            await self._store.wait_settled(queue.store_id)

    def _on_change(self, event: Event, thing: object) -> None:
        """Pass on what is durable. Queues get their ids here, durable or not."""
        assert self._store is not None
        definitions = self._store.definitions
        if isinstance(thing, Queue):
            if event == "queue.created":
                thing.store_id = self._store.take_queue_id()
                if thing.durable:
                    definitions.save_queue(
                        thing.store_id,
                        thing.name.name,
                        encode_table(thing.arguments),
                        thing.declared_by,
                        auto_delete=thing.auto_delete,
                    )
            else:
                self._store.forget_queue(thing.store_id, is_durable=thing.durable)
        elif isinstance(thing, Exchange):
            if event == "exchange.deleted":
                definitions.delete_exchange(thing.name.name)
            elif thing.durable:
                definitions.save_exchange(
                    StoredExchange(
                        thing.name.name,
                        thing.type,
                        thing.auto_delete,
                        thing.internal,
                        encode_table(thing.arguments),
                    )
                )
        elif isinstance(thing, Binding):
            stored = StoredBinding(
                thing.source,
                thing.destination.kind,
                thing.destination.name,
                thing.key,
                encode_table(thing.arguments),
            )
            if event == "binding.deleted":
                definitions.delete_binding(stored)
            elif self.topology.is_durable(thing):
                definitions.save_binding(stored)

    @property
    def database(self) -> Database | None:
        """What a backup has to copy."""
        return None if self._store is None else self._store.database

    # --- the firehose ----------------------------------------------------------------------------

    def trace(self, *, is_on: bool) -> None:
        """Copy what is published and delivered from now on, or stop that. Not kept."""
        if is_on != (self.tracer is not None):
            log.info("vhost '%s': tracing is %s", self.name, "on" if is_on else "off")
            self.tracer = Tracer(self.topology) if is_on else None

    # --- what others may see ---------------------------------------------------------------------

    def statistics(self) -> dict[str, object]:
        return {
            "name": self.name,
            "tracing": self.tracer is not None,
            "exchanges": {
                name: {**exchange.statistics(), **policy_facts(exchange)}
                for name, exchange in self.topology.exchanges.items()
            },
            "queues": {
                queue.name.name: {**actor.statistics(), **policy_facts(queue)}
                for queue, actor in self._supervisor.actors.items()
            },
            "store": {} if self._store is None else self._store.statistics(),
        }

    @property
    def tasks(self) -> Iterable[asyncio.Task[None]]:
        return self._supervisor.tasks


def _table(encoded: bytes) -> Table:
    return decode_table(encoded, 0)[0]
