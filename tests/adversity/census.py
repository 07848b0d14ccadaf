"""What lives in this process for the broker's sake: tasks, objects, timers, sockets.

A test takes a census, does its worst, and waits until a second one says the same.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from leveret.broker.channel.acks import UnackedLedger
from leveret.broker.channel.channel import Channel
from leveret.broker.channel.confirms import Confirms
from leveret.broker.channel.context import ConnectionContext
from leveret.broker.connection.heartbeat import Heartbeat
from leveret.broker.connection.listener import Connection
from leveret.broker.connection.reader import Reader
from leveret.broker.connection.writer import SocketWriter
from leveret.broker.flow import CreditFlow
from leveret.broker.mailbox import Mailbox
from leveret.broker.queues.actor import QueueActor
from leveret.broker.queues.commands import Delivery
from leveret.broker.queues.consumers import ChannelState, Consumer
from leveret.broker.queues.limiter import Limiter
from leveret.broker.queues.record import Queue
from leveret.protocol.assembler import Assembler
from leveret.storage.memory_queue import MemoryQueue
from leveret.storage.msg_status import MsgStatus
from leveret.storage.queue_index import QueueIndex
from leveret.storage.variable_queue import VariableQueue

if TYPE_CHECKING:
    from leveret.broker.server import Broker

OURS = frozenset(
    {
        Assembler,
        Channel,
        ChannelState,
        Confirms,
        Connection,
        ConnectionContext,
        Consumer,
        CreditFlow,
        Delivery,
        Heartbeat,
        Limiter,
        Mailbox,
        MemoryQueue,
        MsgStatus,
        Queue,
        QueueActor,
        QueueIndex,
        Reader,
        SocketWriter,
        UnackedLedger,
        VariableQueue,
    }
)
# Of the compiled codec, and of the event loop: known by name, there may be two of the first.
OURS_BY_NAME = frozenset({"Message", "PublishRun", "AckRun", "RawFrame", "TCPTransport"})
DEADLINE_S = 10.0
_POLL_S = 0.01


def take_census(broker: Broker) -> Counter[str]:
    """Counts by name; garbage is collected first, so what is left is held by somebody."""
    gc.collect()
    counts: Counter[str] = Counter()
    for thing in gc.get_objects():
        kind = type(thing)
        if kind in OURS or kind.__name__ in OURS_BY_NAME:
            counts[kind.__name__] += 1
    counts["tasks"] = len(asyncio.all_tasks())
    counts["timers"] = broker.clock.statistics()["timers"]
    counts["sockets"] = _sockets()
    for vhost in broker.vhosts.values():
        counts["queues"] += len(vhost.topology.queues)
        counts["exchanges"] += len(vhost.topology.exchanges)
        counts["reply consumers"] += len(vhost.reply_consumers)
    return counts


def _sockets() -> int:
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            found += os.readlink(descriptor).startswith("socket:")
        except FileNotFoundError:
            pass  # the one that lists them
    return found


async def wait_until(is_true: Callable[[], object], what: str) -> None:
    """Let the broker work until something holds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + DEADLINE_S
    while not is_true():
        assert loop.time() < deadline, f"never came true: {what}"
        await asyncio.sleep(_POLL_S)


async def wait_same(broker: Broker, before: Counter[str], deadline_s: float = DEADLINE_S) -> None:
    """Wait until everything is as it was."""
    deadline = asyncio.get_running_loop().time() + deadline_s
    while True:
        # A whole census takes some 50 ms: first wait for what is cheap to see.
        while len(asyncio.all_tasks()) != before["tasks"]:
            if asyncio.get_running_loop().time() > deadline:
                break
            await asyncio.sleep(_POLL_S)
        now = take_census(broker)
        if now == before:
            return
        changed = {
            name: f"{before[name]} -> {now[name]}"
            for name in sorted(before.keys() | now.keys())
            if before[name] != now[name]
        }
        assert asyncio.get_running_loop().time() < deadline, f"not as it was: {changed}"
        await asyncio.sleep(_POLL_S)


def resident_bytes(pid: int) -> int:
    """Memory of a process that is really there."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
