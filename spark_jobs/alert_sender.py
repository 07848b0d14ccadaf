"""Alerts on their way to an exchange: kept until the broker has confirmed them.

Upstream: ``tail.py`` adds alerts from Spark's thread and has them sent from its own. Downstream:
``amqp_publisher.py``. A broker that is away is tried again; what it missed goes out then, in order.
Invariant: an alert is forgotten only when it was confirmed, when far too many wait, or at the end,
which says so.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from pika import BasicProperties  # type: ignore[import-untyped]

from leveret.spark_jobs.alert_rules import Alert
from leveret.spark_jobs.amqp_link import Link, LinkError, LinkLost
from leveret.spark_jobs.amqp_publisher import Publisher

_KEPT: Final = 10_000
_BETWEEN_TRIES_S: Final = 5.0
# A stop waits for the broker this long: one that is short of memory answers nobody.
_STOP_S: Final = 3.0
_LOOK_EVERY_S: Final = 0.2
_PRECONDITION_FAILED: Final = 406


class _HurriedLink(Link):
    """A link whose waits end early once its owner has no more time."""

    def __init__(self, url: str, name: str, is_too_late: Callable[[], bool]) -> None:
        """Raises LinkError if the URL is none."""
        super().__init__(url, name)
        self._is_too_late = is_too_late

    def wait(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """As a link's; raises LinkError also when it is too late."""
        deadline = time.monotonic() + timeout_s
        left_s = timeout_s
        while not super().wait(is_done, min(left_s, _LOOK_EVERY_S)):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            if self._is_too_late():
                raise LinkLost("the broker did not answer before the end")
        return True


class AlertSender:
    def __init__(self, url: str, exchange: str) -> None:
        self._url = url
        self._exchange = exchange
        self._waiting: deque[Alert] = deque(maxlen=_KEPT)
        self._link: Link | None = None
        self._publisher: Publisher | None = None
        # When to try again; 0 while all is well.
        self._try_at = 0.0
        # Why the last try failed.
        self._failure: LinkError | None = None
        # When to wait for the broker no longer; soon, once the end was announced.
        self._give_up_at = math.inf
        self._gave_up = False

    def open(self) -> None:
        """Connect, and see to it that the exchange is there. Raises LinkError."""
        try:
            self._connect(declare=True)
        except LinkError as error:
            if error.code != _PRECONDITION_FAILED:
                raise
            # It is there, of another type, which is its owner's business.
            self._connect(declare=False)

    def add(self, alert: Alert) -> None:
        self._waiting.append(alert)

    def send(self) -> str | None:
        """Send what waits; what went wrong, if something did. It is then tried again later."""
        if not self._waiting or time.monotonic() < self._try_at:
            return None
        try:
            if self._publisher is None:
                self.open()
            assert self._publisher is not None
            batch = list(self._waiting)
            for alert in batch:
                self._publisher.publish(
                    self._exchange,
                    alert.routing_key,
                    body_of(alert),
                    _properties(alert),
                    mandatory=False,
                )
            self._publisher.flush()
        except LinkError as error:
            self.close()
            self._try_at = time.monotonic() + _BETWEEN_TRIES_S
            self._failure = error
            self._gave_up = time.monotonic() >= self._give_up_at
            return f"{len(self._waiting)} alerts wait to be published: {error}"
        for alert in batch:
            # Those that gave way to newer ones meanwhile are gone.
            if self._waiting and self._waiting[0] is alert:
                self._waiting.popleft()
        self._try_at = 0.0
        return None

    def hurry(self) -> None:
        """Give up waiting for the broker soon. From any thread, and from a signal's handler."""
        self._give_up_at = min(self._give_up_at, time.monotonic() + _STOP_S)

    def finish(self) -> str | None:
        """Send what waits, now or never, and close; how much was not sent, if something was not.

        Takes a few seconds at most.
        """
        if self._waiting and not self._gave_up:
            # Counted anew: since the end was announced Spark may have been at work on a batch.
            self._give_up_at = time.monotonic() + _STOP_S
            self._try_at = 0.0
            self.send()
        self.close()
        if not self._waiting:
            return None
        return f"{len(self._waiting)} alerts were not sent: {self._failure}"

    def _is_too_late(self) -> bool:
        return time.monotonic() >= self._give_up_at

    def close(self) -> None:
        self._publisher = None
        if self._link is not None:
            self._link.close()
            self._link = None

    def _connect(self, *, declare: bool) -> None:
        self.close()
        self._link = link = _HurriedLink(self._url, "leveret analytics tail", self._is_too_late)
        link.open()
        if declare:
            link.ask(
                lambda done: link.channel.exchange_declare(
                    self._exchange, "topic", durable=True, callback=done
                ),
                "exchange.declare",
            )
        self._publisher = Publisher(link, window=100)


def body_of(alert: Alert) -> bytes:
    return json.dumps(
        {
            "state": _state(alert),
            "rule": alert.rule,
            "kind": alert.kind,
            "vhost": alert.vhost,
            "queue": alert.queue,
            "exchange": alert.exchange,
            "value": round(alert.value, 3),
            "limit": alert.limit,
            "unit": alert.unit,
            "since": _iso(alert.since),
            "at": _iso(alert.at),
            "text": alert.text,
        },
        ensure_ascii=False,
    ).encode()


def _properties(alert: Alert) -> BasicProperties:
    return BasicProperties(
        content_type="application/json",
        delivery_mode=2,
        type=f"alert.{_state(alert)}",
        message_id=_id(alert),
        timestamp=alert.at // 1_000_000,
        app_id="leveret",
    )


def _id(alert: Alert) -> str:
    """The same for the same alert, so that one that was sent twice can be told.

    A hash, since the names may be longer than a property; they are in the body.
    """
    parts = [alert.rule, _state(alert), alert.since, alert.vhost, alert.queue, alert.exchange]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _state(alert: Alert) -> str:
    return "begin" if alert.begins else "end"


def _iso(ts: int) -> str:
    return datetime.fromtimestamp(ts / 1_000_000, UTC).isoformat().replace("+00:00", "Z")
