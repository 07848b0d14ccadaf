"""Who throttled whom: times without credit, written into the event log.

Upstream: ``broker/flow.py`` calls at the moments in which credit with one peer runs out and comes
back, never for a message. Downstream: ``journal.py``. One per virtual host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leveret.broker.event_log.journal import Journal
    from leveret.broker.mailbox import Mailbox


class CreditLog:
    def __init__(self, journal: Journal, vhost: str) -> None:
        self._journal = journal
        self._vhost = vhost
        # Since when who waits for whom.
        self._since_us: dict[tuple[Mailbox, Mailbox], int] = {}

    def blocked(self, who: Mailbox, by: Mailbox) -> None:
        """``who`` has no credit left with ``by``."""
        self._since_us[who, by] = self._journal.now_us()
        self._journal.event("credit_blocked", vhost=self._vhost, attrs=self._names(who, by))

    def unblocked(self, who: Mailbox, by: Mailbox) -> None:
        """It has again, or ``by`` is gone."""
        since_us = self._since_us.pop((who, by), None)
        if since_us is None:
            return
        self._journal.event(
            "credit_unblocked",
            vhost=self._vhost,
            hold_us=max(0, self._journal.now_us() - since_us),
            attrs=self._names(who, by),
        )

    def _names(self, who: Mailbox, by: Mailbox) -> dict[str, str]:
        # The store is one mailbox for everybody, and has no name of its own.
        return {"who": who.log_name, "by": by.log_name or f"store:{self._vhost}"}
