"""Synthetic event logs whose truth is known: for tests, benchmarks and trying things out.

``generate`` writes sealed segments as a broker would and returns what it put there. A log has the
everyday traffic of three tenants and, unless the plan says otherwise, the problems of
``generator_problems.py``, each of which an analysis should name. A plan without problems makes a
quiet log, in which nothing should be found.

Large logs are made in chapters that follow each other in time, so that memory stays bounded; the
problems are in the middle one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from leveret.spark_jobs.generator_load import (
    Lines,
    Served,
    Stream,
    Times,
    arrivals,
    consume_lines,
    enqueue_lines,
    event,
    event_lines,
    publish_lines,
    serve,
)
from leveret.spark_jobs.generator_problems import PROBLEMS, Planted, plant

CHAPTER_MESSAGES: Final = 250_000

STREAMS: Final = (
    Stream("shop", "web", "shop.orders", "placed", ("orders",), 4, 0.30, 600, 2_000, 10),
    Stream("shop", "web", "shop.events", "", ("audit", "mail"), 2, 0.10, 300, 1_000, 20),
    Stream("billing", "erp", "billing", "invoice", ("invoices",), 3, 0.20, 2_000, 3_000, 30),
    Stream("telemetry", "probe", "", "metrics", ("metrics",), 4, 0.40, 120, 500, 40),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to write. ``messages`` is the everyday traffic; problems come on top."""

    messages: int = 10_000
    seconds: int = 120
    seed: int = 7
    # Early in a day, so that a short log stays within one date.
    start: datetime = datetime(2026, 3, 2, 8, 0, tzinfo=UTC)
    boot: str = "3f9a01"
    problems: frozenset[str] = PROBLEMS
    segment_lines: int = 200_000
    compress: bool = False


@dataclass(slots=True)
class Truth:
    """What is in the log."""

    events: int = 0
    by_ev: Counter[str] = field(default_factory=Counter)
    # Everyday messages and their bytes, by (vhost, user); and deliveries and waits by queue.
    published: Counter[tuple[str, str]] = field(default_factory=Counter)
    bytes_in: Counter[tuple[str, str]] = field(default_factory=Counter)
    delivered: Counter[tuple[str, str]] = field(default_factory=Counter)
    waits_us: dict[tuple[str, str], list[Times]] = field(default_factory=dict)
    planted: Planted = field(default_factory=Planted)
    files: list[Path] = field(default_factory=list)
    first_ts: int = 0
    last_ts: int = 0


