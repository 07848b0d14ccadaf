"""Which interceptors see a method, and in which order."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from pamqp import commands
from pamqp.base import Frame

from leveret.broker.interceptors.chain import Interceptor, InterceptorChain
from leveret.protocol.codec import make
from leveret.protocol.errors import ChannelException, ConnectionException, access_refused
from leveret.protocol.message import Message


class Appends(Interceptor):
    """Adds its name to the routing key, or the queue's name."""

    def __init__(self, name: str, priority: int = 0, methods: Iterable[str] = ()) -> None:
        self._name = name
        self.priority = priority
        self._methods = tuple(methods) or ("Basic.Publish",)

    def applies_to(self) -> Iterable[str]:
        return self._methods

    def intercept(self, method: Frame, message: Message | None) -> tuple[Frame, Message | None]:
        if isinstance(method, commands.Basic.Publish):
            method.routing_key = (method.routing_key or "") + self._name
        return method, message


class Forbids(Appends):
    def intercept(self, method: Frame, message: Message | None) -> tuple[Frame, Message | None]:
        raise access_refused("no")


def publish(key: str = "") -> commands.Basic.Publish:
    return make(commands.Basic.Publish, exchange="", routing_key=key)


def key_after(chain: InterceptorChain) -> str | None:
    method, _ = chain.intercept(publish())
    assert isinstance(method, commands.Basic.Publish)
    return method.routing_key


def test_without_interceptors_nothing_is_looked_at() -> None:
    chain = InterceptorChain([])
    assert not chain.is_active
    assert not chain.sees_publishes
    assert not chain.sees_acks
    method = publish()
    message = Message(b"", "", "", b"", b"", 0, False)
    assert chain.intercept(method, message) == (method, message)


def test_the_lowest_priority_goes_first() -> None:
    chain = InterceptorChain([Appends("c", 7), Appends("a", -1), Appends("b", 0)])
    assert key_after(chain) == "abc"


def test_only_the_methods_it_applies_to() -> None:
    declares = Appends("x", methods=["Queue.Declare"])
    chain = InterceptorChain([declares])
    assert chain.is_active
    assert not chain.sees_publishes
    assert key_after(chain) == ""


@pytest.mark.parametrize("method", ["Basic.Ack", "Basic.Nack", "Basic.Reject"])
def test_acks_are_seen_whichever_they_are(method: str) -> None:
    assert InterceptorChain([Appends("x", methods=[method])]).sees_acks


def test_one_that_applies_to_nothing_is_not_there() -> None:
    class Idle(Appends):
        def applies_to(self) -> Iterable[str]:
            return ()

    assert not InterceptorChain([Idle("a"), Idle("b")]).is_active


def test_equal_priorities_for_one_method_are_an_error() -> None:
    """Nobody could say which of them comes first."""
    both = [Appends("a", 3), Appends("b", 3, ["Queue.Bind", "Basic.Publish"])]
    with pytest.raises(ConnectionException, match=r"priority 3 for Basic\.Publish") as refused:
        InterceptorChain(both)
    assert refused.value.code == 541


def test_equal_priorities_for_different_methods_are_fine() -> None:
    chain = InterceptorChain([Appends("a"), Appends("b", methods=["Queue.Declare"])])
    assert key_after(chain) == "a"


def test_one_that_forbids_ends_the_chain() -> None:
    chain = InterceptorChain([Forbids("x", 1), Appends("a", 0), Appends("b", 2)])
    method = publish()
    with pytest.raises(ChannelException):
        chain.intercept(method)
    assert method.routing_key == "a"
