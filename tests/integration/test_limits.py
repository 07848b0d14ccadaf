"""Limits of virtual hosts and users, frame by frame, and with a real client.

The broker runs in the test's own loop, so that ``broker.limits`` is at hand.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import NamedTuple

import aio_pika
import pika  # type: ignore[import-untyped]
import pytest
from aio_pika.exceptions import ChannelPreconditionFailed
from pamqp import commands
from pika.exceptions import ProbableAccessDeniedError  # type: ignore[import-untyped]

from leveret.broker.channel import publish as publish_module
from leveret.broker.config import MESSAGE_SIZE_CAP, Settings
from leveret.broker.limits import Usage
from leveret.broker.parameters import NoSuchParameter, ParameterError
from leveret.broker.server import Broker
from leveret.protocol.codec import make
from leveret.storage.memory_queue import MemoryQueue
from tests.support.raw_client import RawClient, handshake, publish
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(60)

GUEST = "guest"
OPEN, CHANNEL_OPEN, DECLARE, CONSUME, PUBLISH = (10, 40), (20, 10), (50, 10), (60, 20), (60, 40)


class Refusal(NamedTuple):
    code: int
    text: str
    method: tuple[int, int]


async def refusal_of_connection(broker: Broker) -> Refusal:
    """What the broker answers to connection.open."""
    async with await RawClient.connect(broker.port) as client:
        header, start_ok, opening = handshake()
        await client.send(header)
        await client.expect(commands.Connection.Start)
        await client.send(start_ok)
        await client.expect(commands.Connection.Tune)
        await client.send(opening)
        return refusal(await client.expect(commands.Connection.Close))


def refusal(close: object) -> Refusal:
    assert isinstance(close, commands.Connection.Close | commands.Channel.Close)
    method = (close.class_id or 0, close.method_id or 0)
    return Refusal(close.reply_code or 0, close.reply_text or "", method)


def declare(queue: str) -> commands.Queue.Declare:
    return make(commands.Queue.Declare, queue=queue, arguments={})


def consume(queue: str, tag: str) -> commands.Basic.Consume:
    return make(commands.Basic.Consume, queue=queue, consumer_tag=tag, arguments={})


def usage(broker: Broker) -> tuple[int, int, int]:
    counted = broker.vhosts["/"].usage
    return counted.connections, counted.channels, counted.consumers


# --- connections ----------------------------------------------------------------------------------


async def test_connections_of_a_vhost(broker: Broker) -> None:
    await broker.limits.set_vhost("/", {"max-connections": 1})
    first = await RawClient.open(broker.port)
    assert await refusal_of_connection(broker) == Refusal(
        530,
        "NOT_ALLOWED - access to vhost '/' refused for user 'guest': connection limit (1) is"
        " reached",
        OPEN,
    )
    # Who has said goodbye and was answered counts no more.
    await first.say_goodbye()
    async with await RawClient.open(broker.port):
        pass


async def test_connections_of_a_user(broker: Broker) -> None:
    await broker.limits.set_user(GUEST, {"max-connections": 1})
    async with await RawClient.open(broker.port) as first:
        assert await refusal_of_connection(broker) == Refusal(
            530,
            "NOT_ALLOWED - Connection refused for user 'guest': user connection limit (1) is"
            " reached",
            OPEN,
        )
        first.reset()
    await wait_until(lambda: usage(broker) == (0, 0, 0))
    async with await RawClient.open(broker.port):
        pass


async def test_none_and_no_limit(broker: Broker) -> None:
    await broker.limits.set_vhost("/", {"max-connections": 0})
    assert (await refusal_of_connection(broker)).code == 530
    await broker.limits.set_vhost("/", {"max-connections": -1})
    async with await RawClient.open(broker.port):
        pass


async def connect_with_pika(broker: Broker, user: str, password: str) -> None:
    parameters = pika.ConnectionParameters(
        "127.0.0.1", broker.port, credentials=pika.PlainCredentials(user, password)
    )
    connection = await asyncio.to_thread(pika.BlockingConnection, parameters)
    await asyncio.to_thread(connection.close)


async def test_a_real_client_is_told(broker: Broker) -> None:
    await broker.limits.set_vhost("/", {"max-connections": 1})
    async with await aio_pika.connect(broker.url):
        with pytest.raises(ProbableAccessDeniedError, match=r"connection limit \(1\) is reached"):
            await connect_with_pika(broker, GUEST, GUEST)
    await connect_with_pika(broker, GUEST, GUEST)


async def test_one_users_limit_is_not_anothers(broker: Broker) -> None:
    await broker.users.add("app", "secret")
    await broker.limits.set_user("app", {"max-connections": 0})
    async with await RawClient.open(broker.port):
        with pytest.raises(ProbableAccessDeniedError, match="for user 'app'"):
            await connect_with_pika(broker, "app", "secret")


# --- channels -------------------------------------------------------------------------------------


async def test_channels_of_a_user(broker: Broker) -> None:
    await broker.limits.set_user(GUEST, {"max-channels": 2})
    async with (
        await RawClient.open(broker.port) as one,
        await RawClient.open(broker.port) as another,
    ):
        # One that is closed makes room.
        await one.call(1, make(commands.Channel.Close, reply_code=200), commands.Channel.CloseOk)
        await one.open_channel(1)
        await another.tell(2, make(commands.Channel.Open))
        assert refusal(await another.expect(commands.Connection.Close)) == Refusal(
            530,
            "NOT_ALLOWED - number of channels opened for user 'guest' has reached"
            " the maximum allowed user limit of (2)",
            (0, 0),
        )
        await wait_until(lambda: usage(broker)[1] == 1)


async def test_channels_of_a_vhost(broker: Broker) -> None:
    await broker.limits.set_vhost("/", {"max-channels": 1})
    async with await RawClient.open(broker.port) as client:
        await client.tell(2, make(commands.Channel.Open))
        assert refusal(await client.expect(commands.Connection.Close)) == Refusal(
            530,
            "NOT_ALLOWED - number of channels opened in vhost '/' has reached"
            " the maximum allowed limit of (1)",
            (0, 0),
        )


async def test_a_channel_that_failed_makes_room(broker: Broker) -> None:
    await broker.limits.set_vhost("/", {"max-channels": 1})
    async with await RawClient.open(broker.port) as client:
        passive = make(commands.Queue.Declare, queue="missing", passive=True, arguments={})
        await client.call(1, passive, commands.Channel.Close)
        await client.tell(1, make(commands.Channel.CloseOk))
        await client.open_channel(1)
        assert usage(broker) == (1, 1, 0)


# --- queues ---------------------------------------------------------------------------------------


async def test_queues_of_a_user(settings: Settings) -> None:
    """In all virtual hosts together, over a restart; those of others do not count."""
    async with Broker(settings) as broker:
        await broker.users.add("other", "secret")
        await broker.limits.set_user(GUEST, {"max-queues": 2})
        url = broker.url.replace("guest:guest", "other:secret")
        async with await aio_pika.connect(url) as link:
            await (await link.channel()).declare_queue("not-mine", durable=True)
        async with await RawClient.open(broker.port) as client:
            await client.call(1, declare("first"), commands.Queue.DeclareOk)
            durable = make(commands.Queue.Declare, queue="lasts", durable=True, arguments={})
            await client.call(1, durable, commands.Queue.DeclareOk)
            assert refusal(
                await client.call(1, declare("third"), commands.Channel.Close)
            ) == Refusal(
                406,
                "PRECONDITION_FAILED - cannot declare queue 'third': queue limit for user 'guest'"
                " (2) is reached",
                DECLARE,
            )
    async with Broker(replace(settings, port=0)) as broker:
        async with await RawClient.open(broker.port) as client:
            # The durable one is still mine, the other went with the broker.
            await client.call(1, declare("second"), commands.Queue.DeclareOk)
            await client.call(1, declare("third"), commands.Channel.Close)


async def test_queues_of_a_vhost(broker: Broker) -> None:
    await broker.limits.set_vhost("/", {"max-queues": 1})
    async with await RawClient.open(broker.port) as client:
        await client.call(1, declare("first"), commands.Queue.DeclareOk)
        # Only new ones count.
        await client.call(1, declare("first"), commands.Queue.DeclareOk)
        assert refusal(await client.call(1, declare("second"), commands.Channel.Close)) == Refusal(
            406,
            "PRECONDITION_FAILED - cannot declare queue 'second': queue limit in vhost '/' (1)"
            " is reached",
            DECLARE,
        )
        await client.tell(1, make(commands.Channel.CloseOk))
        await client.open_channel(1)
        await client.call(1, make(commands.Queue.Delete, queue="first"), commands.Queue.DeleteOk)
        await client.call(1, declare("second"), commands.Queue.DeclareOk)


# --- consumers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("whose", ["vhost", "user"])
async def test_consumers(broker: Broker, whose: str) -> None:
    if whose == "vhost":
        await broker.limits.set_vhost("/", {"max-consumers": 1})
    else:
        await broker.limits.set_user(GUEST, {"max-consumers": 1})
    of = {"vhost": "in vhost '/'", "user": "for user 'guest'"}[whose]
    async with await RawClient.open(broker.port, channels=2) as client:
        await client.call(1, declare("q"), commands.Queue.DeclareOk)
        await client.call(1, consume("q", "a"), commands.Basic.ConsumeOk)
        assert refusal(await client.call(2, consume("q", "b"), commands.Channel.Close)) == Refusal(
            406,
            f"PRECONDITION_FAILED - cannot consume: consumer limit {of} (1) is reached",
            CONSUME,
        )
        await client.tell(2, make(commands.Channel.CloseOk))
        # One that is cancelled makes room.
        cancel = make(commands.Basic.Cancel, consumer_tag="a")
        await client.call(1, cancel, commands.Basic.CancelOk)
        await client.call(1, consume("q", "c"), commands.Basic.ConsumeOk)
        assert usage(broker)[2] == 1


async def test_consumers_that_end_in_other_ways_make_room(broker: Broker) -> None:
    """With their queue, with their channel, and where they never came to be."""
    async with await RawClient.open(broker.port, channels=3) as client:
        await client.call(1, declare("q"), commands.Queue.DeclareOk)
        await client.call(1, consume("q", "a"), commands.Basic.ConsumeOk)
        await client.call(2, consume("q", "b"), commands.Basic.ConsumeOk)
        assert usage(broker)[2] == 2
        exclusive = make(
            commands.Basic.Consume, queue="q", consumer_tag="c", exclusive=True, arguments={}
        )
        assert refusal(await client.call(3, exclusive, commands.Channel.Close)).code == 403
        assert usage(broker)[2] == 2
        await client.call(2, make(commands.Channel.Close, reply_code=200), commands.Channel.CloseOk)
        assert usage(broker)[2] == 1
        await client.tell(3, make(commands.Channel.CloseOk))
        await client.call(1, make(commands.Queue.Delete, queue="q"), commands.Queue.DeleteOk)
        await wait_until(lambda: usage(broker)[2] == 0)


async def test_consumers_per_channel(settings: Settings) -> None:
    async with (
        Broker(replace(settings, consumer_max_per_channel=2)) as broker,
        await RawClient.open(broker.port, channels=2) as client,
    ):
        await client.call(1, declare("q"), commands.Queue.DeclareOk)
        for channel, tag in ((1, "a"), (1, "b"), (2, "a")):
            await client.call(channel, consume("q", tag), commands.Basic.ConsumeOk)
        assert refusal(
            await client.call(1, consume("q", "c"), commands.Connection.Close)
        ) == Refusal(530, "NOT_ALLOWED - reached maximum (2) of consumers per channel", CONSUME)


# --- message size ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cap", "limit"),
    [
        pytest.param(MESSAGE_SIZE_CAP, "configured max size 1000", id="as-configured"),
        pytest.param(1000, "max size 1000", id="what-no-setting-exceeds"),
    ],
)
async def test_message_size(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, cap: int, limit: str
) -> None:
    monkeypatch.setattr(publish_module, "MESSAGE_SIZE_CAP", cap)
    async with (
        Broker(replace(settings, max_message_size=1000)) as broker,
        await RawClient.open(broker.port) as client,
    ):
        await client.call(1, declare("q"), commands.Queue.DeclareOk)
        await client.send(publish(1, "q", bytes(1000)) + publish(1, "q", bytes(1001)))
        assert refusal(await client.expect(commands.Channel.Close)) == Refusal(
            406,
            f"PRECONDITION_FAILED - message size 1001 is larger than {limit}",
            PUBLISH,
        )


def test_message_size_by_default() -> None:
    assert Settings().max_message_size == 128 * 1024**2


# --- what is counted, kept, refused ---------------------------------------------------------------


async def test_everything_goes_with_its_connection(broker: Broker) -> None:
    clients = [await RawClient.open(broker.port, channels=3) for _ in range(4)]
    for client in clients:
        await client.call(1, declare("q"), commands.Queue.DeclareOk)
        await client.call(2, consume("q", "a"), commands.Basic.ConsumeOk)
    assert usage(broker) == (4, 12, 4)
    for client in clients[:2]:
        client.reset()
    for client in clients[2:]:
        await client.say_goodbye()
    await wait_until(lambda: usage(broker) == (0, 0, 0))
    # Nothing is left of a user without limits.
    assert broker.limits.all_users() == {}


async def test_limits_are_there_after_a_restart(settings: Settings) -> None:
    async with Broker(settings) as broker:
        await broker.users.add("gone", "x")
        await broker.limits.set_vhost("/", {"max-connections": 0, "max-queues": 7})
        await broker.limits.set_vhost("/", {"max-connections": 5})
        await broker.limits.set_user(GUEST, {"max-connections": 0, "max-channels": 9})
        await broker.limits.clear_user(GUEST, "max-channels")
        await broker.limits.set_user("gone", {"max-connections": 1})
        await broker.users.delete("gone")
        assert broker.limits.user("gone") == {}
    async with Broker(settings) as broker:
        assert broker.limits.all_vhosts() == {"/": {"max-connections": 5, "max-queues": 7}}
        assert broker.limits.all_users() == {GUEST: {"max-connections": 0}}
        assert (
            "user 'guest': user connection limit (0)" in (await refusal_of_connection(broker)).text
        )
        await broker.limits.clear_vhost("/")
        await broker.limits.clear_user(GUEST)
    async with Broker(settings) as broker:
        assert broker.limits.vhost("/") == {}
        assert broker.limits.user(GUEST) == {}


async def test_a_user_who_comes_again_has_no_limits(settings: Settings) -> None:
    async with Broker(settings) as broker:
        await broker.users.add("app", "x")
        await broker.limits.set_user("app", {"max-connections": 1})
        await broker.users.delete("app")
        await broker.users.add("app", "x")
        assert broker.limits.user("app") == {}
    async with Broker(settings) as broker:
        assert broker.limits.user("app") == {}


async def test_changes_of_a_user_at_the_same_time(broker: Broker) -> None:
    await asyncio.gather(
        broker.limits.set_user(GUEST, {"max-connections": 5}),
        broker.limits.set_user(GUEST, {"max-channels": 6}),
    )
    assert broker.limits.user(GUEST) == {"max-connections": 5, "max-channels": 6}


async def test_a_broker_without_files_has_limits_too(settings: Settings) -> None:
    async with Broker(settings, make_backing=MemoryQueue) as broker:
        await broker.limits.set_user(GUEST, {"max-connections": 0})
        assert (await refusal_of_connection(broker)).code == 530
        await broker.limits.clear_user(GUEST)
        async with await RawClient.open(broker.port):
            pass


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        (
            {"max-connections": "many"},
            'max-connections should be a number, actually was <<"many">>',
        ),
        ({"max-queues": True}, "max-queues should be a number, actually was true"),
        (
            {"max-nonsense": 1},
            'Unrecognised terms [{<<"max-nonsense">>,1}] in limits\n'
            "the limits are max-connections, max-queues, max-channels, max-consumers",
        ),
    ],
)
async def test_refused(broker: Broker, limits: dict[str, object], text: str) -> None:
    with pytest.raises(ParameterError) as refused:
        await broker.limits.set_vhost("/", limits)
    assert str(refused.value) == text
    assert broker.limits.vhost("/") == {}


async def test_nobody_to_limit(broker: Broker) -> None:
    with pytest.raises(ParameterError, match="there is no vhost 'nowhere'"):
        await broker.limits.set_vhost("nowhere", {"max-queues": 1})
    with pytest.raises(ParameterError, match="there is no user 'nobody'"):
        await broker.limits.set_user("nobody", {"max-channels": 1})
    with pytest.raises(ParameterError, match="in user-limits"):
        await broker.limits.set_user(GUEST, {"max-exchanges": 1})
    with pytest.raises(NoSuchParameter, match="there is no limit 'max-queues' for vhost '/'"):
        await broker.limits.clear_vhost("/", "max-queues")


async def test_a_lower_limit_ends_nothing(broker: Broker) -> None:
    async with await aio_pika.connect(broker.url) as connection:
        channel = await connection.channel()
        await channel.declare_queue("q")
        await broker.limits.set_vhost("/", {"max-connections": 0, "max-queues": 0})
        await channel.default_exchange.publish(aio_pika.Message(b"still here"), "q")
        with pytest.raises(ChannelPreconditionFailed, match=r"queue limit in vhost '/' \(0\)"):
            await channel.declare_queue("another")


def test_limits_are_exact() -> None:
    usage = Usage()
    usage.limits = {"max-channels": 2}
    assert usage.limit_reached("max-channels", 1) is None
    assert usage.limit_reached("max-channels", 2) == 2
    assert usage.limit_reached("max-consumers", 99) is None
