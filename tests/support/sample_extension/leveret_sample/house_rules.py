"""An interceptor: renames routing keys, and forbids names of queues."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pamqp import commands
from pamqp.base import Frame

from leveret.broker.interceptors.chain import Interceptor
from leveret.protocol.codec import make
from leveret.protocol.errors import access_refused

if TYPE_CHECKING:
    from leveret.broker.channel.context import ConnectionContext
    from leveret.protocol.message import Message


class HouseRules(Interceptor):
    description = "old.* is called new.*; nobody declares secret.*"
    priority = 10

    def __init__(self, connection: ConnectionContext) -> None:
        self._user = connection.access.user

    def applies_to(self) -> Iterable[str]:
        return ("Basic.Publish", "Queue.Declare")

    def intercept(self, method: Frame, message: Message | None) -> tuple[Frame, Message | None]:
        if isinstance(method, commands.Basic.Publish):
            key = method.routing_key or ""
            if key.startswith("old."):
                method = make(
                    commands.Basic.Publish,
                    exchange=method.exchange,
                    routing_key="new." + key.removeprefix("old."),
                    mandatory=method.mandatory,
                    immediate=method.immediate,
                )
        elif isinstance(method, commands.Queue.Declare):
            if (method.queue or "").startswith("secret."):
                raise access_refused(f"queue '{method.queue}' is not for {self._user}")
        return method, message
