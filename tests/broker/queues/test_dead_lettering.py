"""From queue to queue: units, targets that refuse or are gone, cycles, ends: rules 85 and 86."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from leveret.broker.clock import VirtualClock
from leveret.broker.mailbox import Mailbox
from leveret.broker.queues import commands as c
from leveret.broker.queues import dead_lettering
from leveret.broker.queues.dead_lettering import BACKLOG, BATCH_MESSAGES
from leveret.broker.queues.record import Queue
from leveret.broker.resource import Resource
from leveret.storage.backing_queue import LOADING, Entry, Loading
from leveret.storage.memory_queue import MemoryQueue
from tests.broker.queues.bench import Port
from tests.broker.queues.town import Town, consume, deaths, delivered, letter

DEAD: dict[str, Any] = {"dead_letter_exchange": "", "dead_letter_routing_key": "dead"}
TTL_MS = 100


@pytest.fixture(params=[False, True], ids=["memory", "loading"])
async def town(request: pytest.FixtureRequest, clock: VirtualClock) -> AsyncIterator[Town]:
    async with Town(clock, is_loading=request.param) as town:
        yield town


@pytest.fixture
def port() -> Port:
    return Port("channel")


async def hold(town: Town, queue: Queue, port: Port, *bodies: bytes) -> list[int]:
    """Publish, and take all of it; the ids."""
    await town.publish(queue.name.name, *(letter(body) for body in bodies))
    held: list[int] = []
    while (answer := await town.get(queue.name.name, port)) is not None:
        held.append(answer.seq_id or 0)
    return held


async def reject(town: Town, queue: Queue, port: Port, seq_ids: Sequence[int]) -> None:
    queue.mailbox.put_urgent(c.Reject(port.mailbox, seq_ids))
    await town.rest()


# --- what dies ---------------------------------------------------------------------------------


async def test_rejected_messages_go_in_the_order_in_which_they_were_rejected(
    town: Town, port: Port
) -> None:
    queue = town.add("q", **DEAD)
    town.add("dead")
    a, b, third = await hold(town, queue, port, b"a", b"b", b"c")
    await reject(town, queue, port, [b])
    await reject(town, queue, port, [a, third])
    found = await town.take_all("dead")
    assert [message.body for message in found] == [b"b", b"a", b"c"]
    assert deaths(found[0]) == [("q", "rejected", 1)]
    assert town.count("q", "messages") == 0
    assert town.count("q", "dead_letter") == {"rejected": 3}
    assert town.count("q", "reject") == 3


async def test_each_reason_is_counted(town: Town, port: Port) -> None:
    queue = town.add("q", max_length=2, policy={"delivery-limit": 0}, **DEAD)
    town.add("dead")
    held = await hold(town, queue, port, b"rejected", b"returned")
    await reject(town, queue, port, held[:1])
    queue.mailbox.put_urgent(c.Requeue(port.mailbox, held[1:]))
    await town.publish("q", letter(b"dropped"), letter(b"1", expiration="10"), letter(b"2"))
    await town.pass_time(10)
    reasons = {"rejected": 1, "delivery_limit": 1, "maxlen": 1, "expired": 1}
    assert town.count("q", "dead_letter") == reasons
    assert (town.count("q", "expire"), town.count("q", "drop")) == (1, 1)
    assert town.count("dead", "publish") == 4


async def test_more_than_one_batch_goes_in_order(town: Town) -> None:
    town.add("q", message_ttl_ms=TTL_MS, **DEAD)
    town.add("dead")
    many = BACKLOG + 2 * BATCH_MESSAGES + 7
    for first in range(0, many, 400):
        run = [letter(b"%d" % n) for n in range(first, min(first + 400, many))]
        await town.publish("q", *run)
    await town.pass_time(TTL_MS)
    assert town.count("q", "messages") == 0
    assert town.made_units >= many // BATCH_MESSAGES
    assert [int(body) for body in await town.bodies("dead")] == list(range(many))


async def test_large_messages_go_in_smaller_batches(town: Town) -> None:
    town.add("q", message_ttl_ms=TTL_MS, **DEAD)
    town.add("dead")
    await town.publish("q", *(letter(bytes(400_000)) for _ in range(9)))
    await town.pass_time(TTL_MS)
    assert town.made_units >= 3
    assert town.count("dead") == 9


async def test_a_ready_consumer_of_the_target_gets_them(town: Town, port: Port) -> None:
    town.add("q", message_ttl_ms=TTL_MS, **DEAD)
    consume(town.add("dead"), port)
    await town.publish("q", letter(b"a"), letter(b"b"))
    await town.pass_time(TTL_MS)
    assert [message.body for message, _ in delivered(port)] == [b"a", b"b"]


# --- where to ----------------------------------------------------------------------------------


async def test_several_queues_get_a_copy_each(town: Town) -> None:
    town.topology.create_exchange(
        "x", "fanout", durable=False, auto_delete=False, internal=False, arguments={}
    )
    for name in ("one", "two"):
        town.add(name)
        town.topology.bind("x", Resource("/", "queue", name), "", {})
    town.add("q", message_ttl_ms=TTL_MS, dead_letter_exchange="x")
    await town.publish("q", letter(b"a"))
    await town.pass_time(TTL_MS)
    assert await town.bodies("one") == await town.bodies("two") == [b"a"]


async def test_without_the_exchange_messages_are_dropped(town: Town, port: Port) -> None:
    queue = town.add("q", dead_letter_exchange="missing")
    await reject(town, queue, port, await hold(town, queue, port, b"a", b"b"))
    assert town.made_units == 0
    assert town.statistics("q")["backing_queue"]["pending_acks"] == 0  # type: ignore[index]
    assert town.count("q", "dead_letter") == {"rejected": 2}


async def test_any_number_that_nobody_wants_is_dropped(
    clock: VirtualClock, port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client may reject all it holds at once: more batches than calls can be nested."""
    monkeypatch.setattr(dead_lettering, "BATCH_MESSAGES", 1)
    async with Town(clock) as town:
        queue = town.add("q", dead_letter_exchange="missing")
        backing = town.actors["q"]._backing
        held = backing.publish_delivered([letter(b"")] * 2_000, None)
        state = town.actors["q"]._consumers.channel(port.mailbox)
        state.unacked.update(dict.fromkeys(held))
        await reject(town, queue, port, held)
        assert backing.depth() == 0