def generate(folder: Path, plan: Plan) -> Truth:
    """Write the segments below ``folder``; an empty or absent one is best."""
    random = np.random.default_rng(plan.seed)
    truth = Truth()
    writer = _Writer(folder, plan, truth)
    start = int(plan.start.timestamp()) * 1_000_000
    chapters = max(1, -(-plan.messages // CHAPTER_MESSAGES))
    length = plan.seconds * 1_000_000 // chapters
    next_msg = 1
    at = start
    writer.write([_objects(start, plan)])
    for chapter in range(chapters):
        lines: list[Lines] = []
        count = plan.messages // chapters
        for stream in STREAMS:
            messages = max(1, int(count * stream.share))
            msg = np.arange(next_msg, next_msg + messages, dtype=np.int64)
            next_msg += messages
            lines += _everyday(random, stream, msg, at + 1_000_000, length, plan, truth)
        if chapter == chapters // 2:
            problem_lines, next_msg = plant(
                random, plan.problems, STREAMS, next_msg, at + 1_000_000, length, truth.planted
            )
            lines += problem_lines
        writer.write(lines)
        # The next begins where this one's last ack was.
        at = max(writer.last_ts, at + length)
    writer.write([event_lines([event(writer.last_ts + 1, "broker_stop")])])
    writer.close()
    truth.first_ts, truth.last_ts = start, writer.last_ts
    return truth


def _everyday(
    random: np.random.Generator,
    stream: Stream,
    msg: Times,
    start: int,
    length: int,
    plan: Plan,
    truth: Truth,
) -> Iterator[Lines]:
    arrived = arrivals(random, len(msg), start, length)
    size = random.integers(stream.size // 2, stream.size * 3 // 2, len(msg))
    who = (stream.vhost, stream.user)
    truth.published[who] += len(msg)
    truth.bytes_in[who] += int(size.sum())
    served: list[Served] = []
    for queue in stream.queues:
        slow = 0 if queue == "orders" and "slow_consumer" in plan.problems else None
        pace_us = 0.3 * length / len(msg)
        one = serve(random, stream, queue, msg, size, arrived, pace_us=pace_us, slow_consumer=slow)
        served.append(one)
        truth.delivered[stream.vhost, queue] += len(msg)
        truth.waits_us.setdefault((stream.vhost, queue), []).append(one.wait_us)
        if slow is not None:
            truth.planted.slow_consumer = (stream.vhost, queue, stream.ctag(queue, slow))
        yield from consume_lines(one)
    yield from publish_lines(stream, msg, size, arrived)
    if len(served) > 1:
        for one in served:
            yield enqueue_lines(one)


def _objects(start: int, plan: Plan) -> Lines:
    """The broker's start, the topology, and the connections that last."""
    events = [event(start, "broker_start", attrs={"version": "0", "level": "all", "sample": "1"})]

    def add(ev: str, **fields: object) -> None:
        events.append(event(start + len(events), ev, **fields))

    for stream in STREAMS:
        vhost, user = stream.vhost, stream.user
        for number in range(stream.consumers * len(stream.queues) + 1):
            conn = stream.conn + number
            peer = f"10.0.{stream.conn}.{number + 1}:50000"
            add("connection_open", vhost=vhost, conn=conn, user=user, peer=peer)
            add("channel_open", vhost=vhost, conn=conn, ch=1, user=user, peer=peer)
        who = {"vhost": vhost, "conn": stream.conn, "ch": 1, "user": user}
        kind = {"type": "fanout" if len(stream.queues) > 1 else "direct"}
        if stream.exchange:
            add("exchange_declare", **who, exchange=stream.exchange, attrs=kind)
        for queue in stream.queues:
            add("queue_declare", **who, queue=queue, attrs={"durable": "true"})
            if stream.exchange:
                add("bind", **who, exchange=stream.exchange, rk=stream.rk, queue=queue)
            for consumer in range(stream.consumers):
                add(
                    "consume",
                    **{**who, "conn": stream.conn + 1 + consumer},
                    queue=queue,
                    ctag=stream.ctag(queue, consumer),
                )
    return event_lines(events)


class _Writer:
    """Sorts events, numbers them, and cuts them into sealed segments."""

    def __init__(self, folder: Path, plan: Plan, truth: Truth) -> None:
        self.last_ts = 0
        self._folder = folder
        self._plan = plan
        self._truth = truth
        self._seq = 0
        # Lines of the segment in the making, the date it is filed under, and when that ends.
        self._pending: list[str] = []
        self._date = ""
        self._day_end = 0

    def write(self, groups: list[Lines]) -> None:
        ts = np.concatenate([group.ts for group in groups])
        texts = [text for group in groups for text in group.texts]
        order = np.argsort(ts, kind="stable")
        head = f',"boot":"{self._plan.boot}",'
        by_ev, seq, limit = self._truth.by_ev, self._seq, self._plan.segment_lines
        for at, index in zip(ts[order].tolist(), order.tolist(), strict=True):
            text = texts[index]
            seq += 1
            if at >= self._day_end or len(self._pending) >= limit:
                self._seal()
                self._date = datetime.fromtimestamp(at / 1e6, UTC).date().isoformat()
                self._day_end = (at // 86_400_000_000 + 1) * 86_400_000_000
            self._pending.append(f'{{"ts":{at},"seq":{seq}{head}{text}\n')
            by_ev[text[6 : text.index('"', 6)]] += 1
        self._truth.events += seq - self._seq
        self._seq = seq
        self.last_ts = max(self.last_ts, int(ts.max()))

    def close(self) -> None:
        self._seal()

    def _seal(self) -> None:
        if not self._pending:
            return
        folder = self._folder / f"date={self._date}"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{self._plan.boot}-{len(self._truth.files):06d}.jsonl"
        content = "".join(self._pending).encode()
        if self._plan.compress:
            name += ".zst"
            content = pa.compress(content, codec="zstd", asbytes=True)
        (folder / name).write_bytes(content)
        self._truth.files.append(folder / name)
        self._pending.clear()
