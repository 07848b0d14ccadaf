"""How many messages a queue may keep in memory: rates, durations, targets [117-124].

The broker tells a queue how long its messages in memory should last (a duration); the queue knows
how fast messages come, go and are acked, and so how many that are.
"""

from __future__ import annotations

import math
from collections.abc import Callable

INFINITY = math.inf
_HALF_LIFE_S = 5.0
_NEGLIGIBLE_RATE = 0.01
# Publish-type operations after which a queue looks whether it has to page.
_PAGING_INTERVAL = 1_000
# Messages after which rates are worked out anew.
_RATE_INTERVAL = 100


class MemoryUse:
    __slots__ = (
        "_ack_in",
        "_ack_out",
        "_counted",
        "_in",
        "_now",
        "_out",
        "_prev_acks",
        "_prev_ram",
        "_since",
        "_until_paging",
        "rates",
        "target_ram_count",
    )

    def __init__(self, now: Callable[[], float]) -> None:
        """``now`` is a monotonic clock, in seconds."""
        self._now = now
        self._since = now()
        # Counted since the rates were worked out last.
        self._in = self._out = self._ack_in = self._ack_out = 0
        # Messages per second: in, out, acks in (deliveries that want one), acks out.
        self.rates = [0.0, 0.0, 0.0, 0.0]
        self._prev_ram = 0
        self._prev_acks = 0
        self.target_ram_count: float = INFINITY
        self._until_paging = _PAGING_INTERVAL

    def count_in(self, count: int) -> None:
        self._in += count

    def count_out(self, count: int) -> None:
        self._out += count

    def count_ack_in(self, count: int) -> None:
        self._ack_in += count

    def count_ack_out(self, count: int) -> None:
        self._ack_out += count

    def is_due(self, count: int) -> bool:
        """Called for publishes: is it time to look at memory again?"""
        if self.target_ram_count == INFINITY:
            return False
        self._until_paging -= count
        if self._until_paging > 0:
            return False
        self._until_paging = _PAGING_INTERVAL
        if self._in + self._out > _RATE_INTERVAL:
            self.update_rates()
        return True

    def update_rates(self) -> None:
        """Exponential moving averages with a half-life of five seconds."""
        now = self._now()
        spent = now - self._since
        if spent <= 0:
            return
        weight = math.exp(spent * math.log(0.5) / _HALF_LIFE_S)
        counts = (self._in, self._out, self._ack_in, self._ack_out)
        self.rates = [
            count / spent * (1 - weight) + rate * weight
            for count, rate in zip(counts, self.rates, strict=True)
        ]
        self._in = self._out = self._ack_in = self._ack_out = 0
        self._since = now

    def ram_duration(self, ram_count: int, ram_acks: int) -> float:
        """How long what is in memory lasts at the present rates."""
        self.update_rates()
        total = sum(self.rates)
        counted = self._prev_ram + ram_count + self._prev_acks + ram_acks
        self._prev_ram, self._prev_acks = ram_count, ram_acks
        if all(rate < _NEGLIGIBLE_RATE for rate in self.rates):
            return INFINITY
        return counted / (4 * total)

    def set_target(self, duration_s: float) -> bool:
        """Returns whether fewer messages may stay in memory than before."""
        before = self.target_ram_count
        if duration_s == INFINITY:
            self.target_ram_count = INFINITY
        else:
            self.target_ram_count = math.trunc(duration_s * sum(self.rates))
        return self.target_ram_count < before

    def acks_grow_faster(self) -> bool:
        """Pending acks grow faster than the queue: page those first."""
        rate_in, rate_out, ack_in, ack_out = self.rates
        return ack_in - ack_out > rate_in - rate_out


def permitted_beta_count(
    length: int, q1: int, q3: int, q4: int, target: float, segment_size: int
) -> float:
    """How many positions may stay in memory [118]."""
    if length == 0:
        return INFINITY
    if target == 0:
        return min(q3, segment_size)
    betas_and_deltas = length - q1 - q4
    if betas_and_deltas + target == 0:
        return segment_size
    return max(segment_size, betas_and_deltas - betas_and_deltas**2 / (betas_and_deltas + target))
