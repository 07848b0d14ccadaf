#!/usr/bin/env python3
"""What the events of messages cost the event loop: CPU of its thread per event, by length of run.

    benchmarks/event_log_messages.py [--messages 200000] [--level all|sampled]

Each message is published to one queue, confirmed, delivered and acked, in runs of the same length,
as the channel tells it to its log; nothing else of a broker runs. Prints one JSON object: events
and microseconds per event by kind, and in all per message. The lines are formatted and handed over
to a writer that forgets them: `event_log.py` measures the real one.
"""

import argparse
import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from leveret.broker.clock import RealClock
from leveret.broker.config import Settings
from leveret.broker.event_log.journal import Journal
from leveret.broker.event_log.messages import ChannelLog, MessageLog
from leveret.broker.event_log.writer import Batch, Retry, Seal, SegmentWriter, Stop
from leveret.protocol.twin import Message

RUNS = (1, 10, 100, 300)


class Forgetful(SegmentWriter):
    def __init__(self) -> None:
        """Writes nothing, so it needs nothing."""

    def put(self, item: Batch | Seal | Retry | Stop) -> None:
        pass


class Stopwatch:
    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.spent_s: Counter[str] = Counter()
        self.events: Counter[str] = Counter()

    def measure(self, kind: str, do: Callable[[], None]) -> None:
        before = self._journal.take_seq(0)
        start = time.thread_time()
        do()
        self.spent_s[kind] += time.thread_time() - start
        self.events[kind] += self._journal.take_seq(0) - before


def run_of(count: int) -> list[Message]:
    envelope, header, body = b"\x00\x06orders", b"\x00\x00", b"x" * 100
    return [Message(envelope, "", "orders", header, body, 0, False) for _ in range(count)]


def live(log: ChannelLog, watch: Stopwatch, run: int, count: int) -> None:
    for tag in range(1, count - run + 2, run):
        messages, tags, last = run_of(run), list(range(tag, tag + run)), tag + run - 1

        def publish(messages: list[Message] = messages, first: int = tag) -> None:
            log.publish(messages, ("orders",), first, 0, is_mandatory=False)

        def confirm(first: int = tag, last: int = last) -> None:
            log.confirm([(first, last)], is_refused=False)

        def deliver(messages: list[Message] = messages, first: int = tag) -> None:
            log.deliver(messages, "orders", "ctag1", first, 0, no_ack=False, redelivered=False)

        def ack(tags: list[int] = tags) -> None:
            if log.holds_any:
                log.acked(tags)

        for kind, do in (("publish", publish), ("confirm", confirm), ("deliver", deliver)):
            watch.measure(kind, do)
        watch.measure("ack", ack)


async def measure(level: str, run: int, count: int) -> dict[str, object]:
    clock = RealClock()
    settings = Settings(data=Path("unused"), event_log=level, event_log_buffer=1 << 36)
    journal = Journal(settings, clock)
    journal._writer = Forgetful()
    log = ChannelLog(MessageLog(journal), "/", 1, 1, "guest")
    live(log, Stopwatch(journal), run, min(count, 20_000))
    watch = Stopwatch(journal)
    live(log, watch, run, count)
    clock.close()
    # What the watch itself takes, so often as it was looked at.
    idle = Stopwatch(journal)
    for _ in range(10_000):
        idle.measure("", lambda: None)
    watch_s = idle.spent_s[""] / 10_000 * (count // run)
    found: dict[str, object] = {
        kind: {
            "events": watch.events[kind],
            "us_per_event": round(1e6 * (spent_s - watch_s) / max(1, watch.events[kind]), 3),
        }
        for kind, spent_s in watch.spent_s.items()
    }
    total_s = sum(watch.spent_s.values()) - 4 * watch_s
    found["us_per_event"] = round(1e6 * total_s / max(1, watch.events.total()), 3)
    found["us_per_message"] = round(1e6 * total_s / count, 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--level", choices=("all", "sampled"), default="all")
    options = parser.parse_args()
    found = {}
    for run in RUNS:
        count = options.messages // run * run
        found[f"runs of {run}"] = asyncio.run(measure(options.level, run, count))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
