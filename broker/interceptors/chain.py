"""Interceptors: code that sees a method before its channel does (hop 3) [37-39].

An interceptor says which methods it ``applies_to`` and gets each of those with its message (for
basic.publish), before anything is checked. It may return another method or message, or forbid by
raising a ChannelException. Those registered when a channel is opened serve that channel; several
for one method run in ascending order of ``priority``, which must differ.

Installed packages register a factory in the group ``leveret.interceptors``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from pamqp.base import Frame

from leveret.protocol.errors import internal_error

if TYPE_CHECKING:
    from leveret.broker.channel.context import ConnectionContext
    from leveret.protocol.message import Message

PUBLISH = "Basic.Publish"
ACKS = ("Basic.Ack", "Basic.Nack", "Basic.Reject")


class Interceptor(Protocol):
    """One instance per channel."""

    description: str = ""
    priority: int = 0

    @abstractmethod
    def applies_to(self) -> Iterable[str]:
        """Names of methods as pamqp has them: ``Basic.Publish``, ``Queue.Declare``, ..."""

    @abstractmethod
    def intercept(self, method: Frame, message: Message | None) -> tuple[Frame, Message | None]:
        """What the channel is to handle instead; raise a ChannelException to forbid it."""


InterceptorFactory = Callable[["ConnectionContext"], Interceptor]


class InterceptorChain:
    """The interceptors of one channel, by method."""

    def __init__(self, interceptors: Iterable[Interceptor]) -> None:
        self._by_method: dict[str, list[Interceptor]] = {}
        for interceptor in sorted(interceptors, key=lambda each: each.priority):
            for method in interceptor.applies_to():
                chain = self._by_method.setdefault(method, [])
                if chain and chain[-1].priority == interceptor.priority:
                    raise internal_error(
                        f"two interceptors with priority {interceptor.priority} for {method}"
                    )
                chain.append(interceptor)
        self.is_active = bool(self._by_method)
        # Asked once per run instead of once per message.
        self.sees_publishes = PUBLISH in self._by_method
        self.sees_acks = not self._by_method.keys().isdisjoint(ACKS)

    def intercept(
        self, method: Frame, message: Message | None = None
    ) -> tuple[Frame, Message | None]:
        for interceptor in self._by_method.get(method.name, ()):
            method, message = interceptor.intercept(method, message)
        return method, message
