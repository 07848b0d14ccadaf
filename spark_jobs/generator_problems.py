"""The problems of a synthetic log, each with the truth that an analysis should find.

Downstream: ``generator.py`` puts the lines into the log; tests and the report's findings are held
against ``Planted``. The slow consumer is not here: it is a property of everyday traffic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np

from leveret.spark_jobs.generator_load import (
    Lines,
    Stream,
    arrivals,
    consume_lines,
    event,
    event_lines,
    publish_lines,
    serve,
)

PROBLEMS: Final = frozenset(
    {"slow_consumer", "poison", "burst", "unroutable", "backlog", "churn", "unused", "throttling"}
)

POISON_DELIVERIES: Final = 9
CHURN_CONNECTIONS: Final = 60
# The burst: how many times everyday traffic, over which part of the time.
BURST_FACTOR: Final = 12
BURST_FROM: Final = 0.5
BURST_UNTIL: Final = 0.55

_EVENT_BURST = Stream("telemetry", "probe", "", "alerts", ("alerts",), 2, 0.0, 120, 500, 60)
_ARCHIVE = Stream("billing", "erp", "billing", "archive", ("archive",), 0, 0.0, 800, 1, 70)


@dataclass(slots=True)
class Planted:
    """The truth. Empty where the plan left a problem out."""

    # Vhost, queue, consumer tag.
    slow_consumer: tuple[str, str, str] | None = None
    # Vhost, queue, message.
    poison: tuple[str, str, int] | None = None
    # Vhost, queue, from and until in microseconds; and how many messages that queue got in all.
    burst: tuple[str, str, int, int] | None = None
    burst_messages: int = 0
    # By exchange, key and user.
    returned: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    dropped: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    # Vhost, queue, messages left in it.
    backlog: tuple[str, str, int] | None = None
    # User and number of connections.
    churn: tuple[str, int] | None = None
    unused: set[tuple[str, str, str]] = field(default_factory=set)
    # Who throttled, in the end, and for how many microseconds each of the others stood still.
    throttling: tuple[str, dict[str, int]] | None = None


def plant(
    random: np.random.Generator,
    problems: frozenset[str],
    streams: Sequence[Stream],
    next_msg: int,
    start: int,
    length: int,
    planted: Planted,
) -> tuple[list[Lines], int]:
    """The lines of all ``problems``, and the next free message number."""
    lines: list[Lines] = []
    if "burst" in problems:
        lines += _burst(random, next_msg, start, length, planted)
        next_msg += planted.burst_messages
    if "poison" in problems:
        lines.append(_poison(next_msg, start + length // 4, planted))
        next_msg += 1
    if "unroutable" in problems:
        added, next_msg = _unroutable(random, next_msg, start, length, planted)
        lines.append(added)
    if "backlog" in problems:
        added_lines, next_msg = _backlog(random, next_msg, start, length, planted)
        lines += added_lines
    if "churn" in problems:
        lines.append(_churn(start, length, planted))
    if "unused" in problems:
        lines.append(_unused(start, planted))
    if "throttling" in problems:
        lines.append(_throttling(start + length // 2, length // 100, planted))
    return lines, next_msg


def _burst(
    random: np.random.Generator, next_msg: int, start: int, length: int, planted: Planted
) -> list[Lines]:
    """A queue whose publisher suddenly sends far more than its consumers take."""
    stream = _EVENT_BURST
    steady = max(200, length // 100_000)
    share = BURST_UNTIL - BURST_FROM
    begin, end = start + int(length * BURST_FROM), start + int(length * BURST_UNTIL)
    extra = int(steady * share * BURST_FACTOR)
    arrived = np.sort(
        np.concatenate(
            [arrivals(random, steady, start, length), arrivals(random, extra, begin, end - begin)]
        )
    )
    msg = np.arange(next_msg, next_msg + len(arrived), dtype=np.int64)
    size = np.full(len(msg), stream.size, dtype=np.int64)
    served = serve(random, stream, "alerts", msg, size, arrived, pace_us=length / steady / 3.0)
    planted.burst = (stream.vhost, "alerts", begin, end)
    planted.burst_messages = len(msg)
    return [
        *publish_lines(stream, msg, size, arrived),
        *consume_lines(served),
        _topology(stream, start),
    ]


def _poison(msg: int, start: int, planted: Planted) -> Lines:
    """A message that every consumer refuses until the delivery limit moves it away."""
    vhost, queue = "billing", "invoices"
    planted.poison = (vhost, queue, msg)
    events = []
    at = start

    def add(ev: str, **fields: object) -> None:
        nonlocal at
        at += 1_500
        events.append(event(at, ev, vhost=vhost, msg=msg, **fields))

    who = {"conn": 30, "ch": 1, "user": "erp"}
    add(
        "publish",
        **who,
        exchange="billing",
        rk="invoice",
        queue=queue,
        size=999,
        persistent=True,
        routed=1,
    )
    for attempt in range(POISON_DELIVERIES):
        consumer = attempt % 3
        taker = {"conn": 31 + consumer, "ch": 1, "user": "erp", "ctag": f"{queue}-c{consumer}"}
        again = {"redelivered": attempt > 0, "delivery_count": attempt}
        dtag = 1_000_000 + attempt
        add("deliver", **taker, **again, queue=queue, dtag=dtag, size=999, wait_us=1_500)
        add("nack", **taker, queue=queue, dtag=dtag, hold_us=1_500, reason="requeue")
        # Back in its place it is counted, and found to have come once too often.
        add("requeue", **taker, queue=queue, delivery_count=attempt + 1, reason="nack")
    add(
        "dead_letter",
        queue=queue,
        exchange="dlx",
        rk="invoice",
        size=999,
        delivery_count=POISON_DELIVERIES,
        routed=1,
        reason="delivery_limit",
    )
    add("enqueue", exchange="dlx", rk="invoice", queue="dead-letters", size=999)
    return event_lines(events)


def _unroutable(
    random: np.random.Generator, next_msg: int, start: int, length: int, planted: Planted
) -> tuple[Lines, int]:
    """A publisher whose key nobody is bound to: some mandatory, some not."""
    who = {"vhost": "shop", "conn": 10, "ch": 2, "user": "web"}
    events = []
    for number in range(50):
        at = start + int(random.integers(0, length))
        mandatory = number % 5 == 0
        key = "cancelled.eu" if number % 2 else "cancelled.us"
        place = {"exchange": "shop.orders", "rk": key, "msg": next_msg + number, "size": 400}
        events.append(event(at, "publish", **who, **place, mandatory=mandatory))
        ev, reason = ("return", "NO_ROUTE") if mandatory else ("drop", "unroutable")
        events.append(event(at + 5, ev, **who, **place, reason=reason))
        counter = planted.returned if mandatory else planted.dropped
        counter["shop.orders", key, "web"] += 1
    return event_lines(events), next_msg + 50


def _backlog(
    random: np.random.Generator, next_msg: int, start: int, length: int, planted: Planted
) -> tuple[list[Lines], int]:
    """A queue without consumers, filling steadily."""
    stream = _ARCHIVE
    count = max(300, length // 200_000)
    arrived = arrivals(random, count, start, length)
    msg = np.arange(next_msg, next_msg + count, dtype=np.int64)
    size = np.full(count, stream.size, dtype=np.int64)
    planted.backlog = (stream.vhost, "archive", count)
    lines = [*publish_lines(stream, msg, size, arrived), _topology(stream, start)]
    return lines, next_msg + count


def _churn(start: int, length: int, planted: Planted) -> Lines:
    """A client that connects anew for every message, and one that cannot log in."""
    planted.churn = ("legacy", CHURN_CONNECTIONS)
    events = []
    for number in range(CHURN_CONNECTIONS):
        at = start + length * number // CHURN_CONNECTIONS
        who = {"vhost": "shop", "conn": 1_000 + number, "user": "legacy"}
        who["peer"] = f"10.9.9.9:{40_000 + number}"
        events.append(event(at, "connection_open", **who))
        events.append(event(at + 100, "channel_open", **who, ch=1))
        events.append(
            event(at + 50_000, "connection_close", **who, hold_us=50_000, reason="client")
        )
    for number in range(12):
        at = start + 1_000 * number
        refused = {"user": "intruder", "peer": f"203.0.113.7:{5_000 + number}"}
        events.append(event(at, "auth_fail", **refused, reason="ACCESS_REFUSED"))
    return event_lines(events)


def _unused(start: int, planted: Planted) -> Lines:
    """What was declared and never used."""
    who = {"vhost": "shop", "conn": 10, "ch": 1, "user": "web"}
    planted.unused = {
        ("shop", "queue", "old-orders"),
        ("shop", "exchange", "shop.legacy"),
        ("shop", "binding", "shop.legacy -> old-orders (all)"),
    }
    return event_lines(
        [
            event(start, "queue_declare", **who, queue="old-orders"),
            event(
                start + 1,
                "exchange_declare",
                **who,
                exchange="shop.legacy",
                attrs={"type": "topic"},
            ),
            event(
                start + 2,
                "bind",
                **who,
                exchange="shop.legacy",
                rk="all",
                queue="old-orders",
            ),
        ]
    )


def _throttling(start: int, blocked_us: int, planted: Planted) -> Lines:
    """The store cannot keep up: it holds a queue, that its channel, that its reader."""
    chain = ["store:shop", "queue:shop/orders", "channel:10/1", "reader:10"]
    durations = {}
    events = []
    for step, (by, who) in enumerate(pairwise(chain)):
        # Each is blocked a little later than the one it waits for, and released a little later.
        begin = start + 1_000 * (step + 1)
        attrs = {"who": who, "by": by}
        events.append(event(begin, "credit_blocked", vhost="shop", attrs=attrs))
        events.append(
            event(
                begin + blocked_us,
                "credit_unblocked",
                vhost="shop",
                hold_us=blocked_us,
                attrs=attrs,
            )
        )
        durations[who] = blocked_us
    planted.throttling = (chain[0], durations)
    return event_lines(events)


def _topology(stream: Stream, start: int) -> Lines:
    (queue,) = stream.queues
    who = {"vhost": stream.vhost, "conn": stream.conn, "ch": 1, "user": stream.user}
    events = [event(start, "queue_declare", **who, queue=queue)]
    if stream.exchange:
        place = {"exchange": stream.exchange, "rk": stream.rk, "queue": queue}
        events.append(event(start + 1, "bind", **who, **place))
    for consumer in range(stream.consumers):
        taker = {**who, "conn": stream.conn + 1 + consumer, "queue": queue}
        taker["ctag"] = stream.ctag(queue, consumer)
        events.append(event(start + 2, "consume", **taker))
    return event_lines(events)
