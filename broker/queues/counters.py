"""What a queue has done, in fixed memory, updated per batch [93, 142]."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leveret.broker.clock import Clock

_HALF_LIFE_S = 1.0


class QueueCounters:
    __slots__ = (
        "_clock",
        "_is_ready",
        "_since",
        "_utilisation",
        "ack",
        "deliver",
        "deliver_no_ack",
        "drop",
        "expire",
        "get",
        "get_empty",
        "get_no_ack",
        "publish",
        "redeliver",
        "refuse",
        "reject",
        "requeue",
    )

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.publish = 0
        self.deliver = 0
        self.deliver_no_ack = 0
        self.get = 0
        self.get_no_ack = 0
        self.get_empty = 0
        self.redeliver = 0
        self.ack = 0
        self.reject = 0
        self.requeue = 0
        # Too much (drop-head), too old, and turned away (reject-publish).
        self.drop = 0
        self.expire = 0
        self.refuse = 0
        # Whether some consumer could take a message, since when, and how that was on average.
        self._is_ready = False
        self._since = clock.monotonic()
        self._utilisation: float | None = None

    def consumers_ready(self, *, is_ready: bool) -> None:
        """Told after each batch; only a change costs more than the comparison."""
        if is_ready != self._is_ready:
            self._account()
            self._is_ready = is_ready

    def utilisation(self) -> float | None:
        """Share of the time in which at least one consumer was ready (half-life one second)."""
        self._account()
        return self._utilisation

    def _account(self) -> None:
        now = self._clock.monotonic()
        spent, self._since = now - self._since, now
        value = 1.0 if self._is_ready else 0.0
        if self._utilisation is None:
            self._utilisation = value
        else:
            weight = math.exp(-math.log(2) * spent / _HALF_LIFE_S)
            self._utilisation = value * (1 - weight) + self._utilisation * weight

    def statistics(self) -> dict[str, object]:
        counted = (name for name in self.__slots__ if not name.startswith("_"))
        return {
            **{name: getattr(self, name) for name in counted},
            "consumer_utilisation": self.utilisation(),
        }
