#!/usr/bin/env python3
"""A backlog far larger than memory: fill a queue, then empty it, and watch the broker.

    benchmarks/backlog.py [--messages 2000000] [--watermark 300MiB] [--png F] [--json F]
    benchmarks/backlog.py --start "CMD with {port}, {data} and {watermark}" ...
    benchmarks/backlog.py --rabbitmq ...     and then RabbitMQ, with the same load and watermark

Messages are persistent, numbered and confirmed; those that come out are acked and must be all
there, in order (numbered.py). Ten times a second the broker is looked at: its resident memory, and
through its control socket where the messages of the queue are. The longest turn of the event loop
and the longest step of the store are what the broker itself records.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import versus

from leveret.broker.admin.client import ControlError, NotRunning, ask

HERE = Path(__file__).parent
START = f"{sys.executable} -m leveret serve --port {{port}} --data {{data}}"
START += " --memory-high-watermark {watermark}"
SAMPLE_S = 0.1
# Between filling and draining, and after it.
REST_S = 2.0
QUEUE = "backlog"
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


def usage(pid: int) -> tuple[float, float]:
    """CPU seconds and resident MiB of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    cpu_s = (int(fields[11]) + int(fields[12])) / CLOCK_TICKS
    return cpu_s, int(fields[21]) * os.sysconf("SC_PAGE_SIZE") / 2**20


class Sampler(threading.Thread):
    """Looks at a broker until it is told to stop. One row for each look."""

    def __init__(self, broker: Any, data: Path | None) -> None:
        super().__init__(daemon=True)
        self._broker = broker
        self._data = data
        self._is_over = threading.Event()
        self.started = time.monotonic()
        self.phase = "start"
        self.rows: list[dict[str, Any]] = []

    def run(self) -> None:
        while not self._is_over.wait(SAMPLE_S):
            self.rows.append(self._look())

    def _look(self) -> dict[str, Any]:
        _, resident_mib = usage(self._broker.pid)
        at = time.monotonic() - self.started
        row = {"at_s": round(at, 2), "phase": self.phase, "resident_mib": round(resident_mib, 1)}
        if self._data is None:
            return row
        try:
            statistics = ask(self._data, {"command": "statistics"}, timeout_s=10.0)
        except (ControlError, NotRunning):
            return row
        queue = statistics["vhosts"][0]["queues"].get(QUEUE)
        if queue is not None:
            kept = queue["backing_queue"]
            row |= {name: kept[name] for name in ("q1", "q2", "q3", "q4")}
            row["delta"] = kept["delta"][1]
            row["unacked"] = queue["messages_unacknowledged"]
            row["target"] = kept["target_ram_count"]
        row["alarms"] = len(statistics["alarms"])
        return row

    def stop(self) -> None:
        self._is_over.set()
        self.join()

    def peak_mib(self, phase: str) -> float:
        return max((row["resident_mib"] for row in self.rows if row["phase"] == phase), default=0.0)


