"""One check for each queue argument: is this a value for it, and if not, why.

A check answers None or the reason in RabbitMQ's words, which arguments.py puts into a 406.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import cast

from leveret.broker.queues.erlang_terms import string_notation
from leveret.protocol.field_table import Field, Table, type_name

# Ten years; also the limit of a message's expiration.
MAX_EXPIRY_MS = 315_360_000_000
MAX_PRIORITY = 255
INTEGER_TAGS = frozenset("bBsuIilL")

# The field, and the table it is in.
Check = Callable[[Field, Table], str | None]


def _integer(field: Field, _: Table) -> str | None:
    if field.tag in INTEGER_TAGS:
        return None
    return f'"expected integer, got {type_name(field.tag)}"'


def _natural(field: Field, arguments: Table) -> str | None:
    wrong = _integer(field, arguments)
    if wrong is None and cast(int, field.value) < 0:
        return f"{{value_negative,{field.value}}}"
    return wrong


def _positive(field: Field, arguments: Table) -> str | None:
    wrong = _natural(field, arguments)
    return "{value_zero,0}" if wrong is None and field.value == 0 else wrong


def _message_ttl(field: Field, arguments: Table) -> str | None:
    wrong = _natural(field, arguments)
    if wrong is None and cast(int, field.value) > MAX_EXPIRY_MS:
        return f"{{value_too_large,{field.value}}}"
    return wrong


def _expires(field: Field, arguments: Table) -> str | None:
    return _message_ttl(field, arguments) or _positive(field, arguments)


def _max_priority(field: Field, arguments: Table) -> str | None:
    wrong = _natural(field, arguments)
    if wrong is None and cast(int, field.value) > MAX_PRIORITY:
        return f"{{max_value_exceeded,{field.value}}}"
    return wrong


def _unacceptable_type(field: Field) -> str:
    return f"{{unacceptable_type,{type_name(field.tag)}}}"


def _boolean(field: Field, _: Table) -> str | None:
    return None if field.tag == "t" else _unacceptable_type(field)


def _string(field: Field, _: Table) -> str | None:
    return None if field.tag == "S" else _unacceptable_type(field)


def _dead_letter_routing_key(field: Field, arguments: Table) -> str | None:
    wrong = _string(field, arguments)
    if wrong is None and "x-dead-letter-exchange" not in arguments:
        return "routing_key_but_no_dlx_defined"
    return wrong


def _one_of(words: tuple[str, ...], otherwise: str) -> Check:
    def check(field: Field, arguments: Table) -> str | None:
        wrong = _string(field, arguments)
        return otherwise if wrong is None and field.value not in words else wrong

    return check


def _supported(what: str, words: tuple[str, ...]) -> Check:
    def check(field: Field, arguments: Table) -> str | None:
        wrong = _string(field, arguments)
        if wrong is None and field.value not in words:
            return string_notation(f"unsupported queue {what} '{field.value}'")
        return wrong

    return check


def _queue_version(field: Field, arguments: Table) -> str | None:
    wrong = _natural(field, arguments)
    if wrong is None and field.value not in (1, 2):
        return f"\"unsupported queue version '{field.value}'\""
    return wrong


def _max_age(field: Field, arguments: Table) -> str | None:
    wrong = _string(field, arguments)
    if wrong is None and not re.fullmatch(r"0*[1-9][0-9]*[YMDhms]", cast(str, field.value)):
        return "invalid_max_age"
    return wrong


_OVERFLOWS = ("drop-head", "reject-publish", "reject-publish-dlx")
check_queue_type = _supported("type", ("classic", "quorum", "stream"))

# In the order in which RabbitMQ looks at them: of several errors the first is reported.
CHECKS: dict[str, Check] = {
    "x-expires": _expires,
    "x-message-ttl": _message_ttl,
    "x-dead-letter-exchange": _string,
    "x-dead-letter-routing-key": _dead_letter_routing_key,
    "x-dead-letter-strategy": _one_of(("at-most-once", "at-least-once"), "invalid_dlx_strategy"),
    "x-max-length": _natural,
    "x-max-length-bytes": _natural,
    "x-max-in-memory-length": _natural,
    "x-max-in-memory-bytes": _natural,
    "x-max-priority": _max_priority,
    "x-overflow": _one_of(_OVERFLOWS, "invalid_overflow"),
    "x-queue-mode": _supported("mode", ("default", "lazy")),
    "x-queue-version": _queue_version,
    "x-single-active-consumer": _boolean,
    "x-quorum-initial-group-size": _positive,
    "x-max-age": _max_age,
    "x-stream-max-segment-size-bytes": _natural,
    "x-initial-cluster-size": _positive,
    "x-queue-leader-locator": _one_of(
        ("client-local", "balanced", "random", "least-leaders"), "invalid_queue_locator_arg"
    ),
    # Ours alone, so it comes last.
    "x-message-ttl-exact": _boolean,
}

CONSUMER_CHECKS: dict[str, Check] = {
    "x-priority": _integer,
    "x-cancel-on-ha-failover": _boolean,
}
