#!/usr/bin/env python3
"""Fill a queue with numbered messages, or empty it and see that none is missing or out of place.

    benchmarks/numbered.py fill --port 5672 --messages 100000 [--size 1000] [--window 2000]
    benchmarks/numbered.py drain --port 5672 --messages 100000 [--size 1000] [--prefetch 1000]

Works with any AMQP 0-9-1 broker that has the user guest. Messages are persistent, confirmed and
acked; the queue is durable and called ``backlog``. Prints one JSON object. Used by backlog.py.

A gap is the time between two reads that brought confirms (or deliveries) while some were owed.
All messages have one size and so have all frames of a kind: they are cut at fixed distances.
"""

import argparse
import json
import select
import socket
import struct
import time
from collections.abc import Iterator

QUEUE = b"backlog"
BATCH = 64
# basic.ack: 7 bytes of header, method, tag, flag, end.
ACK_BYTES = 21
CHUNK_BYTES = 1 << 18
ANSWER_S = 60.0
GAPS_SHOWN = 10

Frame = tuple[int, bytes]


def frame(kind: int, payload: bytes, channel: int = 1) -> bytes:
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + b"\xce"


def method(class_id: int, method_id: int, arguments: bytes = b"", channel: int = 1) -> bytes:
    return frame(1, struct.pack(">HH", class_id, method_id) + arguments, channel)


def short(text: bytes) -> bytes:
    return bytes((len(text),)) + text


