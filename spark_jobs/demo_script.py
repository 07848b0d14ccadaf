"""What the demo plays: three tenants with ordinary traffic, and problems planted in it.

Pure data: who declares what, who publishes which message when, who consumes how. Every message
names the queues that will take it, so what the broker's log must say is known beforehand
(``demo_truth.py``). ``demo_actors.py`` plays it.

Planted are a slow consumer, a poison message, a burst, keys that no binding matches, a queue that
nobody consumes, a client that connects for every message, one that guesses passwords, and a corner
of the topology that nobody uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

PASSWORD: Final = "demo"


class Tenant(NamedTuple):
    vhost: str
    user: str


SHOP: Final = Tenant("shop", "web")
BILLING: Final = Tenant("billing", "ledger")
TELEMETRY: Final = Tenant("telemetry", "sensors")
LEGACY: Final = Tenant("shop", "legacy")
TENANTS: Final = (SHOP, BILLING, TELEMETRY, LEGACY)
INTRUDER: Final = Tenant("shop", "intruder")

# Shorter, and the slow consumer is not given enough to be called slow.
SECONDS_LEAST: Final = 5
# The burst needs a usual state to differ from: so many windows of a second.
SECONDS_FOR_BURST: Final = 15

POISON_ID: Final = "poison"
POISON_DELIVERIES: Final = 9
BURST: Final = 600
UNROUTABLE: Final = 40
CONNECTIONS: Final = 40
BAD_LOGINS: Final = 8
# Messages that pile up in a queue nobody consumes: above what findings call a backlog.
LEFT_ALONE: Final = 250


@dataclass(frozen=True, slots=True)
class Queue:
    tenant: Tenant
    name: str
    exchange: str = ""
    binding_key: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Exchange:
    tenant: Tenant
    name: str
    type: str


EXCHANGES: Final = (
    Exchange(SHOP, "shop.orders", "topic"),
    Exchange(SHOP, "shop.legacy", "fanout"),
    Exchange(BILLING, "billing", "direct"),
    Exchange(BILLING, "billing.dead", "fanout"),
    Exchange(TELEMETRY, "telemetry", "topic"),
)

QUEUES: Final = (
    Queue(SHOP, "orders", "shop.orders", "order.created.*"),
    Queue(SHOP, "old-orders", "shop.legacy", "all"),
    Queue(BILLING, "invoices", "billing", "invoice", {"x-dead-letter-exchange": "billing.dead"}),
    Queue(BILLING, "invoices.dead", "billing.dead"),
    Queue(BILLING, "audit", "billing", "audit"),
    Queue(TELEMETRY, "dashboard", "telemetry", "reading.#"),
    Queue(TELEMETRY, "history", "telemetry", "reading.#"),
    Queue(TELEMETRY, "alerts", "telemetry", "alarm.#"),
)

UNUSED: Final = (
    ("shop", "queue", "old-orders"),
    ("shop", "exchange", "shop.legacy"),
    ("shop", "binding", "shop.legacy -> old-orders (all)"),
)


@dataclass(frozen=True, slots=True)
class Consumer:
    tenant: Tenant
    queue: str
    ctag: str
    prefetch: int
    # How long each message takes it.
    work_s: float
    auto_ack: bool = False
    # It answers so many at a time.
    acks_every: int = 1


SLOW: Final = Consumer(SHOP, "orders", "orders-slow", prefetch=2, work_s=0.15)

CONSUMERS: Final = (
    Consumer(SHOP, "orders", "orders-1", prefetch=4, work_s=0.002),
    Consumer(SHOP, "orders", "orders-2", prefetch=4, work_s=0.002),
    SLOW,
    Consumer(BILLING, "invoices", "invoices-1", prefetch=1, work_s=0.005),
    Consumer(TELEMETRY, "dashboard", "dashboard-1", prefetch=0, work_s=0.0, auto_ack=True),
    Consumer(TELEMETRY, "history", "history-1", prefetch=50, work_s=0.0, acks_every=10),
    Consumer(TELEMETRY, "alerts", "alerts-1", prefetch=5, work_s=0.005),
)


@dataclass(frozen=True, slots=True)
class Letter:
    """A message to be published ``at`` so many seconds from the start."""

    at: float
    exchange: str
    rk: str
    size: int
    # Those that will take it.
    queues: tuple[str, ...] = ()
    mandatory: bool = False
    persistent: bool = False
    message_id: str | None = None


@dataclass(frozen=True, slots=True)
class Publisher:
    tenant: Tenant
    letters: Iterator[Letter]
    # It waits for the confirm of each message.
    confirms: bool = False


def publishers(seconds: float) -> list[Publisher]:
    """Those that keep one connection open, with all that they will publish."""
    return [
        Publisher(SHOP, _orders(seconds)),
        Publisher(SHOP, _cancelled_orders(seconds)),
        Publisher(BILLING, _invoices(seconds), confirms=True),
        Publisher(BILLING, _audit(seconds)),
        Publisher(TELEMETRY, _readings(seconds)),
        Publisher(TELEMETRY, _alarms(seconds)),
    ]


def legacy_letters(seconds: float) -> Iterator[Letter]:
    """What the client sends that connects for each of them."""
    for at in _times(seconds, CONNECTIONS / seconds):
        yield Letter(at, "shop.orders", "order.created.legacy", 900, ("orders",))


def _orders(seconds: float) -> Iterator[Letter]:
    for number, at in enumerate(_times(seconds, 60)):
        key = f"order.created.{('eu', 'us', 'eu', 'asia', 'eu')[number % 5]}"
        yield Letter(at, "shop.orders", key, 300 + 40 * (number % 7), ("orders",))


def _cancelled_orders(seconds: float) -> Iterator[Letter]:
    """No binding matches: a part comes back, the others are gone."""
    for number, at in enumerate(_times(seconds, UNROUTABLE / seconds)):
        key = ("order.cancelled.eu", "order.cancelled.us")[number % 2]
        yield Letter(at, "shop.orders", key, 200, mandatory=number % 4 == 0)


def _invoices(seconds: float) -> Iterator[Letter]:
    poisoned = False
    for at in _times(seconds, 10):
        if not poisoned and at >= seconds / 3:
            poisoned = True
            yield Letter(
                at, "billing", "invoice", 1300, ("invoices",), message_id=POISON_ID, persistent=True
            )
        yield Letter(at, "billing", "invoice", 1200, ("invoices",), persistent=True)


def _audit(seconds: float) -> Iterator[Letter]:
    for at in _times(seconds, LEFT_ALONE / seconds):
        yield Letter(at, "billing", "audit", 150, ("audit",))


def _readings(seconds: float) -> Iterator[Letter]:
    for number, at in enumerate(_times(seconds, 40)):
        key = f"reading.{('temperature', 'humidity', 'power')[number % 3]}"
        yield Letter(at, "telemetry", key, 80, ("dashboard", "history"))


def _alarms(seconds: float) -> Iterator[Letter]:
    has_burst = False
    for at in _times(seconds, 10):
        if not has_burst and at >= seconds / 2:
            has_burst = True
            for _ in range(BURST):
                yield Letter(at, "telemetry", "alarm.smoke", 120, ("alerts",))
        yield Letter(at, "telemetry", "alarm.door", 120, ("alerts",))


def _times(seconds: float, rate: float) -> Iterator[float]:
    return (number / rate for number in range(round(seconds * rate)))
