"""``leveret analytics …``: what can be asked, and how. What it does is in ``commands.py``.

Nothing here imports Spark, which takes seconds and may not be installed: flags are parsed and
explained without it. Three doors lead here: ``leveret analytics``, ``python -m
leveret.spark_jobs`` and, through ``__main__.py``, ``spark-submit``.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from leveret.spark_jobs.table import printable

if TYPE_CHECKING:
    from leveret.spark_jobs.alert_rules import Rule

FAILED: Final = 1

# The jobs by name; jobs/__init__.py has them, and needs Spark to be imported.
JOB_NAMES: Final = (
    "quality",
    "throughput",
    "queue_latency",
    "backlog",
    "forecast",
    "anomalies",
    "slow_consumers",
    "fairness",
    "poison",
    "dead_letters",
    "unroutable",
    "hot_keys",
    "usage",
    "churn",
    "unused",
    "throttling",
    "lifecycle",
)

# On little data all that Spark does to be fast on much is pure cost.
_FOR_LITTLE_DATA: Final = (
    ("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"),
    ("spark.sql.shuffle.partitions", "1"),
    ("spark.sql.adaptive.enabled", "false"),
    ("spark.sql.codegen.wholeStage", "false"),
    ("spark.sql.codegen.factoryMode", "NO_CODEGEN"),
)

_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
# What is beyond these means nothing here, and does not fit the numbers that Spark counts in.
_LONGEST_S: Final = 36_525 * 86_400
_END_US: Final = 253_402_300_800_000_000
_MOST: Final = 1_000_000_000
# Of an exchange, in AMQP.
_NAME_BYTES: Final = 255


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0 well, 1 failed, 2 asked wrongly."""
    parser = argparse.ArgumentParser(prog="leveret analytics", description=DESCRIPTION)
    add_commands(parser)
    options = parser.parse_args(argv)
    status: int = options.run(options)
    return status


DESCRIPTION: Final = (
    "Answer operators' questions from the broker's event log, on Spark: on this machine, or on "
    "any cluster that --master names."
)


def add_commands(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    ingest = _command(commands, "ingest", "take sealed segments of the log into the lake")
    ingest.add_argument(
        "--log", type=_folder, required=True, metavar="DIR", help="where the broker writes it"
    )
    ingest.add_argument(
        "--rebuild", action="store_true", help="empty the lake of events and take in everything"
    )
    ingest.add_argument(
        "--accept-gone",
        action="store_true",
        help="go on without segments that were deleted before they were taken in",
    )
    ingest.add_argument(
        "--batch-files", type=_positive, metavar="N", help="segments that are taken in at a time"
    )

    run = _command(commands, "run", "run jobs and show their answers")
    run.add_argument("jobs", nargs="+", choices=JOB_NAMES, metavar="JOB", help=_jobs_help())
    _add_selection(run)
    _add_tuning(run)
    run.add_argument(
        "--format",
        choices=("table", "csv", "json", "parquet"),
        default="table",
        help="table, csv and json are printed; answers are kept in the lake as Parquet in any case",
    )
    run.add_argument(
        "--output", type=_folder, metavar="DIR", help="write DIR/JOB.csv and so on instead"
    )
    run.add_argument("--limit", type=_positive, default=20, help="rows of a table (20)")

    everything = _command(commands, "all", "take in the log, if --log is given; run every job")
    everything.add_argument("--log", type=_folder, metavar="DIR", help="where the broker writes it")
    _add_selection(everything)
    _add_tuning(everything)

    report = _command(commands, "report", "write a report for people, findings first")
    report.add_argument("--log", type=_folder, metavar="DIR", help="take in this log first")
    report.add_argument(
        "--output", type=_folder, default="report.html", metavar="FILE", help="(report.html)"
    )
    report.add_argument("--pdf", action="store_true", help="also as PDF, where a browser is there")
    _add_selection(report)
    _add_tuning(report)

    _add_tail(commands)
    _add_demo(commands)

    doctor = commands.add_parser(
        "doctor", help="explain which Java and Spark there are, and try them"
    )
    _add_session(doctor)
    doctor.set_defaults(run=_runner("doctor"), command="doctor")


def _add_tail(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "follow the log as it grows: a live table, and alerts"
    tail = commands.add_parser(
        "tail", help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False
    )
    tail.add_argument(
        "--log", type=_folder, required=True, metavar="DIR", help="where the broker writes it"
    )
    tail.add_argument(
        "--window", type=seconds, default=10, metavar="LENGTH", help="what figures are for (10s)"
    )
    tail.add_argument(
        "--interval", type=seconds, default=5, metavar="LENGTH", help="how often to look (5s)"
    )
    tail.add_argument(
        "--since", type=moment, default="10m", metavar="TIME", help="where to begin (10m ago)"
    )
    tail.add_argument("--vhost", help="events of this virtual host only")
    tail.add_argument("--queue", help="events of this queue only")
    tail.add_argument("--limit", type=_positive, default=20, help="queues that are shown (20)")
    tail.add_argument("--rules", type=_rules, metavar="FILE", help="when to alert, as TOML")
    tail.add_argument(
        "--alert", metavar="URL", help="publish alerts to this broker: amqp://user:password@host/"
    )
    tail.add_argument(
        "--exchange",
        type=_exchange,
        default="alerts",
        help="to this exchange, made if it is not there (alerts)",
    )
    _add_session(tail)
    tail.set_defaults(run=_runner("tail"), command="tail")


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "a broker under a lively load, and the report on it"
    demo = commands.add_parser(
        "demo", help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False
    )
    demo.add_argument(
        "--seconds", type=_demo_seconds, default=30, metavar="N", help="how long to load it (30)"
    )
    demo.add_argument(
        "--folder", type=_folder, metavar="DIR", help="a new folder for all of it (a temporary one)"
    )
    demo.add_argument(
        "--no-open", dest="open", action="store_false", help="do not open the report in a browser"
    )
    _add_session(demo)
    # It is a report on all that the demo's broker logged.
    everything = dict.fromkeys(("since", "until", "vhost", "queue"))
    usual = dict.fromkeys(("window", "capacity", "poison_deliveries"))
    demo.set_defaults(run=_runner("demo"), command="demo", pdf=False, **everything, **usual)
    demo.set_defaults(conf=list(_FOR_LITTLE_DATA))


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False
    )
    parser.add_argument(
        "--lake", type=_folder, default="lake", metavar="DIR", help="events and answers (lake)"
    )
    _add_session(parser)
    parser.set_defaults(run=_runner(name), command=name)
    return parser


def _add_session(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--master", help="Spark's cluster (all cores of this machine, or spark-submit's choice)"
    )
    parser.add_argument(
        "--conf",
        action="append",
        default=[],
        type=_pair,
        metavar="KEY=VALUE",
        help="a setting of Spark's",
    )


