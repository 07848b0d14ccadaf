"""The report: one HTML file that needs nothing else.

Findings in words come first, then whether the log can be trusted, charts, and a table for each
question. Everything is inlined: it can be mailed, archived and opened anywhere, and says the same
in ten years.

Upstream: the jobs' answers, which are kept in the lake on the way. Downstream: people.
"""

from __future__ import annotations

import html
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from pyspark.sql import SparkSession

from leveret import __version__
from leveret.spark_jobs import charts, findings
from leveret.spark_jobs.findings import Answers, Finding
from leveret.spark_jobs.jobs import JOBS
from leveret.spark_jobs.jobs.base import Inputs, Job
from leveret.spark_jobs.lake import Lake, LakeError
from leveret.spark_jobs.runner import keep, rows_of, span
from leveret.spark_jobs.table import for_people

# A table in the report shows this many rows; the lake has all.
_ROWS: Final = 15
# One row per message: not for reading.
_NOT_SHOWN: Final = ("lifecycle",)
# Where rows are moments, the ones that matter are those with the most of this.
_WORST: Final = {"throughput": "n", "queue_latency": "wait_p99_ms", "backlog": "depth"}
_BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome", "chrome", "msedge")


@dataclass(frozen=True, slots=True)
class Report:
    findings: list[Finding]
    answers: Answers
    html: str


def write(
    spark: SparkSession,
    inputs: Inputs,
    lake: Lake,
    target: Path,
    on_job: Callable[[str], None] | None = None,
) -> Report:
    """Run every job and write the report. Raises LakeError without events, and OSError.

    ``on_job`` is told the name of each job as it begins.
    """
    report = make(spark, inputs, lake, on_job)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(report.html, encoding="utf-8")
    return report


def make(
    spark: SparkSession, inputs: Inputs, lake: Lake, on_job: Callable[[str], None] | None = None
) -> Report:
    first, last = span(inputs.events)
    answers = {}
    for name, job in JOBS.items():
        if name not in _NOT_SHOWN:
            if on_job is not None:
                on_job(name)
            answers[name] = rows_of(keep(spark, job, inputs, lake))
    found = findings.find(answers, (last - first) / 1_000_000)
    page = render(answers, found, first, last, inputs.options.window_s)
    return Report(found, answers, page)


def render(answers: Answers, found: Sequence[Finding], first: int, last: int, window_s: int) -> str:
    """The page. Whatever comes from the log is escaped: clients choose names."""
    return "".join(_page(answers, found, first, last, window_s))


