"""Which policy applies to what."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leveret.broker.parameters import ParameterError
from leveret.broker.policies.policy import Policy, first_of, in_order
from leveret.broker.queues.arguments import QueueType
from leveret.broker.resource import Resource

QUEUE = Resource("/", "queue", "orders")
EXCHANGE = Resource("/", "exchange", "orders")


def policy(name: str = "p", pattern: str = ".*", **more: Any) -> Policy:
    return Policy("/", name, pattern, more.pop("definition", {"max-length": 5}), **more)


@pytest.mark.parametrize(
    ("apply_to", "queue", "exchange"),
    [("all", True, True), ("queues", True, False), ("exchanges", False, True)],
)
def test_apply_to(apply_to: Any, queue: bool, exchange: bool) -> None:
    one = policy(apply_to=apply_to)
    assert (one.is_for(QUEUE), one.is_for(EXCHANGE)) == (queue, exchange)


@pytest.mark.parametrize(
    ("definition", "queue_type", "expected"),
    [
        ({"max-length": 5, "delivery-limit": 3}, "classic", True),
        ({"max-length": 5, "ha-mode": "all"}, "classic", True),
        ({"max-length": 5, "max-age": "1D"}, "classic", False),
        ({"max-length": 5, "delivery-limit": 3}, "quorum", True),
        ({"max-length": 5, "ha-mode": "all"}, "quorum", False),
        ({"max-length": 5, "queue-mode": "lazy"}, "quorum", False),
        ({"max-length": 5}, "stream", False),
        ({"max-length-bytes": 5, "max-age": "1D"}, "stream", True),
    ],
)
def test_a_policy_for_another_queue_type_does_not_apply(
    definition: dict[str, object], queue_type: QueueType, expected: bool
) -> None:
    assert policy(definition=definition).is_for(QUEUE, queue_type) is expected


def test_the_highest_priority_wins_and_then_the_name() -> None:
    policies = [
        policy("low", priority=-1),
        policy("elsewhere", "^other", priority=9),
        policy("b", priority=3),
        policy("a", priority=3),
        policy("half", priority=2.5),
    ]
    ordered = in_order(policies)
    assert [one.name for one in ordered] == ["elsewhere", "a", "b", "half", "low"]
    first = first_of(ordered, QUEUE)
    assert first is not None
    assert first.name == "a"
    assert first_of(ordered[:1], QUEUE) is None


@given(st.permutations([policy(f"p{n}", priority=n % 3) for n in range(7)]))
def test_the_order_they_came_in_does_not_matter(policies: list[Policy]) -> None:
    assert in_order(policies) == in_order(reversed(policies))


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"name": ""}, "a policy's name must be text of 1 to 255 bytes"),
        ({"priority": "high"}, 'priority should be a number, actually was <<"high">>'),
        ({"priority": True}, "priority should be a number, actually was true"),
        ({"priority": float("nan")}, "nan is out of range for a priority"),
        ({"pattern": 5}, "pattern should be a binary but was 5"),
        (
            {"pattern": "("},
            "pattern should be regular expression but is invalid:"
            ' {"missing ), unterminated subpattern",0}',
        ),
        (
            {"apply_to": "streams"},
            "apply-to 'streams' unrecognised; should be 'queues', 'exchanges' or 'all'",
        ),
        ({"definition": {}}, "no policy provided"),
        ({"kind": "operator_policy", "definition": {"overflow": "drop-head"}}, None),
    ],
)
def test_refused(more: dict[str, Any], text: str | None) -> None:
    with pytest.raises(ParameterError) as refused:
        policy(**more)
    if text is not None:
        assert str(refused.value) == text


def test_kept_and_read_again() -> None:
    one = policy("p", "^a", priority=3, apply_to="queues", kind="operator_policy")
    assert Policy.from_json("/", "p", "operator_policy", one.to_json()) == one
    assert one.as_dict() == {
        "vhost": "/",
        "name": "p",
        "pattern": "^a",
        "apply-to": "queues",
        "definition": {"max-length": 5},
        "priority": 3,
    }


@pytest.mark.parametrize("text", ["", "[]", "5", "{}", '{"pattern": ".*"}'])
def test_what_is_not_a_policy_cannot_be_read(text: str) -> None:
    with pytest.raises(ParameterError):
        Policy.from_json("/", "p", "policy", text)
