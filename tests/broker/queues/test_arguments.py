"""Queue arguments. The texts were read off RabbitMQ 3.10.8, one declaration at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from leveret.broker.queues.arguments import (
    QueueArguments,
    QueueType,
    check_arguments,
    check_consumer_arguments,
    check_equivalent,
    check_server_named,
    dead_letter_exchange,
    locked,
)
from leveret.broker.resource import Resource
from leveret.protocol.errors import ChannelException
from leveret.protocol.field_table import Field, Table

NAME = Resource("/", "queue", "q")
Q = "queue 'q' in vhost '/'"

ONE_OF_EACH_TYPE = {
    "bool": Field("t", True),
    "float": Field("f", 1.5),
    "double": Field("d", 5.0),
    "decimal": Field("D", (2, 500)),
    "timestamp": Field("T", 7),
    "longstr": Field("S", "5"),
    "binary": Field("x", b"abc"),
    "table": Field("F", {"a": Field("I", 1)}),
    "array": Field("A", [Field("I", 1)]),
    "void": Field("V", None),
    "byte": Field("b", 5),
    "unsignedbyte": Field("B", 5),
    "short": Field("s", 5),
    "unsignedshort": Field("u", 5),
    "signedint": Field("I", 5),
    "unsignedint": Field("i", 5),
    "long": Field("l", 5),
}
INTEGER_TYPES = (
    "byte",
    "unsignedbyte",
    "short",
    "unsignedshort",
    "signedint",
    "unsignedint",
    "long",
)


def table(**arguments: Field) -> Table:
    return {"x-" + name.replace("_", "-"): value for name, value in arguments.items()}


def refusal(check: Callable[[], object]) -> ChannelException | None:
    try:
        check()
    except ChannelException as error:
        return error
    return None


def declare(
    arguments: Table, *, durable: bool = False, exclusive: bool = False, auto_delete: bool = False
) -> str | None:
    """Declare a new queue: None, or the text it is refused with."""
    refused = refusal(
        lambda: check_arguments(
            NAME,
            durable=durable,
            exclusive=exclusive,
            auto_delete=auto_delete,
            arguments=arguments,
        )
    )
    if refused is None:
        return None
    assert refused.code == 406
    return refused.text


# --- new queues --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "value", "why"),
    [
        ("x-message-ttl", Field("I", 0), None),
        ("x-message-ttl", Field("I", -1), "{value_negative,-1}"),
        ("x-message-ttl", Field("l", 315_360_000_000), None),
        ("x-message-ttl", Field("l", 315_360_000_001), "{value_too_large,315360000001}"),
        ("x-expires", Field("I", 1), None),
        ("x-expires", Field("I", 0), "{value_zero,0}"),
        ("x-expires", Field("b", -7), "{value_negative,-7}"),
        ("x-expires", Field("l", 315_360_000_001), "{value_too_large,315360000001}"),
        ("x-max-length", Field("I", 0), None),
        ("x-max-length", Field("l", 9_000_000_000_000), None),
        ("x-max-length", Field("s", -7), "{value_negative,-7}"),
        ("x-max-length-bytes", Field("I", 0), None),
        ("x-max-length-bytes", Field("I", -1), "{value_negative,-1}"),
        ("x-max-priority", Field("I", 0), None),
        ("x-max-priority", Field("B", 255), None),
        ("x-max-priority", Field("I", -1), "{value_negative,-1}"),
        ("x-max-priority", Field("I", 256), "{max_value_exceeded,256}"),
        ("x-queue-version", Field("I", 1), None),
        ("x-queue-version", Field("l", 2), None),
        ("x-queue-version", Field("I", 3), "\"unsupported queue version '3'\""),
        ("x-queue-version", Field("I", 0), "\"unsupported queue version '0'\""),
        ("x-queue-version", Field("I", -1), "{value_negative,-1}"),
        ("x-overflow", Field("S", "drop-head"), None),
        ("x-overflow", Field("S", "reject-publish"), None),
        ("x-overflow", Field("S", "reject-publish-dlx"), None),
        ("x-overflow", Field("S", "spill"), "invalid_overflow"),
        ("x-dead-letter-exchange", Field("S", ""), None),
        ("x-dead-letter-routing-key", Field("S", "k"), "routing_key_but_no_dlx_defined"),
        ("x-single-active-consumer", Field("t", False), None),
        ("x-queue-mode", Field("S", "default"), None),
        ("x-queue-mode", Field("S", "lazy"), None),
        ("x-queue-mode", Field("S", "fast"), "\"unsupported queue mode 'fast'\""),
        ("x-queue-type", Field("S", "classic"), None),
        ("x-queue-type", Field("S", "round"), "\"unsupported queue type 'round'\""),
        ("x-unknown", Field("F", {}), None),
    ],
)
def test_values(argument: str, value: Field, why: str | None) -> None:
    assert declare({argument: value}) == (why and f"invalid arg '{argument}' for {Q}: {why}")


@pytest.mark.parametrize(
    "argument",
    ["x-message-ttl", "x-expires", "x-max-length", "x-max-length-bytes", "x-max-priority"],
)
@pytest.mark.parametrize("name", ONE_OF_EACH_TYPE)
def test_integers_may_have_any_width_and_nothing_else_is_one(argument: str, name: str) -> None:
    refused = f"invalid arg '{argument}' for {Q}: \"expected integer, got {name}\""
    expected = None if name in INTEGER_TYPES else refused
    assert declare({argument: ONE_OF_EACH_TYPE[name]}) == expected


@pytest.mark.parametrize(
    ("argument", "wrong_type"),
    [
        (argument, name)
        for argument, type_name in (
            ("x-overflow", "longstr"),
            ("x-queue-mode", "longstr"),
            ("x-queue-type", "longstr"),
            ("x-dead-letter-routing-key", "longstr"),
            ("x-single-active-consumer", "bool"),
            ("x-message-ttl-exact", "bool"),
        )
        for name in ONE_OF_EACH_TYPE
        if name != type_name
    ],
)
def test_words_and_booleans_have_one_type(argument: str, wrong_type: str) -> None:
    expected = f"invalid arg '{argument}' for {Q}: {{unacceptable_type,{wrong_type}}}"
    assert declare({argument: ONE_OF_EACH_TYPE[wrong_type]}) == expected


def test_a_dead_letter_exchange_that_is_no_string_has_a_text_of_its_own() -> None:
    expected = f"invalid type 'signedint' for arg 'x-dead-letter-exchange' in {Q}"
    assert declare(table(dead_letter_exchange=Field("I", 7))) == expected


def test_dead_letter_exchange() -> None:
    assert dead_letter_exchange(NAME, {}) is None
    assert dead_letter_exchange(NAME, table(dead_letter_exchange=Field("S", ""))) == ""


def test_a_dead_letter_routing_key_needs_an_exchange() -> None:
    arguments = table(dead_letter_routing_key=Field("S", "k"), dead_letter_exchange=Field("S", ""))
    assert declare(arguments) is None


@pytest.mark.parametrize(
    ("arguments", "first"),
    [
        pytest.param(
            table(
                expires=Field("I", 0), queue_type=Field("I", 1), dead_letter_exchange=Field("I", 1)
            ),
            "x-dead-letter-exchange",
            id="dead-letter-exchange-before-all",
        ),
        pytest.param(
            table(expires=Field("I", 0), queue_type=Field("S", "round")),
            "x-queue-type",
            id="then-the-type",
        ),
        pytest.param(
            table(message_ttl=Field("I", -1), expires=Field("I", 0)),
            "x-expires",
            id="then-in-the-order-of-checks",
        ),
        pytest.param(
            table(delivery_limit=Field("I", 1), message_ttl=Field("I", -1)),
            "x-message-ttl",
            id="values-before-arguments-of-other-types",
        ),
        pytest.param(
            table(max_age=Field("S", "1D"), delivery_limit=Field("I", 1)),
            "x-max-age",
            id="those-in-the-order-they-came",
        ),
    ],
)
def test_which_of_several_errors_is_reported(arguments: Table, first: str) -> None:
    text = declare(arguments)
    assert text is not None
    assert f"arg '{first}'" in text


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ('a"b', '"unsupported queue mode \'a\\"b\'"'),
        ("a\\b", "\"unsupported queue mode 'a\\\\b'\""),
        ("a\nb", "\"unsupported queue mode 'a\\nb'\""),
        ("中", "\"unsupported queue mode '中'\""),
        (
            "\x01",
            "[117,110,115,117,112,112,111,114,116,101,100,32,113,117,101,117,101,32,109,111,"
            "100,101,32,39,1,39]",
        ),
    ],
)
def test_words_are_shown_as_erlang_shows_them(word: str, shown: str) -> None:
    assert (
        declare(table(queue_mode=Field("S", word)))
        == f"invalid arg 'x-queue-mode' for {Q}: {shown}"
    )


# --- queue types -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("queue_type", "argument", "value"),
    [
        ("classic", "x-delivery-limit", Field("I", 3)),
        ("classic", "x-max-age", Field("S", "1D")),
        ("quorum", "x-max-priority", Field("I", 3)),
        ("quorum", "x-queue-mode", Field("S", "lazy")),
        ("quorum", "x-queue-master-locator", Field("S", "min-masters")),
        ("stream", "x-message-ttl", Field("S", "nonsense")),
        ("stream", "x-dead-letter-exchange", Field("S", "")),
        ("stream", "x-max-length", Field("I", 1)),
    ],
)
def test_arguments_of_another_queue_type(queue_type: str, argument: str, value: Field) -> None:
    arguments = {argument: value, "x-queue-type": Field("S", queue_type)}
    expected = f"invalid arg '{argument}' for {Q} of queue type rabbit_{queue_type}_queue"
    assert declare(arguments, durable=True) == expected


@pytest.mark.parametrize(
    ("queue_type", "argument", "value", "why"),
    [
        ("quorum", "x-delivery-limit", Field("S", "abc"), None),
        ("quorum", "x-quorum-initial-group-size", Field("I", 0), "{value_zero,0}"),
        ("quorum", "x-dead-letter-strategy", Field("S", "at-least-once"), None),
        ("quorum", "x-dead-letter-strategy", Field("S", "abc"), "invalid_dlx_strategy"),
        ("quorum", "x-queue-leader-locator", Field("S", "balanced"), None),
        ("quorum", "x-queue-leader-locator", Field("S", "abc"), "invalid_queue_locator_arg"),
        ("quorum", "x-max-in-memory-length", Field("t", True), '"expected integer, got bool"'),
        ("stream", "x-max-age", Field("S", "1D"), None),
        ("stream", "x-max-age", Field("S", "5x"), "invalid_max_age"),
        ("stream", "x-max-age", Field("S", "0D"), "invalid_max_age"),
        ("stream", "x-max-age", Field("S", "soon"), "invalid_max_age"),
        ("stream", "x-max-age", Field("I", 1), "{unacceptable_type,signedint}"),
        ("stream", "x-initial-cluster-size", Field("I", 0), "{value_zero,0}"),
        ("stream", "x-stream-max-segment-size-bytes", Field("l", 3_000_000_000), None),
    ],
)
def test_values_of_quorum_and_stream_arguments(
    queue_type: str, argument: str, value: Field, why: str | None
) -> None:
    arguments = {argument: value, "x-queue-type": Field("S", queue_type)}
    expected = why and f"invalid arg '{argument}' for {Q}: {why}"
    assert declare(arguments, durable=True) == expected


def test_largest_stream_segment() -> None:
    arguments = table(
        stream_max_segment_size_bytes=Field("l", 3_000_000_001), queue_type=Field("S", "stream")
    )
    expected = "Exceeded max value for x-stream-max-segment-size-bytes"
    assert declare(arguments, durable=True) == expected


@pytest.mark.parametrize("queue_type", ["quorum", "stream"])
@pytest.mark.parametrize(
    ("durable", "exclusive", "auto_delete", "wrong"),
    [
        (True, False, False, None),
        (False, False, False, "non-durable"),
        (False, True, False, "exclusive-owner"),
        (True, True, True, "auto-delete"),
    ],
)
def test_replicated_queues_are_for_ever(
    queue_type: str, durable: bool, exclusive: bool, auto_delete: bool, wrong: str | None
) -> None:
    text = declare(
        table(queue_type=Field("S", queue_type)),
        durable=durable,
        exclusive=exclusive,
        auto_delete=auto_delete,
    )
    assert text == (wrong and f"invalid property '{wrong}' for {Q}")


def test_classic_queues_may_be_anything() -> None:
    assert declare({}, durable=False, exclusive=True, auto_delete=True) is None


def test_only_classic_queues_are_named_by_the_broker() -> None:
    check_server_named({})
    check_server_named(table(queue_type=Field("S", "classic")))
    with pytest.raises(ChannelException) as refused:
        check_server_named(table(queue_type=Field("S", "quorum")))
    assert refused.value.code == 406
    expected = "Cannot declare a server-named queue for type rabbit_quorum_queue"
    assert refused.value.text == expected


# --- declared again ----------------------------------------------------------------------------


@dataclass
class Declared:
    name: Resource = NAME
    durable: bool = False
    exclusive: bool = False
    auto_delete: bool = False
    arguments: Table = field(default_factory=dict)


def redeclare(current: Table, received: Table) -> str | None:
    """What follows on ``inequivalent arg '...' for queue ...: ``; None if it is the same queue."""
    refused = refusal(
        lambda: check_equivalent(
            Declared(arguments=current),
            durable=False,
            exclusive=False,
            auto_delete=False,
            arguments=received,
        )
    )
    if refused is None:
        return None
    assert refused.code == 406
    [argument] = {*current, *received}
    start = f"inequivalent arg '{argument}' for {Q}: "
    assert refused.text.startswith(start)
    return refused.text.removeprefix(start)


@pytest.mark.parametrize(
    ("current", "received", "text"),
    [
        (Field("I", 10), Field("I", 11), "received '11' but current is '10'"),
        (Field("I", 10), Field("b", 10), None),
        (Field("I", 10), Field("l", 10), None),
        (Field("I", 10), Field("T", 10), None),
        (Field("I", 10), Field("d", 10.0), "received '10.0' but current is '10'"),
        (Field("I", 1), Field("t", True), "received 'true' but current is '1'"),
        (Field("I", 10), Field("S", "10"), "received '10' but current is '10'"),
        (Field("I", 10), Field("V", None), "received none but current is '10'"),
        (Field("I", 10), Field("D", (2, 500)), "received '{2,500}' but current is '10'"),
        (Field("S", "dx"), Field("x", b"dx"), None),
        (Field("S", "dx"), Field("S", "é"), "received 'é' but current is 'dx'"),
        (Field("t", True), Field("t", False), "received 'false' but current is 'true'"),
        (Field("A", []), Field("F", {}), None),
        (
            Field("I", 10),
            Field("A", [Field("S", "a"), Field("F", {"k": Field("x", b"\x01")})]),
            'received \'[{longstr,<<"a">>},{table,[{<<"k">>,binary,<<1>>}]}]\''
            " but current is '10'",
        ),
        (Field("I", 10), None, "received none but current is the value '10' of type 'signedint'"),
        (None, Field("l", 5), "received the value '5' of type 'long' but current is none"),
        (None, Field("S", ""), "received the value '' of type 'longstr' but current is none"),
        (
            None,
            Field("V", None),
            "received the value 'undefined' of type 'void' but current is none",
        ),
    ],
)
def test_an_argument_is_compared(
    current: Field | None, received: Field | None, text: str | None
) -> None:
    argument = "x-message-ttl"
    before: Table = {} if current is None else {argument: current}
    after: Table = {} if received is None else {argument: received}
    assert redeclare(before, after) == text


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (1.5, "1.5"),
        (-0.0, "-0.0"),
        (0.1, "0.1"),
        (0.0001, "0.0001"),
        (1e5, "1.0e5"),
        (1e22, "1.0e22"),
        (1.5e-9, "1.5e-9"),
        (123456789.125, "123456789.125"),
    ],
)
def test_doubles_are_shown_as_erlang_shows_them(number: float, shown: str) -> None:
    text = redeclare(table(max_length=Field("I", 1)), table(max_length=Field("d", number)))
    assert text == f"received '{shown}' but current is '1'"


@pytest.mark.parametrize(
    "argument",
    [
        "x-message-ttl",
        "x-expires",
        "x-max-length",
        "x-max-length-bytes",
        "x-overflow",
        "x-dead-letter-exchange",
        "x-dead-letter-routing-key",
        "x-max-priority",
        "x-single-active-consumer",
        "x-queue-mode",
        "x-queue-version",
        "x-queue-master-locator",
    ],
)
def test_arguments_that_are_compared(argument: str) -> None:
    assert redeclare({argument: Field("S", "a")}, {argument: Field("S", "b")}) is not None


@pytest.mark.parametrize("argument", ["x-custom", "x-delivery-limit", "x-max-age"])
def test_arguments_a_queue_does_not_know_are_not_compared(argument: str) -> None:
    assert redeclare({argument: Field("S", "a")}, {argument: Field("S", "b")}) is None
    assert redeclare({}, {argument: Field("S", "b")}) is None


def test_classic_is_the_type_of_a_queue_without_one() -> None:
    classic = table(queue_type=Field("S", "classic"))
    assert redeclare(classic, {}) is None
    assert redeclare({}, classic) is None


def test_the_type_is_compared() -> None:
    quorum = table(queue_type=Field("S", "quorum"))
    expected = "received none but current is the value 'quorum' of type 'longstr'"
    assert redeclare(quorum, {}) == expected
    stream = table(queue_type=Field("S", "stream"))
    assert redeclare(quorum, stream) == "received 'stream' but current is 'quorum'"


def test_a_quorum_queue_compares_its_own_arguments() -> None:
    def quorum(**more: Field) -> Declared:
        return Declared(durable=True, arguments=table(queue_type=Field("S", "quorum"), **more))

    check_equivalent(
        quorum(),
        durable=True,
        exclusive=False,
        auto_delete=False,
        arguments=quorum(max_priority=Field("I", 2)).arguments,
    )
    with pytest.raises(ChannelException) as refused:
        check_equivalent(
            quorum(delivery_limit=Field("I", 1)),
            durable=True,
            exclusive=False,
            auto_delete=False,
            arguments=quorum(delivery_limit=Field("I", 2)).arguments,
        )
    expected = f"inequivalent arg 'x-delivery-limit' for {Q}: received '2' but current is '1'"
    assert refused.value.text == expected


@pytest.mark.parametrize("flag", ["durable", "auto_delete"])
def test_flags_are_compared(flag: str) -> None:
    same = {"durable": False, "exclusive": False, "auto_delete": False}
    with pytest.raises(ChannelException) as refused:
        check_equivalent(Declared(), **(same | {flag: True}), arguments={})
    assert refused.value.code == 406
    expected = f"inequivalent arg '{flag}' for {Q}: received 'true' but current is 'false'"
    assert refused.value.text == expected


@pytest.mark.parametrize("is_exclusive", [True, False])
def test_another_exclusive_flag_finds_the_queue_locked(is_exclusive: bool) -> None:
    existing = Declared(exclusive=not is_exclusive)
    with pytest.raises(ChannelException) as refused:
        check_equivalent(
            existing, durable=True, exclusive=is_exclusive, auto_delete=True, arguments={}
        )
    assert refused.value.code == 405
    assert refused.value.text == locked(NAME).text
    assert refused.value.text == (
        f"cannot obtain exclusive access to locked {Q}. It could be originally declared on"
        " another connection or the exclusive property value does not match that of the"
        " original declaration."
    )


# --- consumers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("queue_type", "argument", "value", "text"),
    [
        ("classic", "x-priority", Field("S", "5"), ': "expected integer, got longstr"'),
        ("classic", "x-priority", Field("t", True), ': "expected integer, got bool"'),
        ("classic", "x-cancel-on-ha-failover", Field("t", True), None),
        ("classic", "x-cancel-on-ha-failover", Field("I", 1), ": {unacceptable_type,signedint}"),
        ("classic", "x-stream-offset", Field("I", 1), " of queue type rabbit_classic_queue"),
        ("classic", "x-unknown", Field("I", 1), None),
        (
            "quorum",
            "x-cancel-on-ha-failover",
            Field("t", True),
            " of queue type rabbit_quorum_queue",
        ),
        ("stream", "x-priority", Field("I", 1), " of queue type rabbit_stream_queue"),
        ("stream", "x-stream-offset", Field("S", "first"), None),
    ],
)
def test_consumer_arguments(
    queue_type: QueueType, argument: str, value: Field, text: str | None
) -> None:
    if text is None:
        assert check_consumer_arguments(NAME, {argument: value}, queue_type) == 0
        return
    with pytest.raises(ChannelException) as refused:
        check_consumer_arguments(NAME, {argument: value}, queue_type)
    assert refused.value.code == 406
    assert refused.value.text == f"invalid arg '{argument}' for {Q}{text}"


def test_consumer_priority() -> None:
    assert check_consumer_arguments(NAME, {}) == 0
    assert check_consumer_arguments(NAME, table(priority=Field("b", -7))) == -7
    assert check_consumer_arguments(NAME, table(priority=Field("l", 2**40)), "quorum") == 2**40


# --- effective values --------------------------------------------------------------------------


def test_nothing_said() -> None:
    assert QueueArguments.of({}) == QueueArguments(
        message_ttl_ms=None,
        expires_ms=None,
        max_length=None,
        max_length_bytes=None,
        message_ttl_exact=None,
        overflow=None,
        dead_letter_exchange=None,
        dead_letter_routing_key=None,
        max_priority=None,
        single_active_consumer=False,
        queue_mode=None,
        queue_type="classic",
        queue_version=None,
        delivery_limit=None,
    )


def test_everything_said() -> None:
    arguments = table(
        message_ttl=Field("I", 0),
        expires=Field("l", 2),
        max_length=Field("b", 0),
        max_length_bytes=Field("I", 4),
        overflow=Field("S", "reject-publish"),
        dead_letter_exchange=Field("S", ""),
        dead_letter_routing_key=Field("S", "k"),
        max_priority=Field("B", 0),
        single_active_consumer=Field("t", True),
        queue_mode=Field("S", "lazy"),
        queue_type=Field("S", "classic"),
        queue_version=Field("I", 2),
        message_ttl_exact=Field("t", False),
    )
    assert declare(arguments) is None
    assert QueueArguments.of(arguments) == QueueArguments(
        message_ttl_ms=0,
        message_ttl_exact=False,
        expires_ms=2,
        max_length=0,
        max_length_bytes=4,
        overflow="reject-publish",
        dead_letter_exchange="",
        dead_letter_routing_key="k",
        max_priority=0,
        single_active_consumer=True,
        queue_mode="lazy",
        queue_type="classic",
        queue_version=2,
        delivery_limit=None,
    )


def test_a_delivery_limit_that_is_no_number_is_none() -> None:
    """It is not checked when a quorum queue is declared."""
    quorum = Field("S", "quorum")
    limited = table(queue_type=quorum, delivery_limit=Field("I", 3))
    unlimited = table(queue_type=quorum, delivery_limit=Field("S", "abc"))
    assert QueueArguments.of(limited) == QueueArguments(queue_type="quorum", delivery_limit=3)
    assert QueueArguments.of(unlimited) == QueueArguments(queue_type="quorum")
