"""``leveret analytics tail`` from segments that appear to alerts that a consumer receives."""

from __future__ import annotations

import io
import json
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from leveret.broker.event_log.schema import Event, encode_lines
from leveret.spark_jobs.alert_rules import KINDS, Alert, Rule
from leveret.spark_jobs.alert_sender import AlertSender
from leveret.spark_jobs.amqp_link import LinkError
from leveret.spark_jobs.lake import Selection
from leveret.spark_jobs.tail import Tail, TailOptions
from leveret.spark_jobs.tail_screen import Screen
from tests.spark.amqp import channel_to, drain, ready, wait_until
from tests.support.broker_process import running_broker

START_S = int(datetime(2026, 3, 2, 8, tzinfo=UTC).timestamp())
RULES = [
    Rule("late", KINDS["latency"], 1000, 500, 2),
    Rule("poison", KINDS["poison"], 5, 5, 1),
    Rule("unroutable", KINDS["unroutable"], 10, 5, 1),
    Rule("growing", KINDS["backlog_slope"], 10, 5, 2),
]


class Log:
    """Events of ten-second windows, and the segments they are sealed in."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "events" / "date=2026-03-02"
        self._folder.mkdir(parents=True)
        self._events: list[Event] = []
        self._seq = 0
        self._segments = 0

    def add(self, window: int, ev: str, count: int = 1, **fields: object) -> None:
        for _ in range(count):
            self._seq += 1
            ts = (START_S + window * 10) * 1_000_000 + self._seq
            self._events.append(Event(ts, self._seq, "boot", ev, **fields))  # type: ignore[arg-type]

    def deliver(self, window: int, wait_ms: int) -> None:
        self.add(
            window, "deliver", 20, vhost="shop", queue="orders", wait_us=wait_ms * 1000, depth=0
        )

    def seal(self) -> None:
        self._segments += 1
        name = f"boot-{self._segments:06d}.jsonl"
        content = encode_lines(self._events)
        self._events = []
        # As the broker does it: hidden while it is written.
        hidden = self._folder / f"_open-{name}"
        hidden.write_bytes(content + b"torn")
        hidden.write_bytes(content)
        hidden.rename(self._folder / name)


@pytest.mark.timeout(180)
def test_alerts_begin_and_end_as_segments_appear(spark: SparkSession, tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    out = io.StringIO()
    with running_broker(tmp_path) as broker, channel_to(broker.url) as channel:
        channel.exchange_declare("alerts", "topic", durable=True)
        channel.queue_declare("inbox", exclusive=True)
        channel.queue_bind("inbox", "alerts", "alert.#")

        log.add(-99, "broker_start", attrs={"sample": "0.5"})
        # Before --since, and so nobody's business.
        log.add(-50, "deliver", 9, vhost="shop", queue="old", wait_us=10**9)
        for window in (0, 1, 2):
            log.deliver(window, 2_000)
            # Nobody consumes, so nothing is stamped. Each stands for two.
            log.add(window, "publish", 100 if window else 10, vhost="shop", queue="archive")
        log.add(0, "deliver", vhost="shop", queue="orders", msg=9, delivery_count=6)
        log.add(0, "return", 3, vhost="shop", exchange="events", rk="nowhere")
        log.seal()

        options = TailOptions(
            str(tmp_path / "log"),
            Selection(since=START_S * 1_000_000),
            interval_s=1,
            rules=RULES,
        )
        sender = AlertSender(broker.url, "alerts")
        tail = Tail(spark, options, Screen(out, in_place=False, limit=20), sender)
        thread = threading.Thread(target=tail.run)
        thread.start()
        try:
            wait_until(lambda: ready(channel, "inbox") == 5 or not thread.is_alive())
            begun = drain(channel, "inbox")
            for window in (3, 4, 5):
                log.deliver(window, 10)
                log.add(window, "publish", vhost="shop", queue="archive")
            log.seal()
            wait_until(lambda: ready(channel, "inbox") == 3 or not thread.is_alive())
            ended = drain(channel, "inbox")
        finally:
            tail.stop()
            thread.join()

    first = {(method.routing_key, json.loads(body)["state"]): body for method, _, body in begun}
    assert first.keys() == {
        ("alert.poison.shop.orders", "begin"),
        ("alert.poison.shop.orders", "end"),
        ("alert.unroutable.shop.events", "begin"),
        ("alert.unroutable.shop.events", "end"),
        ("alert.late.shop.orders", "begin"),
    }
    assert json.loads(first["alert.poison.shop.orders", "begin"])["value"] == 7
    # Half of the messages are logged: three that were seen are six, in ten seconds of a minute.
    assert json.loads(first["alert.unroutable.shop.events", "begin"])["value"] == 36
    late = json.loads(first["alert.late.shop.orders", "begin"])
    assert late["value"] == pytest.approx(2000, rel=0.01)
    assert (late["since"], late["at"]) == ("2026-03-02T08:00:00Z", "2026-03-02T08:00:10Z")
    assert {(one.content_type, one.delivery_mode) for _, one, _ in begun} == {
        ("application/json", 2)
    }
    second = [(method.routing_key, json.loads(body)["state"]) for method, _, body in ended]
    assert second[0] == ("alert.growing.shop.archive", "begin")
    assert sorted(second[1:]) == [
        ("alert.growing.shop.archive", "end"),
        ("alert.late.shop.orders", "end"),
    ]
    shown = out.getvalue()
    assert "late begins: queue orders in vhost shop" in shown
    assert "shop orders: in 0/s" in shown
    assert "old" not in shown


def test_alerts_wait_for_a_broker_that_is_away() -> None:
    sender = AlertSender("amqp://guest:guest@127.0.0.1:1/", "alerts")
    with pytest.raises(LinkError, match="cannot be reached"):
        sender.open()
    sender.add(Alert("r", "latency", True, "v", "q", "", 1.0, 1.0, "ms", 0, 0))
    assert "1 alerts wait to be published" in (sender.send() or "")
    # Not again at once.
    assert sender.send() is None


def test_an_exchange_of_another_type_is_used_as_it_is(tmp_path: Path) -> None:
    with running_broker(tmp_path) as broker, channel_to(broker.url) as channel:
        channel.queue_declare("inbox", exclusive=True)
        channel.queue_bind("inbox", "amq.fanout")
        sender = AlertSender(broker.url, "amq.fanout")
        sender.add(Alert("r", "latency", False, "v", "q", "", 1.0, 1.0, "ms", 0, 0))
        assert sender.send() is None
        sender.close()
        ((_, properties, body),) = drain(channel, "inbox")
        assert json.loads(body)["state"] == "end"
        assert len(properties.message_id) == 32