def print_pdf(page: Path) -> Path:
    """The page as PDF beside it. Raises LakeError without a browser."""
    browser = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        raise LakeError(
            f"{page} is written, but no PDF: there is no browser to print it with "
            f"({', '.join(_BROWSERS)}). Open the page in one and print it."
        )
    target = page.with_suffix(".pdf")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-pdf-header-footer"]
    command += [f"--print-to-pdf={target}", page.resolve().as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode or not target.exists():
        raise LakeError(f"{browser} could not print {page}: {done.stderr.strip()[-500:]}")
    return target


def _page(
    answers: Answers, found: Sequence[Finding], first: int, last: int, window_s: int
) -> Iterator[str]:
    yield "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>\n"
    yield "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
    yield f"<title>Leveret report, {_time(first)}</title>\n<style>{_STYLE}</style></head><body>\n"
    yield "<header><p class='brand'>Leveret</p><h1>What happened in the broker</h1>"
    yield f"<p class='sub'>{_time(first)} to {_time(last)} UTC, {_count(answers):,} events, "
    yield f"in windows of {window_s} s</p></header>\n<main>\n"
    yield from _findings(found)
    yield from _quality(answers)
    yield from _figures(answers, (last - first) / 1_000_000)
    for title, svg in charts.draw(answers):
        yield f"<section class='chart'><h2>{html.escape(title)}</h2>{svg}</section>\n"
    for name, rows in answers.items():
        yield from _table(JOBS[name], rows)
    yield from _method()
    yield f"</main><footer>Leveret {__version__}, written {_now()} UTC</footer></body></html>\n"


def _findings(found: Sequence[Finding]) -> Iterator[str]:
    yield "<section><h2>Findings</h2>"
    if not found:
        yield "<p class='calm'>Nothing out of the ordinary was found.</p>"
    else:
        yield "<ul class='findings'>"
        for one in found:
            yield f"<li class='{one.severity}'><span class='tag'>{one.severity}</span>"
            yield f"<span>{html.escape(one.text)} <a href='#{one.job}'>figures</a></span></li>"
        yield "</ul>"
    yield "</section>\n"


def _quality(answers: Answers) -> Iterator[str]:
    rows = answers["quality"]
    bad = {
        name: sum(row[name] or 0 for row in rows)
        for name in ("missing", "duplicates", "malformed", "shed")
    }
    boots = [row for row in rows if row["boot"]]
    samples = {row["sample"] for row in boots if row["sample"] not in (None, 1.0)}
    is_well = not any(bad.values())
    state = "well" if is_well else "unwell"
    yield f"<section class='quality {state}'><h2>Can this be trusted?</h2>"
    verdict = "The log is whole." if is_well else "Parts of the log are missing or unreadable."
    boots_text = "1 start of the broker" if len(boots) == 1 else f"{len(boots)} broker starts"
    yield f"<p>{verdict} {boots_text}; "
    yield ", ".join(f"{number:,} {name}" for name, number in bad.items()) + ".</p>"
    if samples:
        shares = ", ".join(f"{100 * share:g} %" for share in sorted(samples))
        yield f"<p>Only a sample of messages was logged ({shares}): times and depths are right, "
        yield "counts are of the sample.</p>"
    yield "</section>\n"


def _figures(answers: Answers, span_s: float) -> Iterator[str]:
    """A few large numbers."""
    totals: dict[str, int] = {}
    for row in answers["throughput"]:
        totals[row["ev"]] = totals.get(row["ev"], 0) + row["n"]
    waits = [row for row in answers["queue_latency"] if row["wait_p99_ms"] is not None]
    worst = max((row["wait_p99_ms"] for row in waits), default=None)
    queues = {(row["vhost"], row["queue"]) for row in answers["backlog"]}
    figures = [
        ("published", f"{totals.get('publish', 0):,}"),
        ("delivered", f"{totals.get('deliver', 0) + totals.get('get', 0):,}"),
        ("acked", f"{totals.get('ack', 0):,}"),
        ("published a second", for_people(totals.get("publish", 0) / max(span_s, 1e-6))),
        ("queues", f"{len(queues):,}"),
        ("worst p99 wait", "none" if worst is None else findings.for_ms(worst)),
    ]
    yield "<section class='figures'>"
    for name, value in figures:
        yield f"<div><b>{value}</b><span>{name}</span></div>"
    yield "</section>\n"


def _table(job: Job, rows: Sequence[Any]) -> Iterator[str]:
    yield f"<section id='{job.name}'><h2>{html.escape(job.question)}</h2>"
    if not rows:
        yield f"<p class='calm'>Nothing. <span class='job'>{job.name}</span></p></section>\n"
        return
    worst = _WORST.get(job.name)
    if worst is not None:
        rows = sorted(rows, key=lambda row: row[worst] or 0, reverse=True)
    which = "first" if worst is None else "largest"
    more = f"the {which} {_ROWS} of {len(rows):,} rows, " if len(rows) > _ROWS else ""
    yield f"<p class='job'>{more}{job.name}</p><div class='wide'><table><thead><tr>"
    numeric = [field.dataType.typeName() in ("long", "double") for field in job.schema.fields]
    names = job.schema.names
    for name, right in zip(names, numeric, strict=True):
        yield f"<th{_right(right)}>{html.escape(name.replace('_', ' '))}</th>"
    yield "</tr></thead><tbody>"
    for row in rows[:_ROWS]:
        yield "<tr>"
        for name, right in zip(names, numeric, strict=True):
            yield f"<td{_right(right)}>{html.escape(for_people(row[name]))}</td>"
        yield "</tr>"
    yield "</tbody></table></div></section>\n"


def _method() -> Iterator[str]:
    yield "<section><h2>How this was made</h2><p>From the broker's event log, by Spark. Times are "
    yield "UTC. Waiting is from a message's arrival in the queue to its first delivery, holding "
    yield "from a delivery to the answer, both stamped by the broker. Percentiles are exact to one "
    yield "rank in ten thousand. Odd moments are found by distance from the median in median "
    yield "absolute deviations; forecasts are straight lines through the second half of the time, "
    yield "with 95 % intervals. The whole answers are in the lake, as Parquet.</p></section>\n"


def _right(numeric: bool) -> str:
    return " class='n'" if numeric else ""


def _count(answers: Answers) -> int:
    return sum(row["events"] for row in answers["quality"])


def _time(ts: int) -> str:
    return datetime.fromtimestamp(ts / 1_000_000, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M")


_STYLE: Final = """
:root { --ink:#1f2937; --quiet:#6b7280; --line:#e5e7eb; --paper:#fff; --ground:#f6f7f9;
  --problem:#b42318; --warning:#b54708; --note:#175cd3; --well:#067647 }
* { box-sizing:border-box }
body { margin:0; background:var(--ground); color:var(--ink);
  font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif }
header, main, footer { max-width:1040px; margin:0 auto; padding:0 24px }
header { padding-top:36px }
.brand { margin:0; color:var(--well); font-weight:700; letter-spacing:.04em }
h1 { margin:2px 0 4px; font-size:28px; line-height:1.2 }
h2 { margin:0 0 10px; font-size:17px }
.sub, footer { color:var(--quiet) }
section { background:var(--paper); border:1px solid var(--line); border-radius:10px;
  padding:18px 20px; margin:16px 0 }
.findings { list-style:none; margin:0; padding:0 }
.findings li { display:flex; gap:12px; padding:9px 0; border-top:1px solid var(--line) }
.findings li:first-child { border-top:0 }
.tag { flex:0 0 76px; align-self:flex-start; text-align:center; border-radius:6px; color:#fff;
  font-size:12px; font-weight:600; padding:2px 0; margin-top:1px }
.problem .tag { background:var(--problem) } .warning .tag { background:var(--warning) }
.note .tag { background:var(--note) }
a { color:var(--note) }
.calm { color:var(--quiet); margin:0 }
.quality { border-left:5px solid var(--well) } .quality.unwell { border-left-color:var(--warning) }
.quality p { margin:0 }
.figures { display:grid; grid-template-columns:repeat(auto-fit,minmax(130px,1fr)); gap:14px }
.figures b { display:block; font-size:22px; line-height:1.25 }
.figures span, .job { color:var(--quiet); font-size:13px }
.job { margin:-6px 0 10px }
.chart svg { width:100%; height:auto; display:block }
.wide { overflow-x:auto }
table { border-collapse:collapse; font-size:13px; width:100%; white-space:nowrap }
th { text-align:left; color:var(--quiet); font-weight:600; border-bottom:1px solid var(--line) }
th, td { padding:4px 14px 4px 0 } td { border-bottom:1px solid #f1f2f4 }
.n { text-align:right; font-variant-numeric:tabular-nums }
footer { padding-bottom:40px; font-size:13px }
@media print { body { background:#fff } section { break-inside:avoid; border-color:#ccc } }
"""
