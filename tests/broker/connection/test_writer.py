"""The one writer of a socket: paused, stuck, and who is told."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from leveret.broker.channel.context import Writable
from leveret.broker.connection.writer import HIGH_MARK, LOW_MARK, STUCK_MARK, SocketWriter
from leveret.broker.mailbox import Mailbox


class FakeTransport:
    def __init__(self) -> None:
        self.written = b""
        self.buffered = 0
        self.marks = (0, 0)

    def write(self, data: bytes) -> None:
        self.written += data

    def set_write_buffer_limits(self, high: int, low: int) -> None:
        self.marks = (high, low)

    def get_write_buffer_size(self) -> int:
        return self.buffered


@pytest.fixture
def transport() -> FakeTransport:
    return FakeTransport()


@pytest.fixture
def writer(transport: FakeTransport) -> SocketWriter:
    return SocketWriter(cast(asyncio.Transport, transport))


def test_what_is_written_is_counted(writer: SocketWriter, transport: FakeTransport) -> None:
    writer.write(b"one")
    writer.write(b"two")
    assert transport.written == b"onetwo"
    assert (writer.writes, writer.bytes_sent) == (2, 6)
    assert transport.marks == (HIGH_MARK, LOW_MARK)


def test_whoever_waits_is_told_once(writer: SocketWriter) -> None:
    waiting, indifferent = Mailbox("waiting"), Mailbox("indifferent")
    writer.pause()
    assert writer.is_paused
    writer.call_when_writable(waiting)
    writer.call_when_writable(waiting)
    writer.resume()
    assert not writer.is_paused
    assert waiting.take_urgent() == [Writable()]
    assert indifferent.take_urgent() == []
    writer.pause()
    writer.resume()
    assert waiting.take_urgent() == []


def test_it_is_stuck_far_above_the_high_mark(
    writer: SocketWriter, transport: FakeTransport
) -> None:
    writer.pause()
    transport.buffered = STUCK_MARK
    assert not writer.is_stuck
    transport.buffered += 1
    assert writer.is_stuck
    assert writer.backlog == STUCK_MARK + 1


async def test_waiting_for_room(writer: SocketWriter, transport: FakeTransport) -> None:
    await writer.wait_unstuck()
    writer.pause()
    transport.buffered = STUCK_MARK + 1
    waits = asyncio.create_task(writer.wait_unstuck())
    await asyncio.sleep(0)
    assert not waits.done()
    transport.buffered = 0
    writer.resume()
    await asyncio.wait_for(waits, 5)


async def test_nobody_waits_for_a_socket_that_is_gone(
    writer: SocketWriter, transport: FakeTransport
) -> None:
    writer.pause()
    transport.buffered = STUCK_MARK + 1
    waits = asyncio.create_task(writer.wait_unstuck())
    await asyncio.sleep(0)
    writer.lose()
    await asyncio.wait_for(waits, 5)
    writer.write(b"to nobody")
    assert transport.written == b""
    assert writer.backlog == 0
