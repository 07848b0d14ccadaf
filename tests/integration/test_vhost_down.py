"""A vhost whose file is damaged or gone goes down alone, says why, and can come back [11]."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

from leveret.broker.cli.main import main
from leveret.broker.config import Settings
from leveret.broker.server import Broker
from leveret.storage.database import Database
from leveret.storage.vhost_store import StoreError
from tests.support.broker_process import BrokerProcess, running_broker
from tests.support.refusal import close_reason, refusal
from tests.support.waiting import wait_until

DOWN = (
    541,
    "INTERNAL_ERROR - access to vhost 'bad' refused for user 'guest': vhost 'bad' is down",
    10,
    40,
)
PERSISTENT = aio_pika.DeliveryMode.PERSISTENT


def url(port: int, vhost: str) -> str:
    return f"amqp://guest:guest@127.0.0.1:{port}/{quote(vhost, safe='')}"


def overwrite(path: Path) -> None:
    """As a disk that has gone mad: every page of the file is something else."""
    with path.open("r+b") as file:
        file.write(b"\xaa" * path.stat().st_size)


def file_of(settings: Settings, vhost: str) -> Path:
    return settings.data / "vhosts" / f"{quote(vhost, safe='')}.db"


async def fill_on_disk(channel: AbstractChannel, queue: str, count: int = 100) -> None:
    """A queue whose messages are on disk alone."""
    await channel.declare_queue(queue, durable=True, arguments={"x-queue-mode": "lazy"})
    for number in range(count):
        message = aio_pika.Message(b"%d " % number * 500, delivery_mode=PERSISTENT)
        await channel.default_exchange.publish(message, queue)


async def into_the_file(database: Database | None) -> None:
    """What is in the WAL could still be read from there."""
    assert database is not None
    await database.wait_committed()
    await database.call_writer(lambda c: c.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone())


@asynccontextmanager
async def busy_client(port: int, vhost: str) -> AsyncIterator[list[int]]:
    """Publishes and consumes without a pause; what it yields grows with every round."""
    rounds: list[int] = []
    enough = asyncio.Event()
    async with await aio_pika.connect(url(port, vhost)) as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue("busy", durable=True)

        async def go_on() -> None:
            while not enough.is_set():
                body = str(len(rounds)).encode()
                message = aio_pika.Message(body, delivery_mode=PERSISTENT)
                await channel.default_exchange.publish(message, "busy")
                got = await queue.get(timeout=20)
                assert got is not None
                assert got.body == body
                await got.ack()
                rounds.append(len(rounds))

        task = asyncio.create_task(go_on())
        try:
            yield rounds
            assert not task.done(), task.exception()
        finally:
            enough.set()
            await task


async def take(message: AbstractIncomingMessage) -> None:
    """A consumer that is content with anything."""


async def more(rounds: list[int]) -> None:
    so_far = len(rounds)
    await wait_until(lambda: len(rounds) > so_far + 5)


async def test_a_file_damaged_under_a_running_broker_takes_down_its_vhost_alone(
    broker: Broker, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    bad = await broker.add_vhost("bad")
    async with (
        busy_client(broker.port, "/") as rounds,
        await aio_pika.connect(url(broker.port, "bad")) as user,
        await aio_pika.connect(url(broker.port, "bad")) as bystander,
    ):
        channel = await user.channel()
        await fill_on_disk(channel, "q")
        await (await bystander.channel()).declare_queue("own", exclusive=True)
        await into_the_file(bad.database)
        closed = [close_reason(user), close_reason(bystander)]
        overwrite(file_of(settings, "bad"))
        queue = await channel.get_queue("q")
        await queue.consume(take)
        for reason in closed:
            error = await asyncio.wait_for(reason, 20)
            assert "CONNECTION_FORCED - vhost 'bad' is down" in str(error)
        await more(rounds)
        await wait_until(lambda: "everything else goes on" in caplog.text)
        assert await refusal(broker.port, "bad") == DOWN
        assert list(broker.vhosts) == ["/"]
        [(name, why)] = broker.vhosts.down.items()
        assert name == "bad"
        assert "bad.db is damaged or gone" in why
        assert "move it aside" in why
        assert not bad.tasks
        assert broker.alarms.active == {}
        await more(rounds)


async def test_a_file_that_is_deleted_takes_down_its_vhost_and_confirms_nothing(
    broker: Broker, settings: Settings
) -> None:
    await broker.add_vhost("bad")
    async with (
        busy_client(broker.port, "/") as rounds,
        await aio_pika.connect(url(broker.port, "bad")) as user,
    ):
        channel = await user.channel()
        await channel.declare_queue("q", durable=True)
        closed = close_reason(user)
        for path in (settings.data / "vhosts").glob("bad*"):
            path.unlink()
        message = aio_pika.Message(b"lost", delivery_mode=PERSISTENT)
        with pytest.raises(Exception, match="vhost 'bad' is down"):
            await channel.default_exchange.publish(message, "q")
        await asyncio.wait_for(closed, 20)
        await more(rounds)
        assert await refusal(broker.port, "bad") == DOWN


async def test_a_vhost_can_be_restarted_once_its_file_is_out_of_the_way(
    broker: Broker, settings: Settings
) -> None:
    bad = await broker.add_vhost("bad")
    async with await aio_pika.connect(url(broker.port, "bad")) as user:
        channel = await user.channel()
        await fill_on_disk(channel, "q")
        await into_the_file(bad.database)
        closed = close_reason(user)
        path = file_of(settings, "bad")
        sound = path.read_bytes()
        overwrite(path)
        await (await channel.get_queue("q")).consume(take)
        await asyncio.wait_for(closed, 20)
    await wait_until(lambda: not broker.vhosts._tasks)
    with pytest.raises(StoreError, match="cannot be read"):
        await broker.restart_vhost("bad")
    assert "cannot be read" in broker.vhosts.down["bad"]
    path.rename(path.with_name("aside"))
    await broker.restart_vhost("bad")
    assert broker.vhosts.down == {}
    async with await aio_pika.connect(url(broker.port, "bad")) as user:
        channel = await user.channel()
        await channel.declare_queue("new", durable=True)
        with pytest.raises(aio_pika.exceptions.ChannelNotFoundEntity):
            await channel.declare_queue("q", passive=True)
    # And with the file as it was before the damage.
    await broker.delete_vhost("bad")
    path.write_bytes(sound)
    await broker.add_vhost("bad")
    async with await aio_pika.connect(url(broker.port, "bad")) as user:
        queue = await (await user.channel()).get_queue("q")
        assert queue.declaration_result.message_count == 100


async def test_a_vhost_that_is_down_can_be_deleted(broker: Broker, settings: Settings) -> None:
    bad = await broker.add_vhost("bad")
    bad_file = file_of(settings, "bad")
    overwrite(bad_file)
    assert bad.database is not None
    bad.database._note_damage(OSError("as if a read had met it"))
    # At once: also while it is being taken down.
    await broker.delete_vhost("bad")
    assert not bad_file.exists()
    assert (await refusal(broker.port, "bad"))[0] == 530
    await broker.add_vhost("bad")


async def test_a_broker_stops_in_order_while_a_vhost_goes_down(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    broker = Broker(settings)
    await broker.start()
    bad = await broker.add_vhost("bad")
    assert bad.database is not None
    async with await aio_pika.connect(url(broker.port, "bad")) as user:
        channel = await user.channel()
        await channel.declare_queue("q", durable=True)
        bad.database._note_damage(OSError("as if a read had met it"))
        await broker.stop()
    assert "everything else goes on" in caplog.text
    async with Broker(settings) as again:
        assert sorted(again.vhosts) == ["/", "bad"]


async def test_damage_met_while_stopping_does_not_hold_up_the_stop(settings: Settings) -> None:
    broker = Broker(settings)
    await broker.start()
    database = broker.vhosts["/"].database
    assert database is not None
    async with await aio_pika.connect(url(broker.port, "/")) as user:
        await (await user.channel()).declare_queue("q", durable=True)
    for path in (settings.data / "vhosts").iterdir():
        path.unlink()
    broker.vhosts._is_stopping = True
    broker.vhosts["/"].topology.create_exchange(
        "x",
        "fanout",
        durable=True,
        auto_delete=False,
        internal=False,
        arguments={},
    )
    async with asyncio.timeout(20):
        await broker.stop()
    assert database.damage is not None


# --- damaged at start -----------------------------------------------------------------------------


@pytest.fixture
async def folder_with_a_damaged_vhost(settings: Settings) -> Path:
    async with Broker(settings) as broker:
        await broker.add_vhost("bad")
        for vhost in ("/", "bad"):
            async with await aio_pika.connect(url(broker.port, vhost)) as user:
                await fill_on_disk(await user.channel(), "q")
    overwrite(file_of(settings, "bad"))
    return settings.data


async def test_a_vhost_damaged_at_start_keeps_nobody_else(
    folder_with_a_damaged_vhost: Path, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = file_of(settings, "bad").read_bytes()
    with caplog.at_level(logging.ERROR):
        async with Broker(settings) as broker:
            assert list(broker.vhosts) == ["/"]
            assert "not a database" in broker.vhosts.down["bad"]
            assert broker.statistics()["vhosts_down"] == broker.vhosts.down
            assert await refusal(broker.port, "bad") == DOWN
            async with busy_client(broker.port, "/") as rounds:
                await more(rounds)
    assert "vhost 'bad' cannot be started and is down" in caplog.text
    assert file_of(settings, "bad").read_bytes() == damaged


async def test_even_the_only_vhost_may_be_down(settings: Settings) -> None:
    """As with RabbitMQ: the broker runs, and says so to whoever asks."""
    async with Broker(settings):
        pass
    overwrite(file_of(settings, "/"))
    async with Broker(settings) as broker:
        assert list(broker.vhosts) == []
        assert (await refusal(broker.port, "/"))[0] == 541
        await broker.delete_vhost("/")
        await broker.add_vhost("/")
        async with busy_client(broker.port, "/") as rounds:
            await more(rounds)


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "leveret", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_serve_says_it_loudly_and_so_does_status(
    folder_with_a_damaged_vhost: Path, tmp_path: Path
) -> None:
    data = folder_with_a_damaged_vhost
    with running_broker(tmp_path) as process:
        assert "*** vhost 'bad' IS DOWN, clients cannot use it ***" in process.read_log()
        status = command("status", "--data", data)
        assert "vhost '/': 1 queues" in status.stdout
        [line] = [line for line in status.stdout.splitlines() if "DOWN" in line]
        assert line.startswith("vhost 'bad': DOWN. ")
        assert "check --move-aside" in line
        backup = command("backup", tmp_path / "x.tar", "--data", data)
        assert backup.returncode == 0
        assert "vhost 'bad' is down and NOT in the backup" in backup.stderr
        # Nothing is moved under a broker that runs.
        refused = command("check", "--move-aside", "--data", data)
        assert refused.returncode == 1
        assert f"in use by process {process.pid}" in refused.stderr
        restart_after_moving_by_hand(process)


def restart_after_moving_by_hand(process: BrokerProcess) -> None:
    refused = command("restart-vhost", "bad", "--data", process.data)
    assert refused.returncode == 1
    assert "cannot be read" in refused.stderr
    (process.data / "vhosts" / "bad.db").rename(process.data / "aside.db")
    done = command("restart-vhost", "bad", "--data", process.data)
    assert (done.returncode, done.stdout) == (0, "vhost 'bad' is up: 0 queues, 0 messages\n")
    assert "DOWN" not in command("status", "--data", process.data).stdout


async def test_moving_aside_lets_the_broker_start_with_the_rest(
    folder_with_a_damaged_vhost: Path, settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    data = folder_with_a_damaged_vhost
    damaged = file_of(settings, "bad").read_bytes()
    sound = file_of(settings, "/").read_bytes()
    assert main(["check", "--data", str(data)]) == 1
    assert "leveret check --move-aside" in capsys.readouterr().out
    assert file_of(settings, "bad").read_bytes() == damaged

    assert main(["check", "--data", str(data), "--move-aside", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["damaged"] == ["vhosts/bad.db"]
    aside = answer["moved_aside"]["vhosts/bad.db"]
    assert aside.startswith("vhosts/bad.db.damaged-2")
    assert (data / aside).read_bytes() == damaged
    assert file_of(settings, "/").read_bytes() == sound

    # What is left is sound; there is nothing more to move.
    assert main(["check", "--data", str(data), "--move-aside"]) == 0
    printed = capsys.readouterr().out
    assert "broker.db: 2 vhosts, 1 users" in printed
    assert "remark: broker.db: the file of vhost 'bad' is not there: it will be empty" in printed
    assert "nothing was moved aside: no file is damaged" in printed
    async with Broker(settings) as broker:
        assert sorted(broker.vhosts) == ["/", "bad"]
        async with await aio_pika.connect(url(broker.port, "/")) as user:
            queue = await (await user.channel()).get_queue("q")
            assert queue.declaration_result.message_count == 100


async def test_damaged_broker_db_can_be_moved_aside(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    async with Broker(settings) as broker:
        await broker.add_vhost("other")
    overwrite(settings.data / "broker.db")
    assert main(["check", "--data", str(settings.data), "--move-aside"]) == 1
    assert "broker.db is now broker.db.damaged-" in capsys.readouterr().out
    async with Broker(settings) as broker:
        assert sorted(broker.vhosts) == ["/", "other"]
        assert [user.name for user in broker.users.list()] == ["guest"]
