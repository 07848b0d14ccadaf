"""What queues do to their messages by themselves, written into the event log.

Upstream: queue actors and their dead letters (expire, drop, dead_letter, purge, paging).
Downstream: ``messages.py``, which knows how lines are made.

Nothing is read from disk to be told: what left the queue unread is told as a number, a few times a
second at most, since it may be one for every message that comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from leveret.broker.event_log.messages import KEPT_MAX, named, quoted
from leveret.protocol.lines import each_of
from leveret.protocol.twin import logged

if TYPE_CHECKING:
    from leveret.broker.clock import Clock, Timer
    from leveret.broker.event_log.messages import MessageLog
    from leveret.broker.events import Actor
    from leveret.protocol.lines import Column
    from leveret.protocol.twin import Message, Template

# What left unread in this time is told together.
UNREAD_S = 0.1


class QueueLog:
    def __init__(
        self,
        log: MessageLog,
        vhost: str,
        queue: str,
        clock: Clock,
        count_ready: Callable[[], int] = lambda: 0,
    ) -> None:
        """``count_ready`` says how many messages are ready in the queue."""
        self._log = log
        self._journal = log.journal
        self._clock = clock
        self._count_ready = count_ready
        self._place = vhost, queue
        self._vhost = b',"vhost":' + quoted(vhost)
        self._who = self._vhost + named(b"queue", queue)
        # What the backing queue had paged when that was last told: out and in, messages and bytes.
        self._paged = (0, 0, 0, 0)
        # By kind and what else is the same in all its lines.
        self._templates: dict[tuple[str, ...], Template] = {}
        # How many left unread, by kind and reason, and were not told; set while there are any.
        self._unread: dict[tuple[str, str], int] = {}
        self._timer: Timer | None = None

    def expired(self, messages: Sequence[Message], depth: int) -> None:
        self._gone("expire", "", messages, depth)

    def left(
        self, ev: str, reason: str, count: int, seen: Sequence[Message], depth: int | None = None
    ) -> None:
        """``count`` messages are gone, of which ``seen`` were in memory."""
        if seen:
            self._gone(ev, reason, seen, self._count_ready() if depth is None else depth)
        count -= len(seen)
        if count:
            key = ev, reason
            self._unread[key] = self._unread.get(key, 0) + count
            if self._timer is None:
                self._timer = self._clock.call_later(UNREAD_S, self.tell_unread)

    def tell_unread(self) -> None:
        """What is left to be told; also the last that the queue does."""
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        now_us = self._journal.now_us()
        unread, self._unread = self._unread, {}
        for (ev, reason), count in unread.items():
            template = self._log.template(ev, self._who + named(b"reason", reason), b"n")
            self._journal.buffer.add(now_us, template, (count,), 1, self._count_ready())

    def dropped(self, messages: Sequence[Message], depth: int, reason: str) -> None:
        """Gone, and nobody was given them: ``maxlen``, ``refused``, ``delivery_limit`` or
        ``queue_deleted``."""
        self._gone("drop", reason, messages, depth)

    def _gone(self, ev: str, reason: str, messages: Sequence[Message], depth: int) -> None:
        now_us = self._journal.now_us()
        found = logged(messages, now_us)
        if found is None:
            return
        count, _, ids, sizes, waits = found
        names = [b"msg", b"size"]
        columns: tuple[Column, ...] = (ids, sizes)
        if ev == "expire":
            names.append(b"wait_us")
            columns = (ids, sizes, waits)
        template = self._templates.get((ev, reason))
        if template is None:
            shared = self._who + named(b"reason", reason)
            template = self._keep((ev, reason), self._log.template(ev, shared, *names))
        self._journal.buffer.add(now_us, template, columns, count, depth)
        if self._log.returns.by_queue:
            self._log.returns.done(each_of(ids, count), self._place)

    def inherit(self, message: Message, copy: Message) -> None:
        """A copy for the dead-letter exchange goes on under the same number."""
        copy.log_id = message.log_id
        copy.stamp_us = self._journal.now_us()

    def dead_lettered(
        self, message: Message, copy: Message, reason: str, queues: Sequence[str], depth: int
    ) -> None:
        """One that has left for the dead-letter exchange, and the queues its copy was sent to."""
        msg = message.log_id
        if not msg:
            return
        # Its time there is counted from here.
        now_us = copy.stamp_us = self._journal.now_us()
        returns = self._log.returns
        times = returns.deliveries(msg, self._place) if reason == "delivery_limit" else 0
        numbers = (msg, len(message.body), len(queues), times)
        template = self._dead_letter(copy, reason)
        self._journal.buffer.add(now_us, template, numbers, 1, depth)
        returns.done((msg,), self._place)
        for queue in queues:
            self._journal.buffer.add(now_us, self._enqueue(copy, queue), (msg, len(copy.body)), 1)

    def not_taken(self, copies: Sequence[Message], queue: str, reason: str) -> None:
        """Dead letters that ``queue`` was sent and did not take."""
        now_us = self._journal.now_us()
        found = logged(copies, now_us)
        if found is not None:
            count, _, ids, sizes, _ = found
            shared = self._vhost + named(b"queue", queue) + named(b"reason", reason)
            template = self._log.template("drop", shared, b"msg", b"size")
            self._journal.buffer.add(now_us, template, (ids, sizes), count)

    def _dead_letter(self, copy: Message, reason: str) -> Template:
        key = ("dead_letter", reason, copy.exchange, copy.routing_key)
        template = self._templates.get(key)
        if template is None:
            shared = self._who + _address(copy) + named(b"reason", reason)
            names = (b"msg", b"size", b"routed", b"delivery_count")
            template = self._keep(key, self._log.template("dead_letter", shared, *names))
        return template

    def _enqueue(self, copy: Message, queue: str) -> Template:
        mark = "persistent" if copy.persistent else ""
        key = ("enqueue", mark, copy.exchange, copy.routing_key, queue)
        template = self._templates.get(key)
        if template is None:
            shared = self._vhost + _address(copy) + named(b"queue", queue)
            shared += b',"reason":"dead_letter"' + (b',"persistent":true' if mark else b"")
            template = self._keep(key, self._log.template("enqueue", shared, b"msg", b"size"))
        return template

    def purged(self, count: int, user: str, actor: Actor) -> None:
        now_us = self._journal.now_us()
        shared = b'%b,"conn":%d,"ch":%d%b' % (
            self._who,
            actor.conn,
            actor.ch,
            named(b"user", user),
        )
        self._journal.buffer.add(now_us, self._log.template("purge", shared, b"n"), (count,), 1, 0)

    def paged(self, paged: tuple[int, int, int, int], depth: int) -> None:
        """``paged``: messages and bytes that left memory and came back so far."""
        if paged == self._paged:
            return
        out, out_bytes, back, back_bytes = [
            now - before for now, before in zip(paged, self._paged, strict=True)
        ]
        self._paged = paged
        now_us = self._journal.now_us()
        for ev, count, size in (("paged_out", out, out_bytes), ("paged_in", back, back_bytes)):
            if count:
                template = self._log.template(ev, self._who, b"n", b"size")
                self._journal.buffer.add(now_us, template, (count, size), 1, depth)

    def learn_returns(self, counts: Iterable[tuple[Message, int]]) -> None:
        """The queue counts for itself how often messages came back: also before a restart."""
        for message, count in counts:
            if message.log_id and count:
                self._log.returns.learn(message.log_id, self._place, count)

    @property
    def knows_returns(self) -> bool:
        """Something came back to this queue."""
        return self._place in self._log.returns.by_queue

    def forget_returns(self, but: Iterable[Message] = ()) -> None:
        """All that was ready is gone; ``but`` what consumers have is not."""
        self._log.returns.forget(self._place, [message.log_id for message in but])

    def _keep(self, key: tuple[str, ...], template: Template) -> Template:
        if len(self._templates) >= KEPT_MAX:
            self._templates.clear()
        self._templates[key] = template
        return template


def _address(copy: Message) -> bytes:
    return named(b"exchange", copy.exchange) + named(b"rk", copy.routing_key)
