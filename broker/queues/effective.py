"""What a queue obeys: its arguments, its policy and its operator policy made one [88].

A pure function. Upstream: ``policies/live.py``, which works it out when a queue is made and when
a policy that applies to it changes, never per message. Downstream: the queue actor, which is given
the result with the queue's record and, later, with ``commands.PolicyChanged``.

Two steps, each of them RabbitMQ's. Policy and operator policy: of a number that both give, the
lower one counts. Then arguments: for expiry, length and delivery limits the lower one counts
again; in everything else whoever declared the queue has the last word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from leveret.broker.queues.arguments import Overflow, QueueArguments, QueueMode, QueueType

# The settings of a policy, as they came in JSON.
Definition = Mapping[str, object]

# Of two numbers for one of these the lower one counts.
LOWER_WINS = frozenset(
    {
        "expires",
        "message-ttl",
        "max-length",
        "max-length-bytes",
        "max-in-memory-length",
        "max-in-memory-bytes",
        "delivery-limit",
    }
)


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """Everything a queue obeys; None where there is no limit."""

    expires_ms: int | None = None
    message_ttl_ms: int | None = None
    # Messages expire when they are due, wherever they stand, not only at the head.
    message_ttl_exact: bool = False
    max_length: int | None = None
    max_length_bytes: int | None = None
    overflow: Overflow = "drop-head"
    dead_letter_exchange: str | None = None
    dead_letter_routing_key: str | None = None
    queue_mode: QueueMode = "default"
    delivery_limit: int | None = None
    # By argument only: no policy can give or change these.
    max_priority: int | None = None
    single_active_consumer: bool = False
    queue_type: QueueType = "classic"


def merged(policy: Definition | None, operator_policy: Definition | None) -> dict[str, object]:
    """The effective definition: of what both say, the lower number, else the policy's word."""
    both = {**(operator_policy or {}), **(policy or {})}
    if policy and operator_policy:
        for key in LOWER_WINS & policy.keys() & operator_policy.keys():
            both[key] = min(cast(int, policy[key]), cast(int, operator_policy[key]))
    return dict(sorted(both.items()))


def effective(
    arguments: QueueArguments,
    policy: Definition | None = None,
    operator_policy: Definition | None = None,
) -> QueueOptions:
    """``policy`` and ``operator_policy`` are definitions that passed their checks."""
    said = merged(policy, operator_policy)

    def lower(argument: int | None, key: str) -> int | None:
        given = cast("int | None", said.get(key))
        if argument is None or given is None:
            return given if argument is None else argument
        return min(argument, given)

    def argument_wins(argument: str | None, key: str) -> str | None:
        return cast("str | None", said.get(key)) if argument is None else argument

    exact = arguments.message_ttl_exact
    return QueueOptions(
        expires_ms=lower(arguments.expires_ms, "expires"),
        message_ttl_ms=lower(arguments.message_ttl_ms, "message-ttl"),
        message_ttl_exact=bool(said.get("message-ttl-exact")) if exact is None else exact,
        max_length=lower(arguments.max_length, "max-length"),
        max_length_bytes=lower(arguments.max_length_bytes, "max-length-bytes"),
        overflow=cast("Overflow", argument_wins(arguments.overflow, "overflow") or "drop-head"),
        dead_letter_exchange=argument_wins(arguments.dead_letter_exchange, "dead-letter-exchange"),
        dead_letter_routing_key=argument_wins(
            arguments.dead_letter_routing_key, "dead-letter-routing-key"
        ),
        queue_mode=cast(
            "QueueMode", argument_wins(arguments.queue_mode, "queue-mode") or "default"
        ),
        # As an argument it means something to quorum queues alone.
        delivery_limit=lower(
            arguments.delivery_limit if arguments.queue_type == "quorum" else None,
            "delivery-limit",
        ),
        max_priority=arguments.max_priority,
        single_active_consumer=arguments.single_active_consumer,
        queue_type=arguments.queue_type,
    )
