"""One policy, as a value: which objects it applies to, and what it says.

Upstream: ``live.py`` keeps those of a virtual host and asks each object's policies anew when
something changes. Equal policies are one: nothing happens when a policy is set to what it was.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, cast

from leveret.broker.parameters import ParameterError, term
from leveret.broker.policies.definition import PolicyKind, check_definition
from leveret.broker.policies.pattern import BadPattern, compile_pattern, is_match
from leveret.broker.queues.arguments import QueueType
from leveret.broker.resource import Resource

ApplyTo = Literal["all", "queues", "exchanges"]

_MIRRORED = (
    "ha-mode",
    "ha-params",
    "ha-sync-mode",
    "ha-sync-batch-size",
    "ha-promote-on-shutdown",
    "ha-promote-on-failure",
    "queue-master-locator",
)
_STREAM = ("max-age", "stream-max-segment-size-bytes", "initial-cluster-size")
# A policy that says any of these does not apply to a queue of that type at all, as in RabbitMQ;
# only that `delivery-limit` is for classic queues, too.
_UNSUPPORTED: dict[QueueType, frozenset[str]] = {
    "classic": frozenset({*_STREAM, "queue-leader-locator", "dead-letter-strategy"}),
    "quorum": frozenset({*_STREAM, *_MIRRORED, "queue-mode"}),
    "stream": frozenset(
        {
            *_MIRRORED,
            "expires",
            "message-ttl",
            "message-ttl-exact",
            "dead-letter-exchange",
            "dead-letter-routing-key",
            "dead-letter-strategy",
            "max-length",
            "max-in-memory-length",
            "max-in-memory-bytes",
            "overflow",
            "queue-mode",
            "delivery-limit",
        }
    ),
}


@dataclass(frozen=True, slots=True)
class Policy:
    """Raises ParameterError for anything that is not a policy of its kind."""

    vhost: str
    name: str
    pattern: str
    definition: dict[str, object] = field(hash=False)
    priority: int | float = 0
    apply_to: ApplyTo = "all"
    kind: PolicyKind = "policy"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not 1 <= len(_encoded(self.name)) <= 255:
            raise ParameterError("a policy's name must be text of 1 to 255 bytes")
        if not isinstance(self.priority, int | float) or isinstance(self.priority, bool):
            raise ParameterError(f"priority should be a number, actually was {term(self.priority)}")
        if self.priority != self.priority or abs(self.priority) > 1 << 53:
            raise ParameterError(f"{self.priority} is out of range for a priority")
        if not isinstance(self.pattern, str):
            raise ParameterError(f"pattern should be a binary but was {term(self.pattern)}")
        try:
            compile_pattern(self.pattern)
        except BadPattern as error:
            raise ParameterError(
                f"pattern should be regular expression but is invalid: {error}"
            ) from error
        if self.apply_to not in ("all", "queues", "exchanges"):
            raise ParameterError(
                f"apply-to '{self.apply_to}' unrecognised; should be 'queues', 'exchanges' or 'all'"
            )
        definition = check_definition(self.definition, self.kind)
        object.__setattr__(self, "definition", definition)

    def is_for(self, resource: Resource, queue_type: QueueType = "classic") -> bool:
        """Whether it could apply: which of several does is ``first_of``'s to say."""
        if self.apply_to not in ("all", f"{resource.kind}s"):
            return False
        if resource.kind == "queue" and _UNSUPPORTED[queue_type] & self.definition.keys():
            return False
        return is_match(self.pattern, resource.name)

    # --- as RabbitMQ writes it --------------------------------------------------------------------

    def as_dict(self) -> dict[str, object]:
        """As in RabbitMQ's HTTP API and definition files."""
        return {
            "vhost": self.vhost,
            "name": self.name,
            "pattern": self.pattern,
            "apply-to": self.apply_to,
            "definition": self.definition,
            "priority": self.priority,
        }

    def to_json(self) -> str:
        """What is kept on disk, beside its virtual host and name."""
        kept = self.as_dict()
        del kept["vhost"], kept["name"]
        return json.dumps(kept)

    @classmethod
    def from_json(cls, vhost: str, name: str, kind: PolicyKind, text: str) -> Policy:
        """Raises ParameterError for what is not a policy any more."""
        try:
            kept = json.loads(text)
            pattern, definition = kept["pattern"], kept["definition"]
        except (ValueError, KeyError, TypeError) as error:
            raise ParameterError(f"not a policy: {error}") from error
        return cls(
            vhost,
            name,
            pattern,
            definition,
            kept.get("priority", 0),
            cast(ApplyTo, kept.get("apply-to", "all")),
            kind,
        )


def in_order(policies: Iterable[Policy]) -> list[Policy]:
    """The highest priority first. RabbitMQ leaves ties to chance, we to the name."""
    return sorted(policies, key=lambda policy: (-policy.priority, policy.name))


def first_of(
    ordered: Iterable[Policy], resource: Resource, queue_type: QueueType = "classic"
) -> Policy | None:
    """The one that applies, of policies that are ``in_order``."""
    return next((policy for policy in ordered if policy.is_for(resource, queue_type)), None)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
