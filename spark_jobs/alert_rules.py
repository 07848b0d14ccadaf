"""When to alert: rules, and what follows from them. Pure functions, no clock, no Spark.

A rule looks at one figure of every queue (or, for unroutable messages, of every exchange), window
by window. It begins when the figure has been at ``at`` or above for ``windows`` windows in a row,
and ends when it has been below ``until`` for as many: between the two nothing changes, so that a
figure that hovers around a limit does not ring all the time. Each begin and each end is told once.

Upstream: ``tail_windows.py`` measures. Downstream: ``tail.py`` shows and publishes.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Final

from leveret.spark_jobs.tail_windows import Reading


class RuleError(ValueError):
    """Rules that cannot be used; the text says what to write."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A figure that rules can watch."""

    name: str
    unit: str
    at: float
    # As a part of ``at``, where a rule does not say.
    until_share: float
    windows: int


KINDS: Final = {
    kind.name: kind
    for kind in (
        Kind("latency", "ms waited at the 99th percentile", 5_000, 0.5, 2),
        Kind("backlog_slope", "messages more per second", 10, 0.5, 3),
        Kind("poison", "deliveries of one message", 5, 1.0, 1),
        Kind("unroutable", "messages per minute that no queue takes", 10, 0.5, 1),
    )
}


@dataclass(frozen=True, slots=True)
class Rule:
    name: str
    kind: Kind
    at: float
    until: float
    windows: int
    # Patterns as of a shell.
    vhost: str = "*"
    queue: str = "*"
    exchange: str = "*"

    def concerns(self, reading: Reading) -> bool:
        return (
            fnmatchcase(reading.vhost, self.vhost)
            and fnmatchcase(reading.queue, self.queue)
            and fnmatchcase(reading.exchange, self.exchange)
        )

    def value(self, reading: Reading) -> float | None:
        """The figure; None where the window says nothing about it."""
        if (self.kind.name == "unroutable") != (not reading.queue):
            return None
        match self.kind.name:
            case "latency":
                # A queue that gives nothing out while messages wait in it has not recovered.
                return reading.wait_p99_ms if reading.gave or reading.depth else 0.0
            case "backlog_slope":
                return reading.slope
            case "poison":
                return float(reading.most_deliveries)
            case _:
                return reading.unroutable_per_minute


DEFAULT_RULES: Final = tuple(
    Rule(kind.name, kind, kind.at, kind.at * kind.until_share, kind.windows)
    for kind in KINDS.values()
)


@dataclass(frozen=True, slots=True)
class Alert:
    """Something began or ended."""

    rule: str
    kind: str
    begins: bool
    vhost: str
    queue: str
    exchange: str
    value: float
    limit: float
    unit: str
    # Beginning of the window, in microseconds: of the first that was over the limit, and of the
    # one in which this was found.
    since: int
    at: int

    @property
    def routing_key(self) -> str:
        key = f"alert.{self.rule}.{self.vhost}.{self.queue or self.exchange}"
        # A routing key has at most 255 bytes.
        return key.encode()[:255].decode(errors="ignore")

    @property
    def text(self) -> str:
        subject = (
            f"queue {self.queue}" if self.queue else f"exchange {self.exchange or '(default)'}"
        )
        state = "begins" if self.begins else "is over"
        return (
            f"{self.rule} {state}: {subject} in vhost {self.vhost}: {self.value:.6g} {self.unit} "
            f"(limit {self.limit:g})"
        )


@dataclass(slots=True)
class _Course:
    """One rule on one subject."""

    is_active: bool = False
    # Windows in a row that speak for a change, and when the first was over the limit.
    votes: int = 0
    since: int = 0


