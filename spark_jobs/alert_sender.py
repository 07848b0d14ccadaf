"""Alerts on their way to an exchange: kept until the broker has confirmed them.

Upstream: ``tail.py`` adds alerts from Spark's thread and has them sent from its own. Downstream:
``amqp_publisher.py``. A broker that is away is tried again; what it missed goes out then, in order.
Invariant: an alert is forgotten only when it was confirmed, or when far too many wait.
"""

from __future__ import annotations

import json
import time
from collections import deque
from datetime import UTC, datetime
from typing import Final

from pika import BasicProperties  # type: ignore[import-untyped]

from leveret.spark_jobs.alert_rules import Alert
from leveret.spark_jobs.amqp_link import Link, LinkError
from leveret.spark_jobs.amqp_publisher import Publisher

_KEPT: Final = 10_000
_BETWEEN_TRIES_S: Final = 5.0
_PRECONDITION_FAILED: Final = 406


class AlertSender:
    def __init__(self, url: str, exchange: str) -> None:
        self._url = url
        self._exchange = exchange
        self._waiting: deque[Alert] = deque(maxlen=_KEPT)
        self._link: Link | None = None
        self._publisher: Publisher | None = None
        # When to try again; 0 while all is well.
        self._try_at = 0.0

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
            return f"{len(self._waiting)} alerts wait to be published: {error}"
        for _ in batch:
            self._waiting.popleft()
        self._try_at = 0.0
        return None

    def close(self) -> None:
        self._publisher = None
        if self._link is not None:
            self._link.close()
            self._link = None

    def _connect(self, *, declare: bool) -> None:
        self.close()
        self._link = link = Link(self._url, "leveret analytics tail")
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
    name = alert.queue or alert.exchange
    return BasicProperties(
        content_type="application/json",
        delivery_mode=2,
        type=f"alert.{_state(alert)}",
        # The same for the same alert, so that one that was sent twice can be told.
        message_id=f"{alert.rule}/{_state(alert)}/{alert.since}/{alert.vhost}/{name}"[:120],
        timestamp=alert.at // 1_000_000,
        app_id="leveret",
    )


def _state(alert: Alert) -> str:
    return "begin" if alert.begins else "end"


def _iso(ts: int) -> str:
    return datetime.fromtimestamp(ts / 1_000_000, UTC).isoformat().replace("+00:00", "Z")
