"""What is declared and not used: nothing that may have been used is called so."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import SparkSession

from leveret.broker.event_log.schema import Event
from leveret.spark_jobs.generator_load import event
from leveret.spark_jobs.jobs import JOBS
from leveret.spark_jobs.jobs.base import Inputs, Options
from leveret.spark_jobs.jobs.unused import unused
from leveret.spark_jobs.lake import Selection, select
from tests.spark.answers import frame, quarantine, rows


def answer(job: str, given: Inputs) -> list[dict[str, Any]]:
    return rows(JOBS[job].run(given))


def told(spark: SparkSession, *events: Event) -> dict[tuple[str, str], dict[str, Any]]:
    """Answers by kind and name, of a log in which every message is told."""
    answer = unused(frame(spark, *events), {"a": 1.0, "b": 1.0})
    return {(row["kind"], row["name"]): row for row in rows(answer)}


def used(found: dict[tuple[str, str], dict[str, Any]], kind: str) -> set[str]:
    return {
        name for (of, name), row in found.items() if of == kind and row["last_used"] is not None
    }


def declare(exchange: str, type_: str, **attrs: str) -> Event:
    return event(1, "exchange_declare", exchange=exchange, attrs={"type": type_, **attrs})


def test_unused_knows_patterns_and_deletions(spark: SparkSession) -> None:
    def bind(exchange: str, key: str) -> Event:
        return event(3, "bind", exchange=exchange, rk=key, queue="q")

    patterns = ["a.*", "a.#", "#", "*", "a.b", "a.b.c", "#.c", "a.(b)", ""]
    events = [
        # Not durable, in an earlier run of the broker.
        event(0, "queue_declare", queue="forgotten", boot="a"),
        declare("t", "topic"),
        declare("f", "fanout"),
        declare("d", "direct"),
        declare("gone", "direct"),
        event(2, "exchange_delete", exchange="gone"),
        event(1, "queue_declare", queue="again"),
        event(2, "queue_delete", queue="again"),
        event(3, "queue_declare", queue="again"),
        event(2, "bind", exchange="d", rk="x", queue="again"),
        *(bind("t", pattern) for pattern in patterns),
        bind("f", "anything"),
        bind("d", "k"),
        bind("d", "l"),
        event(10, "publish", exchange="t", rk="a.b", routed=1, queue="q"),
        event(11, "publish", exchange="f", rk="", routed=1, queue="q"),
        event(12, "publish", exchange="d", rk="k", routed=1, queue="q"),
        # From exchange to exchange, and to the alternate one.
        event(1, "exchange_declare", exchange="d2", attrs={"alternate-exchange": "rest"}),
        *(
            event(1, "exchange_declare", exchange=name)
            for name in ("e1", "e2", "e3", "rest", "no", "lone")
        ),
        event(3, "bind", exchange="t", rk="a.#", attrs={"destination": "e1"}),
        event(3, "bind", exchange="t", rk="b.#", attrs={"destination": "no"}),
        event(3, "bind", exchange="e1", rk="a.b", attrs={"destination": "e2"}),
        event(3, "bind", exchange="e2", rk="a.b", attrs={"destination": "e3"}),
        event(3, "bind", exchange="e3", rk="a.b", queue="q"),
        event(13, "publish", exchange="d2", rk="a", routed=1, queue="q"),
    ]
    found = told(spark, *events)
    assert ("exchange", "gone") not in found
    assert ("queue", "forgotten") not in found
    assert ("binding", "d -> again (x)") not in found, "it ended with the queue"
    assert found["queue", "again"]["last_used"] is None
    # A key of CC would be told nowhere.
    assert [key for key, row in found.items() if not row["certain"]] == [
        ("binding", "t -> no (b.#)")
    ]
    matching = {f"t -> q ({pattern})" for pattern in ("a.*", "a.#", "#", "a.b")}
    assert used(found, "binding") == matching | {
        *("f -> q (anything)", "d -> q (k)"),
        *("t -> e1 (a.#)", "e1 -> e2 (a.b)", "e2 -> e3 (a.b)", "e3 -> q (a.b)"),
    }
    assert used(found, "exchange") == set("t f d e1 e2 e3 no d2 rest".split())
    assert used(found, "queue") == set()
    assert found["exchange", "e3"]["last_used"] == 10


def test_a_sample_cannot_tell_what_is_unused(spark: SparkSession) -> None:
    """And of one queue only what is its own is told, with the use that others make of it."""
    events = frame(
        spark,
        event(1, "exchange_declare", exchange="x", attrs={"type": "direct"}),
        *(event(1, "queue_declare", queue=name, vhost="/") for name in ("q", "other")),
        event(2, "bind", exchange="x", rk="k", queue="q", vhost="/"),
        event(2, "bind", exchange="x", rk="o", queue="other", vhost="/"),
        event(3, "publish", exchange="x", rk="k", routed=2, vhost="/", conn=1),
        event(4, "consume", queue="q", vhost="/", conn=2),
        *(event(5, "connection_open", vhost="/", conn=conn, peer=f"h{conn}:1") for conn in (1, 2)),
        event(6, "enqueue", queue="q", exchange="x", rk="k", vhost="/"),
    )
    chosen = select(events, Selection(vhost="/", queue="q"))
    given = Inputs(chosen, quarantine(spark), Options(), {"b": 0.5}, events, "/", "q")
    assert sorted(
        (r["kind"], r["name"], r["last_used"], r["certain"]) for r in answer("unused", given)
    ) == [
        ("binding", "x -> q (k)", 6, False),
        ("queue", "q", 6, False),
    ]
    assert [(r["exchange"], r["rk"], r["n"]) for r in answer("hot_keys", given)] == [("x", "k", 1)]
    assert [(r["host"], r["opens"]) for r in answer("churn", given)] == [("h2", 1)]
    (quality_row,) = answer("quality", given)
    assert (quality_row["events"], quality_row["missing"]) == (10, 0)


def test_binding_keys_are_no_patterns_of_another_kind(spark: SparkSession) -> None:
    """Least of all with what ends a quotation in a regular expression."""
    keys = ["logs\\Errors", "C:\\Events\\x.#", "end\\", "\\E", "\\Q.\\E", "a+", "$"]
    bound = [event(2, "bind", exchange="t", rk=key, queue="q") for key in keys]
    given = ["logs\\Errors", "C:\\Events\\x.y", "end\\", "aa"]
    sent = [event(3, "publish", exchange="t", rk=key, routed=2) for key in given]
    found = told(spark, declare("t", "topic"), *bound, *sent)
    assert used(found, "binding") == {f"t -> q ({key})" for key in keys[:3]}


def test_keys_of_cc_are_seen_by_where_messages_went(spark: SparkSession) -> None:
    events = [
        declare("d", "direct"),
        *(
            event(2, "bind", exchange="d", rk=key, queue=queue)
            for key, queue in (
                *(("primary", "q"), ("beside", "q"), ("copy", "q2")),
                *(("hidden", "q3"), ("nobody", "q4")),
            )
        ),
        event(2, "bind", exchange="d", rk="maybe", attrs={"destination": "e"}),
        # To two queues, one of them by CC.
        event(3, "publish", exchange="d", rk="primary", msg=1, routed=2),
        *(event(3, "enqueue", exchange="d", rk="primary", msg=1, queue=q) for q in ("q", "q2")),
        # To one, whose key is in BCC.
        event(4, "publish", exchange="d", rk="other", msg=2, routed=1, queue="q3"),
    ]
    found = told(spark, *events)
    # What came to q came by its key: whether another one led there as well is no loss.
    assert used(found, "binding") == {"d -> q (primary)", "d -> q2 (copy)", "d -> q3 (hidden)"}
    uncertain = [name for (_, name), row in found.items() if not row["certain"]]
    assert uncertain == ["d -> e (maybe)"], "an exchange that takes a message is not told"


def test_policies_name_alternate_exchanges(spark: SparkSession) -> None:
    def policy(exchange: str, vhost: str) -> Event:
        definition = f'{{"alternate-exchange":"{exchange}"}}'
        attrs = {"name": "p", "pattern": "^orders", "apply-to": "exchanges", "priority": "0"}
        attrs["definition"] = definition
        return event(2, "audit", vhost=vhost, reason="policy.set", attrs=attrs)

    events = [
        *(declare(name, "topic") for name in ("orders", "rest", "archive", "spare")),
        event(2, "bind", exchange="rest", rk="order.*", queue="q"),
        event(2, "bind", exchange="rest", rk="#", attrs={"destination": "archive"}),
        policy("rest", ""),
        policy("spare", "another"),
        event(2, "audit", reason="policy.set", attrs={"definition": '{"max-length":5}'}),
        event(3, "publish", exchange="orders", rk="order.x", msg=1, routed=1, queue="q"),
    ]
    found = told(spark, *events)
    assert used(found, "exchange") == {"orders", "rest", "archive"}
    assert used(found, "binding") == {"rest -> q (order.*)", "rest -> archive (#)"}


def test_what_a_plug_in_routes_by_is_not_known(spark: SparkSession) -> None:
    events = [
        *(declare(name, "x-consistent-hash") for name in ("hash", "idle")),
        *(event(2, "bind", exchange=name, rk="10", queue="q") for name in ("hash", "idle")),
        event(3, "publish", exchange="hash", rk="customer-7", msg=1, routed=2),
    ]
    assert used(told(spark, *events), "binding") == {"hash -> q (10)"}


@pytest.mark.parametrize("hole", ["none", "log_gap", pytest.param("line", marks=pytest.mark.slow)])
def test_a_log_with_holes_cannot_tell_what_is_unused(spark: SparkSession, hole: str) -> None:
    """Of a virtual host, too: its lines alone are never all there are."""
    events = [event(1, "queue_declare", vhost=vhost, queue="q") for vhost in ("/", "shop", "/")]
    if hole == "log_gap":
        events.append(event(2, "log_gap", n=3))
    log = frame(spark, *events)
    if hole == "line":
        log = log.where("seq != 2")
    part = select(log, Selection(vhost="/"))
    given = Inputs(part, quarantine(spark), everything=log, vhost="/")
    assert [row["certain"] for row in answer("unused", given)] == [hole == "none"]
