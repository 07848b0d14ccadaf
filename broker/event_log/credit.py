"""Who throttled whom: times without credit, written into the event log.

Upstream: ``broker/flow.py`` calls at the moments in which credit with one peer runs out and comes
back, never for a message. Downstream: ``journal.py``. One per virtual host.

A publisher at full speed runs out of credit a thousand times a second, for a tenth of a millisecond
each: that is how it is paced. Told one by one, such blocks would drown everything else. So those
that are over by the next tick are added up, and told as one; a block that lasts is told by the
first tick that finds it, and again when it ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leveret.broker.clock import Clock, Timer
    from leveret.broker.event_log.journal import Journal
    from leveret.broker.mailbox import Mailbox

TICK_S = 0.1

# Who waits, and for whom.
_Pair = tuple["Mailbox", "Mailbox"]


class CreditLog:
    def __init__(self, journal: Journal, clock: Clock, vhost: str) -> None:
        self._journal = journal
        self._clock = clock
        self._vhost = vhost
        # Blocks that last, by when they began; those among them that were told.
        self._since_us: dict[_Pair, int] = {}
        self._told: set[_Pair] = set()
        # Blocks that are over and were not told: how many, and how long together.
        self._short: dict[_Pair, tuple[int, int]] = {}
        # Set while there is anything to tell at the next tick.
        self._timer: Timer | None = None

    def blocked(self, who: Mailbox, by: Mailbox) -> None:
        """``who`` has no credit left with ``by``."""
        self._since_us[who, by] = self._journal.now_us()
        if self._timer is None:
            self._timer = self._clock.call_later(TICK_S, self._on_tick)

    def unblocked(self, who: Mailbox, by: Mailbox) -> None:
        """It has again, or one of them is gone."""
        pair = who, by
        since_us = self._since_us.pop(pair, None)
        if since_us is None:
            return
        # The clock of the wall may be set back.
        held_us = max(0, self._journal.now_us() - since_us)
        if pair in self._told:
            self._told.remove(pair)
            self._tell_unblocked(pair, 1, held_us)
        else:
            count, sum_us = self._short.get(pair, (0, 0))
            self._short[pair] = count + 1, sum_us + held_us

    def close(self) -> None:
        """The virtual host stops: tell what is left."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._tell_short()

    def _on_tick(self) -> None:
        self._timer = None
        self._tell_short()
        lasts_since_us = self._journal.now_us() - int(TICK_S * 1_000_000)
        for pair, since_us in self._since_us.items():
            if since_us <= lasts_since_us and pair not in self._told:
                self._told.add(pair)
                names = self._names(pair)
                self._journal.event("credit_blocked", vhost=self._vhost, attrs=names)
        if len(self._told) < len(self._since_us):
            self._timer = self._clock.call_later(TICK_S, self._on_tick)

    def _tell_short(self) -> None:
        short, self._short = self._short, {}
        for pair, (count, sum_us) in short.items():
            self._tell_unblocked(pair, count, sum_us)

    def _tell_unblocked(self, pair: _Pair, count: int, held_us: int) -> None:
        names = self._names(pair)
        self._journal.event(
            "credit_unblocked", vhost=self._vhost, n=count, hold_us=held_us, attrs=names
        )

    def _names(self, pair: _Pair) -> dict[str, str]:
        who, by = pair
        # The store is one mailbox for everybody, and has no name of its own.
        return {"who": who.log_name, "by": by.log_name or f"store:{self._vhost}"}
