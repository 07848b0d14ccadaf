"""When alerts begin and end, and what rules may say."""

from __future__ import annotations

from pathlib import Path

import pytest

from leveret.spark_jobs import cli
from leveret.spark_jobs.alert_rules import (
    DEFAULT_RULES,
    KINDS,
    Alert,
    Rule,
    RuleError,
    Watch,
    parse_rules,
)
from leveret.spark_jobs.tail_windows import Reading

WINDOW_US = 10_000_000


def reading(
    window: int = 0,
    *,
    vhost: str = "shop",
    queue: str = "orders",
    exchange: str = "",
    gave: int = 1,
    wait: float | None = 0.0,
    depth: int | None = 0,
    slope: float = 0.0,
    deliveries: int = 0,
    unroutable: float = 0.0,
) -> Reading:
    return Reading(
        window=window * WINDOW_US,
        vhost=vhost,
        queue=queue,
        exchange=exchange,
        came_per_s=1.0,
        went_per_s=1.0,
        gave=gave,
        wait_p99_ms=wait,
        depth=depth,
        slope=slope,
        most_deliveries=deliveries,
        unroutable_per_minute=unroutable,
    )


def latency(at: float = 100.0, until: float = 50.0, windows: int = 1, queue: str = "*") -> Rule:
    return Rule("latency", KINDS["latency"], at, until, windows, queue=queue)


def course(rule: Rule, values: list[float | None]) -> list[tuple[int, str]]:
    """In which windows an alert begins and ends, for waits of these lengths."""
    watch = Watch([rule])
    told = []
    for window, value in enumerate(values):
        for alert in watch.look([reading(window, wait=value)]):
            told.append((window, "begins" if alert.begins else "ends"))
    return told


@pytest.mark.parametrize(
    ("windows", "values", "told"),
    [
        pytest.param(1, [10, 99, 100, 500, 10], [(2, "begins"), (4, "ends")], id="once-each"),
        pytest.param(1, [100, 70, 120, 50, 99], [(0, "begins")], id="between-nothing-changes"),
        pytest.param(2, [100, 10, 100, 10, 100], [], id="not-in-a-row"),
        pytest.param(2, [100, 100, 10, 60, 10, 10], [(1, "begins"), (5, "ends")], id="in-a-row"),
        pytest.param(1, [100, 10, 100], [(0, "begins"), (1, "ends"), (2, "begins")], id="again"),
        pytest.param(2, [100, None, 100, None], [(2, "begins")], id="silence-says-nothing"),
    ],
)
def test_hysteresis(windows: int, values: list[float | None], told: list[tuple[int, str]]) -> None:
    assert course(latency(windows=windows), values) == told


def test_a_queue_that_gives_nothing_out_has_not_recovered() -> None:
    watch = Watch([latency()])
    assert len(watch.look([reading(0, wait=200, depth=10)])) == 1
    assert watch.look([reading(1, wait=None, gave=0, depth=10)]) == []
    (ended,) = watch.look([reading(2, wait=None, gave=0, depth=0)])
    assert not ended.begins


def test_queues_are_judged_by_themselves() -> None:
    watch = Watch([latency(windows=2)])
    assert watch.look([reading(0, wait=200), reading(0, queue="mail", wait=200)]) == []
    (alert,) = watch.look([reading(1, wait=200), reading(1, queue="mail", wait=1)])
    assert (alert.vhost, alert.queue, alert.since, alert.at) == ("shop", "orders", 0, WINDOW_US)
    assert watch.active == {("shop", "orders", "")}


def test_nothing_is_kept_of_what_is_well() -> None:
    watch = Watch(DEFAULT_RULES)
    for window in range(3):
        watch.look([reading(window, queue=f"q{number}") for number in range(50)])
    assert watch._courses == {}


