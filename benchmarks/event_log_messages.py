#!/usr/bin/env python3
"""What the events of messages cost the event loop: CPU of its thread per event, by length of run.

    benchmarks/event_log_messages.py [--messages 200000] [--level all|sampled] [--times 5]

Each message is published to one queue, confirmed, delivered and acked, in runs of the same length,
as the channel tells it to its log; nothing else of a broker runs. Prints one JSON object: events
and microseconds per event by kind, in all, and per message. `format_us_per_event` is what the
thread that writes takes to make lines of them, and part of what a message costs; `event_log.py`
measures the rest of what that thread does. Each is done so many times and the best one is told: the
others had less of the machine.
"""

import argparse
import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path

from leveret.broker.clock import RealClock
from leveret.broker.config import Settings
from leveret.broker.event_log.journal import Journal
from leveret.broker.event_log.messages import ChannelLog, MessageLog
from leveret.broker.event_log.writer import Batch, Retry, Seal, SegmentWriter, Stop
from leveret.broker.queues.arguments import QueueArguments
from leveret.broker.queues.record import Queue
from leveret.broker.resource import Resource
from leveret.protocol.twin import Message, format_lines, is_told

RUNS = (1, 10, 100, 300)
UNDER_WAY = 300
ENVELOPE = b"\x00\x06orders"


class Forgetful(SegmentWriter):
    """Makes lines, and writes nothing."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self._lines = bytearray()

    def put(self, item: Batch | Seal | Retry | Stop) -> None:
        assert isinstance(item, Batch)
        start = time.thread_time()
        format_lines(item.entries, self._lines)
        self.spent_s += time.thread_time() - start


class Stopwatch:
    def __init__(self, journal: Journal, writer: Forgetful) -> None:
        self._journal = journal
        self._writer = writer
        self.spent_s: Counter[str] = Counter()
        self.events: Counter[str] = Counter()

    @contextmanager
    def measure(self, kind: str) -> Iterator[None]:
        """What the event loop does; lines are made elsewhere."""
        events, formatting_s = self._journal.events, self._writer.spent_s
        start = time.thread_time()
        yield
        spent_s = time.thread_time() - start
        self.spent_s[kind] += spent_s - (self._writer.spent_s - formatting_s)
        self.events[kind] += self._journal.events - events


def run_of(count: int) -> list[Message]:
    header, body = b"\x00\x00", b"x" * 100
    return [Message(ENVELOPE, "", "orders", header, body, 0, False) for _ in range(count)]


def live(log: ChannelLog, watch: Stopwatch, run: int, count: int) -> None:
    """As many messages at a time as a client has under way."""
    queue = Queue(Resource("/", "queue", "orders"), True, False, None, {}, QueueArguments())
    queues = (queue,)
    for begin in range(1, count, UNDER_WAY):
        firsts = range(begin, begin + UNDER_WAY, run)
        runs = [(first, run_of(run)) for first in firsts]
        settled = [[(first, first + run - 1)] for first in firsts]
        tags = [list(range(first, first + run)) for first in firsts]
        with watch.measure("publish"):
            for first, messages in runs:
                log.publish(messages, queues, first, 0, is_mandatory=False)
        with watch.measure("confirm"):
            for ranges in settled:
                log.confirm(ranges, is_refused=False)
        with watch.measure("deliver"):
            for first, messages in runs:
                if is_told(messages):
                    log.deliver(
                        messages, "orders", "ctag1", first, 0, no_ack=False, redelivered=False
                    )
        with watch.measure("ack"):
            for each in tags:
                if log.held:
                    log.acked(each)


async def measure(level: str, run: int, count: int) -> dict[str, object]:
    clock = RealClock()
    settings = Settings(data=Path("unused"), event_log=level, event_log_buffer=1 << 36)
    journal = Journal(settings, clock)
    writer = journal._writer = Forgetful()
    log = ChannelLog(MessageLog(journal), "/", 1, 1, "guest")
    live(log, Stopwatch(journal, writer), run, min(count, 20_000))
    watch = Stopwatch(journal, writer)
    writer.spent_s = 0.0
    live(log, watch, run, count)
    clock.close()
    events = max(1, watch.events.total())
    found: dict[str, object] = {
        kind: {
            "events": watch.events[kind],
            "us_per_event": round(1e6 * spent_s / max(1, watch.events[kind]), 3),
        }
        for kind, spent_s in watch.spent_s.items()
    }
    loop_s = sum(watch.spent_s.values())
    found["us_per_event"] = round(1e6 * loop_s / events, 3)
    found["format_us_per_event"] = round(1e6 * writer.spent_s / events, 3)
    found["us_per_message"] = round(1e6 * (loop_s + writer.spent_s) / count, 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--level", choices=("all", "sampled"), default="all")
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    found = {}
    for run in RUNS:
        count = options.messages // run * run
        tries = [asyncio.run(measure(options.level, run, count)) for _ in range(options.times)]
        found[f"runs of {run}"] = min(tries, key=itemgetter("us_per_message"))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
