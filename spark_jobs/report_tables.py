"""Tables of the report: of each answer, the columns that people compare, in units they think in.

Answers are made for programs: a row for every window, names of boots, milliseconds. A page has room
for about nine columns and patience for fifteen rows, so where an answer has a row per window there
is one per queue or vhost here. The lake has the whole.

Upstream: answers of the jobs. Downstream: ``report.py``, which writes the cells.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from leveret.spark_jobs.findings import Rows, for_ms, for_s, share_of
from leveret.spark_jobs.scope import ABOUT, Scope, spoken

Row = Mapping[str, Any]
Cell = Callable[[Any, Row, Scope], str]
_SIZES: Final = ("B", "KB", "MB", "GB", "TB")
# What was last used so long before the log's end is listed as unused.
_LONG: Final = timedelta(days=7)


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    # The field of the answer, and how its value is said.
    name: str
    cell: Cell

    @property
    def is_number(self) -> bool:
        return self.cell not in (_text, _time, _yes, _what)

    @property
    def is_time(self) -> bool:
        return self.cell is _time

    def show(self, row: Row, scope: Scope) -> str:
        value = row[self.name]
        return "" if value is None else self.cell(value, row, scope)


@dataclass(frozen=True, slots=True)
class View:
    columns: tuple[Column, ...]
    # From the answer's rows to those that are shown.
    rows: Callable[[Rows, Scope], Sequence[Row]]


def _text(value: Any, row: Row, scope: Scope) -> str:
    return str(value)


def _time(value: Any, row: Row, scope: Scope) -> str:
    return scope.time(value)


def _yes(value: Any, row: Row, scope: Scope) -> str:
    return "yes" if value else "no"


def _count(value: Any, row: Row, scope: Scope) -> str:
    return f"{value:,}"


def _whole(value: Any, row: Row, scope: Scope) -> str:
    return f"{value:,.0f}"


def _id(value: Any, row: Row, scope: Scope) -> str:
    # As in the log: to be searched for.
    return str(value)


def _sampled(value: Any, row: Row, scope: Scope) -> str:
    return scope.figure(value)


def _per_s(value: Any, row: Row, scope: Scope) -> str:
    return scope.rate(value)


def _bytes(value: Any, row: Row, scope: Scope) -> str:
    size = scope.estimate(value)
    power = min(len(_SIZES) - 1, int(math.log(max(size, 1), 1000)))
    digits = 1 if power else 0
    mark = "" if scope.share == 1 else ABOUT
    return f"{mark}{size / 1000**power:,.{digits}f} {_SIZES[power]}"


def _share(value: Any, row: Row, scope: Scope) -> str:
    return share_of(value)


def _ms(value: Any, row: Row, scope: Scope) -> str:
    return for_ms(value)


def _seconds(value: Any, row: Row, scope: Scope) -> str:
    return for_s(value)


def _ratio(value: Any, row: Row, scope: Scope) -> str:
    return f"{value:.2f}"


def _times(value: Any, row: Row, scope: Scope) -> str:
    return f"{spoken(value)} times"


def _slope(value: Any, row: Row, scope: Scope) -> str:
    return f"{'-' if value < 0 else '+'}{spoken(abs(value))}/s" if value else "0"


def _what(value: Any, row: Row, scope: Scope) -> str:
    # The unit is beside the figure.
    return str(value).removesuffix(" in ms").removesuffix(" per second")


def _metric(value: Any, row: Row, scope: Scope) -> str:
    if row["metric"].startswith("p99 wait"):
        return for_ms(value)
    return f"{scope.rate(value)}/s"


def _as_they_are(rows: Rows, scope: Scope) -> Sequence[Row]:
    return rows


def _by(rows: Rows, *names: str) -> dict[tuple[Any, ...], list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def _throughput(rows: Rows, scope: Scope) -> Sequence[Row]:
    """One row for each vhost; gets are deliveries, too."""
    shown = []
    for (vhost,), of_vhost in _by(rows, "vhost").items():
        kinds = _by(of_vhost, "ev")
        came = kinds.get(("publish",), [])
        busiest = max(came, key=lambda row: row["per_s"], default=None)
        went = [*kinds.get(("deliver",), []), *kinds.get(("get",), [])]
        shown.append(
            {
                "vhost": vhost,
                "published": _sum(came, "n"),
                "per_s": _sum(came, "n") / max(scope.span_s, 1.0),
                "peak": busiest and busiest["per_s"],
                "at": busiest and busiest["window"],
                "bytes": _sum(came, "bytes"),
                "delivered": _sum(went, "n"),
                "acked": _sum(kinds.get(("ack",), []), "n"),
            }
        )
    return sorted(shown, key=lambda row: -row["published"])


def _queue_latency(rows: Rows, scope: Scope) -> Sequence[Row]:
    """One row for each queue, with its worst window."""
    shown = []
    for (vhost, queue), of_queue in _by(rows, "vhost", "queue").items():
        waited = [row for row in of_queue if row["wait_p99_ms"] is not None]
        worst = max(waited, key=lambda row: row["wait_p99_ms"], default=None)
        ends = [row["e2e_p99_ms"] for row in of_queue if row["e2e_p99_ms"] is not None]
        shown.append(
            {
                "vhost": vhost,
                "queue": queue,
                "n": _sum(of_queue, "n"),
                "usual": _middle(row["wait_p50_ms"] for row in waited),
                "p99": worst and worst["wait_p99_ms"],
                "at": worst and worst["window"],
                "max": max((row["wait_max_ms"] for row in waited), default=None),
                "done": _sum(of_queue, "done"),
                "e2e": _middle(row["e2e_p50_ms"] for row in of_queue),
                "e2e_p99": max(ends, default=None),
            }
        )
    return sorted(shown, key=lambda row: -(row["p99"] or 0))


def _backlog(rows: Rows, scope: Scope) -> Sequence[Row]:
    """One row for each queue: its highest depth and its last, and what lies between the ends."""
    shown = []
    for (vhost, queue), of_queue in _by(rows, "vhost", "queue").items():
        ordered = sorted(of_queue, key=lambda row: row["window"])
        peak = max(ordered, key=lambda row: row["depth"])
        elapsed = (ordered[-1]["window"] - ordered[0]["window"]).total_seconds()
        change = ordered[-1]["depth"] - ordered[0]["depth"]
        shown.append(
            {
                "vhost": vhost,
                "queue": queue,
                "came": _sum(of_queue, "came"),
                "went": _sum(of_queue, "went"),
                "peak": peak["depth"],
                "at": peak["window"] if peak["depth"] else None,
                "last": ordered[-1]["depth"],
                "slope": change / elapsed if elapsed else None,
            }
        )
    return sorted(shown, key=lambda row: (-row["peak"], -row["came"]))


def _slow_consumers(rows: Rows, scope: Scope) -> Sequence[Row]:
    return [
        {**row, "client": scope.peers.get((row["boot"], row["conn"])) or f"conn. {row['conn']}"}
        for row in rows
    ]


def _unused(rows: Rows, scope: Scope) -> Sequence[Row]:
    """Never used, or not for long; in a sampled log nobody can tell."""
    if scope.is_sampled:
        return []
    end = max((row["last_used"] for row in rows if row["last_used"]), default=None)
    return [
        row
        for row in rows
        if row["last_used"] is None or (end is not None and row["last_used"] < end - _LONG)
    ]


def _sum(rows: Iterable[Row], name: str) -> int:
    return sum(row[name] or 0 for row in rows)


def _middle(values: Iterable[float | None]) -> float | None:
    known = sorted(value for value in values if value is not None)
    return known[len(known) // 2] if known else None


def _view(
    *columns: tuple[str, str, Cell], rows: Callable[[Rows, Scope], Sequence[Row]] = _as_they_are
) -> View:
    return View(tuple(Column(*column) for column in columns), rows)


_VHOST: Final = ("vhost", "vhost", _text)
_QUEUE: Final = ("queue", "queue", _text)

VIEWS: Final[dict[str, View]] = {
    "quality": _view(
        ("boot", "boot", _text),
        ("events", "events", _count),
        ("first", "first_at", _time),
        ("last", "last_at", _time),
        ("missing", "missing", _count),
        ("twice", "duplicates", _count),
        ("shed", "shed", _count),
        ("malformed", "malformed", _count),
        ("stopped in order", "has_stop", _yes),
        ("messages logged", "sample", _share),
    ),
    "throughput": _view(
        _VHOST,
        ("published", "published", _sampled),
        ("a second", "per_s", _per_s),
        ("at most", "peak", _per_s),
        ("at", "at", _time),
        ("size", "bytes", _bytes),
        ("delivered", "delivered", _sampled),
        ("acked", "acked", _sampled),
        rows=_throughput,
    ),
    "queue_latency": _view(
        _VHOST,
        _QUEUE,
        ("messages", "n", _sampled),
        ("usual wait", "usual", _ms),
        ("worst p99", "p99", _ms),
        ("at", "at", _time),
        ("longest", "max", _ms),
        ("acked", "done", _sampled),
        ("publish to ack", "e2e", _ms),
        ("its worst p99", "e2e_p99", _ms),
        rows=_queue_latency,
    ),
    "backlog": _view(
        _VHOST,
        _QUEUE,
        ("came", "came", _sampled),
        ("went", "went", _sampled),
        ("most waiting", "peak", _count),
        ("at", "at", _time),
        ("at the end", "last", _count),
        ("change", "slope", _slope),
        rows=_backlog,
    ),
    "forecast": _view(
        _VHOST,
        _QUEUE,
        ("waiting", "depth", _count),
        ("grows by", "slope", _slope),
        ("full in", "eta_s", _seconds),
        ("at the earliest", "eta_low_s", _seconds),
        ("at the latest", "eta_high_s", _seconds),
    ),
    "anomalies": _view(
        ("at", "window", _time),
        _VHOST,
        _QUEUE,
        ("what", "metric", _what),
        ("was", "value", _metric),
        ("usually", "median", _metric),
        ("deviations", "score", _whole),
    ),
    "slow_consumers": _view(
        _VHOST,
        _QUEUE,
        ("consumer", "ctag", _text),
        ("user", "user", _text),
        ("client", "client", _text),
        ("deliveries", "deliveries", _sampled),
        ("unacked", "unacked", _sampled),
        ("median", "hold_p50_ms", _ms),
        ("p99", "hold_p99_ms", _ms),
        ("of all holding", "hold_share", _share),
        ("than others", "times_others", _times),
        rows=_slow_consumers,
    ),
    "fairness": _view(
        _VHOST,
        _QUEUE,
        ("consumers", "consumers", _count),
        ("deliveries", "deliveries", _sampled),
        ("busiest", "busiest", _text),
        ("its share", "max_share", _share),
        ("Gini", "gini", _ratio),
    ),
    "poison": _view(
        _VHOST,
        _QUEUE,
        ("message", "msg", _id),
        ("deliveries", "deliveries", _count),
        ("consumers", "consumers", _count),
        ("first", "first_at", _time),
        ("last", "last_at", _time),
        ("acked", "acked", _yes),
        ("reasons", "reasons", _text),
    ),
    "dead_letters": _view(
        _VHOST,
        _QUEUE,
        ("to exchange", "exchange", _text),
        ("key", "rk", _text),
        ("reason", "reason", _text),
        ("messages", "n", _sampled),
        ("lost", "lost", _sampled),
        ("first", "first_at", _time),
        ("last", "last_at", _time),
    ),
    "unroutable": _view(
        _VHOST,
        ("exchange", "exchange", _text),
        ("key", "rk", _text),
        ("user", "user", _text),
        ("messages", "n", _sampled),
        ("dropped", "dropped", _sampled),
        ("returned", "returned", _sampled),
    ),
    "hot_keys": _view(
        _VHOST,
        ("exchange", "exchange", _text),
        ("key", "rk", _text),
        ("messages", "n", _sampled),
        ("of the exchange's", "share", _share),
        ("size", "bytes", _bytes),
    ),
    "usage": _view(
        _VHOST,
        ("user", "user", _text),
        ("messages in", "msgs_in", _sampled),
        ("size", "bytes_in", _bytes),
        ("messages out", "msgs_out", _sampled),
        ("size", "bytes_out", _bytes),
        ("of all", "share", _share),
        ("connections", "connections", _count),
    ),
    "churn": _view(
        ("user", "user", _text),
        ("from", "host", _text),
        ("connections", "opens", _count),
        ("for a moment", "short", _count),
        ("median life", "median_life_s", _seconds),
        ("channels", "channels", _count),
        ("logins refused", "refused", _count),
    ),
    "unused": _view(
        _VHOST,
        ("kind", "kind", _text),
        ("name", "name", _text),
        ("declared", "declared_at", _time),
        ("last used", "last_used", _time),
        ("certain", "certain", _yes),
        rows=_unused,
    ),
    "throttling": _view(
        ("who", "who", _text),
        ("waited for", "waited_for", _text),
        ("because of", "root", _text),
        ("times", "times", _count),
        ("stood still", "blocked_s", _seconds),
        ("longest", "longest_s", _seconds),
    ),
}
