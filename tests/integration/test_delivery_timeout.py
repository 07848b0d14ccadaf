"""consumer_timeout: deliveries nobody acknowledges, with a clock the test moves and real clients.

The broker runs in the test's own loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import aio_pika
import pytest
from aio_pika.exceptions import ChannelPreconditionFailed
from pamqp import commands

from leveret.broker.channel import acks
from leveret.broker.clock import VirtualClock
from leveret.broker.config import Settings
from leveret.broker.mailbox import Mailbox
from leveret.broker.server import Broker
from leveret.protocol.codec import make
from leveret.storage.memory_queue import MemoryQueue
from tests.support.raw_client import RawClient, publish
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(60)

TIMEOUT_S = 1800.0
TICK_S = 60.0


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(port=0, data=tmp_path, heartbeat=0)


@pytest.fixture
async def broker(settings: Settings, clock: VirtualClock) -> AsyncIterator[Broker]:
    async with Broker(settings, clock, make_backing=MemoryQueue) as broker:
        yield broker


@pytest.fixture
async def patient(settings: Settings, clock: VirtualClock) -> AsyncIterator[Broker]:
    """One that takes deliveries back and lets the channel live."""
    settings = replace(settings, consumer_timeout_action="requeue")
    async with Broker(settings, clock, make_backing=MemoryQueue) as broker:
        yield broker


@pytest.fixture
async def client(broker: Broker) -> AsyncIterator[RawClient]:
    async with await RawClient.open(broker.port) as client:
        await declare(client)
        yield client


@pytest.fixture
async def patient_client(patient: Broker) -> AsyncIterator[RawClient]:
    async with await RawClient.open(patient.port) as client:
        await declare(client)
        yield client


async def declare(client: RawClient) -> None:
    question = make(commands.Queue.Declare, queue="q", arguments={})
    await client.call(1, question, commands.Queue.DeclareOk)


async def get(client: RawClient, *, no_ack: bool = False) -> commands.Basic.GetOk:
    return await client.call(
        1, make(commands.Basic.Get, queue="q", no_ack=no_ack), commands.Basic.GetOk
    )


async def get_published(client: RawClient, body: bytes, *, no_ack: bool = False) -> int:
    """A message of one's own; returns its tag."""
    await client.send(publish(1, "q", body))
    return (await get(client, no_ack=no_ack)).delivery_tag or 0


async def ack(client: RawClient, tag: int, *, multiple: bool = False) -> None:
    await client.tell(1, make(commands.Basic.Ack, delivery_tag=tag, multiple=multiple))


async def settled(client: RawClient) -> None:
    """What was sent before has been handled, and the channel lives."""
    await client.call(1, make(commands.Basic.Qos), commands.Basic.QosOk)


def timers(broker: Broker) -> int:
    return broker.clock.statistics()["timers"]


# --- close --------------------------------------------------------------------------------------


async def test_the_channel_is_closed_in_rabbitmqs_words(
    client: RawClient, clock: VirtualClock
) -> None:
    await get_published(client, b"late")
    clock.advance(TIMEOUT_S - TICK_S)
    await settled(client)
    clock.advance(2 * TICK_S)
    closed = await client.expect(commands.Channel.Close)
    assert closed.reply_code == 406
    assert closed.reply_text == (
        "PRECONDITION_FAILED - delivery acknowledgement on channel 1 timed out. Timeout value"
        " used: 1800000 ms. This timeout value can be configured, see consumers doc guide to"
        " learn more"
    )
    assert (closed.class_id, closed.method_id) == (0, 0)
    await client.tell(1, make(commands.Channel.CloseOk))
    await client.open_channel(1)
    assert (await get(client)).redelivered


async def test_a_consumer_that_acks_in_time_goes_on(client: RawClient, clock: VirtualClock) -> None:
    first = await get_published(client, b"first")
    for _ in range(5):
        clock.advance(TIMEOUT_S / 2)
        second = await get_published(client, b"next")
        await ack(client, first)
        await settled(client)
        first = second


async def test_what_needs_no_ack_never_times_out(client: RawClient, clock: VirtualClock) -> None:
    await get_published(client, b"gone", no_ack=True)
    clock.advance(10 * TIMEOUT_S)
    await settled(client)


async def test_an_idle_channel_has_no_timer(
    broker: Broker, client: RawClient, clock: VirtualClock
) -> None:
    idle = timers(broker)
    tag = await get_published(client, b"1")
    assert timers(broker) == idle + 1
    clock.advance(TICK_S)
    assert timers(broker) == idle + 1
    await ack(client, tag)
    await settled(client)
    clock.advance(TICK_S)
    assert timers(broker) == idle
    # And again.
    await get_published(client, b"2")
    assert timers(broker) == idle + 1
    close = make(commands.Channel.Close, reply_code=200, reply_text="")
    await client.call(1, close, commands.Channel.CloseOk)
    await wait_until(lambda: timers(broker) == idle)


