"""What findings and tables must know of the log as a whole, to say their figures rightly.

Times have a date if the log is of more than one day; a log of one day names it in its header alone.
Where only a sample of messages was logged, counts are estimates and are marked so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

# What an estimate is marked with.
ABOUT = "≈ "


@dataclass(frozen=True, slots=True)
class Scope:
    # Times of the first and the last event, in microseconds.
    first: int
    last: int
    # Length of the windows that time is cut into.
    window_s: int = 60
    # Messages at which forecasts call a queue full.
    capacity: int = 1_000_000
    # By boot, the share of messages that it logged; those not named logged all.
    samples: Mapping[str, float] = field(default_factory=dict)
    # Addresses of clients, by boot and connection, where the log tells them.
    peers: Mapping[tuple[str, int], str] = field(default_factory=dict)
    # Deliveries in the log to which no answer was expected.
    auto_acked: int = 0

    @property
    def span_s(self) -> float:
        return (self.last - self.first) / 1_000_000

    @property
    def is_sampled(self) -> bool:
        """Are there messages of which the log tells nothing?"""
        return any(share < 1 for share in self.samples.values())

    @property
    def share(self) -> float | None:
        """Of all messages, those that are in the log; None if that changed from boot to boot."""
        # Boots that logged no messages have none in any count.
        shares = {share for share in self.samples.values() if share > 0}
        if len(shares) > 1:
            return None
        return shares.pop() if shares else 1.0

    def estimate(self, logged: float) -> float:
        """What a count of the log stands for."""
        return logged / (self.share or 1.0)

    def count(self, logged: int, thing: str) -> str:
        """A number of things that are sampled: '1 message', '≈ 4,000 messages'."""
        things = thing if logged == 1 and self.share == 1 else _plural(thing)
        if self.share is None:
            return f"{logged:,} {things} of the sample"
        return f"{self.figure(logged)} {things}"

    def figure(self, logged: float) -> str:
        """The same without a name."""
        # Of none in the sample there is nothing to estimate.
        mark = "" if self.share == 1 or not logged else ABOUT
        return f"{mark}{self.estimate(logged):,.0f}"

    def rate(self, logged: float) -> str:
        """A number a second, which may be a small one."""
        return ("" if self.share == 1 or not logged else ABOUT) + spoken(self.estimate(logged))

    @property
    def least_rate(self) -> float:
        """Messages in the log a second that are worth a word.

        Sampling takes up to 16 neighbours together: in a sampled log, a few such groups in one
        window are chance.
        """
        return 160.0 / self.window_s if self.is_sampled else 1.0

    def time(self, moment: datetime) -> str:
        # Spark hands over local time without a zone.
        moment = moment.astimezone(UTC)
        return moment.strftime("%H:%M:%S" if self.is_one_day else "%Y-%m-%d %H:%M:%S")

    @property
    def is_one_day(self) -> bool:
        return _day(self.first) == _day(self.last)

    def words(self) -> str:
        """From when to when: the second date only if it is another."""
        first, last = (_moment(ts) for ts in (self.first, self.last))
        end = last.strftime("%H:%M:%S" if self.is_one_day else "%Y-%m-%d %H:%M:%S")
        return f"{first:%Y-%m-%d %H:%M:%S} to {end} UTC"


def spoken(value: float) -> str:
    """A number as one says it."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _plural(thing: str) -> str:
    return f"{thing[:-1]}ies" if thing.endswith("y") else f"{thing}s"


def _moment(ts: int) -> datetime:
    return datetime.fromtimestamp(ts / 1_000_000, UTC)


def _day(ts: int) -> str:
    return _moment(ts).date().isoformat()
