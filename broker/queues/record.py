"""A queue as the rest of the broker knows it: its name, its properties, its address."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from leveret.broker.events import NOBODY, Actor
from leveret.broker.mailbox import Mailbox
from leveret.broker.queues.arguments import QueueArguments
from leveret.broker.queues.effective import QueueOptions, effective
from leveret.broker.resource import Resource

if TYPE_CHECKING:
    from leveret.broker.policies.policy import Policy
    from leveret.protocol.field_table import Table


class Owner(Protocol):
    """The connection of an exclusive queue."""

    @property
    def pid(self) -> str: ...

    @property
    def exclusive_queues(self) -> set[Queue]: ...


@dataclass(eq=False, slots=True)
class Queue:
    """The seeds' ``#amqqueue`` record. Its messages and consumers are its actor's."""

    name: Resource
    durable: bool
    auto_delete: bool
    # The connection that alone may use it; None unless declared exclusive.
    owner: Owner | None
    # As declared, for equivalence and for listing.
    arguments: Table
    # The same, parsed.
    options: QueueArguments
    # What applies to it, and what that comes to with its arguments: written by policies/live.py
    # alone. The actor begins with this and hears of changes (PolicyChanged).
    policy: Policy | None = field(init=False, default=None)
    operator_policy: Policy | None = field(init=False, default=None)
    effective: QueueOptions = field(init=False)
    # The user whose limit it counts against; empty if that is not known.
    declared_by: str = field(init=False, default="")
    mailbox: Mailbox = field(init=False)
    # The user whose queue.delete ended it; None while it lives, or where nobody asked for its end.
    deleted_by: str | None = field(init=False, default=None)
    # For the event log: through which channel that was asked, why it ended where nobody asked for
    # it, and how many messages were ready in it.
    deleted_through: Actor = field(init=False, default=NOBODY)
    delete_reason: str = field(init=False, default="")
    deleted_messages: int = field(init=False, default=0)
    # What the store knows it by; 0 without a store.
    store_id: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.effective = effective(self.options)
        self.mailbox = self.make_mailbox()

    def make_mailbox(self) -> Mailbox:
        """A new address, also for a queue that starts again."""
        return Mailbox(str(self.name), f"queue:{self.name.vhost}/{self.name.name}")

    @property
    def exclusive(self) -> bool:
        return self.owner is not None
