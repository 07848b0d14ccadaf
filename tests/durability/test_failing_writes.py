"""Writes that fail: nothing unacked is confirmed meanwhile, nothing that was confirmed is lost."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aio_pika
import pytest
from pamqp.commands import Basic

from tests.durability.disk import FailingDisk, SmallDisk
from tests.durability.trial import Trial

SEED = 28
DEADLINE_S = 30.0


async def wait_until(is_true: Callable[[], object], what: str) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + DEADLINE_S
    while not is_true():
        assert loop.time() < deadline, f"never came true: {what}"
        await asyncio.sleep(0.01)


async def load(trial: Trial, confirms: int) -> None:
    """Start to publish; returns with so many more confirmed, and goes on."""
    counts = trial.ledger.counts
    wanted = counts["confirmed"] + confirms
    for publisher in trial.publishers:
        publisher.pump()
    await wait_until(lambda: counts["confirmed"] >= wanted, f"{confirms} confirms")


async def end(trial: Trial) -> None:
    trial.target.kill()
    for link in trial.links:
        await link.lost


async def assert_kept(trial: Trial) -> None:
    await trial.restart_and_check()
    assert not trial.ledger.complaints, trial.ledger.report()
    assert trial.ledger.counts["kept"] > 100
    trial.target.stop()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
async def test_writes_fail_and_work_again(tmp_path: Path, disk_library: Path, error: int) -> None:
    with FailingDisk(tmp_path, disk_library) as disk:
        trial = Trial(disk, SEED)
        await trial.begin()
        await trial.connect()
        await load(trial, 500)
        disk.fail(error)
        # Two for each attempt. By the second, all that was confirmed before has been told.
        await wait_until(lambda: disk.failures >= 4, "failures")
        confirmed = trial.ledger.counts["confirmed_by_disk"]
        await wait_until(lambda: disk.failures >= 6, "more failures")
        assert trial.ledger.counts["confirmed_by_disk"] == confirmed > 0
        assert "only what its consumers have acked is confirmed" in disk.read_log()
        disk.recover()
        await load(trial, 2_000)
        assert "writing works again" in disk.read_log()
        await end(trial)
        await assert_kept(trial)


async def test_kill_while_writes_fail(tmp_path: Path, disk_library: Path) -> None:
    with FailingDisk(tmp_path, disk_library) as disk:
        trial = Trial(disk, SEED + 1)
        await trial.begin()
        await trial.connect()
        await load(trial, 1_000)
        disk.fail()
        await wait_until(lambda: disk.failures >= 3, "failures")
        await end(trial)
        disk.recover()
        await assert_kept(trial)


async def test_stop_while_writes_fail(tmp_path: Path, disk_library: Path) -> None:
    """It does not wait for ever, and what is left is what a kill would have left."""
    with FailingDisk(tmp_path, disk_library) as disk:
        disk.env["LEVERET_STORE_CLOSE_TIMEOUT_S"] = "0.5"
        port = disk.start()
        async with await aio_pika.connect(f"amqp://guest:guest@127.0.0.1:{port}/") as client:
            channel = await client.channel()
            queue = await channel.declare_queue("jobs", durable=True)
            kept = aio_pika.Message(b"kept", delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
            await channel.default_exchange.publish(kept, queue.name)
            disk.fail()
            lost = aio_pika.Message(b"lost", delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
            unconfirmed = asyncio.ensure_future(channel.default_exchange.publish(lost, queue.name))
            await wait_until(lambda: disk.failures >= 2, "failures")
            await asyncio.to_thread(disk.stop)
            assert not isinstance(await settled(unconfirmed), Basic.Ack)
        assert "nothing could be written for 0.5 s" in disk.read_log()
        disk.recover()
        port = disk.start()
        async with await aio_pika.connect(f"amqp://guest:guest@127.0.0.1:{port}/") as client:
            queue = await (await client.channel()).get_queue("jobs")
            again = await queue.get()
            assert (again.body, again.redelivered) == (b"kept", True)
            assert await queue.get(fail=False) is None
        disk.stop()


async def settled(future: asyncio.Future[Any]) -> object:
    """What it gave, or raised."""
    await asyncio.wait([future])
    return future.exception() or future.result()


@pytest.mark.slow
async def test_full_filesystem(tmp_path: Path) -> None:
    """A filesystem of its own that fills up, is emptied, fills up again and meets a kill."""
    with SmallDisk(tmp_path) as disk:
        trial = Trial(disk, SEED + 2)
        await trial.begin()
        await trial.connect()
        disk.fill()
        await load(trial, 0)
        await wait_until(lambda: "until it works" in disk.read_log(), "a full disk")
        disk.free()
        await load(trial, 500)
        disk.fill()
        await wait_until(lambda: disk.read_log().count("until it works") > 1, "a full disk again")
        await end(trial)
        disk.free()
        await assert_kept(trial)
