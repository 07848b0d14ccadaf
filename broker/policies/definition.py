"""What a policy may say: one check for each key, with RabbitMQ's words where one fails.

RabbitMQ 3.10's keys, and ``message-ttl-exact``, which is ours. Keys of mirrored queues, streams
and clusters are taken, so that definitions written for RabbitMQ can be used, and mean nothing here
(``WITHOUT_EFFECT``). Those that only a plug-in of RabbitMQ knows are refused, as without it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Literal

from leveret.broker.parameters import ParameterError, pairs, term
from leveret.broker.queues.argument_checks import MAX_EXPIRY_MS

PolicyKind = Literal["policy", "operator_policy"]

# Is it a value for that key?
_Test = Callable[[object], bool]


def _whole(low: int, high: int | None = None) -> _Test:
    def test(value: object) -> bool:
        if not isinstance(value, int) or isinstance(value, bool):
            return False
        return low <= value and (high is None or value <= high)

    return test


def _string(value: object) -> bool:
    return isinstance(value, str)


def _boolean(value: object) -> bool:
    return isinstance(value, bool)


def _one_of(*words: object) -> _Test:
    return lambda value: not isinstance(value, bool) and value in words


def _age(value: object) -> bool:
    return isinstance(value, str) and bool(re.fullmatch(r"0*[1-9][0-9]*[YMDhms]", value))


# The test, and what is said of a value that fails it.
_CHECKS: dict[str, tuple[_Test, str]] = {
    "alternate-exchange": (_string, "{} is not a valid alternate exchange name"),
    "dead-letter-exchange": (_string, "{} is not a valid dead letter exchange name"),
    "dead-letter-routing-key": (_string, "{} is not a valid dead letter routing key"),
    "dead-letter-strategy": (
        _one_of("at-most-once", "at-least-once"),
        "{} is not a valid dead letter strategy",
    ),
    "message-ttl": (_whole(0, MAX_EXPIRY_MS), "{} is not a valid message TTL"),
    "message-ttl-exact": (_boolean, "message-ttl-exact must be true or false, got {}"),
    "expires": (_whole(1, MAX_EXPIRY_MS), "{} is not a valid queue expiry"),
    "max-length": (_whole(0), "{} is not a valid maximum length"),
    "max-length-bytes": (_whole(0), "{} is not a valid maximum length in bytes"),
    "max-in-memory-length": (_whole(0), "{} is not a valid maximum memory in bytes"),
    "max-in-memory-bytes": (_whole(0), "{} is not a valid maximum memory in bytes"),
    "queue-mode": (_one_of("default", "lazy"), "{} is not a valid queue-mode value"),
    "queue-version": (_one_of(1, 2), "{} is not a valid queue-version value"),
    "overflow": (
        _one_of("drop-head", "reject-publish", "reject-publish-dlx"),
        "{} is not a valid overflow value",
    ),
    "delivery-limit": (_whole(0), "{} is not a valid delivery limit"),
    "max-age": (_age, "{} is not a valid max age"),
    "stream-max-segment-size-bytes": (_whole(0, 3_000_000_000), "{} is not a valid segment size"),
    "queue-leader-locator": (
        _one_of("client-local", "balanced", "random", "least-leaders"),
        "{} is not a valid queue leader locator value",
    ),
    "initial-cluster-size": (_whole(0), "{} is not a valid cluster size"),
    "queue-master-locator": (
        _one_of("min-masters", "client-local", "random"),
        "{} is not a valid queue-master-locator value",
    ),
    "ha-mode": (_one_of("all", "exactly", "nodes"), "{} is not a valid ha-mode value"),
    "ha-params": (
        lambda value: isinstance(value, list) or _whole(1)(value),
        "ha-params must be a number or a list of nodes, got {}",
    ),
    "ha-sync-mode": (
        _one_of("automatic", "manual"),
        'ha-sync-mode must be "manual" or "automatic", got {}',
    ),
    "ha-sync-batch-size": (_whole(1), "{} is not a valid ha-sync-batch-size value"),
    "ha-promote-on-shutdown": (
        _one_of("always", "when-synced"),
        'ha-promote-on-shutdown must be "always" or "when-synced", got {}',
    ),
    "ha-promote-on-failure": (
        _one_of("always", "when-synced"),
        'ha-promote-on-failure must be "always" or "when-synced", got {}',
    ),
}

_OPERATOR_KEYS = frozenset(
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

# Known, and of no consequence: a broker of one process has nothing to mirror or to place.
WITHOUT_EFFECT = frozenset(
    {
        "dead-letter-strategy",
        "max-in-memory-length",
        "max-in-memory-bytes",
        "queue-version",
        "max-age",
        "stream-max-segment-size-bytes",
        "queue-leader-locator",
        "initial-cluster-size",
        "queue-master-locator",
        *(key for key in _CHECKS if key.startswith("ha-")),
    }
)


def known_keys(kind: PolicyKind) -> frozenset[str]:
    return frozenset(_CHECKS) if kind == "policy" else _OPERATOR_KEYS


def check_definition(definition: object, kind: PolicyKind = "policy") -> dict[str, object]:
    """The definition, if it is one. Raises ParameterError."""
    if not isinstance(definition, Mapping):
        raise ParameterError(f"definition must be a dictionary: {term(definition)}")
    if not definition:
        raise ParameterError("no policy provided")
    known = known_keys(kind)
    for key, value in definition.items():
        if key in known:
            is_valid, complaint = _CHECKS[key]
            if not is_valid(value):
                raise ParameterError(complaint.format(term(value)))
    if "ha-mode" not in definition and any(key.startswith("ha-") for key in definition):
        raise ParameterError(
            "ha-mode must be specified to specify ha-params, ha-sync-mode or ha-promote-on-shutdown"
        )
    unknown = {str(key): value for key, value in definition.items() if key not in known}
    if unknown:
        raise ParameterError(
            f"{pairs(unknown)} are not recognised policy settings\n{_hint(unknown, kind)}"
        )
    return dict(definition)


def _hint(unknown: Mapping[str, object], kind: PolicyKind) -> str:
    known = sorted(known_keys(kind))
    for key in unknown:
        if kind == "operator_policy" and key in _CHECKS:
            return f"an operator policy may set {', '.join(known)}"
        close = difflib.get_close_matches(key, known, n=1)
        if close:
            return f"did you mean {close[0]}?"
    return f"the settings are {', '.join(known)}"
