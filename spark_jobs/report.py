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
from pyspark.sql import functions as F

from leveret import __version__
from leveret.spark_jobs import charts, findings
from leveret.spark_jobs.findings import Answers, Finding
from leveret.spark_jobs.jobs import JOBS
from leveret.spark_jobs.jobs.base import Inputs, Job, is_
from leveret.spark_jobs.lake import Lake, LakeError
from leveret.spark_jobs.report_tables import VIEWS, Column
from leveret.spark_jobs.runner import at_once, keep, rows_of, span
from leveret.spark_jobs.scope import ABOUT, Scope

# A table in the report shows this many rows; the lake has all.
_ROWS: Final = 15
# One row per message: not for reading.
_NOT_SHOWN: Final = ("lifecycle",)
# Consumers whose addresses are looked up: those that hold messages longest.
_CLIENTS: Final = 50
# What a table's columns need to be understood.
_NOTES: Final = {
    "queue_latency": "usual: the median of an ordinary window; worst: of the window that was worst",
    "forecast": "full is {capacity:,} messages (--capacity)",
    "slow_consumers": "how long from delivery to answer, and how many times as long as the others",
    "anomalies": "deviations: how far from usual, in median absolute deviations",
}
# A page takes a browser a second or two.
_PRINT_S: Final = 120.0
BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome", "chrome", "msedge")


