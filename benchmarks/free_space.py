"""What giving back free pages costs, and whom it holds up.

Two backlogs are written in turn into one file; one is drained, then the pages it leaves are given
back while somebody writes one message at a time and waits for each.

    .venv/bin/python benchmarks/free_space.py --messages 1000000
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

from leveret.protocol.twin import Message
from leveret.storage.database import Database
from leveret.storage.message_store import MessageStore
from leveret.storage.queue_index import Counters, QueueIndex

RUN = 500
BODY = bytes(1000)
MIB = 1 << 20
# How long one writes alone, for comparison.
ALONE_S = 10.0


def message() -> Message:
    return Message(b"\x00\x01q", "", "q", b"\x10\x00\x02", BODY, 0, True)


class Writer:
    """One message at a time; how long each took."""

    def __init__(self, database: Database, index: QueueIndex) -> None:
        self._database = database
        self._index = index
        self._next = 0
        self.is_stopped = False
        self.took_s: list[float] = []

    async def run(self) -> None:
        while not self.is_stopped:
            begun = time.perf_counter()
            self._index.write([self._next], [message()], None, None)
            await self._database.wait_committed()
            self.took_s.append(time.perf_counter() - begun)
            self._next += 1
            await asyncio.sleep(0.002)

    def told(self) -> str:
        took, self.took_s = sorted(self.took_s), []
        median, late = took[len(took) // 2], took[len(took) * 99 // 100]
        return (
            f"median {1e3 * median:.2f} ms, 99th percentile {1e3 * late:.2f} ms,"
            f" longest {1e3 * took[-1]:.1f} ms ({len(took)} commits)"
        )


def size_of(path: Path) -> str:
    return f"{path.stat().st_size / MIB:.0f} MiB"


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.01)


async def measure(path: Path, messages: int, share: float) -> None:
    schema = files("leveret.storage").joinpath("schema.sql").read_text()
    database = Database(path, schema=schema, synchronous="FULL")
    await database.open()
    store = MessageStore(4096)
    goes, stays, other = (QueueIndex(database, store, each, Counters()) for each in (1, 2, 3))
    for first in range(0, messages, RUN):
        index = stays if (first // RUN) % 100 < share * 100 else goes
        index.write(range(first, first + RUN), [message() for _ in range(RUN)], None, None)
        if first % (20 * RUN) == 0:
            await database.wait_committed()
    await database.wait_committed()
    await database.checkpoint()
    print(f"file with {messages} messages: {size_of(path)}")
    writer = Writer(database, other)
    writing = asyncio.create_task(writer.run())
    await asyncio.sleep(ALONE_S)
    print(f"one message at a time: {writer.told()}")
    begun = time.perf_counter()
    for first in range(0, messages, RUN):
        if (first // RUN) % 100 >= share * 100:
            goes.remove([(seq_id, len(BODY), 0) for seq_id in range(first, first + RUN)])
        if first % (20 * RUN) == 0:
            await database.wait_committed()
    await database.wait_committed()
    print(f"drained in {time.perf_counter() - begun:.1f} s")
    database.numbers["longest_step_cpu_s"] = 0.0
    await until(lambda: database.numbers["returned_bytes"] > 0)
    begun = time.perf_counter()
    writer.told()
    await until(lambda: database._free_space._task is None)
    took = time.perf_counter() - begun
    print(f"... while pages are given back: {writer.told()}")
    print(
        f"{database.numbers['returned_bytes'] / MIB:.0f} MiB given back in {took:.1f} s,"
        f" longest step {1e3 * database.numbers['longest_step_cpu_s']:.1f} ms of CPU time;"
        f" file {size_of(path)}"
    )
    writer.is_stopped = True
    await writing
    await database.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--messages", type=int, default=200_000, help="of 1 KB")
    parser.add_argument("--stay", type=float, default=0.3, help="share that is not drained")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(Path(folder) / "vhost.db", options.messages, options.stay))


if __name__ == "__main__":
    main()
