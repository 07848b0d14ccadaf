"""A start with a long backlog: counters are read, messages are not.

The rows are put into the file by SQL: what is tested is the start, not how they came there.
"""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import aio_pika
import pytest

from leveret.broker.admin.client import ask
from leveret.storage.connections import open_read_only
from leveret.storage.database import WAL_LIMIT_BYTES
from tests.storage.data_folder import FILE, make_folder
from tests.support.broker_process import running_broker

# From the start of the process until it accepts connections: most of it is Python's own.
START_S = 3.0
MESSAGES = 1_000_000
BODY_BYTES = 100
# What a broker without any messages takes is far below, a million messages in memory far above.
RESIDENT_MIB = 96

# Exchange '' and routing key 'backlog'; persistent (delivery mode 2), nothing else.
BACKLOG = """
INSERT INTO queue (id, name, auto_delete, arguments) VALUES (3, 'backlog', 0, x'00000000');
WITH RECURSIVE position (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM position LIMIT {count})
INSERT INTO message (key, size, flags, envelope, header, body)
SELECT (3 << 40) | n, {size}, 256, x'00076261636b6c6f67', x'100002',
    CAST(printf('%0{size}d', n) AS BLOB)
FROM position;
INSERT INTO counter VALUES (3, {count}, {count}, {count} * {size}, -1, 0);
"""


def resident_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("the process is gone")


def backing_queue(data: Path) -> dict[str, Any]:
    [vhost] = ask(data, {"command": "statistics"})["vhosts"]
    numbers = vhost["queues"]["backlog"]["backing_queue"]
    assert isinstance(numbers, dict)
    return numbers


def fill_wal(file: Path) -> None:
    """Leave a WAL as long as there ever is one, as a broker does that is killed."""
    with closing(open_read_only(file, is_in_use=True)) as last:
        # Whoever is closed last and may write would copy the WAL into the file.
        last.execute("SELECT count(*) FROM meta").fetchone()
        with closing(sqlite3.connect(file, isolation_level=None)) as writer:
            writer.execute("PRAGMA wal_autocheckpoint=0")
            # A mark that means nothing where there is no expiry.
            writer.execute("UPDATE message SET flags = 768 WHERE key < (3 << 40) | 500000")
            writer.execute("UPDATE meta SET value = 0 WHERE name = 'clean'")
    assert Path(f"{file}-wal").stat().st_size > WAL_LIMIT_BYTES


@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_killed", [False, True], ids=["stopped", "killed"])
async def test_a_start_reads_no_messages(tmp_path: Path, is_killed: bool) -> None:
    count = MESSAGES
    data = make_folder(tmp_path / "data", BACKLOG.format(count=count, size=BODY_BYTES))
    with closing(sqlite3.connect(data / FILE)) as file:
        assert file.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
    if is_killed:
        fill_wal(data / FILE)

    began = time.monotonic()
    with running_broker(tmp_path) as process:
        async with await aio_pika.connect(process.url) as connection:
            took_s = time.monotonic() - began
            found = backing_queue(data)
            assert [found[name] for name in ("q1", "q2", "q3", "q4")] == [0, 0, 0, 0]
            assert found["delta"] == [0, count, 0, count]
            assert (found["len"], found["messages_ready_ram"], found["disk_reads"]) == (count, 0, 0)
            assert resident_mib(process.pid) < RESIDENT_MIB
            assert took_s < START_S

            channel = await connection.channel()
            queue = await channel.get_queue("backlog")
            message = await queue.get()
            assert message.body == b"0" * BODY_BYTES
            assert (message.routing_key, message.redelivered) == ("backlog", is_killed)
            await message.ack()
            # Read as far ahead as a consumer needs, not more.
            assert backing_queue(data)["delta"][1] > count * 0.5
