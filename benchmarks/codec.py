"""What the codec costs: microseconds per message, both twins and pamqp.

    python benchmarks/codec.py [--body BYTES] [--count MESSAGES]

Each figure is the best of several rounds over one chunk of the given number of messages.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from types import ModuleType

from pamqp import body, commands, frame, header

from leveret.protocol import hot
from leveret.protocol.framing import RUN_MAX
from leveret.protocol.items import PublishRun

ROUNDS = 7
FRAME_MAX = 131072
CONSUMER_TAG = b"\x04ctag"


def publishes(count: int, size: int) -> bytes:
    one = (
        frame.marshal(commands.Basic.Publish(exchange="amq.topic", routing_key="a.b.c"), 1)
        + frame.marshal(
            header.ContentHeader(
                body_size=size, properties=commands.Basic.Properties(delivery_mode=2)
            ),
            1,
        )
        + frame.marshal(body.ContentBody(b"x" * size), 1)
    )
    return one * count


def best(count: int, work: Callable[[], object]) -> float:
    """Microseconds for one of ``count``, in the best round."""
    took = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work()
        took.append(time.perf_counter() - start)
    return min(took) / count * 1e6


def unmarshal_all(data: bytes) -> None:
    while data:
        consumed, _, _ = frame.unmarshal(data)
        data = data[consumed:]


def bench_twin(twin: ModuleType, size: int, count: int) -> dict[str, float]:
    stream = publishes(count, size)
    acks = twin.encode_acks(1, list(range(1, count + 1)), False)
    runs: list[PublishRun] = []
    twin.cut(publishes(1, size), 0, FRAME_MAX, 1, runs)
    messages = runs[0].messages * min(count, RUN_MAX)
    tags = list(range(len(messages)))
    return {
        "cut publish": best(count, lambda: twin.cut(stream, 0, FRAME_MAX, 1 << 40, [])),
        "cut ack": best(count, lambda: twin.cut(acks, 0, FRAME_MAX, 1 << 40, [])),
        "encode deliver": best(
            len(messages),
            lambda: twin.encode_deliveries(1, CONSUMER_TAG, 1, False, messages, FRAME_MAX),
        ),
        "encode ack": best(len(tags), lambda: twin.encode_acks(1, tags, False)),
    }


def bench_pamqp(size: int, count: int) -> dict[str, float]:
    # pamqp copies what is left at every step here, so give it little at a time.
    count = min(count, 100)
    stream = publishes(count, size)
    acks = hot.encode_acks(1, list(range(1, count + 1)), False)

    def deliver() -> None:
        for tag in range(count):
            frame.marshal(commands.Basic.Deliver("ctag", tag, False, "amq.topic", "a.b.c"), 1)
            frame.marshal(
                header.ContentHeader(
                    body_size=size, properties=commands.Basic.Properties(delivery_mode=2)
                ),
                1,
            )
            frame.marshal(body.ContentBody(b"x" * size), 1)

    def ack() -> None:
        for tag in range(count):
            frame.marshal(commands.Basic.Ack(tag), 1)

    return {
        "cut publish": best(count, lambda: unmarshal_all(stream)),
        "cut ack": best(count, lambda: unmarshal_all(acks)),
        "encode deliver": best(count, deliver),
        "encode ack": best(count, ack),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--body", type=int, default=100, help="bytes of each body")
    parser.add_argument("--count", type=int, default=2000, help="messages of a chunk")
    options = parser.parse_args()
    columns = {}
    try:
        from leveret.protocol import _hot
    except ImportError:
        print("The compiled codec was not built.")
    else:
        columns["compiled"] = bench_twin(_hot, options.body, options.count)
    columns["pure"] = bench_twin(hot, options.body, options.count)
    columns["pamqp"] = bench_pamqp(options.body, options.count)
    print(f"microseconds each, {options.body} byte bodies")
    print(f"{'':16}" + "".join(f"{name:>10}" for name in columns))
    for row in columns["pure"]:
        print(f"{row:16}" + "".join(f"{column[row]:10.3f}" for column in columns.values()))


if __name__ == "__main__":
    main()
