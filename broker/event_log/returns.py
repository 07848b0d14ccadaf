"""How often messages that came back to their queues had been delivered.

Upstream: ``messages.py`` (what channels send back, deliver again or are done with) and
``queue_log.py`` (what queues count themselves, and what leaves them by itself). Lines of the log
say so as ``delivery_count``.

It is bounded: at most ``RETURNS_MAX`` are remembered, and those go first that have not come back
for longest. What leaves a queue unread (dropped on disk) stays until then, or until the queue goes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

RETURNS_MAX = 100_000

# Virtual host and name of a queue.
Place = tuple[str, str]


class Returns:
    __slots__ = ("_times", "by_queue")

    def __init__(self) -> None:
        # How often it has been delivered; the last to come back is last.
        self._times: OrderedDict[tuple[int, Place], int] = OrderedDict()
        # The same messages. Queues to which nothing came back are not here, so that those who
        # deliver and settle see at once that there is nothing to look for.
        self.by_queue: dict[Place, set[int]] = {}

    def __len__(self) -> int:
        return len(self._times)

    def came_back(self, msg: int, place: Place) -> int:
        """Once more; how often it has been delivered."""
        times = self._times.get((msg, place), 0) + 1
        self._set(msg, place, times)
        return times

    def learn(self, msg: int, place: Place, times: int) -> None:
        """Its queue, which counts for itself, says so; perhaps it knows of an earlier boot."""
        if times > self._times.get((msg, place), 0):
            self._set(msg, place, times)

    def _set(self, msg: int, place: Place, times: int) -> None:
        key = msg, place
        self._times[key] = times
        self._times.move_to_end(key)
        self.by_queue.setdefault(place, set()).add(msg)
        if len(self._times) > RETURNS_MAX:
            (oldest, where), _ = self._times.popitem(last=False)
            self._leave(where, oldest)

    def deliveries(self, msg: int, place: Place) -> int:
        """Of one that is delivered again, before that: one at least."""
        return self._times.get((msg, place), 1)

    def done(self, ids: Collection[int], place: Place) -> None:
        """They will not come back."""
        here = self.by_queue.get(place)
        if here is None:
            return
        for msg in ids:
            if msg in here:
                del self._times[msg, place]
                self._leave(place, msg)

    def forget(self, place: Place, but: Collection[int] = ()) -> None:
        """All that was ready there is gone; ``but`` those consumers have."""
        here = self.by_queue.get(place)
        if here is not None:
            self.done(here.difference(but), place)

    def _leave(self, place: Place, msg: int) -> None:
        here = self.by_queue[place]
        here.remove(msg)
        if not here:
            del self.by_queue[place]
