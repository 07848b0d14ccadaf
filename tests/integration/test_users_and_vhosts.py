"""Users and virtual hosts: made and deleted while the broker runs, kept across restarts."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import aio_pika
import aiormq
import pytest

from leveret.broker.auth.users import UserError
from leveret.broker.cli.main import main
from leveret.broker.clock import RealClock
from leveret.broker.config import Settings
from leveret.broker.server import Broker
from leveret.broker.vhosts import VhostError
from leveret.storage.memory_queue import MemoryQueue
from leveret.storage.vhost_store import StoreError
from tests.support.broker_process import running_broker
from tests.support.refusal import close_reason, refusal
from tests.support.waiting import wait_until

PERSISTENT = aio_pika.DeliveryMode.PERSISTENT


def url(port: int, vhost: str = "/", user: str = "guest", password: str = "guest") -> str:
    return f"amqp://{user}:{password}@127.0.0.1:{port}/{quote(vhost, safe='')}"


async def can_log_in(port: int, vhost: str, user: str, password: str) -> bool:
    try:
        async with await aio_pika.connect(url(port, vhost, user, password)):
            return True
    except (aiormq.exceptions.AMQPError, aiormq.exceptions.AMQPException, ConnectionError):
        return False


async def fill(port: int, vhost: str, *bodies: bytes) -> None:
    async with await aio_pika.connect(url(port, vhost)) as connection:
        channel = await connection.channel()
        await channel.declare_queue("q", durable=True)
        for body in bodies:
            message = aio_pika.Message(body, delivery_mode=PERSISTENT)
            await channel.default_exchange.publish(message, "q")


async def drain(port: int, vhost: str) -> list[bytes]:
    bodies = []
    async with await aio_pika.connect(url(port, vhost)) as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue("q", durable=True)
        while (message := await queue.get(no_ack=True, fail=False)) is not None:
            bodies.append(message.body)
    return bodies


# --- across restarts ------------------------------------------------------------------------------


async def test_a_restart_keeps_users_tags_passwords_and_vhosts(settings: Settings) -> None:
    async with Broker(settings) as broker:
        await broker.users.add("ann", "secret", ["monitoring"])
        await broker.users.add("bob", "secret")
        await broker.users.change_password("guest", "changed")
        await broker.users.set_tags("bob", ["impersonator"])
        await broker.users.delete("ann")
        await broker.add_vhost("other")
        await broker.add_vhost("gone")
        await broker.delete_vhost("gone")
        before = broker.users.list()
    async with Broker(settings) as broker:
        assert broker.users.list() == before
        assert [(user.name, user.tags) for user in before] == [
            ("bob", ("impersonator",)),
            ("guest", ("administrator",)),
        ]
        assert sorted(broker.vhosts) == ["/", "other"]
        assert await can_log_in(broker.port, "other", "guest", "changed")
        assert await can_log_in(broker.port, "/", "bob", "secret")
        assert not await can_log_in(broker.port, "/", "guest", "guest")
        assert not await can_log_in(broker.port, "/", "ann", "secret")
        assert not await can_log_in(broker.port, "gone", "bob", "secret")


async def test_defaults_are_made_at_the_first_start_only(settings: Settings) -> None:
    """A default user that was deleted must not come back, as with RabbitMQ."""
    async with Broker(settings) as broker:
        await broker.users.add("root", "secret")
        await broker.users.delete("guest")
        await broker.delete_vhost("/")
    changed = replace(settings, default_user="late", default_pass="late", default_vhost="late")
    for later in (settings, changed):
        async with Broker(later) as broker:
            assert [user.name for user in broker.users.list()] == ["root"]
            assert dict(broker.vhosts) == {}


CHANGE_AND_DIE = """
import asyncio, os, signal, sys
from pathlib import Path
from leveret.broker.config import Settings
from leveret.broker.server import Broker

