"""Findings in words: what an operator should know, said before any table.

Each rule looks at the answers of one or a few jobs and says what it found, with the figures that
show it. Rules are plain functions over rows; thresholds are chosen so that a log of ordinary
traffic yields nothing, since a report that always complains is not read.

Upstream: answers of the jobs, as ``runner.rows_of`` gives them. Downstream: ``report.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from typing import Any, Final

from leveret.spark_jobs.scope import Scope, spoken

Rows = Sequence[Mapping[str, Any]]
Answers = Mapping[str, Rows]

PROBLEM: Final = "problem"
WARNING: Final = "warning"
NOTE: Final = "note"
_SEVERITIES: Final = (PROBLEM, WARNING, NOTE)
# Sampling takes up to 16 neighbours together: fewer than this are few groups, uneven by chance.
_MANY_SAMPLED: Final = 1600


@dataclass(frozen=True, slots=True)
class Finding:
    severity: str
    # The job whose table has the figures.
    job: str
    text: str


def find(answers: Answers, scope: Scope) -> list[Finding]:
    """All findings, the gravest first."""
    found = [finding for rule in _RULES for finding in rule(answers, scope)]
    return sorted(found, key=lambda finding: _SEVERITIES.index(finding.severity))


def _slow_consumers(answers: Answers, scope: Scope) -> Iterator[Finding]:
    for row in answers["slow_consumers"]:
        times = row["times_others"] or 0.0
        if row["answers"] >= 20 and times >= 5 and row["hold_p50_ms"] >= 20:
            yield Finding(
                PROBLEM,
                "slow_consumers",
                f"{_queue(row)}: consumer {row['ctag']} {_client(row, scope)} "
                f"holds messages {times:.0f} times as long as the others: "
                f"{for_ms(row['hold_p50_ms'])} at the median, {for_ms(row['hold_p99_ms'])} at p99. "
                f"It has {share_of(row['hold_share'])} of all the time that messages were held.",
            )
        elif row["unacked"] >= 1000 and row["unacked"] >= 0.5 * row["deliveries"]:
            yield Finding(
                WARNING,
                "slow_consumers",
                f"{_queue(row)}: consumer {row['ctag']} {_client(row, scope)} was given "
                f"{scope.count(row['deliveries'], 'message')} and has not answered "
                f"{scope.figure(row['unacked'])} of them.",
            )


def _poison(answers: Answers, scope: Scope) -> Iterator[Finding]:
    by_queue = sorted(answers["poison"], key=lambda row: (*_place(row), -row["deliveries"]))
    for _, group in groupby(by_queue, _place):
        rows = list(group)
        for row in rows[:5]:
            within = row["last_at"] - row["first_at"]
            end = "never acked"
            # A dead-letter exchange may bring a message back, so that it is acked after all.
            if row["acked"]:
                end = "acked in the end"
            elif "delivery_limit" in row["reasons"]:
                end = "then removed by the delivery limit"
            elif "rejected" in row["reasons"]:
                end = "then rejected and dead-lettered"
            yield Finding(
                PROBLEM,
                "poison",
                f"{_queue(row)}: message {row['msg']} was delivered {row['deliveries']} times to "
                f"{_count(row['consumers'], 'consumer')} from {scope.time(row['first_at'])} on, "
                f"within {for_ms(1000 * within.total_seconds())} ({end}). It looks like a "
                f"poison message.",
            )
        if len(rows) > 5:
            yield Finding(
                PROBLEM,
                "poison",
                f"{_queue(rows[0])}: {scope.figure(len(rows) - 5)} more messages were delivered "
                f"again and again.",
            )


def _odd_moments(answers: Answers, scope: Scope) -> Iterator[Finding]:
    """Bursts and rises of waiting; both of one queue are told in one sentence."""
    by_queue: dict[tuple[str, str], dict[str, list[Mapping[str, Any]]]] = {}
    for row in answers["anomalies"]:
        is_wait = row["metric"].startswith("p99 wait")
        floor = 100.0 if is_wait else scope.least_rate
        if row["score"] > 0 and row["value"] >= max(floor, 3 * row["median"]):
            series = by_queue.setdefault((row["vhost"], row["queue"]), {})
            series.setdefault("wait" if is_wait else "rate", []).append(row)
    for series in by_queue.values():
        waits, rates = series.get("wait", []), series.get("rate", [])
        row = (waits or rates)[0]
        parts = []
        if waits:
            worst = max(waits, key=lambda one: one["value"])
            parts.append(
                f"p99 wait rose from {for_ms(worst['median'])} to {for_ms(worst['value'])} "
                f"{_when(waits, worst, scope)}{_who_held(answers, worst, scope)}"
            )
        if rates:
            peak = max(rates, key=lambda one: one["value"])
            parts.append(
                f"{scope.rate(peak['value'])} messages a second came in at "
                f"{scope.time(peak['window'])}, usually {scope.rate(peak['median'])}"
            )
        yield Finding(
            PROBLEM if waits else WARNING, "anomalies", f"{_queue(row)}: {'; '.join(parts)}."
        )


def _when(rows: Rows, worst: Mapping[str, Any], scope: Scope) -> str:
    """The windows around the worst one that follow each other, and how often there were more."""
    windows = {int(row["window"].timestamp() // scope.window_s): row["window"] for row in rows}
    # Of numbers that follow each other each is as far from its place as the others.
    numbered = groupby(enumerate(sorted(windows)), lambda one: one[1] - one[0])
    runs = [[windows[number] for _, number in run] for _, run in numbered]
    run = next(run for run in runs if worst["window"] in run)
    text = f"at {scope.time(run[0])}"
    if len(run) > 1:
        text = f"between {scope.time(run[0])} and {scope.time(run[-1])}"
    return text + (f" (and {_count(len(runs) - 1, 'other time')})" if len(runs) > 1 else "")


def _who_held(answers: Answers, worst: Mapping[str, Any], scope: Scope) -> str:
    """The consumer that holds most, if it can have been there in the worst window."""
    begin, end = worst["window"], worst["window"] + timedelta(seconds=scope.window_s)
    others = {
        row["boot"]
        for row in answers["quality"]
        if row["boot"] and not (row["first_at"] < end and begin <= row["last_at"])
    }
    for row in answers["slow_consumers"]:
        is_slow = (row["times_others"] or 0) >= 5 and (row["hold_share"] or 0) >= 0.5
        if is_slow and _place(row) == _place(worst) and row["boot"] not in others:
            share = share_of(row["hold_share"])
            return (
                f" while consumer {row['ctag']} held {share} of deliveries (by time held, over "
                f"the whole time)"
            )
    return ""


def _growth(answers: Answers, scope: Scope) -> Iterator[Finding]:
    went: dict[tuple[str, str], int] = {}
    for row in answers["backlog"]:
        key = (row["vhost"], row["queue"])
        went[key] = went.get(key, 0) + row["went"]
    for row in answers["forecast"]:
        grown = row["slope"] * scope.span_s / 2
        # Noise has a slope, too; what counts is growth that makes most of the depth.
        if row["depth"] < 100 or grown < 0.3 * row["depth"] or row["eta_s"] > 90 * 86_400:
            continue
        idle = "" if went.get((row["vhost"], row["queue"])) else " and nobody consumes it"
        yield Finding(
            WARNING,
            "forecast",
            f"{_queue(row)} grows by {spoken(row['slope'])} messages a second{idle}; "
            f"{row['depth']:,} are waiting. At this rate it holds {scope.capacity:,} (--capacity) "
            f"in {for_s(row['eta_s'])} ({for_s(row['eta_low_s'])} to {for_s(row['eta_high_s'])}).",
        )


def _unroutable(answers: Answers, scope: Scope) -> Iterator[Finding]:
    def place(row: Mapping[str, Any]) -> tuple[str, str, str]:
        return row["vhost"], row["exchange"], row["user"]

    for (vhost, exchange, user), group in groupby(sorted(answers["unroutable"], key=place), place):
        rows = list(group)
        dropped = sum(row["dropped"] for row in rows)
        returned = sum(row["returned"] for row in rows)
        name = f"exchange {exchange}" if exchange else "the default exchange"
        yield Finding(
            PROBLEM if dropped else WARNING,
            "unroutable",
            f"{name} in vhost {vhost}: {scope.count(dropped + returned, 'message')} of user {user} "
            f"reached no queue ({_keys(rows)}); {scope.figure(dropped)} were "
            f"dropped without notice, {scope.figure(returned)} returned.",
        )


def _dead_letters(answers: Answers, scope: Scope) -> Iterator[Finding]:
    def place(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
        return row["vhost"], row["queue"], row["exchange"], row["reason"]

    # Poison messages are findings already.
    told = Counter(
        (*_place(row), reason) for row in answers["poison"] for reason in row["reasons"].split(", ")
    )
    for key, group in groupby(sorted(answers["dead_letters"], key=place), place):
        rows = list(group)
        vhost, queue, exchange, reason = key
        lost = [row for row in rows if row["lost"]]
        if lost:
            yield Finding(
                PROBLEM,
                "dead_letters",
                f"{_queue(rows[0])}: {scope.count(sum(row['lost'] for row in lost), 'message')} "
                f"went to dead-letter exchange {exchange or '(default)'} ({reason}) and reached no "
                f"queue there ({_keys(lost)}).",
            )
        count = sum(row["n"] for row in rows)
        if count > told[vhost, queue, reason]:
            yield Finding(
                WARNING,
                "dead_letters",
                f"{_queue(rows[0])}: {scope.count(count, 'message')} dead-lettered ({reason}) to "
                f"exchange {exchange or '(default)'} ({_keys(rows)}).",
            )


def _unfair(answers: Answers, scope: Scope) -> Iterator[Finding]:
    for row in answers["fairness"]:
        if row["deliveries"] < (_MANY_SAMPLED if scope.is_sampled else 100):
            continue
        if row["consumers"] >= 2 and (row["gini"] or 0) >= 0.4:
            yield Finding(
                WARNING,
                "fairness",
                f"{_queue(row)}: of {row['consumers']} consumers, {row['busiest']} got "
                f"{share_of(row['max_share'])} of {scope.count(row['deliveries'], 'delivery')} "
                f"(Gini {row['gini']:.2f}).",
            )


def _churn(answers: Answers, scope: Scope) -> Iterator[Finding]:
    for row in answers["churn"]:
        if row["short"] >= 20 and row["short"] >= 0.5 * row["opens"]:
            yield Finding(
                WARNING,
                "churn",
                f"user {row['user']} from {row['host']} opened {row['opens']:,} connections, "
                f"{row['short']:,} of them for a moment only (median "
                f"{for_ms(1000 * row['median_life_s'])}). Keep connections open.",
            )
        if row["refused"] >= 5:
            yield Finding(
                WARNING,
                "churn",
                f"{_count(row['refused'], 'login')} as {row['user']} from {row['host']} were "
                f"refused.",
            )


def _unused(answers: Answers, scope: Scope) -> Iterator[Finding]:
    if scope.is_sampled:
        # What nothing is logged of may be used all the time.
        return
    idle = [row for row in answers["unused"] if row["last_used"] is None and row["certain"]]
    for vhost, group in groupby(sorted(idle, key=lambda row: row["vhost"]), _vhost):
        rows = list(group)
        names = [f"{row['kind']} {row['name']}" for row in rows]
        shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        yield Finding(NOTE, "unused", f"vhost {vhost}: never used in this time: {shown}.")


def _throttling(answers: Answers, scope: Scope) -> Iterator[Finding]:
    by_root: dict[str, list[Mapping[str, Any]]] = {}
    for row in answers["throttling"]:
        if row["blocked_s"] >= max(0.5, 0.005 * scope.span_s):
            by_root.setdefault(row["root"], []).append(row)
    for root, rows in by_root.items():
        longest = max(rows, key=lambda row: (row["path"].count("<-"), row["blocked_s"]))
        names = ", ".join(sorted({row["who"] for row in rows})[:4])
        yield Finding(
            WARNING,
            "throttling",
            f"{root} was the bottleneck: {_count(len(rows), 'sender')} behind it stood still "
            f"({names}), {longest['who']} for {for_s(longest['blocked_s'])} in "
            f"{_count(longest['times'], 'stop')} ({longest['path']}).",
        )


def _quality(answers: Answers, scope: Scope) -> Iterator[Finding]:
    rows = answers["quality"]
    last = max((row["first_at"] for row in rows if row["first_at"]), default=None)
    for row in rows:
        if row["malformed"]:
            yield Finding(
                WARNING, "quality", f"{_count(row['malformed'], 'line')} of the log are malformed."
            )
        if row["missing"] or row["duplicates"]:
            yield Finding(
                WARNING,
                "quality",
                f"boot {row['boot']}: {row['missing']:,} lines of the log are missing and "
                f"{row['duplicates']:,} are there twice; figures are off by as much.",
            )
        if row["shed"]:
            yield Finding(
                WARNING,
                "quality",
                f"boot {row['boot']}: the broker shed {_count(row['shed'], 'event')} to keep up; "
                f"figures are too low by as much.",
            )
        if row["boot"] and not row["has_stop"] and row["first_at"] != last:
            yield Finding(
                WARNING,
                "quality",
                f"boot {row['boot']} ended at {scope.time(row['last_at'])} without stopping in "
                f"order: a crash, a kill or a power cut.",
            )


_RULES: Final[tuple[Callable[[Answers, Scope], Iterator[Finding]], ...]] = (
    _odd_moments,
    _slow_consumers,
    _poison,
    _unroutable,
    _dead_letters,
    _growth,
    _throttling,
    _unfair,
    _churn,
    _quality,
    _unused,
)


def _place(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["vhost"], row["queue"]


def _client(row: Mapping[str, Any], scope: Scope) -> str:
    """Whose a consumer is: the address is that of its connection, if the log has its beginning."""
    peer = scope.peers.get((row["boot"], row["conn"]))
    place = f"at {peer}" if peer else f"connection {row['conn']}"
    return f"(user {row['user']}, {place})"


def _vhost(row: Mapping[str, Any]) -> str:
    return str(row["vhost"])


def _queue(row: Mapping[str, Any]) -> str:
    return f"queue {row['queue']} in vhost {row['vhost']}"


def _keys(rows: Rows) -> str:
    """The routing keys with most messages."""
    keys = [row["rk"] for row in sorted(rows, key=lambda row: -row["n"])]
    shown = ", ".join(f"'{key}'" for key in keys[:3]) + (", …" if len(keys) > 3 else "")
    return f"{_count(len(keys), 'key')}: {shown}"


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def share_of(share: float | None) -> str:
    """In percent; a small one with a digit more, so that it is not nothing."""
    percent = 100 * (share or 0)
    return f"{percent:.{1 if 0 < percent < 9.95 else 0}f} %"


def for_ms(value: float) -> str:
    """A length of time as one says it."""
    if value < 1:
        return f"{value:.2f} ms"
    return f"{value:.0f} ms" if value < 1000 else for_s(value / 1000)


def for_s(seconds: float) -> str:
    """The same of seconds."""
    for size, unit in ((86_400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
