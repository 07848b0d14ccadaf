"""What jobs make of unusual lives: few events in, exact rows out."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import SparkSession

from leveret.broker.event_log.schema import Event
from leveret.spark_jobs.generator_load import event
from leveret.spark_jobs.jobs.anomalies import anomalies
from leveret.spark_jobs.jobs.backlog import backlog
from leveret.spark_jobs.jobs.base import Options
from leveret.spark_jobs.jobs.fairness import fairness
from leveret.spark_jobs.jobs.forecast import forecast
from leveret.spark_jobs.jobs.lifecycle import lifecycle
from leveret.spark_jobs.jobs.poison import poison
from leveret.spark_jobs.jobs.quality import quality
from leveret.spark_jobs.jobs.queue_latency import waits
from leveret.spark_jobs.jobs.slow_consumers import slow_consumers
from leveret.spark_jobs.jobs.throttling import throttling
from tests.spark.answers import frame, inputs, rows

SECOND = 1_000_000


def of(msg: int, *steps: str | tuple[str, dict[str, Any]], queue: str = "q") -> list[Event]:
    """A message's life: kinds of events, a microsecond apart."""
    made = []
    for number, step in enumerate(steps):
        ev, fields = (step, {}) if isinstance(step, str) else step
        given = {"vhost": "/", "queue": queue, **fields}
        if ev == "publish" and given["queue"]:
            given.setdefault("routed", 1)
        made.append(event(1000 * msg + number, ev, msg=msg, **given))
    return made


LIVES: list[tuple[str, list[Event], list[tuple[str, str]]]] = [
    ("acked", of(1, "publish", "deliver", "ack"), [("q", "acked")]),
    ("auto-ack", of(2, "publish", ("deliver", {"reason": "auto_ack"})), [("q", "acked")]),
    ("held", of(3, "publish", "deliver"), [("q", "unacked")]),
    (
        "given-back",
        of(4, "publish", "deliver", ("nack", {"reason": "requeue"}), "requeue"),
        [("q", "ready")],
    ),
    (
        "refused",
        of(5, "publish", "deliver", ("reject", {"reason": "discard"})),
        [("q", "rejected")],
    ),
    ("expired", of(6, "publish", "expire"), [("q", "expired")]),
    ("expired-to-dlx", of(7, "publish", "expire", "dead_letter"), [("q", "dead_lettered")]),
    ("overflow", of(8, "publish", ("drop", {"reason": "maxlen"})), [("q", "dropped")]),
    (
        "unroutable",
        of(9, "publish", ("return", {"reason": "NO_ROUTE"}), queue=""),
        [("", "returned")],
    ),
    (
        "two-queues",
        of(
            10,
            ("publish", {"queue": "", "routed": 2}),
            ("enqueue", {"queue": "a"}),
            ("enqueue", {"queue": "b"}),
            ("deliver", {"queue": "b"}),
            ("ack", {"queue": "b"}),
        ),
        [("a", "ready"), ("b", "acked")],
    ),
    (
        # Retrying through a dead-letter exchange brings a message back to where it was.
        "back-through-dlx",
        of(11, "publish", "expire", "dead_letter", "enqueue", "deliver", "ack"),
        [("q", "acked")],
    ),
]


def test_a_message_ends_as_it_ended_last(spark: SparkSession) -> None:
    events = frame(spark, *(one for _, life, _ in LIVES for one in life))
    found = sorted((row["msg"], row["queue"], row["outcome"]) for row in rows(lifecycle(events)))
    expected = sorted(
        (life[0].msg, queue, outcome) for _, life, ends in LIVES for queue, outcome in ends
    )
    assert found == expected


def test_a_life_goes_on_after_a_restart(spark: SparkSession) -> None:
    """Numbers begin anew with each boot: times decide."""
    life = of(1, "publish", "deliver", "requeue", ("deliver", {"redelivered": True}), "ack")
    # The last two are numbers 1 and 2 of another boot.
    before, after = frame(spark, *life[:3], boot="b1"), frame(spark, *life[3:], boot="a2")
    (row,) = rows(lifecycle(after.unionByName(before)))
    assert (row["outcome"], row["deliveries"], row["e2e_us"]) == ("acked", 2, 4)


def test_waiting_counts_first_deliveries_of_known_arrival(spark: SparkSession) -> None:
    first = event(5, "deliver", queue="q", wait_us=4000)
    again = event(6, "deliver", queue="q", wait_us=9000, delivery_count=1)
    recovered = event(7, "deliver", queue="q")
    (row,) = rows(waits(frame(spark, first, again, recovered), Options(window_s=1)))
    assert (row["n"], row["wait_p99_ms"]) == (1, 4.0)