class Client:
    """One connection with one channel, blocking until it is open."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.data = b""
        self.socket.sendall(b"AMQP\0\0\x09\x01")
        self.expect(10, 10)
        response = b"\0guest\0guest"
        login = struct.pack(">I", 0) + short(b"PLAIN") + struct.pack(">I", len(response)) + response
        self.socket.sendall(method(10, 11, login + short(b"en_US"), 0))
        self.expect(10, 30)
        self.socket.sendall(method(10, 31, struct.pack(">HIH", 1, 131_072, 0), 0))
        self.call(method(10, 40, short(b"/") + b"\0\0", 0), 10, 41)
        self.call(method(20, 10, b"\0"), 20, 11)
        declare = struct.pack(">H", 0) + short(QUEUE) + b"\x02" + struct.pack(">I", 0)
        self.call(method(50, 10, declare), 50, 11)

    def call(self, request: bytes, class_id: int, method_id: int) -> None:
        self.socket.sendall(request)
        self.expect(class_id, method_id)

    def expect(self, class_id: int, method_id: int) -> None:
        for kind, payload in self.frames():
            if kind == 1 and struct.unpack_from(">HH", payload) == (class_id, method_id):
                return
            if kind == 1 and struct.unpack_from(">HH", payload) in ((10, 50), (20, 40)):
                raise SystemExit(f"the broker closed: {payload[7:].decode(errors='replace')}")

    def frames(self) -> Iterator[Frame]:
        while True:
            if len(self.data) >= 7:
                kind, _, size = struct.unpack_from(">BHI", self.data)
                if len(self.data) >= 8 + size:
                    payload = self.data[7 : 7 + size]
                    self.data = self.data[8 + size :]
                    yield kind, payload
                    continue
            self.data += self.receive()

    def receive(self) -> bytes:
        data = self.socket.recv(CHUNK_BYTES)
        if not data:
            raise SystemExit("the broker hung up")
        return data

    def close(self) -> None:
        self.socket.settimeout(ANSWER_S)
        self.socket.sendall(method(10, 50, struct.pack(">H", 200) + b"\0" + b"\0" * 4, 0))
        self.expect(10, 51)
        self.socket.close()


class Gaps:
    """The longest times without an answer, and when they ended, in seconds since the start."""

    def __init__(self) -> None:
        self.started = self.last = time.monotonic()
        self.longest: list[tuple[float, float]] = []

    def answered(self) -> None:
        now = time.monotonic()
        if len(self.longest) < GAPS_SHOWN or now - self.last > self.longest[-1][0]:
            self.longest.append((now - self.last, now - self.started))
            self.longest = sorted(self.longest, reverse=True)[:GAPS_SHOWN]
        self.last = now

    def result(self, messages: int) -> dict[str, object]:
        seconds = time.monotonic() - self.started
        return {
            "messages": messages,
            "seconds": round(seconds, 2),
            "rate": round(messages / seconds),
            "longest_gap_ms": round(self.longest[0][0] * 1000, 1) if self.longest else None,
            "gaps_ms_at_s": [(round(gap * 1000, 1), round(at, 1)) for gap, at in self.longest],
        }


def fill(port: int, messages: int, size: int, window: int) -> dict[str, object]:
    client = Client(port)
    client.call(method(85, 10, b"\0"), 85, 11)
    # Deliveries are persistent (delivery-mode 2, the only property).
    publish = method(60, 40, struct.pack(">H", 0) + b"\0" + short(QUEUE) + b"\0")
    header = frame(2, struct.pack(">HHQH", 60, 0, size, 0x1000) + b"\x02")
    one = publish + header + frame(3, b"\0" * size)
    number_at = len(publish) + len(header) + 7
    batch = bytearray(one * BATCH)
    places = range(number_at, number_at + BATCH * len(one), len(one))
    write_number = struct.Struct(">Q").pack_into
    sock = client.socket
    sock.setblocking(False)
    sent = confirmed = 0
    unsent = memoryview(b"")
    acks = client.data
    gaps = Gaps()
    while confirmed < messages:
        if not unsent and sent < messages and sent - confirmed < window:
            count = min(BATCH, messages - sent, window - (sent - confirmed))
            if sent == confirmed:
                gaps.last = time.monotonic()  # nothing was owed
            for number, place in zip(range(sent, sent + count), places, strict=False):
                write_number(batch, place, number)
            unsent = memoryview(batch)[: count * len(one)]
            sent += count
        readable, writable, _ = select.select([sock], [sock] if unsent else [], [], ANSWER_S)
        if not readable and not writable:
            raise SystemExit(f"the broker said nothing for {ANSWER_S:g} s")
        if writable:
            unsent = unsent[sock.send(unsent) :]
        if readable:
            acks += client.receive()
            before = confirmed
            confirmed, acks = read_confirms(acks, confirmed)
            if confirmed > before:
                gaps.answered()
    result = gaps.result(messages)
    client.data = acks
    client.close()
    return result


def read_confirms(data: bytes, confirmed: int) -> tuple[int, bytes]:
    """How many are confirmed now, and what is left of the bytes.

    A confirm without *multiple* out of turn would be counted early; with one queue there is none.
    """
    at = 0
    while len(data) - at >= ACK_BYTES:
        kind, _, size, class_id, method_id, tag = struct.unpack_from(">BHIHHQ", data, at)
        if (kind, size, class_id, method_id) != (1, 13, 60, 80):
            raise SystemExit(f"not a confirm: {data[at : at + 200]!r}")
        if tag > confirmed:
            confirmed = tag
        at += ACK_BYTES
    return confirmed, data[at:]


def drain(port: int, messages: int, size: int, prefetch: int) -> dict[str, object]:
    client = Client(port)
    client.call(method(60, 10, struct.pack(">IHB", 0, prefetch, 0)), 60, 11)
    consume = struct.pack(">H", 0) + short(QUEUE) + short(b"c") + b"\0" + struct.pack(">I", 0)
    client.call(method(60, 20, consume), 60, 21)
    deliver = 12 + len(short(b"c")) + 9 + 1 + len(short(QUEUE))
    header = 8 + 12 + 2 + 1
    stride = deliver + header + 8 + size
    tag_at = 11 + len(short(b"c"))
    # Delivery tag, and the body's number behind the two frames.
    look = struct.Struct(f">{tag_at}xQ{deliver + header + 7 - tag_at - 8}xQ")
    acks_from = max(1, prefetch // 4)
    gaps = Gaps()
    wrong: list[str] = []
    count = acked = redelivered = 0
    data = client.data
    while count < messages:
        at = 0
        end = len(data) - stride
        while at <= end:
            tag, number = look.unpack_from(data, at)
            count += 1
            if (
                data[at] != 1
                or data[at + stride - 1] != 0xCE
                or tag != count
                or number != count - 1
            ):
                wrong.append(f"delivery {count}: tag {tag}, message {number}")
                if len(wrong) == 5:
                    return {"messages": count, "wrong": wrong}
            redelivered += data[at + tag_at + 8]
            at += stride
        data = data[at:]
        if at:
            gaps.answered()
        if count - acked >= acks_from or count == messages:
            client.socket.sendall(method(60, 80, struct.pack(">QB", count, 1)))
            acked = count
        if count < messages:
            data += client.receive()
    result = gaps.result(count) | {"wrong": wrong, "redelivered": redelivered}
    # All acks are taken then: closing waits for what was sent before.
    client.data = data
    client.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("fill", "drain"))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--messages", type=int, required=True)
    parser.add_argument("--size", type=int, default=1000, help="bytes of a body, at least 8")
    parser.add_argument("--window", type=int, default=2000, help="publishes without confirm")
    parser.add_argument("--prefetch", type=int, default=1000)
    options = parser.parse_args()
    if options.what == "fill":
        result = fill(options.port, options.messages, options.size, options.window)
    else:
        result = drain(options.port, options.messages, options.size, options.prefetch)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