async def test_a_queue_may_be_its_own_target(town: Town, port: Port) -> None:
    """A rejected message comes again; one that expires here again and again does not."""
    queue = town.add("q", dead_letter_exchange="", dead_letter_routing_key="q")
    held = await hold(town, queue, port, b"a", b"b")
    await reject(town, queue, port, held)
    found = await town.take_all("q")
    assert [message.body for message in found] == [b"a", b"b"]
    assert deaths(found[0]) == [("q", "rejected", 1)]
    await town.publish("q", letter(b"x", expiration="10"))
    await town.pass_time(10)
    assert town.count("q", "messages") == 0


async def test_a_queue_that_is_full_does_not_feed_itself(town: Town) -> None:
    town.add("q", max_length=2, dead_letter_exchange="", dead_letter_routing_key="q")
    await town.publish("q", *(letter(b"%d" % n) for n in range(5)))
    assert await town.bodies("q") == [b"3", b"4"]


async def test_messages_do_not_go_round_in_a_cycle(town: Town) -> None:
    for name, other in (("a", "b"), ("b", "a")):
        town.add(
            name, message_ttl_ms=TTL_MS, dead_letter_exchange="", dead_letter_routing_key=other
        )
    await town.publish("a", letter(b"x"))
    await town.pass_time(TTL_MS)
    assert (town.count("a"), town.count("b")) == (0, 1)
    await town.pass_time(TTL_MS)
    assert (town.count("a", "messages"), town.count("b", "messages")) == (0, 0)


async def test_a_reject_on_the_way_lets_a_cycle_go_on(town: Town, port: Port) -> None:
    a = town.add("a", dead_letter_exchange="", dead_letter_routing_key="b")
    town.add("b", message_ttl_ms=TTL_MS, dead_letter_exchange="", dead_letter_routing_key="a")
    held = await hold(town, a, port, b"x")
    for count in range(1, 4):
        await reject(town, a, port, held)
        await town.pass_time(TTL_MS)
        answer = await town.get("a", port)
        assert answer is not None
        assert deaths(answer.message) == [("b", "expired", count), ("a", "rejected", count)]
        held = [answer.seq_id or 0]