def test_what_the_broker_took_back_is_not_held(spark: SparkSession) -> None:
    who = {"queue": "q", "ctag": "c", "conn": 1, "ch": 1}
    events = [
        event(1, "deliver", msg=1, **who),
        event(2, "deliver", msg=2, **who),
        event(3, "deliver", msg=3, reason="auto_ack", **who),
        event(4, "deliver", msg=4, **who),
        event(5, "ack", msg=1, hold_us=4, **who),
        event(6, "requeue", msg=2, reason="channel_closed", **who),
        event(7, "deliver", msg=5, **who),
        event(8, "requeue", msg=5, reason="consumer_timeout", **who),
        event(9, "deliver", msg=6, **who),
        event(10, "drop", msg=6, reason="queue_deleted", **who),
    ]
    (row,) = rows(slow_consumers(frame(spark, *events)))
    assert (row["deliveries"], row["answers"], row["unacked"]) == (6, 1, 1)
    assert row["times_others"] is None, "there is nobody to compare with"


def test_a_consumer_that_gets_nothing_counts(spark: SparkSession) -> None:
    events = [event(1, "consume", queue="q", ctag=tag, conn=1) for tag in ("a", "b", "c", "d")]
    events += [event(2, "deliver", queue="q", ctag="a", conn=1, msg=number) for number in (1, 2)]
    (row,) = rows(fairness(frame(spark, *events)))
    assert (row["consumers"], row["gini"], row["max_share"]) == (4, 0.75, 1.0)
    assert row["busiest"] == "a"


