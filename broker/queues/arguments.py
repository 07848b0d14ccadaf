"""Queue arguments: what may be declared, what a redeclaration may not change, what it all means.

Pure functions over typed tables. Upstream: channel/declare.py checks a queue.declare here and
channel/consume.py a basic.consume; ``effective.py`` makes of ``QueueArguments`` and policies what
the queue actor obeys.

Two rules give this module its shape. A *new* queue has every argument of its type checked in
RabbitMQ's order, and the first that fails is reported, so that clients see the text they know.
An *existing* queue is only compared: its redeclaration may carry nonsense in arguments its type
does not know. Where RabbitMQ crashes on a value (a decimal in a redeclaration, an
x-max-age without digits) we answer the 406 it meant to send.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, cast

from leveret.broker.queues.argument_checks import (
    CHECKS,
    CONSUMER_CHECKS,
    INTEGER_TAGS,
    Check,
    check_queue_type,
)
from leveret.broker.queues.argument_checks import MAX_EXPIRY_MS as MAX_EXPIRY_MS
from leveret.broker.queues.erlang_terms import notation, plain
from leveret.broker.resource import Resource
from leveret.protocol.errors import ChannelException, precondition_failed, resource_locked
from leveret.protocol.field_table import Field, Table, type_name

QueueType = Literal["classic", "quorum", "stream"]
Overflow = Literal["drop-head", "reject-publish", "reject-publish-dlx"]
QueueMode = Literal["default", "lazy"]

_MAX_SEGMENT_SIZE = 3_000_000_000

# What a queue type knows, in the order in which a redeclaration is compared.
_KNOWN: dict[QueueType, tuple[str, ...]] = {
    "classic": (
        "x-expires",
        "x-message-ttl",
        "x-dead-letter-exchange",
        "x-dead-letter-routing-key",
        "x-max-length",
        "x-max-length-bytes",
        "x-max-priority",
        "x-overflow",
        "x-queue-mode",
        "x-queue-version",
        "x-single-active-consumer",
        "x-queue-type",
        "x-queue-master-locator",
        "x-message-ttl-exact",
    ),
    "quorum": (
        "x-dead-letter-exchange",
        "x-dead-letter-routing-key",
        "x-dead-letter-strategy",
        "x-expires",
        "x-max-length",
        "x-max-length-bytes",
        "x-max-in-memory-length",
        "x-max-in-memory-bytes",
        "x-overflow",
        "x-single-active-consumer",
        "x-queue-type",
        "x-quorum-initial-group-size",
        "x-delivery-limit",
        "x-message-ttl",
        "x-queue-leader-locator",
        "x-message-ttl-exact",
    ),
    "stream": (
        "x-max-length-bytes",
        "x-queue-type",
        "x-max-age",
        "x-stream-max-segment-size-bytes",
        "x-initial-cluster-size",
        "x-queue-leader-locator",
    ),
}
_KNOWN_TO_ANY = frozenset(argument for known in _KNOWN.values() for argument in known)

_KNOWN_TO_CONSUMERS: dict[QueueType, tuple[str, ...]] = {
    "classic": ("x-cancel-on-ha-failover", "x-priority", "x-credit"),
    "quorum": ("x-priority", "x-credit"),
    "stream": ("x-stream-offset", "x-credit"),
}
_KNOWN_TO_ANY_CONSUMER = frozenset(
    argument for known in _KNOWN_TO_CONSUMERS.values() for argument in known
)


# ---------------------------------------------------------------- declaring and consuming


def _invalid(argument: str, name: Resource, why: str) -> ChannelException:
    return precondition_failed(f"invalid arg '{argument}' for {name}: {why}")


def _check_values(
    name: Resource, arguments: Table, checks: dict[str, Check], known: tuple[str, ...]
) -> None:
    for argument, check in checks.items():
        field = arguments.get(argument)
        if field is not None and argument in known:
            wrong = check(field, arguments)
            if wrong is not None:
                raise _invalid(argument, name, wrong)


def _check_keys(
    name: Resource,
    queue_type: QueueType,
    arguments: Table,
    known: tuple[str, ...],
    known_to_any: frozenset[str],
) -> None:
    for argument in arguments:
        if argument in known_to_any and argument not in known:
            raise precondition_failed(
                f"invalid arg '{argument}' for {name} of queue type rabbit_{queue_type}_queue"
            )


def _type_of(arguments: Table) -> QueueType:
    field = arguments.get("x-queue-type")
    if field is None or field.tag != "S" or field.value not in _KNOWN:
        return "classic"
    return field.value


def check_server_named(arguments: Table) -> None:
    """An empty queue name asks the broker for one: only classic queues get it."""
    queue_type = _type_of(arguments)
    if queue_type != "classic":
        raise precondition_failed(
            f"Cannot declare a server-named queue for type rabbit_{queue_type}_queue"
        )


def dead_letter_exchange(name: Resource, arguments: Table) -> str | None:
    """The dead-letter exchange asked for; 406 if it is not a string.

    Apart from the other checks because permissions on that exchange are looked at in between.
    """
    field = arguments.get("x-dead-letter-exchange")
    if field is None:
        return None
    if field.tag != "S":
        raise precondition_failed(
            f"invalid type '{type_name(field.tag)}' for arg 'x-dead-letter-exchange' in {name}"
        )
    return cast(str, field.value)


def check_arguments(
    name: Resource, *, durable: bool, exclusive: bool, auto_delete: bool, arguments: Table
) -> None:
    """Raise 406 if a new queue may not be declared like this."""
    dead_letter_exchange(name, arguments)
    if "x-queue-type" in arguments:
        wrong = check_queue_type(arguments["x-queue-type"], arguments)
        if wrong is not None:
            raise _invalid("x-queue-type", name, wrong)
    queue_type = _type_of(arguments)
    known = _KNOWN[queue_type]
    _check_values(name, arguments, CHECKS, known)
    _check_keys(name, queue_type, arguments, known, _KNOWN_TO_ANY)
    if queue_type == "classic":
        return
    for refused, what in (
        (auto_delete, "auto-delete"),
        (exclusive, "exclusive-owner"),
        (not durable, "non-durable"),
    ):
        if refused:
            raise precondition_failed(f"invalid property '{what}' for {name}")
    segment_size = arguments.get("x-stream-max-segment-size-bytes")
    if segment_size is not None and cast(int, segment_size.value) > _MAX_SEGMENT_SIZE:
        raise precondition_failed("Exceeded max value for x-stream-max-segment-size-bytes")


def check_consumer_arguments(
    queue: Resource, arguments: Table, queue_type: QueueType = "classic"
) -> int:
    """The consumer's priority; raise 406 if basic.consume may not carry these arguments."""
    known = _KNOWN_TO_CONSUMERS[queue_type]
    _check_values(queue, arguments, CONSUMER_CHECKS, known)
    _check_keys(queue, queue_type, arguments, known, _KNOWN_TO_ANY_CONSUMER)
    priority = arguments.get("x-priority")
    return 0 if priority is None else cast(int, priority.value)


