"""The options of the data source, checked before anything connects.

Spark gives options as texts under names of any case. Whatever is wrong is told at once, in the
driver, with what to write instead; an option that nobody knows is an error, too, because a typing
mistake would otherwise be a setting that silently does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from leveret.spark_jobs.amqp_link import LinkError, parameters

# AMQP's prefetch count has 16 bits.
_MOST_PREFETCH: Final = 65_535
_TRUE_FALSE: Final = {"true": True, "false": False}

# What Spark itself gives along, or its users set for it.
_SPARKS: Final = frozenset({"path", "checkpointlocation", "queryname"})


class OptionError(ValueError):
    """An option is missing or wrong; the text says what to write."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    url: str
    queue: str
    # Rows of a micro-batch, at most.
    batch_size: int
    # Messages that the broker may hand out ahead of their acks.
    prefetch: int
    # How long an empty queue is waited for before a batch ends.
    wait_s: float
    # How long a broker that is gone is tried to be reached again.
    reconnect_s: float
    # For reading as a batch: how many at most, and whether they are gone afterwards.
    max_messages: int | None
    ack: bool


@dataclass(frozen=True, slots=True)
class WriteOptions:
    url: str
    # None where each row says.
    exchange: str | None
    routing_key: str | None
    persistent: bool
    mandatory: bool
    # Messages of a task that may be ahead of their confirms.
    confirm_window: int


_READ: Final = (
    *("url", "queue", "batchSize", "prefetch", "waitMs", "reconnectSeconds"),
    *("maxMessages", "ack"),
)
_WRITE: Final = ("url", "exchange", "routingKey", "persistent", "mandatory", "confirmWindow")


def read_options(options: Mapping[str, str]) -> ReadOptions:
    """Raises OptionError."""
    given = _Given(options, _READ, "reading")
    batch_size = given.number("batchSize", 1000, 1, _MOST_PREFETCH)
    return ReadOptions(
        url=given.url(),
        queue=given.required("queue", "the queue to read from"),
        batch_size=batch_size,
        prefetch=given.number("prefetch", min(2 * batch_size, _MOST_PREFETCH), 1, _MOST_PREFETCH),
        wait_s=given.number("waitMs", 200, 0, 60_000) / 1000,
        reconnect_s=float(given.number("reconnectSeconds", 60, 0, 86_400)),
        max_messages=given.number("maxMessages", 0, 0, 1 << 62) or None,
        ack=given.flag("ack", default=True),
    )


def write_options(options: Mapping[str, str], columns: Iterable[str]) -> WriteOptions:
    """Raises OptionError."""
    given = _Given(options, _WRITE, "writing")
    exchange, routing_key = given.text("exchange"), given.text("routingKey")
    columns = set(columns)
    if routing_key is None and "routing_key" not in columns:
        raise OptionError(
            "where should messages go? Set the option routingKey (with the default exchange, the "
            "name of a queue), or give every row a column routing_key"
        )
    if exchange is None and "exchange" not in columns:
        exchange = ""
    return WriteOptions(
        url=given.url(),
        exchange=exchange,
        routing_key=routing_key,
        persistent=given.flag("persistent", default=True),
        mandatory=given.flag("mandatory", default=True),
        confirm_window=given.number("confirmWindow", 1000, 1, 1_000_000),
    )


class _Given:
    """What the user wrote."""

    def __init__(self, options: Mapping[str, str], known: tuple[str, ...], doing: str) -> None:
        self._values = {name.lower(): value for name, value in options.items()}
        names = {name.lower() for name in known}
        for name in self._values:
            if name not in names and name not in _SPARKS:
                raise OptionError(
                    f"there is no option '{name}' for {doing} with leveret: there are "
                    f"{', '.join(known)}"
                )

    def text(self, name: str) -> str | None:
        return self._values.get(name.lower())

    def required(self, name: str, what: str) -> str:
        value = self.text(name)
        if not value:
            raise OptionError(f"the option {name} is missing: {what}")
        return value

    def url(self) -> str:
        url = self.required(
            "url", "where the broker is, as amqp://user:password@host:5672/vhost (%2F for /)"
        )
        try:
            parameters(url)
        except LinkError as error:
            raise OptionError(f"option url: {error}") from None
        return url

    def number(self, name: str, default: int, least: int, most: int) -> int:
        value = self.text(name)
        if value is None:
            return default
        if not value.isdecimal() or not least <= int(value) <= most:
            raise OptionError(
                f"option {name} is '{value}': write a whole number from {least} to {most}"
            )
        return int(value)

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.text(name)
        if value is None:
            return default
        if value.lower() not in _TRUE_FALSE:
            raise OptionError(f"option {name} is '{value}': write true or false")
        return _TRUE_FALSE[value.lower()]
