"""A log checked as a whole: each message leads a legal life in each of its queues.

``check`` replays the events of one boot at level ``all``. A life is (``msg``, ``queue``); what may
happen to it depends on where it is: ready in the queue, held by one channel under one tag, or over.
What is left at the end must be what the queues themselves say they have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from leveret.broker.event_log.schema import Event


class Holder(NamedTuple):
    conn: int
    ch: int
    dtag: int


class Lives:
    def __init__(self, counting: Collection[str] = ()) -> None:
        """Queues of ``counting`` count deliveries themselves, those that were never sent, too."""
        self._counting = counting
        # Where a message is: "ready", "refused" (its requeue follows), or who has it.
        # Those whose life is over are not here.
        self.places: dict[tuple[int, str], str | Holder] = {}
        self.over: set[tuple[int, str]] = set()
        self.deliveries: Counter[tuple[int, str]] = Counter()
        self.born: dict[int, Event] = {}
        self.purged: Counter[str] = Counter()
        # No queue took them: that they were dropped or returned must follow.
        self.homeless: set[int] = set()

    def check(self, events: list[Event]) -> None:
        for event in events:
            handler = getattr(self, "_" + event.ev, None)
            if handler is not None:
                handler(event)
            assert event.depth is None or event.depth >= 0, event
            assert event.wait_us is None or event.wait_us >= 0, event
            assert event.hold_us is None or event.hold_us >= 0, event
        assert not self.homeless, self.homeless
        left = {place for place in self.places.values() if place != "ready"}
        assert not left, left

    def ready(self, queue: str) -> int:
        """As the log has it, at its end."""
        its = [key for key, place in self.places.items() if key[1] == queue and place == "ready"]
        return len(its) - self.purged[queue]

    # --- coming ----------------------------------------------------------------------------------

    def _publish(self, event: Event) -> None:
        assert event.msg, event
        assert event.msg not in self.born, event
        self.born[event.msg] = event
        if event.queue:
            assert event.routed == 1, event
            self._come(event)
        elif not event.routed:
            self.homeless.add(event.msg)

    def _enqueue(self, event: Event) -> None:
        assert event.msg in self.born, event
        self._come(event)

    def _come(self, event: Event) -> None:
        key = event.msg, event.queue
        # A dead letter may come back to a queue where it has been.
        assert key not in self.places, event
        assert event.reason == "dead_letter" or key not in self.over, event
        self.places[key] = "ready"

    # --- going -----------------------------------------------------------------------------------

    def _deliver(self, event: Event) -> None:
        key = event.msg, event.queue
        assert self.places.get(key) == "ready", event
        assert event.size == self.born[event.msg].size, event
        # A delivery that its channel did not live to see counts as one, and is not told.
        times = self.deliveries[key]
        assert event.redelivered or not times, event
        self._check_count(event, max(times, 1) if event.redelivered else 0)
        self.deliveries[key] += 1
        if event.reason == "auto_ack":
            self._end(key)
        else:
            self.places[key] = Holder(event.conn, event.ch, event.dtag)

    _get = _deliver

    def _check_count(self, event: Event, seen: int) -> None:
        if event.queue in self._counting:
            assert event.delivery_count >= seen, event
        else:
            assert event.delivery_count == seen, event

    def _ack(self, event: Event) -> None:
        key = event.msg, event.queue
        assert self.places.get(key) == Holder(event.conn, event.ch, event.dtag), event
        if event.ev == "ack":
            self._end(key)
        else:
            self.places[key] = "refused"
            if event.reason == "discard":
                self._end(key)

    _nack = _ack
    _reject = _ack

    def _requeue(self, event: Event) -> None:
        key = event.msg, event.queue
        place = self.places.get(key)
        assert place == "refused" or isinstance(place, Holder), event
        assert (place == "refused") == (event.reason in ("nack", "reject")), event
        self._check_count(event, self.deliveries[key])
        self.places[key] = "ready"

    def _expire(self, event: Event) -> None:
        if not event.msg:
            self.purged[event.queue] += event.n
            return
        key = event.msg, event.queue
        assert self.places.get(key) == "ready", event
        self._end(key)

    def _dead_letter(self, event: Event) -> None:
        key = event.msg, event.queue
        if event.reason in ("maxlen", "delivery_limit"):
            assert self.places.get(key) == "ready", event
            self._end(key)
        # Else that it is gone was told before.
        assert key in self.over, event
        assert key not in self.places, event

    def _drop(self, event: Event) -> None:
        if event.reason == "unroutable":
            self.homeless.remove(event.msg)
            return
        if not event.msg:
            self.purged[event.queue] += event.n
            return
        key = event.msg, event.queue
        if event.reason != "queue_deleted" or event.conn == 0:
            assert self.places.get(key) == "ready", event
        self._end(key)

    def _return(self, event: Event) -> None:
        if event.msg in self.homeless:
            self.homeless.remove(event.msg)
        else:
            # Its only queue was deleted before it came in.
            assert (event.msg, self.born[event.msg].queue) in self.over, event

    def _purge(self, event: Event) -> None:
        self.purged[event.queue] += event.n

    def _end(self, key: tuple[int, str]) -> None:
        del self.places[key]
        self.over.add(key)
        self.deliveries.pop(key, None)
