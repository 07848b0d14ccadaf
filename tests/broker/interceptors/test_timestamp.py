"""The built-in interceptor that stamps messages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from pamqp import commands

from leveret.broker.clock import VirtualClock
from leveret.broker.config import Settings
from leveret.broker.interceptors.timestamp import TimestampInterceptor
from leveret.protocol.codec import Properties, make, read_properties, write_properties
from leveret.protocol.message import Message

if TYPE_CHECKING:
    from leveret.broker.channel.context import ConnectionContext


def interceptor(mode: str, now: float = 1_000.9) -> TimestampInterceptor:
    context = SimpleNamespace(clock=VirtualClock(now), settings=Settings(message_timestamp=mode))
    return TimestampInterceptor(cast("ConnectionContext", context))


def stamped(mode: str, properties: Properties) -> Properties:
    message = Message(b"", "", "", write_properties(properties), b"body", 0, False)
    method = make(commands.Basic.Publish)
    seen, changed = interceptor(mode).intercept(method, message)
    assert seen is method
    assert changed is message
    assert message.body == b"body"
    return read_properties(message.header)


def test_it_applies_to_publishes_alone() -> None:
    assert list(interceptor("stamp").applies_to()) == ["Basic.Publish"]
    assert list(interceptor("overwrite").applies_to()) == ["Basic.Publish"]


def test_off_costs_nothing() -> None:
    assert list(interceptor("off").applies_to()) == []


@pytest.mark.parametrize(
    ("mode", "given", "expected"),
    [
        ("stamp", None, 1_000),
        ("stamp", 5, 5),
        ("stamp", 0, 0),
        ("overwrite", None, 1_000),
        ("overwrite", 5, 1_000),
    ],
)
def test_whole_seconds_of_the_brokers_clock(mode: str, given: int | None, expected: int) -> None:
    assert stamped(mode, Properties(timestamp=given)).timestamp == expected


def test_other_properties_stay() -> None:
    given = Properties(content_type="text/plain", priority=3, message_id="id", user_id="guest")
    after = stamped("stamp", given)
    given.timestamp = 1_000
    assert after == given


def test_a_method_without_a_message_is_left_alone() -> None:
    method = make(commands.Basic.Publish)
    assert interceptor("stamp").intercept(method, None) == (method, None)
