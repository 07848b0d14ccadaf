"""The picture of a run of backlog.py: memory above, where the messages were below."""

import argparse
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

# From the front of the queue to its rear; colours that differ in lightness, too.
PARTS = (
    ("q4", "#1b4965"),
    ("q3", "#5fa8d3"),
    ("delta", "#cae9ff"),
    ("q2", "#f4a261"),
    ("q1", "#c1440e"),
)
LABELS = {
    "q4": "q4: alphas, front",
    "q3": "q3: betas",
    "delta": "delta: on disk alone",
    "q2": "q2: betas",
    "q1": "q1: alphas, rear",
}
UNITS = {"KiB": 1 / 1024, "MiB": 1.0, "GiB": 1024.0}


def draw(results: list[dict[str, Any]], options: argparse.Namespace, file: Path) -> None:
    ours = results[0]
    rows = [row for row in ours["samples"] if "q1" in row]
    times = [row["at_s"] for row in rows]
    figure, (memory, messages, kept) = pyplot.subplots(
        3, 1, sharex=True, figsize=(10, 9), height_ratios=(3, 2, 2), layout="constrained"
    )
    figure.suptitle(
        f"{options.messages:,} persistent messages of {options.size:,} bytes in, then out;"
        f" watermark {options.watermark}"
    )
    memory.plot(times, [row["resident_mib"] for row in rows], color="#1b4965", label="Leveret")
    limit = _mib(options.watermark)
    if limit is not None:
        memory.axhline(limit, color="#c1440e", linestyle="--", label="watermark")
        memory.axhline(limit / 2, color="#f4a261", linestyle=":", label="paging begins")
    memory.set_ylim(bottom=0)
    memory.set_ylabel("resident memory, MiB")
    memory.legend(loc="lower right")

    parts = [[row[name] for row in rows] for name, _ in PARTS]
    colours = [colour for _, colour in PARTS]
    messages.stackplot(times, parts, colors=colours, labels=[LABELS[name] for name, _ in PARTS])
    messages.set_ylabel("messages ready")
    messages.legend(loc="upper right", fontsize="small")

    # Beside the delta all else is thin: once more without it.
    for (name, colour), counts in zip(PARTS, parts, strict=True):
        if name != "delta":
            kept.plot(times, counts, color=colour, label=LABELS[name])
    kept.set_ylabel("messages, without delta")
    kept.legend(loc="upper right", fontsize="small")
    kept.set_xlabel("seconds")
    for axes in (memory, messages, kept):
        axes.grid(alpha=0.3)
        axes.yaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,.0f}"))
    _shade(rows, (memory, messages, kept))
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=100)


def _shade(rows: list[dict[str, Any]], plots: tuple[Any, ...]) -> None:
    """Name the phases, and shade the rests between them."""
    for phase in ("fill", "drain"):
        inside = [row["at_s"] for row in rows if row["phase"] == phase]
        if inside:
            place = ((inside[0] + inside[-1]) / 2, 0.02)
            plots[0].annotate(phase, place, xycoords=("data", "axes fraction"), ha="center")
        resting = [row["at_s"] for row in rows if row["phase"] == f"after {phase}"]
        if resting:
            for axes in plots:
                axes.axvspan(resting[0], resting[-1], color="0.5", alpha=0.12)


def _mib(size: str) -> float | None:
    """The size of a watermark that is given with a unit."""
    for unit, factor in UNITS.items():
        if size.endswith(unit):
            return float(size[: -len(unit)]) * factor
    return None
