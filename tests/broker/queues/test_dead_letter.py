"""Headers and address of dead letters: as recorded from RabbitMQ, and for whatever clients send."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leveret.broker.queues.dead_letter import Burial, Reason, cycles
from leveret.protocol.codec import Properties, pick_headers, read_properties, write_properties
from leveret.protocol.field_table import Field, Table
from leveret.protocol.hot import scan_properties
from leveret.protocol.message import NEEDS_EXPIRATION, NEEDS_HEADERS
from leveret.protocol.twin import Message
from tests.protocol.streams import tables

NOW_S = 1_700_000_000
GOLDEN = Path(__file__).parents[2] / "wire" / "golden"


def message(
    properties: Properties | None = None,
    *,
    exchange: str = "",
    key: str = "q",
    extra_keys: tuple[str, ...] = (),
) -> Message:
    header = write_properties(properties or Properties())
    names = [name.encode() for name in (exchange, key)]
    envelope = b"".join(bytes((len(name),)) + name for name in names)
    made = Message(envelope, exchange, key, header, b"a", *scan_properties(header, 0, len(header)))
    made.extra_keys = extra_keys
    return made


def bury(
    dead: Message,
    reason: Reason = "rejected",
    *,
    queue: str = "q",
    exchange: str = "",
    key: str | None = "dlq",
) -> Message:
    copy = Burial(queue, exchange, key, NOW_S).bury(dead, reason)
    scanned = scan_properties(copy.header, 0, len(copy.header))
    assert scanned == (copy.needs, copy.persistent)
    return copy


def headers(copy: Message) -> Table:
    return pick_headers(copy.header) or {}


def deaths(copy: Message) -> list[Table]:
    array = headers(copy)["x-death"]
    assert array.tag == "A"
    return [cast(Table, item.value) for item in cast(list[Field], array.value)]


def told(copy: Message) -> list[tuple[object, object, object]]:
    return [(d["queue"].value, d["reason"].value, d["count"].value) for d in deaths(copy)]


def death(queue: str, reason: str, count: int | None = 1) -> Field:
    fields = {"queue": Field("S", queue), "reason": Field("S", reason)}
    if count is not None:
        fields["count"] = Field("l", count)
    return Field("F", fields)


# --- as RabbitMQ answered ----------------------------------------------------------------------


def recorded(scenario: str, place: int) -> dict[str, Any]:
    """The message that a recorded scenario got as its ``place``-th."""
    transcript = json.loads((GOLDEN / f"{scenario}.json").read_text())
    got = [step for step in transcript["transcript"] if step.get("recv") == "basic.get-ok"]
    return cast(dict[str, Any], got[place])


def spelled(field: Field) -> list[Any]:
    """A value as transcripts have it, the time as they do not compare it."""
    if field.tag == "T":
        assert field.value == NOW_S
        return ["T", "<now>"]
    if field.tag == "F":
        return ["F", {name: spelled(each) for name, each in cast(Table, field.value).items()}]
    if field.tag == "A":
        return ["A", [spelled(each) for each in cast(list[Field], field.value)]]
    return [field.tag, field.value]


def check_as_recorded(copy: Message, scenario: str, place: int) -> None:
    answer = recorded(scenario, place)
    assert (copy.exchange, copy.routing_key) == (answer["exchange"], answer["routing_key"])
    properties = read_properties(copy.header)
    assert properties.expiration is None
    assert properties.content_type == answer["props"].get("content_type")
    shown = {name: spelled(field) for name, field in headers(copy).items()}
    assert shown == answer["props"]["headers"]


MINE: Table = {"mine": Field("I", 1)}
CC: Table = {"CC": Field("A", [Field("S", "other")])}


@pytest.mark.parametrize(
    ("scenario", "place", "dead", "reason"),
    [
        ("rejected", 1, message(Properties(content_type="text/plain", headers=MINE)), "rejected"),
        ("nacked_multiple", 3, message(), "rejected"),
        ("expired_queue_ttl", 0, message(), "expired"),
        ("expired_message_expiration", 0, message(Properties(expiration="50")), "expired"),
        ("maxlen", 0, message(), "maxlen"),
        ("cc_is_recorded", 1, message(Properties(headers=CC), extra_keys=("other",)), "rejected"),
        (
            "bcc_is_not_recorded",
            1,
            message(Properties(headers={}), key="other", extra_keys=("q",)),
            "rejected",
        ),
        ("rejected_with_expiration", 1, message(Properties(expiration="60000")), "rejected"),
    ],
)
def test_as_recorded(scenario: str, place: int, dead: Message, reason: Reason) -> None:
    check_as_recorded(bury(dead, reason), f"deadletter/{scenario}", place)


def test_delivery_limit_as_recorded() -> None:
    check_as_recorded(bury(message(), "delivery_limit"), "quorum/delivery_limit", 2)


def test_without_a_key_of_its_own_the_old_one_is_kept() -> None:
    copy = bury(message(exchange="src", key="a.b"), exchange="dlx", key=None)
    check_as_recorded(copy, "deadletter/keeps_routing_key", 1)


def test_once_more_in_the_same_queue_as_recorded() -> None:
    copy = message()
    for place in (1, 2, 3):
        copy = bury(copy, key="q")
        check_as_recorded(copy, "deadletter/cycle_with_reject_goes_on", place)


def test_two_queues_as_recorded() -> None:
    first = bury(message(key="one"), queue="one", key="two")
    check_as_recorded(bury(first, "expired", queue="two", key="last"), "deadletter/two_queues", 1)


def test_byte_for_byte() -> None:
    """What RabbitMQ 3.10.8 makes of the same message, in the order in which it writes it."""
    own: Table = {"z": Field("I", 1), "mine": Field("I", 1), "CC": Field("A", [Field("S", "o")])}
    dead = message(
        Properties(content_type="t", headers=own, expiration="50", message_id="m"),
        exchange="x",
        key="k",
        extra_keys=("o", "b"),
    )
    copy = bury(dead, "expired", queue="one", exchange="dlx", key=None)
    time = b"\x04timeT" + NOW_S.to_bytes(8, "big")
    assert copy.header == (
        b"\xa0\x80\x01t\x00\x00\x01\x11\x02CCA\x00\x00\x00\x06S\x00\x00\x00\x01o\x04mineI\x00\x00"
        b"\x00\x01\x07x-deathA\x00\x00\x00\x8bF\x00\x00\x00\x86\x05countl\x00\x00\x00\x00\x00\x00"
        b"\x00\x01\x06reasonS\x00\x00\x00\x07expired\x05queueS\x00\x00\x00\x03one" + time + b"\x08"
        b"exchangeS\x00\x00\x00\x01x\x0crouting-keysA\x00\x00\x00\x0cS\x00\x00\x00\x01kS\x00\x00"
        b"\x00\x01o\x13original-expirationS\x00\x00\x00\x0250\x16x-first-death-exchangeS\x00\x00"
        b"\x00\x01x\x13x-first-death-queueS\x00\x00\x00\x03one\x14x-first-death-reasonS\x00\x00\x00"
        b"\x07expired\x01zI\x00\x00\x00\x01\x01m"
    )
    # From the second on, the fields of an entry are sorted.
    again = bury(copy, "expired", queue="two", exchange="dlx", key=None)
    assert list(deaths(again)[0]) == [
        "count",
        "exchange",
        "queue",
        "reason",
        "routing-keys",
        "time",
    ]
    assert deaths(again)[1:] == deaths(copy)


# --- address -----------------------------------------------------------------------------------


def test_a_key_of_its_own_takes_the_place_of_all_others() -> None:
    copy = bury(message(Properties(headers=CC), extra_keys=("other", "blind")), key="dead")
    assert (copy.routing_key, copy.extra_keys, copy.envelope) == ("dead", (), b"\x00\x04dead")
    assert "CC" not in headers(copy)


def test_without_one_all_keys_are_kept() -> None:
    copy = bury(message(Properties(headers=CC), extra_keys=("other", "blind")), key=None)
    assert (copy.routing_key, copy.extra_keys) == ("q", ("other", "blind"))
    assert headers(copy)["CC"] == CC["CC"]
    assert deaths(copy)[0]["routing-keys"].value == [Field("S", "q"), Field("S", "other")]


def test_an_empty_key_is_a_key() -> None:
    copy = bury(message(Properties(headers=CC), extra_keys=("other",)), key="")
    assert (copy.routing_key, copy.extra_keys) == ("", ())


def test_a_key_that_is_too_long_to_be_sent_is_cut() -> None:
    copy = bury(message(), key="k" * 300)
    assert copy.routing_key == "k" * 255
    assert copy.envelope == b"\x00\xff" + b"k" * 255


def test_names_that_are_no_text_survive() -> None:
    odd = b"\xff\x00".decode("utf-8", "surrogateescape")
    copy = bury(message(), queue=odd, exchange=odd, key=odd)
    assert copy.envelope == b"\x02\xff\x00\x02\xff\x00"
    assert deaths(copy)[0]["queue"] == Field("S", odd)


def test_the_rest_of_the_message_stays() -> None:
    dead = message(Properties(delivery_mode=2, priority=7, correlation_id="c", expiration="5"))
    dead.body_id = 12
    copy = bury(dead)
    assert (copy.body, copy.body_id, copy.persistent) == (b"a", 12, True)
    assert copy.needs & (NEEDS_HEADERS | NEEDS_EXPIRATION) == NEEDS_HEADERS
    properties = read_properties(copy.header)
    assert (properties.priority, properties.correlation_id) == (7, "c")


def test_what_dies_together_shares_what_is_alike() -> None:
    burial = Burial("q", "dlx", "dlq", NOW_S)
    one, two = (burial.bury(message(Properties(priority=1)), "expired") for _ in range(2))
    assert one.header is two.header
    assert one.envelope is two.envelope
    elsewhere = burial.bury(message(Properties(priority=1), exchange="x"), "expired")
    assert deaths(elsewhere)[0]["exchange"].value == "x"
    rejected = burial.bury(message(Properties(priority=1)), "rejected")
    assert told(rejected) == [("q", "rejected", 1)]


# --- what a client may have sent ----------------------------------------------------------------


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(Field("S", "[{}]"), id="text"),
        pytest.param(Field("F", {}), id="table"),
        pytest.param(Field("V", None), id="void"),
    ],
)
def test_an_x_death_of_another_type_is_replaced(odd: Field) -> None:
    """And the first death is then not told, as it may not have been the first."""
    copy = bury(message(Properties(headers={"x-death": odd})))
    assert told(copy) == [("q", "rejected", 1)]
    assert list(headers(copy)) == ["x-death"]


def test_entries_that_are_no_deaths_are_left_alone() -> None:
    odd = [Field("S", "x"), Field("F", {}), Field("F", {"queue": Field("I", 1)})]
    copy = bury(message(Properties(headers={"x-death": Field("A", odd)})))
    assert cast(list[Field], headers(copy)["x-death"].value)[1:] == odd


@pytest.mark.parametrize(
    ("known", "count"),
    [
        pytest.param([death("q", "rejected", 4)], 5, id="count"),
        pytest.param([death("q", "rejected", None)] * 3, 4, id="one-entry-for-each-death"),
        pytest.param(
            [Field("F", {**cast(Table, death("q", "rejected").value), "count": Field("S", "4")})],
            2,
            id="a-count-that-is-no-number",
        ),
        pytest.param([death("q", "rejected", (1 << 63) - 1)], (1 << 63) - 1, id="no-room-for-more"),
        pytest.param([death("q", "expired"), death("p", "rejected")], 1, id="others"),
    ],
)
def test_counting(known: list[Field], count: int) -> None:
    copy = bury(message(Properties(headers={"x-death": Field("A", known)})))
    assert told(copy)[0] == ("q", "rejected", count)
    assert [entry for entry in told(copy)[1:] if entry[:2] == ("q", "rejected")] == []


def test_the_latest_death_comes_first_and_the_others_keep_their_order() -> None:
    copy = message()
    for queue in ("one", "two", "three", "four", "two"):
        copy = bury(copy, "expired", queue=queue, key="next")
    assert told(copy) == [
        ("two", "expired", 2),
        ("four", "expired", 1),
        ("three", "expired", 1),
        ("one", "expired", 1),
    ]
    assert headers(copy)["x-first-death-queue"].value == "one"


def test_how_it_died_the_first_time_stays() -> None:
    first = bury(message(Properties(expiration="7"), exchange="x", key="k"), key="q")
    again = deaths(Burial("q", "", "q", NOW_S + 60).bury(first, "rejected"))[0]
    assert (again["time"].value, again["exchange"].value) == (NOW_S, "x")
    assert again["original-expiration"].value == "7"


steps = st.lists(
    st.tuples(st.sampled_from(["p", "q"]), st.sampled_from(["rejected", "expired", "maxlen"])),
    min_size=1,
    max_size=8,
)


@given(tables, st.booleans(), steps)
def test_any_headers_survive_and_counts_add_up(
    own: Table, has_others: bool, steps: list[tuple[str, Reason]]
) -> None:
    own = {name: field for name, field in own.items() if not name.startswith("x-death")}
    for name in ("CC", "BCC"):
        own.pop(name, None)
    others = {"content_type": "t", "message_id": "m", "app_id": "a"} if has_others else {}
    dead = message(Properties(headers=own, **cast(dict[str, Any], others)))
    copy = dead
    for queue, reason in steps:
        copy = bury(copy, reason, queue=queue, key="next")
    properties = read_properties(copy.header)
    assert properties.headers is not None
    kept = {name: properties.headers.get(name) for name in own if not name.startswith("x-first-")}
    assert kept == {name: field for name, field in own.items() if not name.startswith("x-first-")}
    properties.headers = own
    assert write_properties(properties) == dead.header
    counted = {(queue, reason): count for queue, reason, count in told(copy)}
    assert counted == {step: steps.count(step) for step in steps}
    assert told(copy)[0][:2] == steps[-1]
    assert headers(copy)["x-first-death-reason"].value == steps[0][1]


@given(tables)
def test_any_x_death_is_survived(own: Table) -> None:
    """Whatever a client puts there, nested in whatever way."""
    entries = [Field("F", own), *own.values()]
    copy = bury(message(Properties(headers={"x-death": Field("A", entries)})))
    cycles(copy, "q")
    assert read_properties(copy.header).headers is not None


# --- cycles ------------------------------------------------------------------------------------


def went_through(*steps: tuple[str, Reason]) -> Message:
    copy = message()
    for queue, reason in steps:
        copy = bury(copy, reason, queue=queue, key="next")
    return copy


@pytest.mark.parametrize(
    ("steps", "is_cycle"),
    [
        pytest.param([("q", "expired")], True, id="itself"),
        pytest.param([("q", "rejected")], False, id="rejected-there"),
        pytest.param([("p", "expired")], False, id="never-been-there"),
        pytest.param([("q", "expired"), ("p", "maxlen")], True, id="of-two"),
        pytest.param([("q", "rejected"), ("p", "expired")], False, id="rejected-before"),
        pytest.param([("q", "expired"), ("p", "rejected")], False, id="rejected-since"),
        pytest.param([("p", "rejected"), ("q", "expired")], True, id="rejected-longer-ago"),
        pytest.param(
            [("q", "expired"), ("p", "rejected"), ("r", "expired")], False, id="rejected-on-the-way"
        ),
        pytest.param([("q", "delivery_limit")], True, id="delivery-limit"),
    ],
)
def test_a_cycle_without_a_reject_ends(steps: list[tuple[str, Reason]], is_cycle: bool) -> None:
    assert cycles(went_through(*steps), "q") is is_cycle


def test_a_name_elsewhere_in_the_headers_is_no_cycle() -> None:
    own: Table = {"note": Field("F", {"queue": Field("S", "q")})}
    assert not cycles(bury(message(Properties(headers=own)), "expired", queue="p"), "q")


def test_what_no_broker_wrote_makes_no_cycle() -> None:
    odd = Field("A", [Field("S", "hand-made"), death("q", "expired")])
    copy = bury(message(Properties(headers={"x-death": odd})), "expired", queue="p")
    assert not cycles(copy, "q")
