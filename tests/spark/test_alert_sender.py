"""Alerts on their way, above all when the end comes: of the broker, or of ``tail``."""

from __future__ import annotations

import io
import math
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leveret.spark_jobs import alert_sender, tail
from leveret.spark_jobs.alert_rules import Alert
from leveret.spark_jobs.alert_sender import AlertSender
from leveret.spark_jobs.amqp_link import LinkLost
from leveret.spark_jobs.lake import Selection
from leveret.spark_jobs.tail import Tail, TailOptions
from leveret.spark_jobs.tail_screen import Screen
from tests.spark.amqp import channel_to, drain, wait_until
from tests.support.broker_process import running_broker

NOWHERE = "amqp://guest:guest@127.0.0.1:1/"
PATIENCE_S = 30.0


def alert(queue: str = "q", *, begins: bool = True) -> Alert:
    return Alert("r", "latency", begins, "v", queue, "", 1.0, 1.0, "ms", 0, 0)


def test_ids_fit_and_tell_alerts_apart() -> None:
    wide, long = "队列" * 42, "q" * 250
    queues = (f"{wide}1", f"{wide}2", f"{long}1", f"{long}2", "q")
    alerts = [alert("q", begins=False), *map(alert, queues)]
    made = [alert_sender._properties(one) for one in [*alerts, alert("q")]]
    for properties in made:
        properties.encode()
    ids = [properties.message_id for properties in made]
    assert len(set(ids)) == len(alerts)
    assert ids[-1] == ids[-2]


def test_the_end_is_one_more_try_and_tells_what_is_left() -> None:
    sender = AlertSender(NOWHERE, "alerts")
    sender.add(alert())
    assert "wait to be published" in (sender.send() or "")
    assert sender.send() is None, "it is not time yet"
    sender.add(alert("other"))
    assert "2 alerts were not sent: amqp://" in (sender.finish() or "")
    assert AlertSender(NOWHERE, "alerts").finish() is None


def test_a_broker_that_is_back_at_the_end_gets_them(tmp_path: Path) -> None:
    with running_broker(tmp_path) as broker, channel_to(broker.url) as channel:
        channel.queue_declare("inbox", exclusive=True)
        channel.queue_bind("inbox", "amq.topic", "alert.#")
        sender = AlertSender(NOWHERE, "amq.topic")
        sender.add(alert())
        assert sender.send() is not None
        sender._url = broker.url
        # Announced long ago: Spark was at work on its last batch.
        sender._give_up_at = time.monotonic() - 1
        assert sender.finish() is None
        assert len(drain(channel, "inbox")) == 1


def test_a_broker_that_does_not_answer_is_not_waited_for_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is short of memory, which takes no messages for as long as that lasts."""
    monkeypatch.setattr(alert_sender, "_STOP_S", 0.3)
    with running_broker(tmp_path) as broker:
        sender = AlertSender(broker.url, "alerts")
        sender.open()
        broker.send_signal(signal.SIGSTOP)
        try:
            sender.add(alert())
            told: list[str | None] = []
            thread = threading.Thread(target=lambda: told.append(sender.send()), daemon=True)
            thread.start()
            publisher = sender._publisher
            assert publisher is not None
            wait_until(lambda: publisher._unconfirmed)
            sender.hurry()
            wait_until(lambda: sender._publisher is None)
        finally:
            # So that the connection, which is being closed, ends in order.
            broker.send_signal(signal.SIGCONT)
        thread.join(PATIENCE_S)
        assert "1 alerts wait" in (told[0] or "")
        # Not once more: that was the last try.
        assert "1 alerts were not sent" in (sender.finish() or "")


class Query:
    """A query of Spark's whose thread is about to look at a batch when it is stopped."""

    isActive = True

    def __init__(self) -> None:
        self.on_batch: Callable[[Any, int], None] | None = None
        self.is_stopped = False

    def foreachBatch(self, on_batch: Callable[[Any, int], None]) -> Query:
        self.on_batch = on_batch
        return self

    def trigger(self, processingTime: str) -> Query:
        return self

    def start(self) -> Query:
        return self

    def exception(self) -> None:
        return None

    def stop(self) -> None:
        """Waits for the thread, as Spark does."""
        assert self.on_batch is not None
        thread = threading.Thread(target=self.on_batch, args=(None, 1), daemon=True)
        thread.start()
        thread.join(5)
        self.is_stopped = not thread.is_alive()

    @property
    def writeStream(self) -> Query:
        return self


def test_a_stop_does_not_wait_for_who_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    query = Query()
    monkeypatch.setattr(tail, "segments_of", lambda spark, log: log)
    monkeypatch.setattr(tail, "read_segments", lambda *given: query)
    out = io.StringIO()
    sender = AlertSender(NOWHERE, "alerts")
    answers = iter([None])

    def open_once() -> None:
        for _ in answers:
            return
        raise LinkLost("it is away")

    monkeypatch.setattr(sender, "open", open_once)
    spark: Any = None
    screen = Screen(out, in_place=False, limit=1)
    follower = Tail(spark, TailOptions("log", Selection()), screen, sender)
    sender.add(alert())
    follower.stop()
    assert sender._give_up_at < math.inf
    follower.run()
    assert query.is_stopped
    assert "1 alerts were not sent: it is away" in out.getvalue()
