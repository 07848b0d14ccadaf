"""When messages expire: rules 81, 83 and 84, and what is added to them (exact expiry)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from leveret.broker.clock import VirtualClock
from leveret.broker.queues import commands as c
from leveret.storage.unit import Unit
from tests.broker.queues.bench import Port
from tests.broker.queues.town import Town, consume, delivered, letter, outcome

TTL_MS = 1_000


@pytest.fixture(params=[False, True], ids=["memory", "loading"])
async def town(request: pytest.FixtureRequest, clock: VirtualClock) -> AsyncIterator[Town]:
    async with Town(clock, is_loading=request.param) as town:
        yield town


@pytest.fixture
def port() -> Port:
    return Port("channel")


# --- which TTL ---------------------------------------------------------------------------------


async def test_a_message_goes_when_its_time_is_over(town: Town) -> None:
    town.add("q", message_ttl_ms=TTL_MS)
    await town.publish("q", letter(b"a"), letter(b"b"))
    await town.pass_time(TTL_MS - 1)
    assert town.count("q") == 2
    await town.pass_time(1)
    assert town.count("q") == 0
    assert town.count("q", "expire") == 2


@pytest.mark.parametrize(("queue_ms", "own"), [(TTL_MS, "5000"), (5_000, str(TTL_MS))])
async def test_the_lower_of_both_counts(town: Town, queue_ms: int, own: str) -> None:
    town.add("q", message_ttl_ms=queue_ms)
    await town.publish("q", letter(b"a", expiration=own))
    await town.pass_time(TTL_MS - 1)
    assert town.count("q") == 1
    await town.pass_time(1)
    assert town.count("q") == 0


async def test_an_expiration_needs_no_ttl_of_the_queue(town: Town) -> None:
    town.add("q")
    await town.publish("q", letter(b"a", expiration="100"), letter(b"b"))
    await town.pass_time(100)
    assert await town.bodies("q") == [b"b"]


async def test_a_tenth_of_a_second_is_over_after_a_tenth_of_a_second(town: Town) -> None:
    """Seconds are floats: 0.1 s after a moment is not quite 100 ms after it."""
    for ttl_ms in (100, 7, 13, 1):
        town.add(f"q{ttl_ms}", message_ttl_ms=ttl_ms)
        for _ in range(40):
            await town.publish(f"q{ttl_ms}", letter(b"a"))
            await town.pass_time(ttl_ms)
            assert town.count(f"q{ttl_ms}") == 0


async def test_a_policy_is_for_what_comes_later(town: Town) -> None:
    town.add("q", message_ttl_ms=5_000)
    await town.publish("q", letter(b"early"))
    town.change_policy("q", {"message-ttl": TTL_MS})
    await town.publish("q", letter(b"late"))
    await town.pass_time(TTL_MS)
    assert town.count("q") == 2, "the early one is at the head"
    await town.pass_time(5_000 - TTL_MS)
    assert town.count("q") == 0


# --- at the head -------------------------------------------------------------------------------


async def test_what_stands_behind_a_longer_lived_one_is_counted_but_not_delivered(
    town: Town, port: Port
) -> None:
    town.add("q")
    await town.publish("q", letter(b"long", expiration="9000"), letter(b"short", expiration="10"))
    await town.publish("q", letter(b"for ever"))
    await town.pass_time(TTL_MS)
    assert town.count("q") == 3
    answer = await town.get("q", port)
    assert answer is not None
    assert answer.message.body == b"long"
    assert answer.ready == 1 or town.is_loading, "the second has gone meanwhile"
    answer = await town.get("q", port)
    assert answer is not None
    assert answer.message.body == b"for ever"
    assert town.count("q", "expire") == 1


@pytest.mark.parametrize("no_ack", [False, True])
async def test_a_consumer_is_never_given_what_has_expired(
    town: Town, port: Port, no_ack: bool
) -> None:
    """Between those that have not: one run is fetched of the queue."""
    queue = town.add("q")
    mixed = [letter(b"%d" % n, expiration="9000" if n % 2 else "10") for n in range(8)]
    await town.publish("q", letter(b"first", expiration="8000"), *mixed)
    await town.pass_time(TTL_MS)
    assert town.count("q") == 9
    consume(queue, port, no_ack=no_ack)
    await town.rest()
    assert [message.body for message, _ in delivered(port)] == [b"first", b"1", b"3", b"5", b"7"]
    assert town.count("q", "expire") == 4
    assert town.count("q", "messages") == (0 if no_ack else 5)


async def test_a_limited_prefetch_is_not_used_up_by_what_has_expired(
    town: Town, port: Port
) -> None:
    queue = town.add("q")
    await town.publish("q", letter(b"long", expiration="9000"))
    await town.publish("q", *(letter(b"x", expiration="10") for _ in range(3)), letter(b"last"))
    await town.pass_time(TTL_MS)
    consume(queue, port, prefetch=2)
    await town.rest()
    assert [message.body for message, _ in delivered(port)] == [b"long", b"last"]


@pytest.mark.parametrize("use", ["get", "consume"])
async def test_who_comes_to_the_head_expires_at_its_own_time(
    town: Town, port: Port, use: str
) -> None:
    queue = town.add("q")
    await town.publish("q", letter(b"long", expiration="9000"), letter(b"short", expiration="500"))
    if use == "get":
        await town.get("q", port)
    else:
        consume(queue, port, prefetch=1)
        await town.rest()
    await town.pass_time(499)
    assert town.count("q") == 1
    await town.pass_time(1)
    assert town.count("q") == 0


@pytest.mark.parametrize("use", ["get", "consume"])
async def test_what_is_found_to_have_expired_is_dead_lettered_at_once(
    town: Town, port: Port, use: str
) -> None:
    queue = town.add("q", dead_letter_exchange="", dead_letter_routing_key="dead")
    town.add("dead")
    await town.publish("q", letter(b"long", expiration="9000"), letter(b"0", expiration="0"))
    if use == "get":
        await town.get("q", port)
    else:
        consume(queue, port)
        await town.rest()
    assert await town.bodies("dead") == [b"0"]


async def test_unacked_messages_do_not_expire(town: Town, port: Port) -> None:
    queue = town.add("q", message_ttl_ms=TTL_MS)
    await town.publish("q", letter(b"a"))
    answer = await town.get("q", port)
    assert answer is not None
    await town.pass_time(10 * TTL_MS)
    assert town.count("q", "messages_unacknowledged") == 1
    assert answer.seq_id is not None
    queue.mailbox.put_urgent(c.Requeue(port.mailbox, [answer.seq_id]))
    await town.rest()
    assert town.count("q", "messages") == 0, "it has the expiry it had"
    assert town.count("q", "expire") == 1


async def test_a_requeued_message_expires_when_it_would_have(town: Town, port: Port) -> None:
    queue = town.add("q", message_ttl_ms=TTL_MS)
    consume(queue, port)
    await town.publish("q", letter(b"a"), letter(b"b"))
    held = delivered(port)
    await town.pass_time(TTL_MS // 2)
    queue.mailbox.put(c.Cancel(port.mailbox, "tag"))
    await town.rest()
    queue.mailbox.put_urgent(c.Requeue(port.mailbox, [held[0][1] or 0]))
    await town.rest()
    await town.pass_time(TTL_MS // 2 - 1)
    assert town.count("q") == 1
    await town.pass_time(1)
    assert town.count("q") == 0


# --- a TTL of nothing --------------------------------------------------------------------------


@pytest.mark.parametrize("no_ack", [False, True])
async def test_ttl_0_reaches_a_consumer_that_is_ready(town: Town, port: Port, no_ack: bool) -> None:
    queue = town.add("q", message_ttl_ms=0)
    consume(queue, port, prefetch=2, no_ack=no_ack)
    publisher = await town.publish("q", *(letter(b"%d" % n, persistent=True) for n in range(3)))
    wanted = [b"0", b"1"] if not no_ack else [b"0", b"1", b"2"]
    assert [message.body for message, _ in delivered(port)] == wanted
    assert town.count("q", "expire") == 3 - len(wanted)
    assert town.count("q") == 0
    assert outcome(publisher) == ([1, 2, 3], []), "what was discarded is confirmed, too"


@pytest.mark.parametrize(
    ("queue_ms", "own"), [(0, None), (None, "0"), (5_000, "0"), (0, "5000"), (0, "0")]
)
async def test_ttl_0_without_a_consumer(
    town: Town, port: Port, queue_ms: int | None, own: str | None
) -> None:
    queue = town.add("q", message_ttl_ms=queue_ms)
    publisher = await town.publish("q", letter(b"a", expiration=own, persistent=True))
    assert town.count("q") == 0
    assert town.count("q", "expire") == 1
    assert outcome(publisher) == ([1], [])
    consume(queue, port)
    await town.publish("q", letter(b"b", expiration=own))
    assert [message.body for message, _ in delivered(port)] == [b"b"]


async def test_ttl_0_of_a_queue_with_dead_letters_is_dead_lettered(town: Town) -> None:
    town.add("q", message_ttl_ms=0, dead_letter_exchange="", dead_letter_routing_key="dead")
    town.add("dead")
    await town.publish("q", letter(b"a"))
    assert await town.bodies("dead") == [b"a"]


async def test_ttl_0_waits_behind_what_does_not_expire(town: Town) -> None:
    town.add("q")
    await town.publish("q", letter(b"for ever"), letter(b"0", expiration="0"))
    assert town.count("q") == 2, "at the head only"
    assert await town.bodies("q") == [b"for ever"]


async def prepare(town: Town, name: str, port: Port, *bodies: bytes) -> list[bool]:
    """Publish as a transaction does."""
    ended: list[bool] = []
    unit: Unit = town.make_unit(ended.append)
    unit.expect()
    town.topology.queues[name].mailbox.put(
        c.Prepare(unit, port.mailbox, [letter(body) for body in bodies], ())
    )
    unit.begin()
    await town.rest()
    return ended


@pytest.mark.parametrize("no_ack", [False, True])
async def test_ttl_0_of_a_transaction_reaches_a_consumer_that_is_ready(
    clock: VirtualClock, port: Port, no_ack: bool
) -> None:
    """When it is committed: its time runs while that is waited for, too."""
    async with Town(clock) as town:
        queue = town.add("q", message_ttl_ms=0)
        consume(queue, port, no_ack=no_ack)
        await town.rest()
        town.is_holding = True
        ended = await prepare(town, "q", Port("transaction"), b"a", b"b")
        await town.pass_time(50)
        await town.commit_held()
        assert ended == [True]
        assert [message.body for message, _ in delivered(port)] == [b"a", b"b"]
        assert town.count("q", "expire") == 0
        assert town.count("q", "messages") == (0 if no_ack else 2)


async def test_ttl_0_of_a_transaction_without_a_consumer(town: Town) -> None:
    town.add("q", message_ttl_ms=0)
    assert await prepare(town, "q", Port("transaction"), b"a") == [True]
    assert town.count("q") == 0
    assert town.count("q", "expire") == 1


async def test_no_room_is_needed_for_what_a_transaction_gives_to_a_consumer(
    clock: VirtualClock, port: Port
) -> None:
    async with Town(clock) as town:
        queue = town.add("q", max_length=0)
        consume(queue, port)
        await town.rest()
        assert await prepare(town, "q", Port("transaction"), b"a", b"b") == [True]
        assert [message.body for message, _ in delivered(port)] == [b"a", b"b"]
        assert town.count("q", "drop") == 0


# --- timers ------------------------------------------------------------------------------------


async def test_there_is_one_timer_whatever_waits(town: Town, clock: VirtualClock) -> None:
    town.add("q")
    for expiration in ("500", "300", "900"):
        await town.publish("q", *(letter(b"x", expiration=expiration) for _ in range(5)))
    assert clock.statistics()["timers"] == 1
    await town.bodies("q")
    assert clock.statistics()["timers"] == 0


@pytest.mark.parametrize("end", [c.DeleteNow(), c.Terminate()])
async def test_no_timer_outlives_its_queue(town: Town, clock: VirtualClock, end: object) -> None:
    queue = town.add("q", message_ttl_ms=TTL_MS, expires_ms=10 * TTL_MS)
    await town.publish("q", letter(b"a"))
    assert clock.statistics()["timers"] == 2
    queue.mailbox.put(end) if isinstance(end, c.Terminate) else queue.mailbox.put_urgent(end)
    await town.rest()
    assert not town.is_alive("q")
    assert clock.statistics()["timers"] == 0


# --- exact expiry ------------------------------------------------------------------------------


async def test_exact_expiry_takes_from_anywhere(town: Town) -> None:
    town.add("q", message_ttl_exact=True)
    await town.publish(
        "q",
        letter(b"long", expiration="9000"),
        letter(b"short", expiration="10"),
        letter(b"for ever"),
        letter(b"middle", expiration="500"),
    )
    await town.pass_time(10)
    assert town.count("q") == 3
    await town.pass_time(490)
    assert town.count("q") == 2
    assert await town.bodies("q") == [b"long", b"for ever"]


async def test_exact_expiry_goes_on_and_off_with_a_policy(town: Town) -> None:
    town.add("q")
    await town.publish("q", letter(b"long", expiration="9000"), letter(b"1", expiration="10"))
    await town.pass_time(10)
    assert town.count("q") == 2
    town.change_policy("q", {"message-ttl-exact": True})
    await town.rest()
    assert town.count("q") == 1
    await town.publish("q", letter(b"2", expiration="10"))
    town.change_policy("q", None)
    await town.pass_time(10)
    assert town.count("q") == 2
    await town.pass_time(9_000)
    assert town.count("q") == 0


async def test_an_exact_queue_dead_letters_in_order_of_due_time(town: Town) -> None:
    town.add("q", message_ttl_exact=True, dead_letter_exchange="", dead_letter_routing_key="dead")
    town.add("dead")
    times = [700, 100, 400, 100, 300, 900, 200]
    await town.publish("q", *(letter(b"%d" % ms, expiration=str(ms)) for ms in times))
    await town.pass_time(1_000)
    assert [int(body) for body in await town.bodies("dead")] == sorted(times)


async def test_an_unacked_message_of_an_exact_queue_expires_when_it_is_back(
    town: Town, port: Port
) -> None:
    queue = town.add("q", message_ttl_exact=True, message_ttl_ms=TTL_MS)
    await town.publish("q", letter(b"a"))
    answer = await town.get("q", port)
    assert answer is not None
    await town.pass_time(2 * TTL_MS)
    queue.mailbox.put_urgent(c.Requeue(port.mailbox, [answer.seq_id or 0]))
    await town.rest()
    assert town.count("q", "messages") == 0
    assert town.count("q", "expire") == 1


async def test_exact_expiry_over_priorities_is_in_order_of_due_time(town: Town) -> None:
    town.add(
        "q",
        max_priority=3,
        message_ttl_exact=True,
        dead_letter_exchange="",
        dead_letter_routing_key="dead",
    )
    town.add("dead")
    times = [(700, 3), (100, 0), (400, 2), (300, 3), (200, 1), (250, 0)]
    await town.publish(
        "q", *(letter(b"%d" % ms, expiration=str(ms), priority=level) for ms, level in times)
    )
    await town.pass_time(1_000)
    assert [int(body) for body in await town.bodies("dead")] == sorted(ms for ms, _ in times)


async def test_without_exact_expiry_higher_priorities_are_looked_at_first(town: Town) -> None:
    town.add("q", max_priority=3)
    await town.publish(
        "q", letter(b"low", expiration="10"), letter(b"high", expiration="500", priority=3)
    )
    await town.pass_time(10)
    assert town.count("q") == 2, "the head is that of the highest priority"
    assert await town.bodies("q") == [b"high"]