def _add_selection(parser: argparse.ArgumentParser) -> None:
    when = "2026-03-02, 2026-03-02T08:15 (UTC), or 90m, 12h, 7d ago"
    parser.add_argument("--since", type=moment, metavar="TIME", help=when)
    parser.add_argument("--until", type=moment, metavar="TIME", help="the same; not included")
    parser.add_argument("--vhost", help="events of this virtual host only")
    parser.add_argument("--queue", help="events of this queue only")


def _add_tuning(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--window", type=seconds, metavar="LENGTH", help="10s, 5m, 1h (one that fits the log)"
    )
    parser.add_argument(
        "--capacity",
        type=_positive,
        metavar="N",
        help="messages at which forecasts call a queue full (1000000)",
    )
    parser.add_argument(
        "--poison-deliveries",
        type=_positive,
        metavar="N",
        help="deliveries that make a message suspect (5)",
    )


def _runner(name: str) -> Callable[[argparse.Namespace], int]:
    def run(options: argparse.Namespace) -> int:
        if name == "doctor":
            # It has something to say also where Spark is not there.
            from leveret.spark_jobs import doctor

            return doctor.run(options)
        try:
            from leveret.spark_jobs import commands
        except ModuleNotFoundError as error:
            return fail(
                f"{error.name} is not installed: pip install 'leveret[spark]' brings all that "
                f"analytics need"
            )
        return commands.run(options)

    return run


def fail(text: str) -> int:
    """Say what went wrong; returns the exit status."""
    for line in text.splitlines():
        # Brokers and Spark quote names that clients chose.
        print(f"leveret: {printable(line.expandtabs())}", file=sys.stderr)
    return FAILED


def moment(text: str) -> int:
    """A time as microseconds since 1970: absolute (UTC unless it says otherwise), or ago."""
    if re.fullmatch(r"\d+[smhd]", text):
        time = datetime.now(UTC) - timedelta(seconds=seconds(text))
    else:
        try:
            time = datetime.fromisoformat(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"'{text}' is no time: write 2026-03-02, 2026-03-02T08:15 or 12h"
            ) from None
        if time.tzinfo is None:
            time = time.replace(tzinfo=UTC)
    micros = round(time.timestamp() * 1_000_000)
    # Its zone may put it out of the calendar, and before 1970 there were no events.
    if not 0 <= micros < _END_US:
        raise argparse.ArgumentTypeError(f"'{text}' is out of reach: from 1970 to 9999 it may be")
    return micros


def seconds(text: str) -> int:
    match = re.fullmatch(r"(\d{1,12})([smhd])", text)
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is no length of time: write 10s, 5m, 1h or 1d")
    length = int(match[1]) * _UNITS_S[match[2]]
    if length > _LONGEST_S:
        raise argparse.ArgumentTypeError(f"'{text}' is longer than a hundred years")
    return length


def _rules(path: str) -> list[Rule]:
    from leveret.spark_jobs.alert_rules import RuleError, parse_rules

    try:
        return parse_rules(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"cannot read it: {error}") from None
    except RuleError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error}") from None


def _positive(text: str) -> int:
    if not re.fullmatch(r"\d{1,12}", text) or not 0 < int(text) <= _MOST:
        raise argparse.ArgumentTypeError(f"'{text}' is no number from 1 to {_MOST:,}")
    return int(text)


def _folder(text: str) -> str:
    # As an unset variable of a shell gives it; paths would begin at the root.
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty")
    return text


def _exchange(text: str) -> str:
    if len(text.encode(errors="replace")) > _NAME_BYTES:
        raise argparse.ArgumentTypeError(f"a name has at most {_NAME_BYTES} bytes")
    return text


def _demo_seconds(text: str) -> int:
    from leveret.spark_jobs.demo_script import SECONDS_LEAST

    if (length := _positive(text)) < SECONDS_LEAST:
        raise argparse.ArgumentTypeError(f"there is nothing to see in less than {SECONDS_LEAST} s")
    return length


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"'{text}' is not KEY=VALUE")
    return key, value


def _jobs_help() -> str:
    return "one or more of " + ", ".join(JOB_NAMES)