@dataclass(slots=True)
class Watch:
    """The rules, and where each of them stands with each subject."""

    rules: Sequence[Rule]
    _courses: dict[tuple[str, str, str, str], _Course] = field(default_factory=dict)

    def look(self, readings: Iterable[Reading]) -> list[Alert]:
        """What the readings of one window begin and end."""
        alerts = []
        for reading in readings:
            for rule in self.rules:
                if rule.concerns(reading):
                    value = rule.value(reading)
                    if value is not None:
                        alerts += self._judge(rule, reading, value)
        return alerts

    @property
    def active(self) -> set[tuple[str, str, str]]:
        """Vhost, queue and exchange of whatever an alert has begun and not ended for."""
        return {key[1:] for key, course in self._courses.items() if course.is_active}

    def _judge(self, rule: Rule, reading: Reading, value: float) -> list[Alert]:
        key = (rule.name, reading.vhost, reading.queue, reading.exchange)
        course = self._courses.get(key)
        if course is None:
            if value < rule.at:
                return []  # nothing is kept of what was always well
            course = self._courses[key] = _Course()
        if course.is_active:
            speaks_for_change = value < rule.until
        else:
            speaks_for_change = value >= rule.at
        if not speaks_for_change:
            course.votes = 0
            if not course.is_active:
                del self._courses[key]
            return []
        if course.votes == 0 and not course.is_active:
            course.since = reading.window
        course.votes += 1
        if course.votes < rule.windows:
            return []
        course.votes = 0
        course.is_active = not course.is_active
        alert = Alert(
            *(rule.name, rule.kind.name, course.is_active),
            *(reading.vhost, reading.queue, reading.exchange),
            *(value, rule.at if course.is_active else rule.until, rule.kind.unit),
            *(course.since, reading.window),
        )
        if not course.is_active:
            del self._courses[key]
        return [alert]


def parse_rules(text: str) -> list[Rule]:
    """Rules as TOML. Raises RuleError."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RuleError(f"not TOML: {error}") from None
    tables = document.pop("rule", None)
    if document or not isinstance(tables, list) or not tables:
        raise RuleError(
            "rules are tables under [[rule]], and nothing else: write [[rule]] and below it "
            'kind = "latency" and at = 1000'
        )
    rules = [_rule(table, number) for number, table in enumerate(tables, 1)]
    names = [rule.name for rule in rules]
    for name in names:
        if names.count(name) > 1:
            raise RuleError(f"two rules are called '{name}': give each a name of its own")
    return rules


def _rule(table: dict[str, Any], number: int) -> Rule:
    where = f"rule {number}"
    fields = dict(table)
    kind = KINDS.get(str(fields.pop("kind", None)))
    if kind is None:
        raise RuleError(f"{where}: kind is one of {', '.join(KINDS)}")
    name = fields.pop("name", kind.name)
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
        raise RuleError(
            f"{where}: a name is made of letters, digits, _ and -, because it becomes a word of a "
            f"routing key"
        )
    where = f"rule '{name}'"
    at = _number(fields.pop("at", kind.at), f"{where}: at")
    until = _number(fields.pop("until", at * kind.until_share), f"{where}: until")
    if until > at:
        raise RuleError(f"{where}: until ({until:g}) is above at ({at:g}), so it would never rest")
    windows = fields.pop("windows", kind.windows)
    if not isinstance(windows, int) or isinstance(windows, bool) or windows < 1:
        raise RuleError(f"{where}: windows is a whole number from 1 on")
    # A subject that rules of the kind do not have cannot be chosen by it.
    subject = "exchange" if kind.name == "unroutable" else "queue"
    patterns = {}
    for key in ("vhost", subject):
        patterns[key] = fields.pop(key, "*")
        if not isinstance(patterns[key], str) or not patterns[key]:
            raise RuleError(f'{where}: {key} is a name or a pattern, as in {key} = "shop*"')
    if fields:
        raise RuleError(
            f"{where}: there is no '{next(iter(fields))}' for {kind.name}: there are name, kind, "
            f"at, until, windows, vhost and {subject}"
        )
    return Rule(name, kind, at, until, windows, **patterns)


def _number(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e15:
        raise RuleError(f"{what} is a number above 0")
    return float(value)
