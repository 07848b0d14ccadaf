"""The loop monitor: what it records of long turns, and that it leaves a loop at rest alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

import aio_pika
import pytest
from pamqp.base import Frame

from leveret.broker.admin.client import ask
from leveret.broker.interceptors.chain import PUBLISH, Interceptor
from leveret.broker.loop_monitor import TICK_S, LoopMonitor
from leveret.broker.server import Broker
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from leveret.broker.channel.context import ConnectionContext
    from leveret.protocol.message import Message

LONG_S = 0.04


def burn(cpu_s: float = LONG_S) -> None:
    end = time.thread_time() + cpu_s
    while time.thread_time() < end:
        pass


@pytest.fixture
async def monitor() -> AsyncIterator[LoopMonitor]:
    monitor = LoopMonitor()
    monitor.start()
    yield monitor
    monitor.stop()


async def rest(monitor: LoopMonitor) -> None:
    """Return when ticks have ended: nobody wakes the loop any more."""
    await wait_until(lambda: not monitor.is_ticking)


async def test_a_turn_that_works_for_long_is_recorded(monitor: LoopMonitor) -> None:
    before = time.time()
    asyncio.get_running_loop().call_soon(burn)
    await wait_until(lambda: monitor.longest_cpu_s >= LONG_S)
    # What else was done between two ticks is counted as well: little here, and never more than
    # fits between them.
    assert monitor.longest_cpu_s < LONG_S + 4 * TICK_S
    assert monitor.longest_wall_s >= LONG_S
    assert monitor.longest_cpu_at is not None
    assert before <= monitor.longest_cpu_at <= time.time()


async def test_many_short_turns_are_no_long_one(monitor: LoopMonitor) -> None:
    for _ in range(100):
        burn(LONG_S / 40)
        await asyncio.sleep(0)
    assert 0 < monitor.longest_cpu_s < LONG_S


async def test_waiting_is_no_work(monitor: LoopMonitor) -> None:
    """The machine, or another thread, had the time: by the clock it is long all the same."""
    asyncio.get_running_loop().call_soon(time.sleep, LONG_S)
    await wait_until(lambda: monitor.longest_wall_s >= LONG_S)
    assert monitor.longest_cpu_s < LONG_S


async def test_a_loop_at_rest_is_left_alone_until_there_is_work(monitor: LoopMonitor) -> None:
    await rest(monitor)
    monitor.note_work()
    # This very turn counts.
    burn()
    await wait_until(lambda: monitor.longest_cpu_s >= LONG_S)
    assert monitor.is_ticking
    await rest(monitor)


class CountingLoop:
    """Counts how often the loop is asked to wake up."""

    def __init__(self) -> None:
        self.ticks = 0

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        self.ticks += 1
        return asyncio.get_running_loop().call_later(delay_s, callback)


async def test_a_small_piece_of_work_costs_one_tick(monitor: LoopMonitor) -> None:
    """A broker with a heartbeat here and a message there stays at rest in between."""
    await rest(monitor)
    loop = CountingLoop()
    monitor._loop = cast(asyncio.AbstractEventLoop, loop)
    monitor.note_work()
    await rest(monitor)
    assert loop.ticks == 1


async def test_after_real_work_it_is_watched_for_a_while(monitor: LoopMonitor) -> None:
    """What the disk answers is work as well, and nobody announces it."""
    await rest(monitor)
    loop = CountingLoop()
    monitor._loop = cast(asyncio.AbstractEventLoop, loop)
    monitor.note_work()
    burn()
    await rest(monitor)
    assert loop.ticks > 5


async def test_forgotten_is_forgotten(monitor: LoopMonitor) -> None:
    asyncio.get_running_loop().call_soon(burn)
    await wait_until(lambda: monitor.longest_cpu_s >= LONG_S)
    monitor.forget()
    assert monitor.statistics() == {
        "longest_turn_cpu_s": 0.0,
        "longest_turn_cpu_at": None,
        "longest_turn_wall_s": 0.0,
        "longest_turn_wall_at": None,
    }


async def test_after_its_end_nothing_is_watched(monitor: LoopMonitor) -> None:
    monitor.stop()
    monitor.note_work()
    assert not monitor.is_ticking


# --- in a broker -------------------------------------------------------------------------------


class Burner(Interceptor):
    """Makes each publish a long turn."""

    def __init__(self, connection: ConnectionContext) -> None:
        pass

    def applies_to(self) -> Iterable[str]:
        return (PUBLISH,)

    def intercept(self, method: Frame, message: Message | None) -> tuple[Frame, Message | None]:
        burn()
        return method, message


def longest_turn(broker: Broker) -> float:
    statistics: Any = broker.statistics()["loop"]
    return float(statistics["longest_turn_cpu_s"])


async def test_what_a_client_causes_is_recorded(broker: Broker) -> None:
    broker.registries.interceptors.register("burner", Burner)
    async with await aio_pika.connect(broker.url) as connection:
        channel = await connection.channel()
        await rest(broker.loop_monitor)
        broker.loop_monitor.forget()
        await channel.default_exchange.publish(aio_pika.Message(b""), "nowhere", mandatory=False)
    assert longest_turn(broker) >= LONG_S


async def test_what_a_timer_causes_is_recorded(broker: Broker) -> None:
    await rest(broker.loop_monitor)
    broker.loop_monitor.forget()
    broker.clock.call_later(0.001, burn)
    await wait_until(lambda: longest_turn(broker) >= LONG_S)


async def test_statistics_can_be_asked_for_and_the_longest_forgotten(broker: Broker) -> None:
    def ask_broker(**more: object) -> dict[str, Any]:
        answer: dict[str, Any] = ask(broker.settings.data, {"command": "statistics", **more})
        return answer

    broker.loop_monitor.note_work()
    burn()
    await wait_until(lambda: longest_turn(broker) >= LONG_S)
    answer = await asyncio.to_thread(ask_broker, forget_longest=True)
    assert answer["loop"]["longest_turn_cpu_s"] >= LONG_S
    assert answer.keys() == broker.statistics().keys()
    assert (await asyncio.to_thread(ask_broker))["loop"]["longest_turn_cpu_s"] < LONG_S


async def test_what_is_without_limit_is_null_in_json(broker: Broker) -> None:
    async with await aio_pika.connect(broker.url) as connection:
        channel = await connection.channel()
        await channel.declare_queue("q", exclusive=True)
        request: dict[str, object] = {"command": "statistics"}
        answer = await asyncio.to_thread(ask, broker.settings.data, request)
    [queue] = answer["vhosts"][0]["queues"].values()
    assert queue["backing_queue"]["target_ram_count"] is None
