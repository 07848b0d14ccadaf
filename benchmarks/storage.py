"""What the store costs: messages a second and CPU microseconds a message.

    python benchmarks/storage.py [--bodies 100,1000,3500] [--count MESSAGES] [--page-size BYTES]

One queue, as the broker has it: a variable queue on a SQLite file with synchronous=FULL. CPU time
is that of the whole process, the store's threads included; on a busy machine look at that.

    in and out      published in runs of 300, confirmed, then fetched from memory and acked
    flying          published and acked before the next commit takes them
    to disk         published, confirmed, paged out
    from disk       fetched and acked, everything being on disk
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path

import uvloop

from leveret.protocol.twin import Message
from leveret.storage import connections as connections_module
from leveret.storage.backing_queue import LOADING, Confirm
from leveret.storage.database import Database
from leveret.storage.message_store import MessageStore
from leveret.storage.queue_index import Counters, QueueIndex
from leveret.storage.variable_queue import VariableQueue

RUN = 300
# Publishers have so many unconfirmed at most, as credit would see to.
WINDOW = 3_000
EMBED_BELOW = 4_096
ENVELOPE, HEADER = b"\x00\x01q", b"\x10\x00\x02"


class Bench:
    def __init__(self, folder: Path, size: int) -> None:
        schema = files("leveret.storage").joinpath("schema.sql").read_text()
        self.database = Database(folder / "vhost.db", schema=schema, synchronous="FULL")
        self.transient = Database(folder / "transient.db", schema=schema, synchronous="OFF")
        self.woken = asyncio.Event()
        index = QueueIndex(self.database, MessageStore(EMBED_BELOW), 1, Counters())
        self.queue = VariableQueue(
            self.woken.set,
            index,
            lambda: QueueIndex(self.transient, MessageStore(EMBED_BELOW), 1, Counters()),
            time.monotonic,
        )
        self._body = b"x" * size
        self._published = 0
        self._confirmed = 0

    async def publish(self, count: int) -> None:
        queue = self.queue
        for _ in range(0, count, RUN):
            # Made here as the codec makes them: no two messages share a body.
            run = [
                Message(ENVELOPE, "", "q", HEADER, bytes(bytearray(self._body)), 0, True)
                for _ in range(RUN)
            ]
            first = self._published + 1
            self._published += RUN
            queue.publish(run, Confirm("port", first, self._published))
            await self._wait_confirmed(WINDOW)

    async def _wait_confirmed(self, unconfirmed_max: int) -> None:
        while True:
            self.woken.clear()
            for confirm in self.queue.drain_confirmed():
                self._confirmed += confirm.last - confirm.first + 1
            if self._published - self._confirmed <= unconfirmed_max:
                break
            await self.woken.wait()
        await asyncio.sleep(0)

    async def consume(self, count: int) -> None:
        queue = self.queue
        while count:
            entries = queue.fetch(min(RUN, count), ack_required=True)
            if entries is LOADING:
                self.woken.clear()
                await self.woken.wait()
                continue
            assert isinstance(entries, list)
            queue.ack([entry.seq_id for entry in entries])
            count -= len(entries)
            await asyncio.sleep(0)

    async def in_and_out(self, count: int) -> None:
        for _ in range(0, count, WINDOW):
            await self.publish(WINDOW)
            await self._wait_confirmed(0)
            await self.consume(WINDOW)

    async def flying(self, count: int) -> None:
        for _ in range(0, count, RUN):
            await self.publish(RUN)
            await self.consume(RUN)

    async def to_disk(self, count: int) -> None:
        self.queue.memory.target_ram_count = 0
        for _ in range(0, count, WINDOW):
            await self.publish(WINDOW)
            self.queue.resume()
        await self._wait_confirmed(0)


@asynccontextmanager
async def benched(size: int) -> AsyncIterator[Bench]:
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), size)
        await bench.database.open()
        yield bench
        await bench.database.wait_committed()
        await bench.database.close()
        await bench.transient.close()


async def measure(size: int, count: int) -> dict[str, tuple[float, float]]:
    results: dict[str, tuple[float, float]] = {}
    async with benched(size) as bench:
        database = bench.database
        for name, work in (
            ("in and out", bench.in_and_out),
            ("flying", bench.flying),
            ("to disk", bench.to_disk),
            ("from disk", bench.consume),
        ):
            wall, cpu = time.perf_counter(), time.process_time()
            await work(count)
            await database.wait_committed()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            results[name] = (count / wall, cpu / count * 1e6)
        results["file, MB"] = (0, database.path.stat().st_size / 1e6)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bodies", default="100,1000,3500", help="sizes in bytes")
    parser.add_argument("--count", type=int, default=60_000, help="messages of each kind")
    parser.add_argument("--page-size", type=int, help="of the SQLite file")
    options = parser.parse_args()
    if options.page_size:
        connections_module.PAGE_SIZE = options.page_size
    print(f"page size {connections_module.PAGE_SIZE}, {options.count} messages")
    for size in map(int, options.bodies.split(",")):
        print(f"{size} byte bodies")
        for name, (rate, cpu) in uvloop.run(measure(size, options.count)).items():
            print(f"    {name:12}{rate:12,.0f}/s {cpu:8.2f}")


if __name__ == "__main__":
    main()
