"""Charts for the report: matplotlib, as SVG to be put into the page itself.

A chart shows at most a handful of series, those that matter most; the tables have the rest. Text
stays text, so that it takes the page's font and can be searched.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, DateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogFormatter

from leveret.spark_jobs.findings import Answers
from leveret.spark_jobs.scope import Scope

_WIDTH: Final = 9.0
_HEIGHT: Final = 2.6
_SERIES: Final = 6
# A series this many times below the highest is not drawn on the same scale.
_LOW: Final = 200
_BARS: Final = 12
# How a time axis names its moments, by the length of the log in seconds.
_TIMES: Final = (
    (2 * 3600, "%H:%M:%S"),
    (24 * 3600, "%H:%M"),
    (10 * 86_400, "%m-%d %H:%M"),
    (math.inf, "%Y-%m-%d"),
)
_FLOW: Final = ("publish", "deliver", "ack")
# Distinguishable also for those who see colours differently (Okabe and Ito).
_COLOURS: Final = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
_QUIET: Final = "#6b7280"

_STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    # Whoever names a queue may write dollars: no formula is meant.
    "text.parse_math": False,
    # Ids in the file do not change from run to run.
    "svg.hashsalt": "leveret",
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#d1d5db",
    "axes.labelcolor": _QUIET,
    "xtick.color": _QUIET,
    "ytick.color": _QUIET,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#eceff3",
    "legend.frameon": False,
}


def draw(answers: Answers, scope: Scope) -> Iterator[tuple[str, str]]:
    """Titles and SVG texts of the charts that there is something to show in.

    A painter returns the height that its chart needs, in inches; 0 if it has nothing to show.
    """
    for title, paint in _CHARTS:
        with mpl.rc_context(_STYLE):
            figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
            axes = figure.add_subplot()
            height = paint(axes, answers, scope)
            if height:
                figure.set_figheight(height)
                yield title, _svg(figure)


def _rates(axes: Axes, answers: Answers, scope: Scope) -> float:
    series: dict[str, dict[datetime, float]] = {}
    for row in answers["throughput"]:
        if row["ev"] in _FLOW:
            values = series.setdefault(row["ev"], {})
            at = _moment(row["window"])
            values[at] = values.get(at, 0.0) + scope.estimate(row["per_s"])
    # The last window is mostly not whole: it would look as if all came to a halt.
    last = max((at for values in series.values() for at in values), default=None)
    drawn = {
        name: {at: value for at, value in values.items() if at != last}
        for name, values in series.items()
    }
    return _lines(axes, [(name, drawn[name]) for name in _FLOW if name in drawn], "per second")


def _waits(axes: Axes, answers: Answers, scope: Scope) -> float:
    height = _lines(axes, _by_queue(answers["queue_latency"], "wait_p99_ms"), "ms", scale="log")
    if height:
        axes.yaxis.set_major_formatter(FuncFormatter(_plain))
        # The default writes formulas between the decades.
        axes.yaxis.set_minor_formatter(LogFormatter())
    return height


def _depths(axes: Axes, answers: Answers, scope: Scope) -> float:
    series = _by_queue(answers["backlog"], "depth")
    # Beside a queue of thousands, those in which a message waits now and then are a line at zero.
    highest = max((max(values.values()) for _, values in series), default=0.0)
    high = [one for one in series if max(one[1].values()) >= highest / _LOW]
    return _lines(axes, high, "messages ready")


def _holders(axes: Axes, answers: Answers, scope: Scope) -> float:
    rows = [row for row in answers["slow_consumers"] if row["hold_p99_ms"]]
    rows = sorted(rows, key=lambda row: row["hold_p99_ms"])[-_BARS:]
    names = [f"{row['vhost']}/{row['queue']}: {row['ctag']}" for row in rows]
    # By place, not by name: several consumers may have the same tag.
    places = range(len(rows))
    axes.barh(places, [row["hold_p99_ms"] for row in rows], color=_COLOURS[5], height=0.75)
    axes.barh(places, [row["hold_p50_ms"] for row in rows], color=_COLOURS[0], height=0.75)
    axes.legend(["p99", "median"], loc="lower right")
    _finish_bars(axes, names, "ms between delivery and answer")
    return 0.9 + 0.22 * len(rows) if rows else 0.0


def _tenants(axes: Axes, answers: Answers, scope: Scope) -> float:
    rows = [row for row in answers["usage"] if row["share"]]
    rows = sorted(rows, key=lambda row: row["share"])[-_BARS:]
    names = [f"{row['vhost']}: {row['user']}" for row in rows]
    came = [scope.estimate(row["bytes_in"]) / 1e6 for row in rows]
    went = [scope.estimate(row["bytes_out"]) / 1e6 for row in rows]
    places = range(len(rows))
    axes.barh(places, came, color=_COLOURS[0], height=0.7)
    axes.barh(places, went, left=came, color=_COLOURS[5], height=0.7)
    axes.legend(["in", "out"], loc="lower right")
    _finish_bars(axes, names, "MB")
    return 0.9 + 0.22 * len(rows) if rows else 0.0


_CHARTS: Final[tuple[tuple[str, Callable[[Axes, Answers, Scope], float]], ...]] = (
    ("Messages a second", _rates),
    ("Waiting in the queue, p99", _waits),
    ("Messages that wait", _depths),
    ("How long consumers hold messages", _holders),
    ("Bytes by tenant", _tenants),
)


def _by_queue(
    rows: Sequence[Mapping[str, Any]], value: str
) -> list[tuple[str, dict[datetime, float]]]:
    """The series with the highest peaks, highest first."""
    series: dict[tuple[str, str], dict[datetime, float]] = {}
    for row in rows:
        if row[value] is not None:
            queue = (row["vhost"], row["queue"])
            series.setdefault(queue, {})[_moment(row["window"])] = row[value]
    highest = sorted(series.items(), key=lambda one: -max(one[1].values()))[:_SERIES]
    return [("/".join(queue), values) for queue, values in highest]


def _lines(
    axes: Axes,
    series: Sequence[tuple[str, dict[datetime, float]]],
    unit: str,
    *,
    scale: Literal["linear", "log"] = "linear",
) -> float:
    if not any(len(values) > 1 for _, values in series):
        return 0.0
    if not any(value > 0 for _, values in series for value in values.values()):
        # A logarithm has no place for zeros alone.
        scale = "linear"
    for (name, values), colour in zip(series, _COLOURS, strict=False):
        # matplotlib takes datetimes; its types do not say so.
        xs: Any = sorted(values)
        axes.plot(xs, [values[at] for at in xs], label=name, color=colour, linewidth=1.6)
    moments = [at for _, values in series for at in values]
    length_s = (max(moments) - min(moments)).total_seconds()
    locator = AutoDateLocator(minticks=4, maxticks=8)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    shape = next(shape for up_to, shape in _TIMES if length_s < up_to)
    axes.xaxis.set_major_formatter(DateFormatter(shape))  # type: ignore[no-untyped-call]
    axes.set_ylabel(unit)
    axes.set_yscale(scale)
    if scale == "linear":
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:,.10g}")
    axes.margins(x=0.01)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return _HEIGHT


def _finish_bars(axes: Axes, names: Sequence[str], unit: str) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel(unit)
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")


def _plain(value: float, _: int) -> str:
    return f"{value:g}"


def _moment(naive_local: datetime) -> datetime:
    # Spark hands over local time without a zone; the report is in UTC.
    return naive_local.astimezone(UTC).replace(tzinfo=None)


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    # From the element on; it grows with the page.
    text = text[text.index("<svg") :]
    return re.sub(r' (?:width|height)="[\d.]+pt"', "", text, count=2)
