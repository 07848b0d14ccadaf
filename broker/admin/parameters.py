"""Policies and limits, as they are set through the control socket.

Upstream: ``admin/handlers.py``, of whose commands these are a part. Downstream:
``broker.policies``, ``broker.operator_policies`` and ``broker.limits``, which check everything:
here only the shape of a request is looked at, so that none fails as a bug.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from leveret.broker.admin.control import Handler, Progress, Refused
from leveret.broker.parameters import ParameterError
from leveret.storage.vhost_store import StoreError

if TYPE_CHECKING:
    from leveret.broker.policies.store import Policies
    from leveret.broker.server import Broker


class ParameterHandlers:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    @property
    def by_command(self) -> dict[str, Handler]:
        return {
            name: _refusing(handler)
            for name, handler in {
                "set_policy": self._set_policy,
                "clear_policy": self._clear_policy,
                "list_policies": self._list_policies,
                "set_limits": self._set_limits,
                "clear_limits": self._clear_limits,
                "list_limits": self._list_limits,
            }.items()
        }

    # --- policies --------------------------------------------------------------------------------

    def _policies(self, request: Mapping[str, Any]) -> Policies:
        broker = self._broker
        return broker.operator_policies if request.get("operator") else broker.policies

    async def _set_policy(self, request: Mapping[str, Any], tell: Progress) -> object:
        definition = request.get("definition")
        if not isinstance(definition, dict):
            raise Refused("a policy needs a definition: a JSON object of settings")
        await self._policies(request).set(
            _text(request, "vhost"),
            _text(request, "name"),
            _text(request, "pattern"),
            definition,
            request.get("priority", 0),
            str(request.get("apply_to", "all")),
        )
        return {}

    async def _clear_policy(self, request: Mapping[str, Any], tell: Progress) -> object:
        await self._policies(request).delete(_text(request, "vhost"), _text(request, "name"))
        return {}

    async def _list_policies(self, request: Mapping[str, Any], tell: Progress) -> object:
        vhost = request.get("vhost")
        policies = self._policies(request).list(None if vhost is None else str(vhost))
        return [policy.as_dict() for policy in policies]

    # --- limits ----------------------------------------------------------------------------------

    async def _set_limits(self, request: Mapping[str, Any], tell: Progress) -> object:
        limits = self._broker.limits
        wanted = request.get("limits")
        if not isinstance(wanted, dict) or not wanted:
            raise Refused("give limits as a JSON object of numbers")
        if "user" in request:
            await limits.set_user(_text(request, "user"), wanted)
        else:
            await limits.set_vhost(_text(request, "vhost"), wanted)
        return {}

    async def _clear_limits(self, request: Mapping[str, Any], tell: Progress) -> object:
        limits = self._broker.limits
        limit = request.get("limit")
        limit = None if limit is None else str(limit)
        if "user" in request:
            await limits.clear_user(_text(request, "user"), limit)
        else:
            await limits.clear_vhost(_text(request, "vhost"), limit)
        return {}

    async def _list_limits(self, request: Mapping[str, Any], tell: Progress) -> object:
        limits = self._broker.limits
        vhosts, users = limits.all_vhosts(), limits.all_users()
        if "user" in request:
            name = _text(request, "user")
            vhosts, users = {}, {name: limits.user(name)}
        elif "vhost" in request:
            name = _text(request, "vhost")
            vhosts, users = {name: limits.vhost(name)}, {}
        return {"vhosts": vhosts, "users": users}


def _text(request: Mapping[str, Any], what: str) -> str:
    value = request.get(what)
    if not isinstance(value, str):
        raise Refused(f"'{what}' is missing, or is not text")
    return value


def _refusing(handler: Handler) -> Handler:
    """What cannot be set is told to who asked, not to the log."""

    async def handle(request: Mapping[str, Any], tell: Progress) -> object:
        try:
            return await handler(request, tell)
        except (ParameterError, StoreError) as error:
            raise Refused(str(error)) from error

    return handle
