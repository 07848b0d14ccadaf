"""The ordinary traffic of a synthetic log: who publishes what, and how it is consumed.

A ``Stream`` is one publisher's messages to one or more queues. Arrivals are random, each queue
serves them in order at a steady pace, so that waiting times and depths follow from the arrivals as
they would in a broker. All of it is numpy; text is made once per event.

Upstream: ``generator.py`` chooses streams and intervals. Downstream: it, too, sorts and writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from leveret.broker.event_log.schema import Event, encode_lines

Times = npt.NDArray[np.int64]

# Publishes that one confirm covers.
CONFIRM_EVERY: Final = 8


@dataclass(frozen=True, slots=True)
class Stream:
    """Messages of one publisher, and the consumers of the queues they reach."""

    vhost: str
    user: str
    exchange: str
    rk: str
    queues: tuple[str, ...]
    consumers: int
    # Of all messages.
    share: float
    size: int
    # Typical time between delivery and ack.
    work_us: int
    # Numbers of its connections: the publisher's, then one per consumer.
    conn: int

    def ctag(self, queue: str, consumer: int) -> str:
        return f"{queue}-c{consumer}"


@dataclass(frozen=True, slots=True)
class Lines:
    """Events in no particular order: their times, and their text from ``ev`` on."""

    ts: Times
    texts: list[str]


@dataclass(frozen=True, slots=True)
class Served:
    """What became of one stream's messages in one queue; the i-th entries belong together."""

    stream: Stream
    queue: str
    msg: Times
    size: Times
    arrived: Times
    delivered: Times
    acked: Times
    consumer: Times

    @property
    def wait_us(self) -> Times:
        return self.delivered - self.arrived


def arrivals(random: np.random.Generator, count: int, start: int, length: int) -> Times:
    times: Times = np.sort(random.integers(start, start + length, count))
    return times


def serve(
    random: np.random.Generator,
    stream: Stream,
    queue: str,
    msg: Times,
    size: Times,
    arrived: Times,
    *,
    pace_us: float,
    slow_consumer: int | None = None,
) -> Served:
    """Deliver in order of arrival, a message each ``pace_us`` or so; ack after work.

    ``slow_consumer`` takes fifty times as long over each message.
    """
    count = len(arrived)
    service = random.gamma(4.0, pace_us / 4.0, count).astype(np.int64) + 20
    # Each is delivered once it has arrived and all before it have been served: the sum of
    # services plus the latest start that any of them forced.
    total = np.cumsum(service)
    delivered = total + np.maximum.accumulate(arrived - (total - service))
    consumer = np.arange(count, dtype=np.int64) % max(stream.consumers, 1)
    hold = random.lognormal(np.log(stream.work_us), 0.5, count)
    if slow_consumer is not None:
        hold = np.where(consumer == slow_consumer, hold * 50.0, hold)
    acked = delivered + hold.astype(np.int64) + 1
    return Served(stream, queue, msg, size, arrived, delivered, acked, consumer)


def publish_lines(stream: Stream, msg: Times, size: Times, ts: Times) -> Iterator[Lines]:
    """The publishes and their confirms."""
    head = f'"ev":"publish","vhost":"{stream.vhost}","conn":{stream.conn},"ch":1'
    head += f',"user":"{stream.user}","exchange":"{stream.exchange}","rk":"{stream.rk}"'
    # One queue is named; several tell of it themselves.
    routed = f',"routed":{len(stream.queues)}' if stream.queues else ""
    if len(stream.queues) == 1:
        routed += f',"queue":"{stream.queues[0]}"'
    texts = [
        f'{head},"msg":{m},"size":{s},"persistent":true{routed}}}'
        for m, s in zip(msg.tolist(), size.tolist(), strict=True)
    ]
    yield Lines(ts, texts)
    first = np.arange(0, len(ts), CONFIRM_EVERY)
    last = np.minimum(first + CONFIRM_EVERY, len(ts)) - 1
    at = ts[last] + 300
    head = f'"ev":"confirm","vhost":"{stream.vhost}","conn":{stream.conn},"ch":1'
    head += f',"user":"{stream.user}"'
    waits = at - ts[first]
    rows = zip((last + 1).tolist(), (last - first + 1).tolist(), waits.tolist(), strict=True)
    yield Lines(at, [f'{head},"dtag":{d}{_count(n)},"wait_us":{wait}}}' for d, n, wait in rows])


def enqueue_lines(served: Served) -> Lines:
    """One queue of several took the messages."""
    stream = served.stream
    head = f'"ev":"enqueue","vhost":"{stream.vhost}","exchange":"{stream.exchange}"'
    head += f',"rk":"{stream.rk}","queue":"{served.queue}"'
    rows = zip(served.msg.tolist(), served.size.tolist(), strict=True)
    texts = [f'{head},"msg":{m},"size":{s},"persistent":true}}' for m, s in rows]
    return Lines(served.arrived, texts)


def consume_lines(served: Served) -> Iterator[Lines]:
    """Deliveries and acks."""
    stream, queue = served.stream, served.queue
    come = np.searchsorted(served.arrived, served.delivered, side="right")
    depth = come - np.arange(1, len(come) + 1)
    dtag = np.arange(len(come)) // max(stream.consumers, 1) + 1
    who = [
        f'"vhost":"{stream.vhost}","conn":{stream.conn + 1 + consumer},"ch":1'
        f',"user":"{stream.user}","queue":"{queue}","ctag":"{stream.ctag(queue, consumer)}"'
        for consumer in range(stream.consumers)
    ]
    consumers, messages, tags = (
        served.consumer.tolist(),
        served.msg.tolist(),
        dtag.tolist(),
    )
    rows = zip(
        *(consumers, messages, tags, served.size.tolist()),
        *(served.wait_us.tolist(), depth.tolist()),
        strict=True,
    )
    yield Lines(
        served.delivered,
        [
            f'"ev":"deliver",{who[c]},"msg":{m},"dtag":{t},"size":{s},"wait_us":{w},"depth":{d}}}'
            for c, m, t, s, w, d in rows
        ],
    )
    hold = (served.acked - served.delivered).tolist()
    yield Lines(
        served.acked,
        [
            f'"ev":"ack",{who[c]},"msg":{m},"dtag":{t},"hold_us":{h}}}'
            for c, m, t, h in zip(consumers, messages, tags, hold, strict=True)
        ],
    )


def event(ts: int, ev: str, **fields: object) -> Event:
    """A single event, checked; its number and boot come when the whole log is sorted."""
    return msgspec.convert({"ts": ts, "seq": 0, "boot": "", "ev": ev, **fields}, Event)


def event_lines(events: Sequence[Event]) -> Lines:
    """The same for events that are too few to be made from arrays."""
    texts = []
    for event in events:
        line = encode_lines([event]).decode().rstrip("\n")
        texts.append(line[line.index('"ev"') :])
    return Lines(np.array([event.ts for event in events], dtype=np.int64), texts)


def _count(number: int) -> str:
    # As the broker writes it: 1 is the default.
    return f',"n":{number}' if number != 1 else ""