async def main():
    broker = Broker(Settings(port=0, data=Path(sys.argv[1])))
    await broker.start()
    await broker.users.add("ann", "secret", ["monitoring"])
    await broker.users.change_password("guest", "changed")
    await broker.add_vhost("other")
    await broker.add_vhost("gone")
    await broker.delete_vhost("gone")
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_what_was_answered_survives_kill_9(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHANGE_AND_DIE, str(tmp_path / "data")]
    assert subprocess.run(command, check=False, timeout=30).returncode == -9
    assert {path.name for path in (tmp_path / "data" / "vhosts").iterdir()} >= {"other.db"}
    with running_broker(tmp_path) as process:

        async def look() -> None:
            assert await can_log_in(process.port, "other", "ann", "secret")
            assert await can_log_in(process.port, "/", "guest", "changed")
            assert not await can_log_in(process.port, "/", "guest", "guest")
            assert not await can_log_in(process.port, "gone", "ann", "secret")

        asyncio.run(look())
        status = subprocess.run(
            [sys.executable, "-m", "leveret", "status", "--data", str(process.data)],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        assert "vhost 'other': 0 queues" in status.stdout


async def test_a_folder_without_broker_db_keeps_its_vhosts(settings: Settings) -> None:
    """Of an older version, or broker.db was damaged and moved aside."""
    async with Broker(settings) as broker:
        await broker.add_vhost("other")
        await fill(broker.port, "other", b"kept")
    for name in os.listdir(settings.data):
        if name.startswith("broker.db"):
            (settings.data / name).unlink()
    async with Broker(settings) as broker:
        assert sorted(broker.vhosts) == ["/", "other"]
        assert await drain(broker.port, "other") == [b"kept"]


async def test_damaged_broker_db_is_told_and_left_alone(settings: Settings) -> None:
    async with Broker(settings):
        pass
    garbage = b"\xaa" * 8192
    (settings.data / "broker.db").write_bytes(garbage)
    with pytest.raises(StoreError, match="users and virtual hosts, cannot be read"):
        await Broker(settings).start()
    assert (settings.data / "broker.db").read_bytes() == garbage


async def test_a_broker_that_writes_nothing_has_users_and_vhosts_too(settings: Settings) -> None:
    async with Broker(settings, RealClock(), MemoryQueue) as broker:
        await broker.users.add("ann", "secret")
        await broker.add_vhost("other")
        await fill(broker.port, "other", b"x")
        assert await can_log_in(broker.port, "other", "ann", "secret")
        await broker.delete_vhost("other")
        await broker.add_vhost("other")
        assert await drain(broker.port, "other") == []
    assert not settings.data.exists()


async def test_a_backup_has_users_and_vhosts_in_it(
    broker: Broker, settings: Settings, tmp_path: Path
) -> None:
    await broker.users.add("ann", "secret", ["monitoring"])
    await broker.add_vhost("other")
    await fill(broker.port, "other", b"kept")
    archive, restored = tmp_path / "x.tar", tmp_path / "restored"
    backup = ["backup", str(archive), "--data", str(settings.data)]
    assert await asyncio.to_thread(main, backup) == 0
    await broker.users.delete("ann")
    await broker.delete_vhost("other")
    assert main(["restore", str(archive), "--data", str(restored)]) == 0
    async with Broker(replace(settings, data=restored)) as again:
        assert [(user.name, user.tags) for user in again.users.list()] == [
            ("ann", ("monitoring",)),
            ("guest", ("administrator",)),
        ]
        assert await can_log_in(again.port, "other", "ann", "secret")
        assert await drain(again.port, "other") == [b"kept"]


# --- while the broker runs ------------------------------------------------------------------------


async def test_deleting_a_vhost_closes_its_connections_and_no_others(broker: Broker) -> None:
    await broker.add_vhost("other")
    async with (
        await aio_pika.connect(url(broker.port)) as stays,
        await aio_pika.connect(url(broker.port, "other")) as goes,
    ):
        channel = await goes.channel()
        await channel.declare_queue("own", exclusive=True)
        reason = close_reason(goes)
        await broker.delete_vhost("other")
        error = await asyncio.wait_for(reason, 20)
        assert "CONNECTION_FORCED - vhost 'other' is deleted" in str(error)
        await (await stays.channel()).declare_queue("still", exclusive=True)
    not_found = (530, "NOT_ALLOWED - vhost other not found", 10, 40)
    assert await refusal(broker.port, "other") == not_found


async def test_what_was_in_a_deleted_vhost_does_not_come_back(
    broker: Broker, settings: Settings
) -> None:
    await broker.add_vhost("other")
    await fill(broker.port, "other", b"old", b"old")
    await broker.delete_vhost("other")
    assert [path.name for path in (settings.data / "vhosts").glob("other*")] == []
    await broker.add_vhost("other")
    assert await drain(broker.port, "other") == []


async def test_a_deletion_that_was_interrupted_is_finished_by_the_next_start(
    settings: Settings,
) -> None:
    async with Broker(settings) as broker:
        await broker.add_vhost("other")
        await fill(broker.port, "other", b"old")
        assert broker._store is not None
        # As far as a delete comes before its files go.
        await broker._store.begin_deleting_vhost("other")
    async with Broker(settings) as broker:
        assert list(broker.vhosts) == ["/"]
        assert list((settings.data / "vhosts").glob("other*")) == []
        await broker.add_vhost("other")
        assert await drain(broker.port, "other") == []


async def test_deleting_a_user_closes_his_connections(broker: Broker) -> None:
    await broker.users.add("ann", "secret")
    async with (
        await aio_pika.connect(url(broker.port)) as stays,
        await aio_pika.connect(url(broker.port, user="ann", password="secret")) as goes,
    ):
        reason = close_reason(goes)
        await broker.users.delete("ann")
        error = await asyncio.wait_for(reason, 20)
        assert "CONNECTION_FORCED - user 'ann' is deleted" in str(error)
        await (await stays.channel()).declare_queue("still", exclusive=True)


async def test_what_cannot_be_is_refused(broker: Broker) -> None:
    with pytest.raises(VhostError, match="vhost '/' exists already"):
        await broker.add_vhost("/")
    with pytest.raises(VhostError, match="vhost 'none' does not exist"):
        await broker.delete_vhost("none")
    with pytest.raises(VhostError, match="vhost 'none' does not exist"):
        await broker.restart_vhost("none")
    with pytest.raises(VhostError, match="vhost '/' is running"):
        await broker.restart_vhost("/")
    for name in ("", "x" * 256):
        with pytest.raises(VhostError, match="1 to 255 bytes"):
            await broker.add_vhost(name)
    with pytest.raises(VhostError, match="UTF-8"):
        await broker.add_vhost("\ud800")
    assert list(broker.vhosts) == ["/"]


async def test_changes_at_the_same_time_take_turns(broker: Broker, settings: Settings) -> None:
    added = await asyncio.gather(
        *(broker.add_vhost("other") for _ in range(3)), return_exceptions=True
    )
    assert sorted(type(result).__name__ for result in added) == [
        "LiveVhost",
        "VhostError",
        "VhostError",
    ]
    users = await asyncio.gather(
        *(broker.users.add("ann", f"{number}") for number in range(3)), return_exceptions=True
    )
    assert [type(result) for result in users].count(UserError) == 2


async def test_who_asks_and_goes_leaves_a_whole_vhost(broker: Broker) -> None:
    caller = asyncio.create_task(broker.add_vhost("other"))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    await wait_until(lambda: "other" in broker.vhosts)
    await fill(broker.port, "other", b"x")
