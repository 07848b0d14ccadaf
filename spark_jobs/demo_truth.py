"""What happened in the demo, counted by those who did it.

The log of the broker must say the same. Several threads count; ``Truth`` has the lock.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

from leveret.spark_jobs.demo_script import Consumer, Letter, Tenant

Place = tuple[str, str]


@dataclass(slots=True)
class Traffic:
    """What one user of a virtual host moved."""

    msgs_in: int = 0
    bytes_in: int = 0
    msgs_out: int = 0
    bytes_out: int = 0
    connections: int = 0


@dataclass(slots=True)
class Truth:
    # By vhost, exchange and key.
    published: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    # By vhost and queue: messages that came in by publishing, and those that are done with.
    took: Counter[Place] = field(default_factory=Counter)
    done: Counter[Place] = field(default_factory=Counter)
    # By vhost, queue and consumer tag; deliveries of one message count each.
    delivered: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    answered: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    # By vhost, exchange, key and user.
    returned: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)
    dropped: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)
    # By vhost and queue.
    dead_lettered: Counter[Place] = field(default_factory=Counter)
    poison_deliveries: Counter[Place] = field(default_factory=Counter)
    refused_logins: Counter[str] = field(default_factory=Counter)
    traffic: dict[Tenant, Traffic] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def connected(self, tenant: Tenant) -> None:
        with self._lock:
            self._traffic(tenant).connections += 1

    def refused(self, tenant: Tenant) -> None:
        with self._lock:
            self.refused_logins[tenant.user] += 1

    def sent(self, tenant: Tenant, letter: Letter) -> None:
        place = (tenant.vhost, letter.exchange, letter.rk)
        with self._lock:
            traffic = self._traffic(tenant)
            traffic.msgs_in += 1
            traffic.bytes_in += letter.size
            self.published[place] += 1
            for queue in letter.queues:
                self.took[tenant.vhost, queue] += 1
            if not letter.queues:
                counter = self.returned if letter.mandatory else self.dropped
                counter[*place, tenant.user] += 1

    def given(self, consumer: Consumer, size: int) -> None:
        with self._lock:
            traffic = self._traffic(consumer.tenant)
            traffic.msgs_out += 1
            traffic.bytes_out += size
            self.delivered[consumer.tenant.vhost, consumer.queue, consumer.ctag] += 1

    def finished(self, consumer: Consumer, messages: int) -> None:
        """So many messages were acked, or came acked already."""
        place = (consumer.tenant.vhost, consumer.queue)
        with self._lock:
            self.done[place] += messages
            if not consumer.auto_ack:
                self.answered[*place, consumer.ctag] += messages

    def failed(self, consumer: Consumer, *, is_discarded: bool) -> None:
        """The poison message was refused: for another try, or for good."""
        place = (consumer.tenant.vhost, consumer.queue)
        with self._lock:
            self.poison_deliveries[place] += 1
            self.answered[*place, consumer.ctag] += 1
            if is_discarded:
                self.dead_lettered[place] += 1
                self.done[place] += 1

    def open_places(self, consumed: set[Place]) -> list[Place]:
        """Queues with consumers in which something is not done yet."""
        with self._lock:
            return [place for place in consumed if self.done[place] < self.took[place]]

    def so_far(self) -> tuple[int, int]:
        """Messages published, and deliveries."""
        with self._lock:
            return self.published.total(), self.delivered.total()

    def _traffic(self, tenant: Tenant) -> Traffic:
        return self.traffic.setdefault(tenant, Traffic())