async def test_a_policy_names_another_target_from_then_on(town: Town) -> None:
    town.add("q", message_ttl_ms=TTL_MS)
    for name in ("one", "two"):
        town.add(name)
        policy = {"dead-letter-exchange": "", "dead-letter-routing-key": name}
        town.change_policy("q", policy)
        await town.publish("q", letter(name.encode()))
        await town.pass_time(TTL_MS)
    town.change_policy("q", None)
    await town.publish("q", letter(b"nobody"))
    await town.pass_time(TTL_MS)
    assert await town.bodies("one") == [b"one"]
    assert await town.bodies("two") == [b"two"]
    assert town.count("q") == 0


# --- targets that cannot -----------------------------------------------------------------------


async def test_a_full_target_is_left_out(town: Town) -> None:
    """Each message for itself: a small one may fit where a large one did not."""
    town.add("q", message_ttl_ms=TTL_MS, dead_letter_exchange="amq.fanout")
    town.add("full", max_length_bytes=10, overflow="reject-publish")
    town.add("roomy")
    for name in ("full", "roomy"):
        town.topology.bind("amq.fanout", Resource("/", "queue", name), "", {})
    await town.publish("q", letter(bytes(8)), letter(bytes(9)), letter(b"ab"), letter(b"c"))
    await town.pass_time(TTL_MS)
    assert [len(body) for body in await town.bodies("full")] == [8, 2]
    assert town.count("full", "refuse") == 2
    assert [len(body) for body in await town.bodies("roomy")] == [8, 9, 2, 1]
    assert town.count("q", "messages") == 0


async def test_a_target_that_is_deleted_before_it_answers_is_left_out(town: Town) -> None:
    town.add("q", message_ttl_ms=TTL_MS, dead_letter_exchange="amq.fanout")
    for name in ("gone", "there"):
        queue = town.add(name)
        town.topology.bind("amq.fanout", queue.name, "", {})
    await town.publish("q", letter(b"a"))
    # It finds the end in its control lane before what is asked in the other.
    town.topology.queues["gone"].mailbox.put_urgent(c.DeleteNow())
    await town.pass_time(TTL_MS)
    assert not town.is_alive("gone")
    assert await town.bodies("there") == [b"a"]
    assert town.count("q", "messages") == 0


async def test_a_target_that_is_deleted_before_the_commit_makes_it_begin_anew(
    town: Town,
) -> None:
    town.add("q", message_ttl_ms=TTL_MS, dead_letter_exchange="amq.fanout")
    for name in ("gone", "there"):
        town.topology.bind("amq.fanout", town.add(name).name, "", {})
    await town.publish("q", letter(b"a"), letter(b"b"))
    town.is_holding = True
    await town.pass_time(TTL_MS)
    town.topology.queues["gone"].mailbox.put_urgent(c.DeleteNow())
    await town.rest()
    await town.commit_held()
    assert (town.count("q", "messages"), town.count("there")) == (0, 0)
    assert town.statistics("q")["backing_queue"]["pending_acks"] == 2  # type: ignore[index]
    assert town.count("q", "dead_letter") == {"expired": 2}
    await town.commit_held()
    assert await town.bodies("there") == [b"a", b"b"]
    assert town.count("q", "dead_letter") == {"expired": 2}
    assert town.statistics("q")["backing_queue"]["pending_acks"] == 0  # type: ignore[index]


async def test_the_only_target_is_deleted_before_the_commit(town: Town) -> None:
    town.add("q", message_ttl_ms=TTL_MS, **DEAD)
    dead = town.add("dead")
    await town.publish("q", letter(b"a"))
    town.is_holding = True
    await town.pass_time(TTL_MS)
    dead.mailbox.put_urgent(c.DeleteNow())
    await town.rest()
    await town.commit_held()
    assert town.statistics("q")["backing_queue"]["pending_acks"] == 0  # type: ignore[index]
    assert not town.held


async def test_nothing_is_seen_in_either_queue_until_the_commit_ends(town: Town) -> None:
    town.add("q", message_ttl_ms=TTL_MS, **DEAD)
    town.add("dead")
    await town.publish("q", letter(b"a"))
    town.is_holding = True
    await town.pass_time(TTL_MS)
    batch = town.begin_held()
    await town.rest()
    assert (town.count("q"), town.count("dead")) == (0, 0)
    await town.publish("q", letter(b"b"))
    await town.pass_time(TTL_MS)
    assert town.held == [], "one unit at a time"
    for call in batch.after:
        call()
    await town.rest()
    assert await town.bodies("dead") == [b"a"]
    await town.commit_held()
    assert await town.bodies("dead") == [b"b"]