def test_depth_continues_from_the_last_stamp(spark: SparkSession) -> None:
    """Also where the log begins with a queue that has messages, and where nothing is stamped."""
    events = [
        event(1 * SECOND, "deliver", queue="q", msg=1, depth=101),
        event(2 * SECOND, "publish", queue="q", msg=2, routed=1),
        event(3 * SECOND, "deliver", queue="q", msg=3),
        event(4 * SECOND, "deliver", queue="q", msg=4, depth=99),
        event(4 * SECOND + 1, "publish", queue="q", msg=7, routed=1),
        event(5 * SECOND, "purge", queue="q", n=90),
        # Left for its length: it was ready. After an expire it has been counted already.
        event(6 * SECOND, "dead_letter", queue="q", msg=5, reason="maxlen"),
        event(7 * SECOND, "dead_letter", queue="q", msg=6, reason="expired"),
        # Came back, and once too often.
        event(8 * SECOND, "requeue", queue="q", msg=8, reason="nack"),
        event(8 * SECOND, "dead_letter", queue="q", msg=8, reason="delivery_limit"),
        event(9 * SECOND, "publish", queue="q", msg=9, routed=1),
        # A consumer had one of what goes with the queue; who comes later finds it empty.
        event(10 * SECOND, "drop", queue="q", msg=10, ctag="c", reason="queue_deleted"),
        event(10 * SECOND, "queue_delete", queue="q", n=10),
        event(10 * SECOND, "publish", queue="q", msg=11, routed=1),
    ]
    found = rows(backlog(frame(spark, *events), Options(window_s=1)))
    depths = {row["window"] // SECOND: row["depth"] for row in found}
    assert depths == {1: 101, 2: 102, 3: 101, 4: 100, 5: 10, 6: 9, 8: 9, 9: 10, 10: 1}
    assert sum(row["went"] for row in found) == 3 + 90 + 2


def test_a_sample_stands_for_all_messages(spark: SparkSession) -> None:
    """One of a hundred is logged; a purge counts all."""
    events = [event(second * SECOND, "publish", queue="q", routed=1) for second in (1, 2, 3)]
    # Dropped on disk, unread: nobody knows which they were.
    events.append(event(4 * SECOND, "drop", queue="q", n=50, reason="maxlen"))
    events.append(event(5 * SECOND, "purge", queue="q", n=250))
    found = rows(backlog(frame(spark, *events), Options(window_s=1), {"b": 0.01}))
    depths = {row["window"] // SECOND: row["depth"] for row in found}
    assert depths == {1: 100, 2: 200, 3: 300, 4: 250, 5: 0}
    assert {row["came"] for row in found} == {0, 1}


def test_only_growing_queues_are_forecast(spark: SparkSession) -> None:
    events = []
    for second in range(20):
        at = second * SECOND
        events.append(event(at, "deliver", queue="grows", depth=100 + 10 * second))
        events.append(event(at, "deliver", queue="shrinks", depth=1000 - 10 * second))
        events.append(event(at, "deliver", queue="steady", depth=5 + second % 2))
        # Grew fast, and stands since.
        events.append(event(min(second, 8) * SECOND, "publish", queue="stands", routed=1))
    options = Options(window_s=1, capacity=390)
    (row,) = rows(forecast(inputs(frame(spark, *events), options)))
    assert (row["queue"], row["depth"]) == ("grows", 290)
    assert row["slope"] == pytest.approx(10.0)
    assert row["eta_s"] == pytest.approx(10.0)


def test_silence_is_a_rate_of_zero(spark: SparkSession) -> None:
    """A queue that gets a burst and nothing else: its usual rate is none."""
    steady = [event(second * SECOND, "publish", queue="s", routed=1) for second in range(30)]
    burst = [event(15 * SECOND + number, "publish", queue="b", routed=1) for number in range(50)]
    (row,) = rows(anomalies(frame(spark, *steady, *burst), Options(window_s=1)))
    assert (row["queue"], row["window"], row["value"]) == ("b", 15 * SECOND, 50.0)
    assert row["median"] == 0


def test_earlier_deliveries_are_believed(spark: SparkSession) -> None:
    """The log may begin, or be sampled, in the middle of a message's life."""
    events = [
        event(1, "deliver", queue="q", msg=1, delivery_count=7, redelivered=True),
        event(2, "ack", queue="q", msg=1),
        event(3, "deliver", queue="q", msg=2, delivery_count=1, redelivered=True),
    ]
    (row,) = rows(poison(frame(spark, *events), Options(poison_deliveries=5)))
    assert (row["msg"], row["deliveries"], row["acked"]) == (1, 8, True)


def test_a_log_with_holes_says_so(spark: SparkSession) -> None:
    events = frame(
        spark,
        event(1, "broker_start", attrs={"sample": "0.01"}),
        event(2, "publish"),
        event(3, "publish"),
        event(4, "log_gap", n=500),
        event(5, "publish"),
    )
    holed = events.where("seq != 3").unionByName(events.where("seq = 2"))
    given = inputs(holed)
    malformed = spark.createDataFrame([("f", "{", "no", "0")], given.quarantine.schema)
    found = {row["boot"]: row for row in rows(quality(type(given)(holed, malformed)))}
    boot = found["b"]
    assert (boot["missing"], boot["duplicates"], boot["shed"]) == (1, 1, 500)
    assert (boot["has_start"], boot["has_stop"], boot["sample"]) == (True, False, 0.01)
    assert found[""]["malformed"] == 1


def test_who_is_still_blocked_counts_to_the_end(spark: SparkSession) -> None:
    store = {"who": "queue://a", "by": "store:/"}
    channel = {"who": "channel:1/1", "by": "queue://a"}
    elsewhere = {"who": "channel:2/1", "by": "queue://b"}
    events = [
        event(1 * SECOND, "credit_blocked", attrs=store),
        event(2 * SECOND, "credit_blocked", attrs=channel),
        event(3 * SECOND, "credit_blocked", attrs=elsewhere),
        event(4 * SECOND, "credit_unblocked", attrs=elsewhere, hold_us=SECOND, n=7),
        event(5 * SECOND, "credit_unblocked", attrs=channel, hold_us=3 * SECOND),
        event(6 * SECOND, "credit_blocked", attrs=channel),
        event(9 * SECOND, "broker_stop"),
    ]
    found = {row["who"]: row for row in rows(throttling(frame(spark, *events)))}
    assert found["channel:1/1"]["root"] == "store:/"
    assert (found["channel:1/1"]["times"], found["channel:1/1"]["blocked_s"]) == (2, 6.0)
    assert found["queue://a"]["blocked_s"] == 8.0
    short = found["channel:2/1"]
    assert (short["root"], short["blocked_s"], short["times"]) == ("queue://b", 1.0, 7)


def test_the_delivery_limit_drops_where_there_is_no_dead_letter_exchange(
    spark: SparkSession,
) -> None:
    events = [
        event(1, "deliver", queue="q", msg=1),
        event(2, "requeue", queue="q", msg=1, reason="nack", delivery_count=1),
        event(3, "drop", queue="q", msg=1, reason="delivery_limit"),
        # Of these there is nothing to say.
        event(4, "drop", queue="q", msg=2, reason="maxlen"),
    ]
    (row,) = rows(poison(frame(spark, *events), Options(poison_deliveries=5)))
    assert (row["msg"], row["deliveries"], row["last_at"]) == (1, 1, 3)
    assert row["reasons"] == "delivery_limit, nack"
