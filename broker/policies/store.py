"""Policies of all virtual hosts, for whoever administers them: ``broker.policies``.

One object for policies and one for operator policies (``broker.operator_policies``). Upstream: the
command line through ``admin/``, and programs that embed the broker. Downstream: each virtual host's
``LivePolicies``, which applies a change at once, and its store: a call returns when the change is
on disk.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from leveret.broker.events import acting, parameter_event
from leveret.broker.parameters import NoSuchParameter, ParameterError
from leveret.broker.policies.definition import WITHOUT_EFFECT, PolicyKind
from leveret.broker.policies.policy import ApplyTo, Policy

if TYPE_CHECKING:
    from leveret.broker.events import Events
    from leveret.broker.live_vhost import LiveVhost

log = logging.getLogger(__name__)


class Policies:
    def __init__(self, vhosts: Mapping[str, LiveVhost], kind: PolicyKind = "policy") -> None:
        self._vhosts = vhosts
        self._kind: PolicyKind = kind

    async def set(
        self,
        vhost: str,
        name: str,
        pattern: str,
        definition: Mapping[str, object],
        priority: int | float = 0,
        apply_to: str = "all",
    ) -> None:
        """Set a policy, or change it. Raises ParameterError if it must not be like this."""
        live = self._vhost(vhost)
        policy = Policy(
            vhost,
            name,
            pattern,
            cast("dict[str, object]", definition),
            priority,
            cast(ApplyTo, apply_to),
            self._kind,
        )
        ignored = sorted(WITHOUT_EFFECT & policy.definition.keys())
        if ignored:
            log.warning(
                "%s '%s' in vhost '%s': without effect here: %s",
                self._kind,
                name,
                vhost,
                ", ".join(ignored),
            )
        before = live.policies.get(self._kind, name)
        live.policies.set([policy])
        await live.save_parameter(self._kind, name, policy.to_json())
        if live.events.is_heard and policy != before:
            self._tell_set(live.events, policy)

    async def delete(self, vhost: str, name: str) -> None:
        """Raises NoSuchParameter if there is none of that name."""
        live = self._vhost(vhost)
        try:
            live.policies.clear(self._kind, name)
        except KeyError:
            what = self._kind.replace("_", " ")
            raise NoSuchParameter(f"there is no {what} '{name}' in vhost '{vhost}'") from None
        await live.save_parameter(self._kind, name, None)
        if live.events.is_heard:
            self._tell_cleared(live.events, vhost, name)

    def get(self, vhost: str, name: str) -> Policy | None:
        return self._vhost(vhost).policies.get(self._kind, name)

    def list(self, vhost: str | None = None) -> list[Policy]:
        """Of one virtual host or of all; those that are tried first come first."""
        lives = self._vhosts.values() if vhost is None else [self._vhost(vhost)]
        return [policy for live in lives for policy in live.policies.all(self._kind)]

    # --- events: an operator policy is told as a parameter as well, as RabbitMQ does -------------

    def _tell_set(self, events: Events, policy: Policy) -> None:
        value: dict[str, object] = {
            "pattern": policy.pattern,
            "definition": policy.definition,
            "priority": policy.priority,
            "apply-to": policy.apply_to,
        }
        if self._kind != "policy":
            events.notify(
                "parameter.set",
                parameter_event(policy.vhost, self._kind, policy.name, {"value": value}),
            )
        whose: dict[str, object] = {"name": policy.name, "vhost": policy.vhost}
        events.notify("policy.set", {**whose, **acting(), **value})

    def _tell_cleared(self, events: Events, vhost: str, name: str) -> None:
        if self._kind != "policy":
            events.notify("parameter.cleared", parameter_event(vhost, self._kind, name, {}))
        kind = "policy.cleared" if self._kind == "policy" else "operator.policy.cleared"
        events.notify(kind, {"name": name, "vhost": vhost, **acting()})

    def _vhost(self, name: str) -> LiveVhost:
        live = self._vhosts.get(name)
        if live is None:
            raise ParameterError(f"there is no vhost '{name}', or it is down")
        return live
