"""What a queue obeys: arguments, policy and operator policy made one."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leveret.broker.queues.arguments import QueueArguments
from leveret.broker.queues.effective import LOWER_WINS, QueueOptions, effective, merged

LOWER = {
    "expires": "expires_ms",
    "message-ttl": "message_ttl_ms",
    "max-length": "max_length",
    "max-length-bytes": "max_length_bytes",
}
ARGUMENT_WINS = {
    "overflow": ("overflow", "reject-publish", "drop-head"),
    "dead-letter-exchange": ("dead_letter_exchange", "policy-dlx", ""),
    "dead-letter-routing-key": ("dead_letter_routing_key", "policy-key", ""),
    "queue-mode": ("queue_mode", "lazy", "default"),
    "message-ttl-exact": ("message_ttl_exact", True, False),
}


def test_nothing_said() -> None:
    assert effective(QueueArguments()) == QueueOptions(
        expires_ms=None,
        message_ttl_ms=None,
        message_ttl_exact=False,
        max_length=None,
        max_length_bytes=None,
        overflow="drop-head",
        dead_letter_exchange=None,
        dead_letter_routing_key=None,
        queue_mode="default",
        delivery_limit=None,
        max_priority=None,
        single_active_consumer=False,
        queue_type="classic",
    )


@pytest.mark.parametrize(("key", "option"), LOWER.items())
@given(
    argument=st.none() | st.integers(0, 99),
    policy=st.none() | st.integers(0, 99),
    operator_policy=st.none() | st.integers(0, 99),
)
def test_the_lowest_number_counts(
    key: str, option: str, argument: int | None, policy: int | None, operator_policy: int | None
) -> None:
    arguments: dict[str, Any] = {option: argument}
    options = effective(
        QueueArguments(**arguments),
        None if policy is None else {key: policy},
        None if operator_policy is None else {key: operator_policy},
    )
    said = [number for number in (argument, policy, operator_policy) if number is not None]
    assert getattr(options, option) == min(said, default=None)


@pytest.mark.parametrize(("key", "case"), ARGUMENT_WINS.items())
def test_the_argument_wins(key: str, case: tuple[str, object, object]) -> None:
    option, policy, argument = case
    declared: dict[str, Any] = {option: argument}
    assert getattr(effective(QueueArguments(), {key: policy}), option) == policy
    assert getattr(effective(QueueArguments(**declared), {key: policy}), option) == argument


@pytest.mark.parametrize(
    ("arguments", "policy", "operator_policy", "limit"),
    [
        pytest.param({"queue_type": "quorum", "delivery_limit": 3}, None, None, 3, id="argument"),
        pytest.param({"delivery_limit": 3}, None, None, None, id="argument-of-a-classic-queue"),
        pytest.param({}, 4, None, 4, id="policy-on-a-classic-queue"),
        pytest.param({"queue_type": "quorum", "delivery_limit": 3}, 2, None, 2, id="lower-policy"),
        pytest.param({"queue_type": "quorum", "delivery_limit": 3}, 4, 5, 3, id="lower-argument"),
        pytest.param({}, 4, 0, 0, id="operator"),
    ],
)
def test_delivery_limit(
    arguments: dict[str, Any], policy: int | None, operator_policy: int | None, limit: int | None
) -> None:
    options = effective(
        QueueArguments(**arguments),
        None if policy is None else {"delivery-limit": policy},
        None if operator_policy is None else {"delivery-limit": operator_policy},
    )
    assert options.delivery_limit == limit


def test_what_no_policy_can_give() -> None:
    arguments = QueueArguments(max_priority=7, single_active_consumer=True, queue_type="quorum")
    options = effective(arguments, {"max-length": 1})
    assert (options.max_priority, options.single_active_consumer) == (7, True)
    assert options.queue_type == "quorum"


def test_every_argument_counts() -> None:
    """A field of the arguments that is forgotten here would be obeyed by no queue."""
    passed_over = {"queue_version"}
    names = {field.name for field in fields(QueueArguments)} - passed_over
    assert names == {field.name for field in fields(QueueOptions)}


def test_both_policies_are_one_definition() -> None:
    policy = {"max-length": 5, "message-ttl": 10, "overflow": "reject-publish"}
    operator_policy = {"max-length": 3, "message-ttl": 20, "expires": 7}
    assert merged(policy, operator_policy) == {
        "expires": 7,
        "max-length": 3,
        "message-ttl": 10,
        "overflow": "reject-publish",
    }
    assert merged(policy, None) == policy
    assert merged(None, operator_policy) == operator_policy
    assert merged(None, None) == {}


@given(
    policy=st.dictionaries(st.sampled_from(sorted(LOWER_WINS)), st.integers(0, 9)),
    operator_policy=st.dictionaries(st.sampled_from(sorted(LOWER_WINS)), st.integers(0, 9)),
)
def test_an_operator_policy_is_never_exceeded(
    policy: dict[str, object], operator_policy: dict[str, Any]
) -> None:
    both: dict[str, Any] = merged(policy, operator_policy)
    assert both.keys() == policy.keys() | operator_policy.keys()
    assert all(both[key] <= limit for key, limit in operator_policy.items())
