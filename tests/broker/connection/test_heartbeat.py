"""Heartbeats both ways, under a clock that the test moves [19]."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from leveret.broker.clock import VirtualClock
from leveret.broker.connection.heartbeat import Heartbeat
from leveret.broker.connection.writer import SocketWriter
from leveret.protocol.framing import HEARTBEAT_FRAME
from tests.broker.connection.test_writer import FakeTransport

INTERVAL_S = 10


class Bench:
    def __init__(self, clock: VirtualClock, interval_s: int = INTERVAL_S) -> None:
        self.clock = clock
        self.transport = FakeTransport()
        self.writer = SocketWriter(cast(asyncio.Transport, self.transport))
        self.received = 0
        self.deaths = 0
        self.heartbeat = Heartbeat(clock, interval_s, self.writer, lambda: self.received, self.die)

    def die(self) -> None:
        self.deaths += 1

    def beats(self) -> int:
        """Heartbeats sent since the last time; nothing else may have been."""
        written, self.transport.written = self.transport.written, b""
        assert written == HEARTBEAT_FRAME * (len(written) // len(HEARTBEAT_FRAME))
        return len(written) // len(HEARTBEAT_FRAME)


@pytest.fixture
def bench(clock: VirtualClock) -> Bench:
    return Bench(clock)


def test_one_every_half_interval(bench: Bench) -> None:
    bench.clock.advance(INTERVAL_S / 2 - 0.1)
    assert bench.beats() == 0
    bench.clock.advance(0.1)
    assert bench.beats() == 1
    bench.received = 1
    bench.clock.advance(INTERVAL_S)
    assert bench.beats() == 2


def test_whatever_was_sent_stands_for_one(bench: Bench) -> None:
    bench.writer.write(b"")
    bench.clock.advance(INTERVAL_S / 2)
    assert bench.beats() == 0
    bench.clock.advance(INTERVAL_S / 2)
    assert bench.beats() == 1


def test_nothing_is_added_to_a_full_socket(bench: Bench) -> None:
    bench.writer.pause()
    bench.clock.advance(INTERVAL_S)
    assert bench.beats() == 0
    bench.writer.resume()
    bench.clock.advance(INTERVAL_S / 2)
    assert bench.beats() == 1


def test_a_peer_that_is_silent_for_two_intervals_is_dead(bench: Bench) -> None:
    bench.clock.advance(2 * INTERVAL_S - 0.1)
    assert bench.deaths == 0
    bench.clock.advance(0.1)
    assert bench.deaths == 1
    bench.clock.advance(10 * INTERVAL_S)
    assert bench.deaths == 1, "nobody dies twice"


def test_it_may_take_almost_three_intervals(bench: Bench) -> None:
    """What came just after a look counts until the next but one."""
    bench.clock.advance(INTERVAL_S - 1)
    bench.received += 1
    bench.clock.advance(2 * INTERVAL_S)
    assert bench.deaths == 0
    bench.clock.advance(1)
    assert bench.deaths == 1


def test_a_sign_of_life_now_and_then_is_enough(bench: Bench) -> None:
    for _ in range(5):
        bench.clock.advance(2 * INTERVAL_S - 1)
        bench.received += 1
    assert bench.deaths == 0


def test_none_asked_for(clock: VirtualClock) -> None:
    bench = Bench(clock, interval_s=0)
    clock.advance(100_000)
    assert (bench.beats(), bench.deaths) == (0, 0)
    assert clock.statistics()["timers"] == 0


def test_stopped(bench: Bench) -> None:
    bench.heartbeat.stop()
    bench.clock.advance(10 * INTERVAL_S)
    assert (bench.beats(), bench.deaths) == (0, 0)
    assert bench.clock.statistics()["timers"] == 0