async def test_a_timeout_of_nothing_never_comes(
    settings: Settings, clock: VirtualClock, tmp_path: Path
) -> None:
    settings = replace(settings, consumer_timeout=0)
    async with (
        Broker(settings, clock, make_backing=MemoryQueue) as broker,
        await RawClient.open(broker.port) as client,
    ):
        await declare(client)
        idle = timers(broker)
        await get_published(client, b"kept")
        assert timers(broker) == idle
        clock.advance(100 * TIMEOUT_S)
        await settled(client)


async def test_what_a_rollback_gives_back_times_out(client: RawClient, clock: VirtualClock) -> None:
    await client.call(1, make(commands.Tx.Select), commands.Tx.SelectOk)
    await client.send(publish(1, "q", b"late"))
    await client.call(1, make(commands.Tx.Commit), commands.Tx.CommitOk)
    tag = (await get(client)).delivery_tag or 0
    await ack(client, tag)
    await settled(client)
    clock.advance(2 * TICK_S)
    await client.call(1, make(commands.Tx.Rollback), commands.Tx.RollbackOk)
    clock.advance(TIMEOUT_S + TICK_S)
    assert (await client.expect(commands.Channel.Close)).reply_code == 406


async def test_with_a_real_client(broker: Broker, clock: VirtualClock) -> None:
    # Half an hour passes at once: nobody could send heartbeats meanwhile.
    async with await aio_pika.connect(f"{broker.url}?heartbeat=0") as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue("q")
        await channel.default_exchange.publish(aio_pika.Message(b"late"), "q")
        message = await queue.get()
        assert message is not None
        clock.advance(TIMEOUT_S + TICK_S)
        with pytest.raises(ChannelPreconditionFailed, match="timed out"):
            await channel.declare_queue("q", passive=True)
        other = await connection.channel()
        again = await (await other.get_queue("q")).get()
        assert again is not None
        assert (again.body, again.redelivered) == (b"late", True)
        await again.ack()


# --- requeue ------------------------------------------------------------------------------------


async def test_just_the_late_delivery_goes_back(
    patient_client: RawClient, clock: VirtualClock
) -> None:
    client = patient_client
    late = await get_published(client, b"late")
    clock.advance(TIMEOUT_S - TICK_S)
    young = await get_published(client, b"young")
    clock.advance(2 * TICK_S)
    await settled(client)
    await client.tell(1, make(commands.Basic.Get, queue="q"))
    again = await client.receive()
    assert isinstance(again.method, commands.Basic.GetOk)
    assert (again.body, again.method.redelivered) == (b"late", True)
    # The client, who knows nothing of it, settles them after all.
    await ack(client, late)
    await ack(client, young)
    await ack(client, again.method.delivery_tag or 0)
    await settled(client)
    await ack(client, late)
    closed = await client.expect(commands.Channel.Close)
    assert closed.reply_text == f"PRECONDITION_FAILED - unknown delivery tag {late}"


async def test_an_ack_of_all_up_to_a_late_one(
    patient: Broker, patient_client: RawClient, clock: VirtualClock
) -> None:
    client = patient_client
    for body in (b"1", b"2", b"3"):
        await get_published(client, body)
    clock.advance(TIMEOUT_S + TICK_S)
    await settled(client)
    await ack(client, 2, multiple=True)
    await settled(client)
    # 3 was taken back as well, and is still forgiven; 1 was settled with 2.
    await client.tell(1, make(commands.Basic.Nack, delivery_tag=3, requeue=True))
    await settled(client)
    assert [(await get(client)).redelivered for _ in range(3)] == [True] * 3
    await ack(client, 1)
    assert (await client.expect(commands.Channel.Close)).reply_code == 406


async def test_late_deliveries_are_counted(
    patient: Broker, patient_client: RawClient, clock: VirtualClock
) -> None:
    await get_published(patient_client, b"late")
    clock.advance(TIMEOUT_S + TICK_S)
    await settled(patient_client)
    (reader,) = patient.listeners[0].readers
    channels = reader.statistics()["channels"]
    assert isinstance(channels, dict)
    assert channels[1]["ack_timeout_count"] == 1
    assert channels[1]["messages_unacknowledged"] == 0


def test_what_was_taken_back_is_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acks, "TAKEN_BACK_KNOWN", 3)
    ledger = acks.UnackedLedger()
    source = acks.Source(Mailbox(), "tag")
    ledger.add(ledger.take_tags(10), source, list(range(10)))
    assert len(ledger.take_back_below(8)) == 7
    assert len(ledger) == 3
    for tag in (1, 1, 4, 5, 6, 7):
        assert ledger.pop(tag, multiple=False) == []
    for tag in (0, 5, 11):
        with pytest.raises(Exception, match="unknown delivery tag"):
            ledger.pop(tag, multiple=False)
    assert [tag for tag, _ in ledger.pop(9, multiple=True)] == [8, 9]
