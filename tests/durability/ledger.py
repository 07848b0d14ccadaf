"""What a broker has promised, and whether it kept it.

The load (``load.py``) tells the ledger what it sent and what it was told; after each restart the
ledger compares what is in the queues with what must, may and must not be there:

- confirmed and never acked: there, once, in order;
- sent and not confirmed, acked at the last moment, or transient: there or not;
- delivered before: if it is there it is marked as redelivered, also if it was acked;
- acked, and a publish made to the same queue after that was confirmed, though nobody had acked it:
  not there. The broker's log is in order, so what was kept later proves that the ack was kept, too.
  (What is acked itself is confirmed for that, whether it is kept or not, and proves nothing);
- not there at an earlier restart: never again.

What was there after a restart is on disk, confirmed or not, and must be there after the next.

Order is checked for each publisher, and for all of them together as far as deliveries showed it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# Complaints of one kind that are shown in full.
SHOWN = 5


class Name(NamedTuple):
    """Who published a message, and the how manieth it was."""

    publisher: int
    number: int

    def __str__(self) -> str:
        return f"{self.publisher}.{self.number}"


class Letter:
    """A message that was published, to one queue or several."""

    __slots__ = ("is_confirmed", "is_persistent", "name", "queues", "sent_at", "size")

    def __init__(
        self,
        name: Name,
        size: int,
        queues: Sequence[QueueBook],
        sent_at: int,
        *,
        is_persistent: bool,
    ) -> None:
        self.name = name
        self.size = size
        self.queues = queues
        self.sent_at = sent_at
        self.is_persistent = is_persistent
        self.is_confirmed = False

    @property
    def is_promised(self) -> bool:
        """A confirm of a transient message promises nothing."""
        return self.is_confirmed and self.is_persistent


class Copy:
    """A message in one queue."""

    __slots__ = ("is_acked", "is_out", "letter", "rank", "settled_at", "was_delivered", "was_kept")

    def __init__(self, letter: Letter) -> None:
        self.letter = letter
        # It was there after an earlier restart.
        self.was_kept = False
        self.was_delivered = False
        # Delivered and, for all the broker can know, neither acked nor returned.
        self.is_out = False
        self.is_acked = False
        # When the broker had answered something that was asked after the ack; 0: not yet.
        self.settled_at = 0
        # Its place in the queue as deliveries showed it; 0: not known.
        self.rank = 0

    @property
    def must_be_there(self) -> bool:
        return (self.was_kept or self.letter.is_promised) and not self.is_acked

    def __str__(self) -> str:
        states = (
            ("transient", not self.letter.is_persistent),
            ("confirmed", self.letter.is_confirmed),
            ("there at an earlier restart", self.was_kept),
            ("delivered", self.was_delivered),
            ("acked", self.is_acked),
            ("settled", self.settled_at > 0),
        )
        known = ", ".join(text for text, holds in states if holds) or "not confirmed"
        return f"{self.letter.name} ({self.letter.size} bytes, {known})"


class Found(NamedTuple):
    """A message that a queue delivered."""

    name: Name
    redelivered: bool
    # Its size and all its bytes are those that were published.
    is_whole: bool


class Complaint(NamedTuple):
    kind: str
    queue: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.queue}: {self.text}"


class QueueBook:
    """One queue as it must be. ``is_shared``: several consumers, whose deliveries have no order."""

    def __init__(self, name: str, *, is_shared: bool = False) -> None:
        self.name = name
        self.is_shared = is_shared
        # All that may be there.
        self.copies: dict[Name, Copy] = {}
        # When the newest message that was confirmed since, and not acked, had been sent.
        self.confirmed_to = 0
        self.next_rank = 1
        # Publisher -> the last message that was delivered for the first time.
        self.newest_delivered: dict[int, int] = {}


class Ledger:
    def __init__(self) -> None:
        self.complaints: list[Complaint] = []
        # What happened, by name, for reports.
        self.counts: Counter[str] = Counter()
        self._now = 0

    # --- while the broker runs -------------------------------------------------------------------

    def sent(
        self, name: Name, size: int, queues: Sequence[QueueBook], *, is_persistent: bool = True
    ) -> Letter:
        letter = Letter(name, size, queues, self._tick(), is_persistent=is_persistent)
        for queue in queues:
            queue.copies[name] = Copy(letter)
        self.counts["sent"] += 1
        return letter

    def confirmed(self, letter: Letter) -> None:
        letter.is_confirmed = True
        is_on_disk = False
        for queue in letter.queues:
            copy = queue.copies.get(letter.name)
            if copy is not None and not copy.is_acked and letter.is_persistent:
                queue.confirmed_to = max(queue.confirmed_to, letter.sent_at)
                is_on_disk = True
        self.counts["confirmed"] += 1
        # Neither transient nor acked: only a commit can have confirmed it.
        self.counts["confirmed_by_disk"] += is_on_disk

    def delivered(self, queue: QueueBook, found: Found) -> Copy | None:
        """A consumer got a message; None if there should be no such message."""
        copy = queue.copies.get(found.name)
        self.counts["delivered"] += 1
        if not found.is_whole:
            self.complain("damaged", queue, f"{copy or found.name}")
        if copy is None:
            self.complain("unknown", queue, f"{found.name} is not, or no longer, in the queue")
            return None
        if copy.is_out:
            self.complain("doubled", queue, f"{copy} was delivered twice")
        elif copy.is_acked:
            self.complain("returned", queue, f"{copy} was delivered again")
        if copy.was_delivered and not found.redelivered:
            self.complain("unmarked redelivery", queue, f"{copy}")
        if not copy.was_delivered:
            self._first_delivery(queue, copy, found)
        copy.was_delivered = copy.is_out = True
        return copy

    def _first_delivery(self, queue: QueueBook, copy: Copy, found: Found) -> None:
        if found.redelivered:
            self.complain("marked without reason", queue, f"{copy}")
        if queue.is_shared:
            return
        publisher, number = found.name
        before = queue.newest_delivered.get(publisher, 0)
        if number < before:
            self.complain("out of order", queue, f"{copy} came after {publisher}.{before}")
        queue.newest_delivered[publisher] = number
        copy.rank = queue.next_rank
        queue.next_rank += 1

    def acked(self, copies: Iterable[Copy]) -> None:
        for copy in copies:
            copy.is_acked = True
            copy.is_out = False
            self.counts["acked"] += 1

    def settled(self, copies: Iterable[Copy]) -> None:
        """The broker answered something that was asked after the ack."""
        now = self._tick()
        for copy in copies:
            copy.settled_at = now
            self.counts["settled"] += 1

    def returned(self, copies: Iterable[Copy]) -> None:
        """They went back to their queue, unacked."""
        for copy in copies:
            copy.is_out = False

    # --- after a restart -------------------------------------------------------------------------

    def check(self, queue: QueueBook, found: Sequence[Found]) -> list[Copy]:
        """Compare with what a restarted broker has; from here on, that is what it must have.

        Returns the copies that are there, in their order, as delivered.
        """
        there: dict[Name, Copy] = {}
        newest: dict[int, int] = {}
        highest = 0
        for item in found:
            copy = queue.copies.get(item.name)
            if copy is None:
                self.complain("unknown", queue, f"{item.name} is there, and should not be")
                continue
            if item.name in there:
                self.complain("doubled", queue, f"{copy} is there twice")
                continue
            there[item.name] = copy
            self._check_marks(queue, copy, item)
            publisher, number = item.name
            if number < newest.get(publisher, 0):
                text = f"{copy} is behind {publisher}.{newest[publisher]}"
                self.complain("out of order", queue, text)
            elif copy.rank and copy.rank < highest:
                text = f"{copy} is behind one that was delivered after it"
                self.complain("out of order", queue, text)
            newest[publisher] = max(number, newest.get(publisher, 0))
            highest = max(copy.rank, highest)
        for copy in queue.copies.values():
            if copy.must_be_there and copy.letter.name not in there:
                self.complain("lost", queue, f"{copy}")
        self._start_anew(queue, there)
        return list(there.values())

    def _check_marks(self, queue: QueueBook, copy: Copy, item: Found) -> None:
        if not item.is_whole:
            self.complain("damaged", queue, f"{copy}")
        if copy.was_delivered and not item.redelivered:
            self.complain("unmarked redelivery", queue, f"{copy}")
        if 0 < copy.settled_at < queue.confirmed_to:
            text = f"{copy} is there, though a later publish was confirmed"
            self.complain("returned", queue, text)
        if copy.settled_at:
            self.counts["returned, marked"] += 1
        if not copy.letter.is_confirmed and not copy.was_kept:
            self.counts["kept, unconfirmed"] += 1

    def _start_anew(self, queue: QueueBook, there: dict[Name, Copy]) -> None:
        self.counts["kept"] += len(there)
        queue.copies = there
        queue.next_rank = 1
        for copy in there.values():
            copy.rank = queue.next_rank
            queue.next_rank += 1
            copy.was_kept = copy.was_delivered = copy.is_out = True
            copy.is_acked = False
            copy.settled_at = 0

    # --- what came out of it ---------------------------------------------------------------------

    def kinds(self) -> set[str]:
        return {complaint.kind for complaint in self.complaints}

    def report(self) -> str:
        """A line for each kind of complaint, with the first of them; empty if there are none."""
        lines = []
        for kind, count in Counter(complaint.kind for complaint in self.complaints).items():
            lines.append(f"{kind}: {count} in all")
            same = [complaint for complaint in self.complaints if complaint.kind == kind]
            lines += [f"    {complaint.queue}: {complaint.text}" for complaint in same[:SHOWN]]
        return "\n".join(lines)

    def complain(self, kind: str, queue: QueueBook, text: str) -> None:
        self.complaints.append(Complaint(kind, queue.name, text))

    def _tick(self) -> int:
        self._now += 1
        return self._now
