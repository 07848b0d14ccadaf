#!/usr/bin/env python3
"""What the event log costs: CPU per `event()`, and per run of 1,000 `lines()`.

    benchmarks/event_log.py [--events 200000] [--data DIR]

Prints one JSON object. `thread` is the CPU of the event loop's thread, which is what messages wait
for; `process` counts the thread that formats lines and writes them as well.
"""

import argparse
import asyncio
import json
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path

from leveret.broker.clock import RealClock
from leveret.broker.config import Settings
from leveret.broker.event_log.journal import Journal
from leveret.protocol.twin import Template

RUN = 1000


async def measure(data: Path, count: int, do: Callable[[Journal], None], per: int) -> object:
    clock = RealClock()
    # Nothing is to be shed: that would be cheaper.
    settings = Settings(data=data, event_log="all", event_log_buffer=1 << 34)
    journal = Journal(settings, clock)
    await journal.start()
    process, thread = time.process_time(), time.thread_time()
    for _ in range(count // per):
        do(journal)
        await asyncio.sleep(0)
    loop_s = time.thread_time() - thread
    await journal.stop()
    process_s = time.process_time() - process
    statistics = journal.statistics()
    clock.close()
    return {
        "events": statistics["events"],
        "bytes": statistics["bytes"],
        "us_per_event_thread": round(1e6 * loop_s / count, 3),
        "us_per_event_process": round(1e6 * process_s / count, 3),
        "us_per_1000_thread": round(1e9 * loop_s / count, 1),
    }


def one_hundred_events(journal: Journal) -> None:
    for number in range(100):
        journal.event(
            "consume",
            vhost="/",
            conn=number,
            ch=1,
            user="guest",
            queue="orders",
            ctag="ctag1.0123456789",
            attrs={"ack_required": "true", "prefetch_count": "10"},
        )


def one_run(journal: Journal) -> None:
    journal.buffer.add(journal.now_us(), ACKS, (1, 1, HOLDS), RUN)


ACKS = Template(
    (
        b',"boot":"1a1ed5f2ffbb95f","ev":"ack","vhost":"/","conn":1,"ch":1,"user":"guest",'
        b'"queue":"orders","ctag":"ctag1.0123456789","msg":',
        b',"dtag":',
        b',"hold_us":',
        b"}\n",
    )
)
HOLDS = array("q", range(1_000, 1_000 + RUN))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=200_000)
    parser.add_argument("--data", help="parent of the folder that is written to, for another disk")
    options = parser.parse_args()
    found = {}
    for name, do, per in (("event()", one_hundred_events, 100), ("lines()", one_run, RUN)):
        with tempfile.TemporaryDirectory(dir=options.data) as data:
            found[name] = asyncio.run(measure(Path(data), options.events, do, per))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