@dataclass(frozen=True, slots=True)
class Report:
    scope: Scope
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

    ``on_job`` is told the name of each job as it begins, by one of several threads.
    """
    report = make(spark, inputs, lake, on_job)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(report.html, encoding="utf-8")
    return report


def make(
    spark: SparkSession, inputs: Inputs, lake: Lake, on_job: Callable[[str], None] | None = None
) -> Report:
    first, last = span(inputs.events)

    def answer(job: Job) -> Sequence[dict[str, Any]]:
        if on_job is not None:
            on_job(job.name)
        return rows_of(keep(spark, job, inputs, lake))

    shown = [job for name, job in JOBS.items() if name not in _NOT_SHOWN]
    answers = at_once(spark, shown, answer)
    scope = _scope(inputs, answers, first, last)
    found = findings.find(answers, scope)
    return Report(scope, found, answers, render(answers, found, scope))


def _scope(inputs: Inputs, answers: Answers, first: int, last: int) -> Scope:
    """What is to be known of the whole log; asks for the addresses of consumers that are shown."""
    shown = answers["slow_consumers"][:_CLIENTS]
    is_open = is_("connection_open") & F.col("conn").isin(*{row["conn"] for row in shown})
    needs_no_ack = is_("deliver", "get") & (F.col("reason") == "auto_ack")
    rows = (
        inputs.events.where(is_open | needs_no_ack)
        .groupBy(*(F.when(is_open, F.col(name)).alias(name) for name in ("boot", "conn")))
        .agg(F.max("peer").alias("peer"), F.sum("n").alias("n"))
        .collect()
    )
    boots = [row for row in answers["quality"] if row["boot"]]
    logged = {row["boot"]: row["sample"] for row in boots if row["sample"] is not None}
    logged |= {row["boot"]: inputs.samples.get(row["boot"], 1.0) for row in boots if inputs.samples}
    return Scope(
        first,
        last,
        window_s=inputs.options.window_s,
        capacity=inputs.options.capacity,
        samples=logged,
        peers={(row["boot"], row["conn"]): row["peer"] for row in rows if row["boot"] is not None},
        auto_acked=sum(row["n"] for row in rows if row["boot"] is None),
    )


def render(answers: Answers, found: Sequence[Finding], scope: Scope) -> str:
    """The page. Whatever comes from the log is escaped: clients choose names."""
    return "".join(_page(answers, found, scope))


def pdf_of(page: Path) -> Path:
    """Where the page is printed to: beside it. Raises LakeError if it is there itself."""
    if page.suffix.lower() == ".pdf":
        raise LakeError(
            f"{page} would be the page and the PDF: name the page, as --output "
            f"{page.with_suffix('.html')}, and the PDF goes beside it"
        )
    return page.with_suffix(".pdf")


def print_pdf(page: Path) -> Path:
    """The page as PDF beside it. Raises LakeError without a browser, or if it does not print."""
    target = pdf_of(page)
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        raise LakeError(
            f"{page} is written, but no PDF: there is no browser to print it with "
            f"({', '.join(BROWSERS)}). Open the page in one and print it."
        )
    # Printed aside, so that an older PDF is not taken for the new one, nor lost to a failure.
    draft = page.with_name(f"{page.stem}.new.pdf").resolve()
    draft.unlink(missing_ok=True)
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-pdf-header-footer"]
    command += [f"--print-to-pdf={draft}", page.resolve().as_uri()]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_PRINT_S, check=False
        )
        if done.returncode or not draft.exists():
            said = done.stderr.strip()[-500:] or f"it ended with status {done.returncode}"
            raise LakeError(f"{page} is written, but {browser} could not print it: {said}")
        draft.replace(target)
    except subprocess.TimeoutExpired:
        raise LakeError(
            f"{page} is written, but {browser} had not printed it after {_PRINT_S:.0f} s. Open the "
            f"page in a browser and print it."
        ) from None
    finally:
        draft.unlink(missing_ok=True)
    return target


def _page(answers: Answers, found: Sequence[Finding], scope: Scope) -> Iterator[str]:
    yield "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>\n"
    yield "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
    yield f"<title>Leveret report, {scope.words()}</title>\n<style>{_STYLE}</style></head><body>\n"
    yield "<header><p class='brand'>Leveret</p><h1>What happened in the broker</h1>"
    yield f"<p class='sub'>{scope.words()}, {_count(answers):,} events, "
    yield f"in windows of {_window(scope.window_s)}</p></header>\n<main>\n"
    yield from _findings(found)
    yield from _quality(answers, scope)
    yield from _figures(answers, scope)
    for title, svg in charts.draw(answers, scope):
        yield f"<section class='chart'><h2>{html.escape(title)}</h2>{svg}</section>\n"
    for name, rows in answers.items():
        yield from _table(JOBS[name], rows, scope)
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


def _quality(answers: Answers, scope: Scope) -> Iterator[str]:
    rows = answers["quality"]
    bad = {
        name: sum(row[name] or 0 for row in rows)
        for name in ("missing", "duplicates", "malformed", "shed")
    }
    boots = [row for row in rows if row["boot"]]
    is_well = not any(bad.values())
    state = "well" if is_well else "unwell"
    yield f"<section class='quality {state}'><h2>Can this be trusted?</h2>"
    verdict = "The log is whole." if is_well else "Parts of the log are missing or unreadable."
    boots_text = "1 start of the broker" if len(boots) == 1 else f"{len(boots)} broker starts"
    yield f"<p>{verdict} {boots_text}; "
    yield ", ".join(f"{number:,} {name}" for name, number in bad.items()) + ".</p>"
    if scope.is_sampled:
        shares = ", ".join(findings.share_of(share) for share in sorted({*scope.samples.values()}))
        counts = "of the sample" if scope.share is None else f"estimates ({ABOUT.strip()})"
        yield f"<p>Only a sample of messages was logged ({shares}): times, shares and depths are "
        yield f"right, counts of messages are {counts}.</p>"
    yield "</section>\n"


def _figures(answers: Answers, scope: Scope) -> Iterator[str]:
    """A few large numbers."""
    totals: dict[str, int] = {}
    for row in answers["throughput"]:
        totals[row["ev"]] = totals.get(row["ev"], 0) + row["n"]
    published = totals.get("publish", 0)
    waits = [row for row in answers["queue_latency"] if row["wait_p99_ms"] is not None]
    worst = max((row["wait_p99_ms"] for row in waits), default=None)
    queues = {(row["vhost"], row["queue"]) for row in answers["backlog"]}
    # What needs no ack would look lost beside what was acked.
    without = f"; {scope.figure(scope.auto_acked)} need no ack" if scope.auto_acked else ""
    figures = [
        ("published", scope.figure(published)),
        ("delivered", scope.figure(totals.get("deliver", 0) + totals.get("get", 0))),
        (f"acked{without}", scope.figure(totals.get("ack", 0))),
        ("published a second", scope.rate(published / max(scope.span_s, 1e-6))),
        ("queues", f"{len(queues):,}"),
        ("worst p99 wait", "none" if worst is None else findings.for_ms(worst)),
    ]
    yield "<section class='figures'>"
    for name, value in figures:
        yield f"<div><b>{value}</b><span>{name}</span></div>"
    yield "</section>\n"


def _table(job: Job, answer: Sequence[Any], scope: Scope) -> Iterator[str]:
    view = VIEWS[job.name]
    rows = view.rows(answer, scope)
    yield f"<section id='{job.name}'><h2>{html.escape(job.question)}</h2>"
    if not rows:
        nothing = "Nothing."
        if job.name == "unused" and scope.is_sampled:
            nothing = "A sample of messages does not tell."
        yield f"<p class='calm'>{nothing} <span class='job'>{job.name}</span></p></section>\n"
        return
    notes = [job.name]
    if len(rows) > _ROWS:
        notes.append(f"the first {_ROWS} of {len(rows):,}")
    if job.name in _NOTES:
        notes.append(_NOTES[job.name].format(capacity=scope.capacity))
    yield f"<p class='job'>{'; '.join(notes)}</p><div class='wide'><table><thead><tr>"
    for column in view.columns:
        yield f"<th{_class(column)}>{html.escape(column.title)}</th>"
    yield "</tr></thead><tbody>"
    for row in rows[:_ROWS]:
        yield "<tr>"
        for column in view.columns:
            text = html.escape(column.show(row, scope))
            yield f"<td{_class(column)}>{text}</td>"
        yield "</tr>"
    yield "</tbody></table></div></section>\n"


def _method() -> Iterator[str]:
    yield "<section><h2>How this was made</h2><p>From the broker's event log, by Spark. Times are "
    yield "UTC. Waiting is from a message's arrival in the queue to its first delivery, holding "
    yield "from a delivery to the answer, both stamped by the broker. Percentiles are exact to one "
    yield "rank in ten thousand. Odd moments are found by distance from the median in median "
    yield "absolute deviations; forecasts are straight lines through the second half of the time, "
    yield "with 95 % intervals. The whole answers are in the lake, as Parquet.</p></section>\n"


def _class(column: Column) -> str:
    return " class='n'" if column.is_number else " class='t'" if column.is_time else ""


def _count(answers: Answers) -> int:
    return sum(row["events"] for row in answers["quality"])


def _window(seconds: int) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds % size == 0:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


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
.findings li > span:last-child::first-letter { text-transform:uppercase }
.findings a { font-size:13px }
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
table { border-collapse:collapse; font-size:13px; width:100% }
th { text-align:left; color:var(--quiet); font-weight:600; border-bottom:1px solid var(--line);
  vertical-align:bottom }
th, td { padding:4px 12px 4px 0 } td { border-bottom:1px solid #f1f2f4; vertical-align:top }
th:last-child, td:last-child { padding-right:0 } tr:last-child td { border-bottom:0 }
.n + th:not(.n), .n + td:not(.n) { padding-left:10px } td { overflow-wrap:anywhere }
.n { text-align:right; font-variant-numeric:tabular-nums } td.n { white-space:nowrap }
td.t { white-space:nowrap }
footer { padding-bottom:40px; font-size:13px }
@page { size:A4; margin:14mm 12mm }
@media print { body { background:#fff; font-size:11px } header, main, footer { max-width:none;
  padding:0 } section { break-inside:avoid; border-color:#ccc; padding:12px 14px; margin:10px 0 }
  .wide { overflow:visible } table { font-size:9px } th, td { padding:3px 7px 3px 0 }
  h1 { font-size:22px } h2 { font-size:14px } .figures b { font-size:17px }
  .figures { grid-template-columns:repeat(6,1fr) } .job { font-size:10px }
  .tag, .quality { -webkit-print-color-adjust:exact; print-color-adjust:exact } }
"""
