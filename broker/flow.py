"""Credit flow: who may pause whom. RabbitMQ's credit_flow, one object per task.

Chain: reader -> channel -> queue (-> store). A sender spends credit for what it sends; a
receiver grants more each time it has taken enough. A receiver that is itself blocked further
down the chain defers its grants, so that pressure travels up to the socket, where the reader,
the only one who acts on being blocked, stops reading.

Peers are known by their mailboxes, and grants travel as ``Bump`` through them. Credit counts
messages; a large one costs more (``1 + size / 16 KiB``), so that what a link can hold is bounded
in bytes as well.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from leveret.broker.mailbox import Mailbox


class Bump(NamedTuple):
    """A grant: ``peer`` has taken what it was sent and allows ``credit`` more."""

    peer: Mailbox
    credit: int


class Witness(Protocol):
    """Hears when credit with a peer runs out, and when there is some again."""

    def blocked(self, who: Mailbox, by: Mailbox) -> None: ...

    def unblocked(self, who: Mailbox, by: Mailbox) -> None: ...


class CreditFlow:
    """Both ends of every link of one task: what it may send, what it owes its senders."""

    __slots__ = (
        "_address",
        "_blockers",
        "_deferred",
        "_from",
        "_initial",
        "_more_after",
        "_to",
        "witness",
    )

    def __init__(
        self, address: Mailbox, initial: int, more_after: int, witness: Witness | None = None
    ) -> None:
        self._address = address
        self.witness = witness
        self._initial = initial
        self._more_after = more_after
        # Credit left with each peer we send to; absent means all of it.
        self._from: dict[Mailbox, int] = {}
        # What is still to be taken from each sender before it is granted more.
        self._to: dict[Mailbox, int] = {}
        # Peers whose credit is used up.
        self._blockers: set[Mailbox] = set()
        # Grants held back while we are blocked ourselves.
        self._deferred: list[tuple[Mailbox, int]] = []

    @property
    def is_blocked(self) -> bool:
        return bool(self._blockers)

    @property
    def blockers(self) -> frozenset[Mailbox]:
        return frozenset(self._blockers)

    def credit(self, to: Mailbox) -> int:
        return self._from.get(to, self._initial)

    def lowest_credit(self) -> int:
        """The least credit left with any peer: what may be sent without asking to whom."""
        return min(self._from.values(), default=self._initial)

    def send(self, to: Mailbox, cost: int) -> None:
        """Spend credit for something sent; blocks us when it is used up."""
        left = self._from.get(to, self._initial) - cost
        self._from[to] = left
        if left <= 0 and to not in self._blockers:
            self._blockers.add(to)
            if self.witness is not None:
                self.witness.blocked(self._address, to)

    def ack(self, sender: Mailbox, cost: int) -> None:
        """We took something from ``sender``; grant more once it adds up."""
        left = self._to.get(sender, self._more_after) - cost
        if left <= 0:
            self._grant(sender, self._more_after - left)
            left = self._more_after
        self._to[sender] = left

    def handle_bump(self, bump: Bump) -> None:
        peer, credit = bump
        if peer not in self._from:
            return  # forgotten in the meantime
        left = self._from[peer] + credit
        if left >= self._initial:
            del self._from[peer]
        else:
            self._from[peer] = left
        if left > 0:
            self._unblock(peer)

    def peer_down(self, peer: Mailbox) -> None:
        """Forget a peer: one that is gone must never block anybody."""
        self._from.pop(peer, None)
        self._to.pop(peer, None)
        self._unblock(peer)

    def end(self) -> None:
        """The task ends, and waits for nobody any more."""
        if self.witness is not None:
            for peer in self._blockers:
                self.witness.unblocked(self._address, peer)
        self._blockers.clear()

    def _grant(self, sender: Mailbox, credit: int) -> None:
        if self._blockers:
            self._deferred.append((sender, credit))
        else:
            sender.put_urgent(Bump(self._address, credit))

    def _unblock(self, peer: Mailbox) -> None:
        if peer in self._blockers:
            self._blockers.remove(peer)
            if self.witness is not None:
                self.witness.unblocked(self._address, peer)
        if self._blockers or not self._deferred:
            return
        deferred, self._deferred = self._deferred, []
        for sender, credit in deferred:
            sender.put_urgent(Bump(self._address, credit))
