"""A backup of a real broker under load: what comes back is a moment that there was.

Publishers go on while `leveret backup` runs. Every message that was confirmed before the backup
began is in it; each queue holds a beginning of what was published to it, without a gap; and no
queue is ahead of another by more than what was under way at the time.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel, AbstractExchange, AbstractIncomingMessage

from leveret.storage.check import check_folder
from tests.support.broker_process import ROOT, BrokerProcess, running_broker

pytestmark = pytest.mark.skipif(
    bool(os.environ.get("LEVERET_TEST_AMQP_URL")), reason="Leveret's own commands"
)

QUEUES = ("backup.one", "backup.two", "backup.three")
WINDOW = 20
DEADLINE_S = 60.0


async def leveret(*arguments: object) -> dict[str, Any]:
    """Run a command for machines; it must succeed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "leveret",
        *map(str, arguments),
        "--json",
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(DEADLINE_S):
        printed, errors = await process.communicate()
    assert process.returncode == 0, printed + errors
    answer = json.loads(printed)
    assert isinstance(answer, dict)
    return answer


class Publisher:
    """Publishes numbers, a window of them at a time, to all queues behind an exchange."""

    def __init__(self, channel: AbstractChannel) -> None:
        self._channel = channel
        self._window = asyncio.Semaphore(WINDOW)
        self._confirms: set[asyncio.Task[None]] = set()
        self._confirmed: set[int] = set()
        self._is_ending = False
        # Number -> all below this were confirmed when it was published.
        self.settled_before: list[int] = []
        # All below this are confirmed.
        self.settled = 0

    async def run(self) -> None:
        exchange = await self._channel.declare_exchange("backup.all", "fanout", durable=True)
        for name in QUEUES:
            queue = await self._channel.declare_queue(name, durable=True)
            await queue.bind(exchange)
        while not self._is_ending:
            await self._window.acquire()
            number = len(self.settled_before)
            self.settled_before.append(self.settled)
            # Some with a body in the message store, which the queues share.
            body = b"%d " % number + bytes(6_000 if number % 7 == 0 else 100)
            message = aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
            publish = asyncio.create_task(self._publish(exchange, message, number))
            self._confirms.add(publish)
            publish.add_done_callback(self._confirms.discard)
            # In order: the next is published after this one has been sent.
            await asyncio.sleep(0)
        await asyncio.gather(*self._confirms)

    async def _publish(
        self, exchange: AbstractExchange, message: aio_pika.Message, number: int
    ) -> None:
        await exchange.publish(message, "")
        self._confirmed.add(number)
        while self.settled in self._confirmed:
            self._confirmed.remove(self.settled)
            self.settled += 1
        self._window.release()

    async def wait_settled(self, count: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while self.settled < count:  # noqa: ASYNC110 - it is told of nothing but confirms
                await asyncio.sleep(0.005)

    def end(self) -> None:
        self._is_ending = True


@asynccontextmanager
async def publishing(process: BrokerProcess) -> AsyncIterator[Publisher]:
    async with await aio_pika.connect(process.url) as connection:
        publisher = Publisher(await connection.channel())
        task = asyncio.create_task(publisher.run())
        try:
            yield publisher
        finally:
            publisher.end()
            async with asyncio.timeout(DEADLINE_S):
                await task


async def read_queue(channel: AbstractChannel, name: str) -> list[int]:
    """Every number in a queue, from front to rear."""
    queue = await channel.get_queue(name)
    count = queue.declaration_result.message_count
    found: list[int] = []
    if count:
        async with asyncio.timeout(DEADLINE_S), queue.iterator(no_ack=True) as messages:
            async for message in messages:
                number = int(message.body.split()[0])
                expected = 6_000 if number % 7 == 0 else 100
                assert len(message.body) - len(b"%d " % number) == expected
                found.append(number)
                if len(found) == count:
                    break
    return found


async def ack(message: AbstractIncomingMessage) -> None:
    await message.ack()


async def back_up_under_load(tmp_path: Path, *, messages: int, backups: int) -> None:
    expected: list[tuple[Path, int, int]] = []
    with running_broker(tmp_path) as process:
        async with publishing(process) as publisher:
            for number in range(backups):
                await publisher.wait_settled(messages * (number + 1))
                confirmed = publisher.settled
                file = tmp_path / f"{number}.tar"
                await leveret("backup", file, "--data", process.data)
                # It went on while the backup was made.
                assert publisher.settled > confirmed
                expected.append((file, confirmed, len(publisher.settled_before)))
        everything = len(publisher.settled_before)
    assert check_folder(process.data).problems == []

    for number, (file, confirmed, published) in enumerate(expected):
        folder = tmp_path / f"restored-{number}"
        await leveret("restore", file, "--data", folder / "data")
        with running_broker(folder) as restored:
            async with await aio_pika.connect(restored.url) as connection:
                channel = await connection.channel()
                queues = [await read_queue(channel, name) for name in QUEUES]
        lengths = [len(queue) for queue in queues]
        for queue in queues:
            assert queue == list(range(len(queue)))
        assert confirmed <= min(lengths)
        assert max(lengths) <= published <= everything
        assert min(lengths) >= publisher.settled_before[max(lengths) - 1]
        assert check_folder(restored.data).problems == []


async def test_backup_under_load(tmp_path: Path) -> None:
    await back_up_under_load(tmp_path, messages=500, backups=2)


@pytest.mark.slow
async def test_many_backups_under_load(tmp_path: Path) -> None:
    await back_up_under_load(tmp_path, messages=1_500, backups=8)


async def test_consumers_at_work_and_queues_that_go(tmp_path: Path) -> None:
    """Acks and deletions under way leave no wrong count in a backup, only what a start removes."""
    with running_broker(tmp_path) as process:
        async with (
            publishing(process) as publisher,
            await aio_pika.connect(process.url) as connection,
        ):
            await publisher.wait_settled(200)
            channel = await connection.channel()
            await channel.set_qos(50)
            queue = await channel.get_queue(QUEUES[0])
            await queue.consume(ack)
            victim = await channel.declare_queue("backup.victim", durable=True)
            message = aio_pika.Message(b"x", delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
            await asyncio.gather(
                *(
                    channel.default_exchange.publish(message, victim.name)
                    for _ in range(5_000)  # more than one commit deletes
                )
            )
            deleting = asyncio.create_task(victim.delete(if_unused=False, if_empty=False))
            file = tmp_path / "x.tar"
            made = await leveret("backup", file, "--data", process.data)
            await deleting
        assert made["held_s"] < 5
    restored = tmp_path / "restored"
    # Which checks it as well.
    answer = await leveret("restore", file, "--data", restored / "data")
    assert answer["files"][0]["queues"] >= len(QUEUES)
    with running_broker(restored) as process:
        async with await aio_pika.connect(process.url) as connection:
            channel = await connection.channel()
            numbers = await read_queue(channel, QUEUES[1])
            assert numbers == list(range(len(numbers)))
            left = await read_queue(channel, QUEUES[0])
            # What was not acked at that moment is the rear of the queue.
            assert not left or left == list(range(left[0], left[-1] + 1))
            assert len(left) < len(numbers)
    assert check_folder(process.data).problems == []