# ---------------------------------------------------------------- declaring again


class DeclaredQueue(Protocol):
    """What a redeclaration is compared with."""

    @property
    def name(self) -> Resource: ...
    @property
    def durable(self) -> bool: ...
    @property
    def auto_delete(self) -> bool: ...
    @property
    def exclusive(self) -> bool: ...
    @property
    def arguments(self) -> Table: ...


def locked(name: Resource) -> ChannelException:
    """405: the queue is another connection's, or exclusive where the declaration is not."""
    return resource_locked(
        f"cannot obtain exclusive access to locked {name}. It could be originally declared on "
        "another connection or the exclusive property value does not match that of the original "
        "declaration."
    )


def _inequivalent(name: Resource, argument: str, received: str, current: str) -> ChannelException:
    return precondition_failed(
        f"inequivalent arg '{argument}' for {name}: received {received} but current is {current}"
    )


def _typed(field: Field | None) -> str:
    if field is None:
        return "none"
    return f"the value '{plain(field)}' of type '{type_name(field.tag)}'"


def _untyped(field: Field) -> str:
    return "none" if field.tag == "V" else f"'{plain(field)}'"


def _check_same_argument(
    name: Resource, argument: str, current: Field | None, received: Field | None
) -> None:
    if current is None or received is None:
        given = current or received
        # Classic is what a queue is when it says nothing.
        unsaid = argument == "x-queue-type" and given == Field("S", "classic")
        if given is not None and not unsaid:
            raise _inequivalent(name, argument, _typed(received), _typed(current))
    elif notation(current) != notation(received):
        raise _inequivalent(name, argument, _untyped(received), _untyped(current))


