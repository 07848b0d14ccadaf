"""How much a queue holds, and what happens to the rest: rules 76, 77 and 82."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from leveret.broker.clock import VirtualClock
from leveret.broker.queues import commands as c
from leveret.storage.unit import Unit
from tests.broker.queues.bench import Port
from tests.broker.queues.town import Town, consume, deaths, delivered, letter, outcome


@pytest.fixture(params=[False, True], ids=["memory", "loading"])
async def town(request: pytest.FixtureRequest, clock: VirtualClock) -> AsyncIterator[Town]:
    async with Town(clock, is_loading=request.param) as town:
        yield town


@pytest.fixture
def port() -> Port:
    return Port("channel")


# --- drop-head ---------------------------------------------------------------------------------


async def test_the_oldest_go(town: Town) -> None:
    town.add("q", max_length=3)
    publisher = await town.publish("q", *(letter(b"%d" % n) for n in range(5)))
    assert town.count("q", "drop") == 2
    assert outcome(publisher) == ([1, 2, 3, 4, 5], [])
    assert await town.bodies("q") == [b"2", b"3", b"4"]


async def test_bytes_of_bodies_count(town: Town) -> None:
    town.add("q", max_length_bytes=10)
    await town.publish("q", letter(b"aaaa"), letter(b"bbbb"), letter(b""), letter(b"cccc"))
    assert await town.bodies("q") == [b"bbbb", b"", b"cccc"]
    await town.publish("q", letter(b"a"), letter(bytes(11)))
    assert await town.bodies("q") == [], "it is too large for itself, and all before it had to go"


async def test_both_limits_hold(town: Town) -> None:
    town.add("q", max_length=2, max_length_bytes=5)
    await town.publish("q", letter(b"1"), letter(b"2"), letter(b"3"))
    await town.publish("q", letter(b"4444"), letter(b"5"))
    assert await town.bodies("q") == [b"4444", b"5"]


async def test_unacked_messages_do_not_count(town: Town, port: Port) -> None:
    queue = town.add("q", max_length=2)
    consume(queue, port, prefetch=3)
    await town.publish("q", *(letter(b"%d" % n) for n in range(6)))
    assert [message.body for message, _ in delivered(port)] == [b"0", b"1", b"2"]
    assert town.count("q", "messages") == 5
    assert await town.bodies("q") == [b"4", b"5"]


async def test_what_returns_to_a_full_queue_goes_first(town: Town, port: Port) -> None:
    """It is the oldest."""
    queue = town.add("q", max_length=2)
    await town.publish("q", letter(b"0"), letter(b"1"))
    answer = await town.get("q", port)
    assert answer is not None
    await town.publish("q", letter(b"2"))
    queue.mailbox.put_urgent(c.Requeue(port.mailbox, [answer.seq_id or 0]))
    await town.rest()
    assert await town.bodies("q") == [b"1", b"2"]


async def test_zero_keeps_only_what_a_consumer_takes(town: Town, port: Port) -> None:
    queue = town.add("q", max_length=0)
    await town.publish("q", letter(b"lost"))
    assert town.count("q") == 0
    consume(queue, port, prefetch=2)
    await town.publish("q", *(letter(b"%d" % n) for n in range(4)))
    assert [message.body for message, _ in delivered(port)] == [b"0", b"1"]
    assert town.count("q", "drop") == 3


async def test_the_head_of_the_highest_priority_goes(town: Town) -> None:
    """A surprise, but RabbitMQ's [104]."""
    town.add("q", max_length=2, max_priority=5)
    await town.publish(
        "q", letter(b"high", priority=5), letter(b"low"), letter(b"middle", priority=3)
    )
    assert await town.bodies("q") == [b"middle", b"low"]


async def test_a_lower_limit_by_policy_is_kept_at_once(town: Town) -> None:
    town.add("q", max_length=5)
    await town.publish("q", *(letter(b"%d" % n) for n in range(5)))
    town.change_policy("q", {"max-length": 2})
    await town.rest()
    assert town.count("q") == 2
    town.change_policy("q", None)
    await town.publish("q", *(letter(b"%d" % n) for n in range(5, 8)))
    assert await town.bodies("q") == [b"3", b"4", b"5", b"6", b"7"]


async def test_what_is_dropped_is_dead_lettered(town: Town) -> None:
    town.add("q", max_length=1, dead_letter_exchange="", dead_letter_routing_key="dead")
    town.add("dead")
    await town.publish("q", *(letter(b"%d" % n) for n in range(4)))
    found = await town.take_all("dead")
    assert [message.body for message in found] == [b"0", b"1", b"2"]
    assert deaths(found[0]) == [("q", "maxlen", 1)]
    assert town.count("q", "dead_letter") == {"maxlen": 3}


# --- reject-publish ----------------------------------------------------------------------------


@pytest.mark.parametrize("persistent", [False, True])
async def test_messages_of_a_run_are_refused_one_by_one(town: Town, persistent: bool) -> None:
    town.add("q", max_length=3, overflow="reject-publish")
    publisher = Port("publisher")
    run = [letter(b"%d" % n, persistent=persistent) for n in range(5)]
    await town.publish("q", *run, port=publisher)
    assert outcome(publisher) == ([1, 2, 3], [4, 5])
    assert town.count("q", "refuse") == 2
    assert town.count("q", "publish") == 3
    assert await town.bodies("q") == [b"0", b"1", b"2"]