@pytest.mark.parametrize(
    ("kind", "bad", "value"),
    [
        pytest.param("latency", reading(wait=6_000.0), 6_000, id="latency"),
        pytest.param("backlog_slope", reading(slope=50.0, depth=500), 50, id="backlog-slope"),
        pytest.param("poison", reading(deliveries=5), 5, id="poison"),
        pytest.param(
            "unroutable", reading(queue="", exchange="x", unroutable=30.0), 30, id="unroutable"
        ),
    ],
)
def test_defaults_find_each_kind(kind: str, bad: Reading, value: float) -> None:
    watch = Watch(DEFAULT_RULES)
    told = [alert for _ in range(KINDS[kind].windows) for alert in watch.look([bad])]
    (alert,) = told
    assert (alert.kind, alert.value, alert.begins) == (kind, value, True)
    name = bad.queue or bad.exchange
    assert alert.routing_key == f"alert.{kind}.shop.{name}"
    assert name in alert.text
    assert KINDS[kind].unit in alert.text


def test_a_quiet_queue_alerts_nobody() -> None:
    watch = Watch(DEFAULT_RULES)
    assert [watch.look([reading(window, wait=20.0, deliveries=1)]) for window in range(9)] == [
        [] for _ in range(9)
    ]


def test_routing_keys_are_cut_to_what_amqp_can_carry() -> None:
    alert = Alert("r", "latency", True, "v", "ä" * 200, "", 1.0, 1.0, "ms", 0, 0)
    assert len(alert.routing_key.encode()) <= 255
    assert alert.routing_key.startswith("alert.r.v.ää")


def test_rules_in_toml() -> None:
    rules = parse_rules(
        """
        [[rule]]
        kind = "latency"
        at = 1000

        [[rule]]
        name = "orders-late"
        kind = "latency"
        at = 200
        until = 150
        windows = 4
        vhost = "shop"
        queue = "orders*"

        [[rule]]
        kind = "unroutable"
        exchange = "shop.*"
        """
    )
    assert [rule.name for rule in rules] == ["latency", "orders-late", "unroutable"]
    assert (rules[0].at, rules[0].until, rules[0].windows) == (1000, 500, 2)
    assert (rules[1].until, rules[1].windows) == (150, 4)
    assert rules[1].concerns(reading(queue="orders.eu"))
    assert not rules[1].concerns(reading(queue="mail"))
    assert not rules[1].concerns(reading(vhost="other"))
    assert rules[2].concerns(reading(queue="", exchange="shop.orders"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        pytest.param("[[rule]", "not TOML", id="toml"),
        pytest.param("", r"\[\[rule\]\]", id="empty"),
        pytest.param("[latency]\nat = 1", r"\[\[rule\]\]", id="other-table"),
        pytest.param("[[rule]]\nat = 1", "kind is one of latency, backlog_slope", id="no-kind"),
        pytest.param('[[rule]]\nkind = "speed"', "kind is one of", id="unknown-kind"),
        pytest.param('[[rule]]\nkind = "latency"\nat = "1s"', "at is a number", id="text"),
        pytest.param('[[rule]]\nkind = "latency"\nat = nan', "at is a number", id="nan"),
        pytest.param(
            '[[rule]]\nkind = "latency"\nat = 1\nuntil = 2', "would never rest", id="until"
        ),
        pytest.param('[[rule]]\nkind = "latency"\nwindows = 0', "from 1 on", id="windows"),
        pytest.param('[[rule]]\nkind = "latency"\nname = "a.b"', "routing key", id="name"),
        pytest.param('[[rule]]\nkind = "latency"\nabove = 3', "no 'above'", id="unknown-key"),
        pytest.param('[[rule]]\nkind = "latency"\nexchange = "x"', "no 'exchange'", id="subject"),
        pytest.param('[[rule]]\nkind = "latency"\nqueue = 3', "a pattern", id="pattern"),
        pytest.param('[[rule]]\nkind = "poison"\n' * 2, "two rules are called", id="same-name"),
    ],
)
def test_wrong_rules(text: str, told: str) -> None:
    with pytest.raises(RuleError, match=told):
        parse_rules(text)


def test_a_wrong_file_is_told_before_spark_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nkind = "speed"\n', encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        cli.main(["tail", "--log", "log", "--rules", str(rules)])
    assert ended.value.code == 2
    assert "rule 1: kind is one of latency" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        cli.main(["tail", "--log", "log", "--rules", str(tmp_path / "absent")])
    assert "cannot read it" in capsys.readouterr().err
