"""What a policy may say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leveret.broker.parameters import ParameterError
from leveret.broker.policies.definition import (
    WITHOUT_EFFECT,
    PolicyKind,
    check_definition,
    known_keys,
)
from leveret.broker.queues.argument_checks import MAX_EXPIRY_MS


@pytest.mark.parametrize(
    "definition",
    [
        {"message-ttl": 0, "expires": 1, "max-length": 0, "max-length-bytes": 0},
        {"message-ttl": MAX_EXPIRY_MS, "message-ttl-exact": True},
        {"overflow": "reject-publish-dlx", "dead-letter-exchange": ""},
        {"dead-letter-routing-key": "k", "queue-mode": "lazy", "delivery-limit": 0},
        {"alternate-exchange": "ae"},
        {"ha-mode": "exactly", "ha-params": 2, "ha-sync-mode": "automatic"},
        {"queue-master-locator": "min-masters"},
        {"max-age": "7D", "queue-version": 2},
    ],
)
def test_accepted(definition: dict[str, object]) -> None:
    assert check_definition(definition) == definition


@pytest.mark.parametrize(
    ("definition", "text"),
    [
        ({"message-ttl": -1}, "-1 is not a valid message TTL"),
        ({"message-ttl": "5"}, '<<"5">> is not a valid message TTL'),
        ({"message-ttl": 1.5}, "1.5 is not a valid message TTL"),
        ({"message-ttl": True}, "true is not a valid message TTL"),
        ({"message-ttl": None}, "null is not a valid message TTL"),
        ({"message-ttl": MAX_EXPIRY_MS + 1}, "315360000001 is not a valid message TTL"),
        ({"expires": 0}, "0 is not a valid queue expiry"),
        ({"max-length": [1]}, "[1] is not a valid maximum length"),
        ({"max-length-bytes": {"a": 1}}, '#{<<"a">> => 1} is not a valid maximum length in bytes'),
        ({"overflow": "drop"}, '<<"drop">> is not a valid overflow value'),
        ({"dead-letter-exchange": 5}, "5 is not a valid dead letter exchange name"),
        ({"dead-letter-routing-key": 5}, "5 is not a valid dead letter routing key"),
        ({"alternate-exchange": []}, "[] is not a valid alternate exchange name"),
        ({"queue-mode": "fast"}, '<<"fast">> is not a valid queue-mode value'),
        ({"queue-version": True}, "true is not a valid queue-version value"),
        ({"delivery-limit": -1}, "-1 is not a valid delivery limit"),
        ({"message-ttl-exact": 1}, "message-ttl-exact must be true or false, got 1"),
        ({"ha-mode": "some"}, '<<"some">> is not a valid ha-mode value'),
        (
            {"ha-params": 2},
            "ha-mode must be specified to specify ha-params, ha-sync-mode or "
            "ha-promote-on-shutdown",
        ),
        ({}, "no policy provided"),
        ([], "definition must be a dictionary: []"),
        ("x", 'definition must be a dictionary: <<"x">>'),
    ],
)
def test_refused(definition: object, text: str) -> None:
    with pytest.raises(ParameterError) as refused:
        check_definition(definition)
    assert str(refused.value) == text


@pytest.mark.parametrize(
    ("definition", "kind", "text"),
    [
        pytest.param(
            {"max-lenght": 5},
            "policy",
            '[{<<"max-lenght">>,5}] are not recognised policy settings\ndid you mean max-length?',
            id="misspelled",
        ),
        pytest.param(
            {"overflow": "drop-head", "max-length": 1},
            "operator_policy",
            '[{<<"overflow">>,<<"drop-head">>}] are not recognised policy settings\n'
            "an operator policy may set delivery-limit, expires, max-in-memory-bytes,"
            " max-in-memory-length, max-length, max-length-bytes, message-ttl",
            id="not-for-operators",
        ),
    ],
)
def test_unknown_keys(definition: dict[str, object], kind: PolicyKind, text: str) -> None:
    with pytest.raises(ParameterError) as refused:
        check_definition(definition, kind)
    assert str(refused.value) == text


@pytest.mark.parametrize("key", ["federation-upstream-set", "max-priority", "ha-nonsense", ""])
def test_keys_of_plug_ins_and_of_nobody(key: str) -> None:
    with pytest.raises(ParameterError, match="are not recognised policy settings"):
        check_definition({key: 1, "ha-mode": "all"})


def test_keys_without_effect_are_known() -> None:
    assert known_keys("policy") >= WITHOUT_EFFECT
    assert known_keys("policy") > known_keys("operator_policy")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(sorted(known_keys("policy"))) | st.text(), _JSON))
def test_whatever_json_says_is_a_definition_or_refused(definition: dict[str, object]) -> None:
    try:
        checked = check_definition(definition)
    except ParameterError:
        return
    assert checked == definition