class Cpu:
    """CPU seconds since it was made: of the broker, of the load, of all else on this machine."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before = self._now()
        self._began = time.monotonic()

    def _now(self) -> tuple[float, float, float]:
        broker, _ = usage(self._pid)
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        with open("/proc/stat") as stat:
            user, nice, system, _, _, irq, soft, *_ = map(int, stat.readline().split()[1:])
        busy = (user + nice + system + irq + soft) / CLOCK_TICKS
        return broker, children.ru_utime + children.ru_stime, busy

    def since(self, messages: int) -> dict[str, float]:
        broker, load, busy = (a - b for a, b in zip(self._now(), self._before, strict=True))
        seconds = time.monotonic() - self._began
        return {
            "broker_cpu_us_per_message": round(broker / messages * 1e6, 2),
            "cores_used_by_others": round(max(0.0, busy - broker - load) / seconds, 2),
        }


def numbered(what: str, port: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run the load in a process of its own: it is not to wait for the sampler."""
    command = [sys.executable, str(HERE / "numbered.py"), what, "--port", str(port)]
    command += ["--messages", str(options.messages), "--size", str(options.size)]
    command += ["--window", str(options.window), "--prefetch", str(options.prefetch)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(f"{what}: {run.stderr.strip()[-500:]}")
    result: dict[str, Any] = json.loads(run.stdout)
    return result


def longest(data: Path | None) -> dict[str, Any]:
    """The longest turn and step since this was asked last; the store's since its start."""
    if data is None:
        return {}
    statistics = ask(data, {"command": "statistics", "forget_longest": True})
    store = statistics["vhosts"][0]["store"]["persistent"]
    loop = statistics["loop"]
    return {
        "longest_turn_cpu_ms": round(loop["longest_turn_cpu_s"] * 1000, 1),
        "longest_turn_wall_ms": round(loop["longest_turn_wall_s"] * 1000, 1),
        "longest_store_step_cpu_ms": round(store["longest_step_cpu_s"] * 1000, 1),
        "longest_commit_ms": round(store["longest_commit_s"] * 1000, 1),
    }


def run(broker: Any, data: Path | None, options: argparse.Namespace) -> dict[str, Any]:
    """Fill, rest, drain, rest."""
    longest(data)
    sampler = Sampler(broker, data)
    sampler.start()
    result: dict[str, Any] = {"broker": broker.name}
    for what in ("fill", "drain"):
        sampler.phase = what
        cpu = Cpu(broker.pid)
        figures = numbered(what, broker.port, options)
        result[what] = figures | cpu.since(options.messages) | longest(data)
        sampler.phase = f"after {what}"
        time.sleep(REST_S)
        result[what]["peak_resident_mib"] = sampler.peak_mib(what)
    sampler.stop()
    rows = sampler.rows
    result["states_seen"] = {
        "alpha": any(row.get("q1", 0) + row.get("q4", 0) for row in rows),
        "beta": any(row.get("q2", 0) + row.get("q3", 0) for row in rows),
        "delta": any(row.get("delta", 0) for row in rows),
    }
    result["seconds_with_alarm"] = round(sum(SAMPLE_S for row in rows if row.get("alarms")), 1)
    result["peak_resident_mib"] = peak(broker.pid)
    result["in_order_and_complete"] = (
        not result["drain"]["wrong"] and result["drain"]["messages"] == options.messages
    )
    result["samples"] = rows
    return result


def peak(pid: int) -> float:
    """The most that was ever resident, as the kernel saw it."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return round(int(line.split()[1]) / 1024, 1)
    raise SystemExit("no VmHWM")


def report(result: dict[str, Any]) -> None:
    print(f"{result['broker']}: at most {result['peak_resident_mib']} MiB resident,", end=" ")
    print(f"alarm for {result['seconds_with_alarm']} s" if "q1" in result["samples"][-1] else "")
    for what in ("fill", "drain"):
        shown = {key: value for key, value in result[what].items() if key != "gaps_ms_at_s"}
        print(f"  {what}: " + ", ".join(f"{key} {value}" for key, value in shown.items()))
        print(f"    longest gaps (ms, at s): {result[what]['gaps_ms_at_s'][:5]}")
    if "q1" in result["samples"][-1]:
        print(f"  states seen: {result['states_seen']}")
    print(f"  in order and complete: {result['in_order_and_complete']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--start", default=START)
    parser.add_argument("--messages", type=int, default=2_000_000)
    parser.add_argument("--size", type=int, default=1000)
    parser.add_argument("--window", type=int, default=2000)
    parser.add_argument("--prefetch", type=int, default=1000)
    parser.add_argument("--watermark", default="300MiB")
    parser.add_argument("--rabbitmq", action="store_true", help="RabbitMQ afterwards")
    parser.add_argument("--png")
    parser.add_argument("--json")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="backlog-"))
    work.chmod(0o755)
    data = work / "ours"
    data.mkdir()
    results = []
    try:
        command = options.start.replace("{watermark}", options.watermark)
        ours = versus.start_ours(command, str(data))
        try:
            results.append(run(ours, data, options))
        finally:
            ours.stop()
        report(results[-1])
        if options.rabbitmq:
            results.append(run_rabbitmq(work, options))
            report(results[-1])
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n")
    if options.png:
        # Only here: whoever wants figures alone need not have it.
        import backlog_chart

        backlog_chart.draw(results, options, Path(options.png))


def run_rabbitmq(work: Path, options: argparse.Namespace) -> dict[str, Any]:
    folder = work / "rabbit"
    folder.mkdir()
    config = work / "rabbitmq.conf"
    config.write_text(f"vm_memory_high_watermark.absolute = {options.watermark}\n")
    os.environ["RABBITMQ_CONFIG_FILE"] = str(config)
    rabbit = versus.start_rabbit(str(folder))
    try:
        return run(rabbit, None, options)
    finally:
        versus.stop_rabbit(rabbit)


if __name__ == "__main__":
    main()
