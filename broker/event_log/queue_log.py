"""What queues do to their messages by themselves, written into the event log.

Upstream: queue actors and their dead letters (expire, drop, dead_letter, purge, paging).
Downstream: ``messages.py``, which knows how lines are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from leveret.broker.event_log.messages import KEPT_MAX, named, quoted
from leveret.protocol.twin import logged

if TYPE_CHECKING:
    from leveret.broker.event_log.messages import MessageLog
    from leveret.broker.events import Actor
    from leveret.protocol.lines import Column
    from leveret.protocol.twin import Message, Template


class QueueLog:
    def __init__(self, log: MessageLog, vhost: str, queue: str) -> None:
        self._log = log
        self._journal = log.journal
        self._queue = queue
        self._vhost = b',"vhost":' + quoted(vhost)
        self._who = self._vhost + named(b"queue", queue)
        # What the backing queue had paged when that was last told: out and in, messages and bytes.
        self._paged = (0, 0, 0, 0)
        # By kind and what else is the same in all its lines.
        self._templates: dict[tuple[str, ...], Template] = {}

    def expired(self, messages: Sequence[Message], depth: int) -> None:
        self._gone("expire", "", messages, depth)

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
        if self._log.returns:
            self._log.done(ids, count, self._queue)

    def dead_lettered(
        self,
        message: Message,
        copy: Message,
        reason: str,
        queues: Sequence[str],
        depth: int,
        *,
        is_told: bool,
    ) -> None:
        """One that left for the dead-letter exchange; the copy goes on under the same number.

        ``is_told``: this is another copy of it, the first came to nothing.
        """
        msg = message.log_id
        if not msg:
            return
        now_us = self._journal.now_us()
        copy.log_id = msg
        copy.stamp_us = now_us
        if is_told:
            return
        times = self._log.deliveries(msg, self._queue) if reason == "delivery_limit" else 0
        numbers = (msg, len(message.body), len(queues), times)
        template = self._dead_letter(copy, reason)
        self._journal.buffer.add(now_us, template, numbers, 1, depth)
        self._log.done(msg, 1, self._queue)
        for queue in queues:
            self._journal.buffer.add(now_us, self._enqueue(copy, queue), (msg, len(copy.body)), 1)

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

    def _keep(self, key: tuple[str, ...], template: Template) -> Template:
        if len(self._templates) >= KEPT_MAX:
            self._templates.clear()
        self._templates[key] = template
        return template


def _address(copy: Message) -> bytes:
    return named(b"exchange", copy.exchange) + named(b"rk", copy.routing_key)