async def test_a_small_message_fits_where_a_large_one_does_not(town: Town) -> None:
    town.add("q", max_length_bytes=10, overflow="reject-publish")
    publisher = await town.publish(
        "q", letter(bytes(6)), letter(bytes(7)), letter(bytes(8)), letter(b"abc"), letter(b"xy")
    )
    assert outcome(publisher) == ([1, 4], [2, 3, 5])
    assert town.count("q", "message_bytes_ready") == 9


async def test_a_full_queue_is_asked_before_its_consumers(town: Town, port: Port) -> None:
    """A limit of zero refuses all, though somebody could take them."""
    queue = town.add("q", max_length=0, overflow="reject-publish")
    consume(queue, port)
    publisher = await town.publish("q", letter(b"a"))
    assert outcome(publisher) == ([], [1])
    assert delivered(port) == []


async def test_what_a_consumer_takes_leaves_room(town: Town, port: Port) -> None:
    queue = town.add("q", max_length=1, overflow="reject-publish")
    consume(queue, port, prefetch=3)
    publisher = await town.publish("q", *(letter(b"%d" % n) for n in range(6)))
    assert [message.body for message, _ in delivered(port)] == [b"0", b"1", b"2"]
    assert outcome(publisher) == ([1, 2, 3, 4], [5, 6])
    assert town.count("q") == 1


async def test_what_returns_may_be_too_much(town: Town, port: Port) -> None:
    """Nothing that was taken in is refused afterwards."""
    queue = town.add("q", max_length=1, overflow="reject-publish")
    await town.publish("q", letter(b"0"))
    answer = await town.get("q", port)
    assert answer is not None
    await town.publish("q", letter(b"1"))
    queue.mailbox.put_urgent(c.Requeue(port.mailbox, [answer.seq_id or 0]))
    await town.rest()
    assert await town.bodies("q") == [b"0", b"1"]


async def test_room_that_expiry_makes_is_used(town: Town) -> None:
    town.add("q", max_length=1, overflow="reject-publish", message_ttl_ms=100)
    await town.publish("q", letter(b"0"))
    await town.pass_time(100)
    assert outcome(await town.publish("q", letter(b"1"))) == ([1], [])


@pytest.mark.parametrize("overflow", ["reject-publish", "drop-head"])
async def test_what_expires_at_once_takes_no_room(clock: VirtualClock, overflow: str) -> None:
    """Not even from the next one of the same run."""
    async with Town(clock) as town:
        town.add(
            "q",
            max_length=1,
            overflow=overflow,
            dead_letter_exchange="",
            dead_letter_routing_key="dead",
        )
        town.add("dead")
        run = [letter(b"%d" % n, expiration="0") for n in range(3)]
        assert outcome(await town.publish("q", *run)) == ([1, 2, 3], [])
        assert town.count("q", "dead_letter") == {"expired": 3}
        assert await town.bodies("dead") == [b"0", b"1", b"2"]


async def test_refused_messages_are_dead_lettered_with_reject_publish_dlx(town: Town) -> None:
    town.add(
        "q",
        max_length=1,
        overflow="reject-publish-dlx",
        dead_letter_exchange="",
        dead_letter_routing_key="dead",
    )
    town.add("dead")
    publisher = await town.publish("q", *(letter(b"%d" % n) for n in range(3)))
    assert outcome(publisher) == ([1], [2, 3])
    found = await town.take_all("dead")
    assert [message.body for message in found] == [b"1", b"2"]
    assert deaths(found[0]) == [("q", "maxlen", 1)]
    assert await town.bodies("q") == [b"0"]


async def test_reject_publish_alone_dead_letters_nothing(town: Town) -> None:
    town.add(
        "q",
        max_length=1,
        overflow="reject-publish",
        dead_letter_exchange="",
        dead_letter_routing_key="dead",
    )
    town.add("dead")
    await town.publish("q", letter(b"0"), letter(b"1"))
    assert town.count("dead", "publish") == 0


# --- units -------------------------------------------------------------------------------------


async def test_a_transaction_that_does_not_fit_is_refused_whole(town: Town) -> None:
    town.add("q", max_length=1, overflow="reject-publish")
    ended: list[bool] = []
    unit: Unit = town.make_unit(ended.append)
    unit.expect()
    run = [letter(b"a"), letter(b"b")]
    town.topology.queues["q"].mailbox.put(c.Prepare(unit, Port("channel").mailbox, run, ()))
    unit.begin()
    await town.rest()
    assert ended == [False]
    assert town.count("q") == 0


async def test_what_a_transaction_is_about_to_bring_has_its_place(town: Town) -> None:
    town.add("q", max_length=2, overflow="reject-publish")
    town.is_holding = True
    unit: Unit = town.make_unit(lambda is_committed: None)
    unit.expect()
    run = [letter(b"a"), letter(b"b")]
    town.topology.queues["q"].mailbox.put(c.Prepare(unit, Port("channel").mailbox, run, ()))
    unit.begin()
    await town.rest()
    assert outcome(await town.publish("q", letter(b"c"))) == ([], [1])
    await town.commit_held()
    assert await town.bodies("q") == [b"a", b"b"]
    assert outcome(await town.publish("q", letter(b"d"))) == ([1], [])
