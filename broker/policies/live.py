"""The policies of one virtual host, applied: which object has which, and who is told of a change.

Owns the policies by name, and writes ``policy``, ``operator_policy`` and ``effective`` of queue
records and exchanges. Upstream: ``live_vhost.py``, when a queue or an exchange is made, and
``store.py``, when a policy is set or cleared. Downstream: ``queues/effective.py``; a queue that
runs hears ``PolicyChanged``, an exchange's new alternate goes through ``Vhost.policy_changed``.

Matching happens here and only here: when something is made or a policy changes, never per message.
Invariant, between two calls: every object has the policies that apply to it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

from leveret.broker.exchanges.base import ALTERNATE_EXCHANGE
from leveret.broker.policies.definition import PolicyKind
from leveret.broker.policies.policy import Policy, first_of, in_order
from leveret.broker.queues import commands as c
from leveret.broker.queues.effective import effective, merged

if TYPE_CHECKING:
    from leveret.broker.exchanges.base import Exchange
    from leveret.broker.queues.record import Queue
    from leveret.broker.vhost import Event, Vhost

log = logging.getLogger(__name__)


class LivePolicies:
    def __init__(self, topology: Vhost[Queue]) -> None:
        self._topology = topology
        self._by_name: dict[PolicyKind, dict[str, Policy]] = {"policy": {}, "operator_policy": {}}
        # The same, in the order in which they are tried.
        self._ordered: dict[PolicyKind, list[Policy]] = {"policy": [], "operator_policy": []}
        topology.events.append(self._on_event)

    def get(self, kind: PolicyKind, name: str) -> Policy | None:
        return self._by_name[kind].get(name)

    def all(self, kind: PolicyKind) -> list[Policy]:
        """The ones that are tried first come first."""
        return list(self._ordered[kind])

    def set(self, policies: Iterable[Policy]) -> None:
        """Put each in place of the one that had its name, and apply what has changed."""
        for policy in policies:
            self._by_name[policy.kind][policy.name] = policy
        self._changed()

    def clear(self, kind: PolicyKind, name: str) -> None:
        """KeyError if there is none of that name."""
        del self._by_name[kind][name]
        self._changed()

    def apply_to_new(self, queue: Queue) -> None:
        """For a queue whose actor has not started: it begins with what this leaves there."""
        self._match_queue(queue)

    # --- within ----------------------------------------------------------------------------------

    def _changed(self) -> None:
        for kind, by_name in self._by_name.items():
            self._ordered[kind] = in_order(by_name.values())
        # Copies: decorators and exchange types are told, and may change the topology.
        for exchange in list(self._topology.exchanges.values()):
            self._match_exchange(exchange)
        for queue in self._topology.queues.values():
            if self._match_queue(queue):
                queue.mailbox.put_urgent(c.PolicyChanged(queue.effective))

    def _match_queue(self, queue: Queue) -> bool:
        """Whether another policy applies than before, or the same says something else."""
        queue_type = queue.options.queue_type
        policy = first_of(self._ordered["policy"], queue.name, queue_type)
        operator_policy = first_of(self._ordered["operator_policy"], queue.name, queue_type)
        if (policy, operator_policy) == (queue.policy, queue.operator_policy):
            return False
        queue.policy, queue.operator_policy = policy, operator_policy
        queue.effective = effective(
            queue.options,
            None if policy is None else policy.definition,
            None if operator_policy is None else operator_policy.definition,
        )
        return True

    def _match_exchange(self, exchange: Exchange) -> None:
        policy = first_of(self._ordered["policy"], exchange.name)
        operator_policy = first_of(self._ordered["operator_policy"], exchange.name)
        if (policy, operator_policy) == (exchange.policy, exchange.operator_policy):
            return
        exchange.policy, exchange.operator_policy = policy, operator_policy
        if not exchange.name.name:
            return  # the default exchange has no alternate, and nothing follows it
        said = {} if policy is None else policy.definition
        try:
            self._topology.policy_changed(
                exchange, alternate=cast("str | None", said.get(ALTERNATE_EXCHANGE))
            )
        except Exception:
            # Foreign code: the others must get their policies all the same.
            log.exception("%s: an extension failed at policy_changed", exchange.name)

    def _on_event(self, event: Event, thing: object) -> None:
        if event == "exchange.created":
            self._match_exchange(cast("Exchange", thing))


def policy_facts(thing: Queue | Exchange) -> dict[str, object]:
    """What a listing says of the policies that apply."""
    policy, operator_policy = thing.policy, thing.operator_policy
    return {
        "policy": None if policy is None else policy.name,
        "operator_policy": None if operator_policy is None else operator_policy.name,
        "effective_policy_definition": merged(
            None if policy is None else policy.definition,
            None if operator_policy is None else operator_policy.definition,
        ),
    }