def check_equivalent(
    existing: DeclaredQueue,
    *,
    durable: bool,
    exclusive: bool,
    auto_delete: bool,
    arguments: Table,
) -> None:
    """Raise 405 or 406 if an existing queue is declared with something else than it has.

    ``durable`` is what it comes to: an exclusive queue ends with its connection, whatever is said.
    That the queue is not another connection's is for the caller to check, before.
    """
    name = existing.name
    if existing.exclusive != exclusive:
        raise locked(name)
    for flag, current, received in (
        ("durable", existing.durable, durable),
        ("auto_delete", existing.auto_delete, auto_delete),
    ):
        if current != received:
            raise _inequivalent(
                name, flag, f"'{str(received).lower()}'", f"'{str(current).lower()}'"
            )
    for argument in _KNOWN[_type_of(existing.arguments)]:
        _check_same_argument(
            name, argument, existing.arguments.get(argument), arguments.get(argument)
        )


# ---------------------------------------------------------------- what they mean


@dataclass(frozen=True, slots=True)
class QueueArguments:
    """What a checked table says; None where it says nothing, so that a policy may."""

    message_ttl_ms: int | None = None
    message_ttl_exact: bool | None = None
    expires_ms: int | None = None
    max_length: int | None = None
    max_length_bytes: int | None = None
    overflow: Overflow | None = None
    dead_letter_exchange: str | None = None
    dead_letter_routing_key: str | None = None
    max_priority: int | None = None
    single_active_consumer: bool = False
    queue_mode: QueueMode | None = None
    queue_type: QueueType = "classic"
    queue_version: int | None = None
    delivery_limit: int | None = None

    @classmethod
    def of(cls, arguments: Table) -> QueueArguments:
        """Read a table that ``check_arguments`` let pass."""

        def integer(argument: str) -> int | None:
            field = arguments.get(argument)
            # x-delivery-limit may be of any type: nobody checks it, and only numbers count.
            if field is None or field.tag not in INTEGER_TAGS:
                return None
            return cast(int, field.value)

        def string(argument: str) -> str | None:
            field = arguments.get(argument)
            return None if field is None else cast(str, field.value)

        single_active = arguments.get("x-single-active-consumer")
        exact = arguments.get("x-message-ttl-exact")
        return cls(
            message_ttl_ms=integer("x-message-ttl"),
            message_ttl_exact=None if exact is None else bool(exact.value),
            expires_ms=integer("x-expires"),
            max_length=integer("x-max-length"),
            max_length_bytes=integer("x-max-length-bytes"),
            overflow=cast("Overflow | None", string("x-overflow")),
            dead_letter_exchange=string("x-dead-letter-exchange"),
            dead_letter_routing_key=string("x-dead-letter-routing-key"),
            max_priority=integer("x-max-priority"),
            single_active_consumer=single_active is not None and bool(single_active.value),
            queue_mode=cast("QueueMode | None", string("x-queue-mode")),
            queue_type=_type_of(arguments),
            queue_version=integer("x-queue-version"),
            delivery_limit=integer("x-delivery-limit"),
        )
