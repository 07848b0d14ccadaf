"""Messages that come back too often, and queues that nobody uses: rules 85 and 89."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from leveret.broker.clock import VirtualClock
from leveret.broker.queues import commands as c
from leveret.broker.queues.record import Queue
from leveret.protocol.codec import pick_headers
from leveret.protocol.field_table import Field
from tests.broker.queues.bench import Port
from tests.broker.queues.town import Town, consume, deaths, delivered, letter

DEAD: dict[str, Any] = {"dead_letter_exchange": "", "dead_letter_routing_key": "dead"}
EXPIRES_MS = 1_000


@pytest.fixture(params=[False, True], ids=["memory", "loading"])
async def town(request: pytest.FixtureRequest, clock: VirtualClock) -> AsyncIterator[Town]:
    async with Town(clock, is_loading=request.param) as town:
        yield town


@pytest.fixture
def port() -> Port:
    return Port("channel")


# --- delivery limit ----------------------------------------------------------------------------


async def return_all(town: Town, queue: Queue, port: Port, times: int) -> list[bytes]:
    """Take what there is and give it back, so many times; what came the last time."""
    found: list[bytes] = []
    for _ in range(times):
        seq_ids: list[int] = []
        found = []
        while (answer := await town.get(queue.name.name, port)) is not None:
            seq_ids.append(answer.seq_id or 0)
            found.append(answer.message.body)
        queue.mailbox.put_urgent(c.Requeue(port.mailbox, seq_ids))
        await town.rest()
    return found


@pytest.mark.parametrize("max_priority", [None, 3])
async def test_after_too_many_returns_a_message_dies(
    town: Town, port: Port, max_priority: int | None
) -> None:
    queue = town.add("q", policy={"delivery-limit": 2}, max_priority=max_priority, **DEAD)
    town.add("dead")
    await town.publish("q", letter(b"a"), letter(b"b", priority=2))
    assert await return_all(town, queue, port, 1)
    await town.publish("q", letter(b"fresh"))
    assert len(await return_all(town, queue, port, 1)) == 3
    assert await return_all(town, queue, port, 1)
    dead = await town.take_all("dead")
    assert sorted(message.body for message in dead) == [b"a", b"b"]
    assert deaths(dead[0]) == [("q", "delivery_limit", 1)]
    assert await town.bodies("q") == [b"fresh"]
    assert town.count("q", "dead_letter") == {"delivery_limit": 2}


async def test_without_a_dead_letter_exchange_it_is_dropped(town: Town, port: Port) -> None:
    queue = town.add("q", policy={"delivery-limit": 0})
    await town.publish("q", letter(b"a"))
    await return_all(town, queue, port, 1)
    assert town.count("q", "messages") == 0


async def test_an_argument_counts_on_a_quorum_queue_alone(town: Town, port: Port) -> None:
    for name, kind in (("classic", "classic"), ("quorum", "quorum")):
        queue = town.add(name, queue_type=kind, delivery_limit=1)
        await town.publish(name, letter(b"a"))
        await return_all(town, queue, port, 2)
    assert (town.count("classic"), town.count("quorum")) == (1, 0)


async def test_a_channel_that_dies_returns_what_it_held(town: Town, port: Port) -> None:
    queue = town.add("q", policy={"delivery-limit": 1}, **DEAD)
    town.add("dead")
    await town.publish("q", letter(b"a"), letter(b"b"))
    for attempt in range(2):
        holder = Port(f"holder {attempt}")
        consume(queue, holder, prefetch=1)
        await town.rest()
        assert [message.body for message, _ in delivered(holder)] == [b"a"]
        queue.mailbox.put_urgent(c.ChannelDown(holder.mailbox))
        await town.rest()
    assert await town.bodies("dead") == [b"a"]
    assert await town.bodies("q") == [b"b"]


async def test_deliveries_of_a_quorum_queue_say_how_often_they_came_back(
    town: Town, port: Port
) -> None:
    queue = town.add("q", queue_type="quorum")
    await town.publish("q", letter(b"a"))
    counts = []
    for _ in range(3):
        answer = await town.get("q", port)
        assert answer is not None
        count = (pick_headers(answer.message.header) or {})["x-delivery-count"]
        counts.append((count.tag, count.value))
        queue.mailbox.put_urgent(c.Requeue(port.mailbox, [answer.seq_id or 0]))
        await town.rest()
    assert counts == [("l", 0), ("l", 1), ("l", 2)]


async def test_a_quorum_queue_says_so_to_a_consumer_that_was_waiting(
    town: Town, port: Port
) -> None:
    queue = town.add("q", queue_type="quorum")
    consume(queue, port)
    await town.rest()
    await town.publish("q", letter(b"a"), letter(b"b", headers={"x": Field("I", 1)}))
    headers = [pick_headers(message.header) for message, _ in delivered(port)]
    count = {"x-delivery-count": Field("l", 0)}
    assert headers == [count, {"x": Field("I", 1), **count}]


@pytest.mark.parametrize("use", ["get", "consume"])
async def test_it_says_so_where_no_ack_is_expected(town: Town, port: Port, use: str) -> None:
    queue = town.add("q", queue_type="quorum")
    await town.publish("q", letter(b"a"))
    await return_all(town, queue, port, 2)
    if use == "get":
        answer = await town.get("q", port, no_ack=True)
        assert answer is not None
        message = answer.message
    else:
        consume(queue, port, no_ack=True)
        await town.rest()
        [(message, _)] = delivered(port)
    assert (pick_headers(message.header) or {})["x-delivery-count"].value == 2
    assert town.count("q", "messages") == 0
    assert town.actors["q"]._backing.depth() == 0


async def test_a_limit_that_comes_by_policy_counts_from_then_on(town: Town, port: Port) -> None:
    queue = town.add("q")
    await town.publish("q", letter(b"a"))
    await return_all(town, queue, port, 5)
    town.change_policy("q", {"delivery-limit": 1})
    await return_all(town, queue, port, 1)
    assert town.count("q") == 1, "what came before it was not counted"
    await return_all(town, queue, port, 1)
    assert town.count("q") == 0


async def test_an_ack_forgets_the_count(town: Town, port: Port) -> None:
    """Places are not given again, but what is kept of each must not grow for ever."""
    queue = town.add("q", policy={"delivery-limit": 5})
    await town.publish("q", *(letter(b"%d" % n) for n in range(3)))
    await return_all(town, queue, port, 2)
    assert await town.bodies("q") == [b"0", b"1", b"2"]
    assert getattr(town.actors["q"]._backing, "_returns") == {}  # noqa: B009


# --- x-expires ---------------------------------------------------------------------------------


async def test_a_queue_that_nobody_uses_goes(town: Town) -> None:
    town.add("q", expires_ms=EXPIRES_MS, **DEAD)
    town.add("dead")
    await town.publish("q", letter(b"a"))
    await town.pass_time(EXPIRES_MS - 1)
    assert town.is_alive("q")
    await town.pass_time(1)
    assert not town.is_alive("q")
    assert "q" not in town.topology.queues
    assert town.count("dead", "publish") == 0, "its messages do not die, they go with it"


@pytest.mark.parametrize("use", ["get", "declare"])
async def test_get_and_declare_are_use(town: Town, port: Port, use: str) -> None:
    queue = town.add("q", expires_ms=EXPIRES_MS)
    for _ in range(5):
        await town.pass_time(EXPIRES_MS - 1)
        if use == "get":
            assert await town.get("q", port) is None
        else:
            queue.mailbox.put(c.Count(port.mailbox))
            await town.rest()
        assert town.is_alive("q")
    await town.pass_time(EXPIRES_MS)
    assert not town.is_alive("q")


async def test_publishing_is_no_use(town: Town) -> None:
    town.add("q", expires_ms=EXPIRES_MS)
    await town.rest()
    for _ in range(4):
        await town.pass_time(EXPIRES_MS // 5)
        await town.publish("q", letter(b"a"))
    await town.pass_time(EXPIRES_MS // 5)
    assert not town.is_alive("q")


@pytest.mark.parametrize("end", ["cancel", "channel"])
async def test_a_consumer_keeps_it_until_it_leaves(town: Town, port: Port, end: str) -> None:
    queue = town.add("q", expires_ms=EXPIRES_MS)
    consume(queue, port)
    await town.pass_time(10 * EXPIRES_MS)
    assert town.is_alive("q")
    if end == "cancel":
        queue.mailbox.put(c.Cancel(port.mailbox, "tag"))
    else:
        queue.mailbox.put_urgent(c.ChannelDown(port.mailbox))
    await town.rest()
    await town.pass_time(EXPIRES_MS - 1)
    assert town.is_alive("q")
    await town.pass_time(1)
    assert not town.is_alive("q")


async def test_a_policy_gives_and_takes_a_lifetime(town: Town, clock: VirtualClock) -> None:
    town.add("q")
    town.change_policy("q", {"expires": EXPIRES_MS})
    await town.rest()
    await town.pass_time(EXPIRES_MS - 1)
    town.change_policy("q", None)
    await town.rest()
    await town.pass_time(5 * EXPIRES_MS)
    assert town.is_alive("q")
    assert clock.statistics()["timers"] == 0


async def test_a_timer_that_fires_when_a_consumer_comes_does_nothing(
    town: Town, port: Port
) -> None:
    queue = town.add("q", expires_ms=EXPIRES_MS)
    await town.rest()
    town.clock.advance(EXPIRES_MS / 1000)
    consume(queue, port)
    await town.rest()
    assert not town.is_alive("q"), "it came too late"
    again = town.add("again", expires_ms=EXPIRES_MS)
    await town.rest()
    consume(again, port)
    town.clock.advance(EXPIRES_MS / 1000)
    await town.rest()
    assert town.is_alive("again"), "it came in time, though neither was handled yet"
