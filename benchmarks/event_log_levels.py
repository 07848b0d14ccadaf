#!/usr/bin/env python3
"""What the event log costs a broker under load: one broker for each level, in alternation.

    benchmarks/event_log_levels.py [--levels off,sampled] [--starts 5] [--rounds 4] [--seconds 2]
        [--scenario confirmed-acked-100B]

The load and the way it is measured are those of `versus.py`. Prints the medians: messages a second,
their share of those without a log, CPU per message (all threads), and what an event costs: the CPU
that a broker with the log takes more, by the events that it wrote. Shares and costs are taken round
by round, from neighbours in time, and brokers take turns in going first: machines are noisy. All
brokers are started anew so many times, since two processes of the same program differ, too (where
their memory lies, what they hash). Events that were left out, since the disk could not follow, are
counted.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import versus  # type: ignore[import-not-found]  # noqa: E402

LEVELS = ("off", "objects", "sampled", "all")


def event_log_of(data: str) -> dict[str, Any]:
    command = [str(Path(sys.executable).parent / "leveret"), "status", "--data", data, "--json"]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    status: dict[str, Any] = json.loads(told.stdout)
    found: dict[str, Any] = status.get("event_log") or {}
    return found


@contextmanager
def started(levels: Sequence[str], folder: str) -> Iterator[dict[str, Any]]:
    """A broker for each level, each with its data in a folder of its name."""
    brokers: dict[str, Any] = {}
    try:
        for level in levels:
            data = os.path.join(folder, level)
            os.mkdir(data)
            # The log is thrown away as it is sealed, or it would fill the disk of the machine.
            command = (
                f"{Path(sys.executable).parent / 'leveret'} serve --port {{port}} --data {{data}}"
                f" --event-log {level} --event-log-retention-bytes 500000000"
            )
            brokers[level] = versus.start_ours(command, data)
        yield brokers
    finally:
        for broker in brokers.values():
            broker.stop()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=4, help="of each start (4)")
    parser.add_argument("--seconds", type=int, default=2)
    parser.add_argument("--scenario", choices=versus.SCENARIOS, default="confirmed-acked-100B")
    parser.add_argument("--levels", default=",".join(LEVELS))
    options = parser.parse_args()
    levels = options.levels.split(",")
    load, figure = versus.SCENARIOS[options.scenario]
    figure = "consume_rate" if figure == "p99_us" else figure
    work = tempfile.mkdtemp(prefix="leveret-levels-")
    binary = os.path.join(work, "amqpload")
    subprocess.run(["cc", "-O2", "-pthread", "-o", binary, HERE / "amqpload.c"], check=True)
    rounds: dict[str, list[dict[str, Any]]] = {level: [] for level in levels}
    try:
        for start in range(options.starts):
            folder = os.path.join(work, str(start))
            os.mkdir(folder)
            with started(levels, folder) as brokers:
                for number in range(options.rounds):
                    order = [levels[(number + place) % len(levels)] for place in range(len(levels))]
                    for level in order:
                        data = os.path.join(folder, level)
                        before = event_log_of(data)
                        figures = versus.load(binary, brokers[level], load, options.seconds)
                        after = event_log_of(data)
                        moved = max(figures["published"], figures["consumed"], 1)
                        for name in ("events", "shed"):
                            told = after.get(name, 0) - before.get(name, 0)
                            figures[f"{name}_per_msg"] = told / moved
                        rounds[level].append(figures)
                        print(
                            f"{level:8} {figures[figure]:>10,} /s {figures['cpu_us_per_msg']} us",
                            flush=True,
                        )
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    report(rounds, figure)


def report(rounds: dict[str, list[dict[str, Any]]], figure: str) -> None:
    base = rounds.get("off", next(iter(rounds.values())))

    def middle(numbers: Iterable[float]) -> float:
        return statistics.median(numbers)

    print(
        "\nlevel      messages/s  of off  CPU us/msg  of off  events/msg  left out/msg"
        "  CPU us/event  p99 ms"
    )
    for level, found in rounds.items():
        pairs = list(zip(found, base, strict=True))
        rate = middle(one[figure] / other[figure] for one, other in pairs)
        cpu = middle(one["cpu_us_per_msg"] / other["cpu_us_per_msg"] for one, other in pairs)
        events = middle(one["events_per_msg"] for one in found)
        each = ""
        if events > 0.001:
            more = [
                (one["cpu_us_per_msg"] - other["cpu_us_per_msg"]) / one["events_per_msg"]
                for one, other in pairs
            ]
            each = f"{middle(more):.2f}"
        print(
            f"{level:8} {middle(one[figure] for one in found):12,.0f} {rate:7.3f}"
            f" {middle(one['cpu_us_per_msg'] for one in found):11.2f} {cpu:7.3f} {events:11.3f}"
            f" {middle(one['shed_per_msg'] for one in found):13.3f} {each:>13}"
            f" {middle(one['p99_us'] for one in found) / 1000:7.2f}"
        )


if __name__ == "__main__":
    main()