# --- ends --------------------------------------------------------------------------------------


async def test_a_queue_that_is_deleted_meanwhile_has_dead_lettered_what_had_died(
    town: Town, port: Port
) -> None:
    queue = town.add("q", **DEAD)
    town.add("dead")
    held = await hold(town, queue, port, *(b"%d" % n for n in range(6)))
    town.is_holding = True
    await reject(town, queue, port, held[:2])
    await reject(town, queue, port, held[2:4])
    queue.mailbox.put_urgent(c.DeleteNow())
    await town.rest()
    assert not town.is_alive("q")
    await town.commit_held()
    found = [int(body) for body in await town.bodies("dead")]
    assert sorted(found) == [0, 1, 2, 3], "what it merely held goes with it"


async def test_a_queue_and_one_of_its_targets_are_deleted_meanwhile(town: Town) -> None:
    queue = town.add("q", message_ttl_ms=TTL_MS, dead_letter_exchange="amq.fanout")
    for name in ("gone", "there"):
        town.topology.bind("amq.fanout", town.add(name).name, "", {})
    await town.publish("q", letter(b"a"))
    town.is_holding = True
    await town.pass_time(TTL_MS)
    for mailbox in (queue.mailbox, town.topology.queues["gone"].mailbox):
        mailbox.put_urgent(c.DeleteNow())
    await town.rest()
    await town.commit_held()
    assert await town.bodies("there") == [b"a"]


async def test_a_queue_that_crashed_meanwhile_has_its_messages_back(town: Town) -> None:
    """So its unit must not happen, or they would be in both."""
    queue = town.add("q", message_ttl_ms=TTL_MS, **DEAD)
    town.add("dead")
    await town.publish("q", letter(b"a"))
    town.is_holding = True
    await town.pass_time(TTL_MS)
    actor = town.actors["q"]
    actor.say_goodbye(crashed=True)
    await town.commit_held()
    assert town.count("dead") == 0
    queue.mailbox = Mailbox("q")


async def test_a_queue_that_stops_leaves_what_has_begun_to_the_store(town: Town) -> None:
    queue = town.add("q", message_ttl_ms=TTL_MS, **DEAD)
    town.add("dead")
    await town.publish("q", letter(b"a"))
    town.is_holding = True
    await town.pass_time(TTL_MS)
    queue.mailbox.put(c.Terminate())
    await town.rest()
    await town.commit_held()
    assert await town.bodies("dead") == [b"a"]


# --- messages that must be read ----------------------------------------------------------------


class Forgetful(MemoryQueue):
    """What is pending must be read before it can be looked at, a few at a time."""

    def __init__(self, wake: Callable[[], None]) -> None:
        super().__init__(wake)
        self._some = random.Random(1)
        self.read: set[int] = set()
        self.asked = 0

    def pending(self, seq_ids: Sequence[int]) -> list[Entry] | Loading:
        self.asked += 1
        known = [seq_id for seq_id in seq_ids if seq_id in self._pending]
        there: list[int] = []
        for seq_id in known:
            if seq_id not in self.read:
                break
            there.append(seq_id)
        if known and not there:
            self.read.update(known[: self._some.randint(1, 3)])
            self._wake()
            return LOADING
        return super().pending(there)


async def test_messages_that_left_memory_are_read_before_they_go(
    clock: VirtualClock, port: Port
) -> None:
    async with Town(clock) as town:
        made: list[Forgetful] = []

        def make(wake: Callable[[], None]) -> Forgetful:
            made.append(Forgetful(wake))
            return made[-1]

        queue = town.add("q", make_backing=make, **DEAD)
        town.add("dead")
        held = await hold(town, queue, port, *(b"%d" % n for n in range(20)))
        # One that is gone already is no reason to wait, nor to lose others.
        made[0].ack([held[5], held[19]])
        await reject(town, queue, port, held)
        found = [int(body) for body in await town.bodies("dead")]
        assert found == [n for n in range(20) if n not in (5, 19)]
        assert made[0].asked > 5
        assert town.count("q", "dead_letter") == {"rejected": 18}
