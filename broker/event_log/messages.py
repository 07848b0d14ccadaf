"""What channels do to messages, written into the event log a run at a time.

Upstream: channels (``ChannelLog``: publish, enqueue, confirm, return, deliver, get, ack, nack,
reject, requeue); ``queue_log.py`` has what queues do by themselves. Downstream: ``journal.py``.

Events of a run share their names and their time: those are encoded once and kept (``Template``),
and the compiled codec puts the numbers between (``protocol/lines.py``). A message without a number
(``Message.log_id``) is not told; while the journal sheds, what would have been told is counted and
left out.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

import msgspec

from leveret.broker.event_log.numbering import Numbering
from leveret.protocol.twin import Held, fill_lines, logged, stamp

if TYPE_CHECKING:
    from leveret.broker.channel.context import ConnectionContext
    from leveret.broker.event_log.journal import Journal
    from leveret.protocol.lines import Column, Numbers
    from leveret.protocol.twin import Message

# How many messages that came back are remembered with the number of their deliveries.
RETURNS_MAX = 100_000
# How many templates, and sources of deliveries, are kept.
KEPT_MAX = 1_000

# What stands behind the number of a line, between its other numbers, and at its end.
Template = tuple[bytes, ...]
# First and last of a range of sequence numbers.
Range = tuple[int, int]

_END = b"}\n"


@lru_cache(maxsize=8192)
def quoted(name: str) -> bytes:
    """A name as JSON; bytes that were no UTF-8 are shown as replacement characters."""
    return msgspec.json.encode(name.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))


def named(field: bytes, name: str) -> bytes:
    """A field, unless it is at its default."""
    return b',"%b":%b' % (field, quoted(name)) if name else b""


class MessageLog:
    """What all channels and queues of a broker share; only where messages are told at all."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.numbering = Numbering(1.0 if journal.level == "all" else journal.sample)
        self._boot = b',"boot":' + quoted(journal.boot) + b',"ev":'
        # How often a message had been delivered when it came back to a queue.
        self._returns: dict[tuple[int, str], int] = {}

    def template(self, ev: str, shared: bytes, *names: bytes) -> Template:
        """For lines of a kind that have ``shared`` in common and differ in the numbers named."""
        pieces = [b',"%b":' % name for name in names]
        return (self._boot + quoted(ev) + shared + pieces[0], *pieces[1:], _END)

    def write(
        self,
        now_us: int,
        template: Template,
        columns: Sequence[Column],
        count: int,
        depth: int | None = None,
    ) -> None:
        """``count`` lines; one column for each number of the template."""
        journal = self.journal
        if journal.is_shedding:
            journal.shed(count)
            return
        if depth is None:
            head = b'{"ts":%d,"seq":' % now_us
        else:
            head = b'{"ts":%d,"depth":%d,"seq":' % (now_us, depth)
        first = journal.take_seq(count)
        journal.write(fill_lines((head, *template), (first, *columns), count), count)

    # --- deliveries that came back ---------------------------------------------------------------

    def returned(self, msg: int, queue: str) -> int:
        """It came back once more; how often it has been delivered."""
        if len(self._returns) >= RETURNS_MAX:
            self._returns.clear()
        times = self._returns[msg, queue] = self._returns.get((msg, queue), 0) + 1
        return times

    def deliveries(self, msg: int, queue: str) -> int:
        """Before the one that is under way; at least one, for a message that was redelivered."""
        return self._returns.get((msg, queue), 1)

    @property
    def has_returns(self) -> bool:
        return bool(self._returns)

    def done(self, msg: int, queue: str) -> None:
        self._returns.pop((msg, queue), None)


class _Source:
    """Where deliveries come from; one for each consumer."""

    __slots__ = ("is_gone", "queue", "shared", "templates")

    def __init__(self, queue: str, shared: bytes) -> None:
        self.queue = queue
        self.shared = shared
        # The queue was deleted: nothing goes back there.
        self.is_gone = False
        # By kind and reason.
        self.templates: dict[tuple[str, str, bool], Template] = {}


class ChannelLog:
    """What one channel does to messages."""

    def __init__(
        self, log: MessageLog, vhost: str, connection: int, channel: int, user: str
    ) -> None:
        self._log = log
        self._queue_prefix = f"queue:{vhost}/"
        self._vhost = b',"vhost":' + quoted(vhost)
        self._who = b'%b,"conn":%d,"ch":%d,"user":%b' % (
            self._vhost,
            connection,
            channel,
            quoted(user),
        )
        # Publishes that wait for a confirm: sequence numbers of a run, and when; in order.
        self._unconfirmed: deque[tuple[int, int, int]] = deque()
        self._confirms = {
            is_refused: log.template(
                "confirm",
                self._who + (b',"reason":"nack"' if is_refused else b""),
                *(b"dtag", b"n", b"wait_us"),
            )
            for is_refused in (False, True)
        }
        # Deliveries that wait for their answer, by delivery tag, each with its _Source.
        self._held = Held()
        self._sources: dict[tuple[str, str], _Source] = {}
        # For publish and the enqueues that go with it: by envelope, queues, mandatory, persistent.
        self._published: dict[tuple[bytes, tuple[str, ...], bool, bool], list[Template]] = {}

    # --- publishing ------------------------------------------------------------------------------

    def passes_over(self, count: int) -> bool:
        """None of the next so many publishes is told: they are done with."""
        return self._log.numbering.passes_over(count)

    @property
    def awaits_confirms(self) -> bool:
        return bool(self._unconfirmed)

    def publish(
        self,
        messages: Sequence[Message],
        queues: Sequence[str],
        confirm_first: int,
        persistent: int,
        *,
        is_mandatory: bool,
    ) -> None:
        """A run was accepted; before queues are given it, so that they know the numbers."""
        log = self._log
        count = len(messages)
        now_us = log.journal.now_us()
        chosen = log.numbering.choose(count, now_us)
        if chosen is None:
            return
        first, places = chosen
        if log.journal.is_shedding:
            # Without a number, so that the rest of their lives is not told either.
            log.journal.shed(count if places is None else len(places))
            return
        if places is not None:
            messages = [messages[at] for at in places]
        if confirm_first and places is None:
            self._unconfirmed.append((confirm_first, confirm_first + count - 1, now_us))
        elif confirm_first and places is not None:
            self._unconfirmed.extend(
                [(confirm_first + at, confirm_first + at, now_us) for at in places]
            )
        parts: list[Sequence[Message]] = [messages]
        if 0 < persistent < count:
            parts = [list(run) for _, run in groupby(messages, attrgetter("persistent"))]
        for part in parts:
            columns = (first, stamp(part, first))
            for template in self._templates_for(part[0], tuple(queues), is_mandatory):
                log.write(now_us, template, columns, len(part))
            first += len(part)

    def _templates_for(
        self, message: Message, queues: tuple[str, ...], is_mandatory: bool
    ) -> list[Template]:
        """One for the publish, and one for each queue if there are several."""
        key = (message.envelope, queues, is_mandatory, message.persistent)
        templates = self._published.get(key)
        if templates is None:
            if len(self._published) >= KEPT_MAX:
                self._published.clear()
            address = named(b"exchange", message.exchange) + named(b"rk", message.routing_key)
            if message.persistent:
                address += b',"persistent":true'
            shared = b"%b%b%b%b%b" % (
                self._who,
                address,
                b',"routed":%d' % len(queues) if queues else b"",
                named(b"queue", queues[0]) if len(queues) == 1 else b"",
                b',"mandatory":true' if is_mandatory else b"",
            )
            templates = [self._log.template("publish", shared, b"msg", b"size")]
            for queue in queues if len(queues) > 1 else ():
                shared = self._vhost + address + named(b"queue", queue)
                templates.append(self._log.template("enqueue", shared, b"msg", b"size"))
            self._published[key] = templates
        return templates

    def confirm(self, settled: Sequence[Range], *, is_refused: bool) -> None:
        """The publisher was told of these; of any that is told here, that is."""
        waiting = self._unconfirmed
        if not waiting or waiting[0][0] > settled[-1][1]:
            return
        since_us = _subtract(waiting, settled)
        if since_us is None:
            return
        now_us = self._log.journal.now_us()
        count = sum([last - first + 1 for first, last in settled])
        numbers = (settled[-1][1], count, max(0, now_us - since_us))
        self._log.write(now_us, self._confirms[is_refused], numbers, 1)

    def unroutable(self, messages: Sequence[Message], *, is_returned: bool) -> None:
        now_us = self._log.journal.now_us()
        found = logged(messages, now_us)
        if found is None:
            return
        _, ids, sizes, _ = found
        one = messages[0]
        shared = b'%b%b%b,"reason":%b' % (
            self._who,
            named(b"exchange", one.exchange),
            named(b"rk", one.routing_key),
            b'"NO_ROUTE"' if is_returned else b'"unroutable"',
        )
        template = self._log.template("return" if is_returned else "drop", shared, b"msg", b"size")
        self._log.write(now_us, template, (ids, sizes), len(ids))

    def withdrawn(self, messages: Sequence[Message], queues: Sequence[str]) -> None:
        """They were published in a transaction that some queue refused."""
        self._lost(messages, queues, "refused")

    def _lost(self, messages: Sequence[Message], queues: Sequence[str], reason: str) -> None:
        now_us = self._log.journal.now_us()
        found = logged(messages, now_us)
        if found is None:
            return
        _, ids, sizes, _ = found
        one = messages[0]
        address = named(b"exchange", one.exchange) + named(b"rk", one.routing_key)
        for queue in queues:
            shared = self._who + address + named(b"queue", queue) + named(b"reason", reason)
            template = self._log.template("drop", shared, b"msg", b"size")
            self._log.write(now_us, template, (ids, sizes), len(ids))

    def unsent(self, messages: Sequence[Message], log_name: str) -> None:
        """Deliveries that needed no answer, and that the channel did not live to send."""
        self._lost(messages, [log_name.removeprefix(self._queue_prefix)], "channel_closed")

    # --- delivering ------------------------------------------------------------------------------

    def deliver(
        self,
        messages: Sequence[Message],
        queue: str,
        consumer_tag: str | None,
        first_tag: int,
        depth: int,
        *,
        no_ack: bool,
        redelivered: bool,
    ) -> None:
        """Sent to a consumer, or, where ``consumer_tag`` is None, the answer to a basic.get."""
        # Mostly none is told: the time is not asked for that.
        if logged(messages, 0) is None:
            return
        log = self._log
        now_us = log.journal.now_us()
        found = logged(messages, now_us)
        assert found is not None
        places, ids, sizes, waits = found
        count = len(ids)
        tags: Column = first_tag
        if count < len(messages):
            tags = array("q", [first_tag + place for place in places])
        source = self._source(queue, consumer_tag or "")
        ev, reason = "get" if consumer_tag is None else "deliver", "auto_ack" if no_ack else ""
        columns: list[Column] = [ids, tags, sizes, waits]
        names = [b"msg", b"dtag", b"size", b"wait_us"]
        if redelivered:
            columns.append(array("q", [log.deliveries(msg, queue) for msg in ids]))
            names.append(b"delivery_count")
        template = source.templates.get((ev, reason, redelivered))
        if template is None:
            mark = b',"redelivered":true' if redelivered else b""
            template = self._template(source, ev, reason, mark, names, is_mark=redelivered)
        log.write(now_us, template, columns, count, depth)
        if not no_ack:
            self._held.add(tags, ids, now_us, source)

    def _source(self, queue: str, consumer_tag: str) -> _Source:
        source = self._sources.get((queue, consumer_tag))
        if source is None:
            if len(self._sources) >= KEPT_MAX:
                self._sources.clear()
            shared = self._who + named(b"queue", queue) + named(b"ctag", consumer_tag)
            source = self._sources[queue, consumer_tag] = _Source(queue, shared)
        return source

    def _template(
        self,
        source: _Source,
        ev: str,
        reason: str,
        mark: bytes,
        names: Sequence[bytes],
        *,
        is_mark: bool = False,
    ) -> Template:
        shared = source.shared + mark + named(b"reason", reason)
        template = self._log.template(ev, shared, *names)
        source.templates[ev, reason, is_mark] = template
        return template

    # --- answers ---------------------------------------------------------------------------------

    @property
    def holds_any(self) -> bool:
        return len(self._held) > 0

    def acked(self, tags: Iterable[int]) -> None:
        self._settle(tags, "ack", "", None)

    def refused(self, tags: Iterable[int], *, is_nack: bool, requeue: bool) -> None:
        ev = "nack" if is_nack else "reject"
        self._settle(tags, ev, "requeue" if requeue else "discard", ev if requeue else None)

    def returned(self, tags: Iterable[int], reason: str) -> None:
        """Back to their queues without the client's having said so of each."""
        self._settle(tags, None, "", reason)

    def end(self) -> None:
        """The channel is closed: what it held goes back."""
        self._settle(None, None, "", "channel_closed")

    def queue_deleted(self, log_name: str) -> None:
        """What is held of it has nowhere to go back to; ``log_name`` is its mailbox's."""
        queue = log_name.removeprefix(self._queue_prefix)
        for key in [key for key in self._sources if key[0] == queue]:
            self._sources.pop(key).is_gone = True

    def _settle(
        self, tags: Iterable[int] | None, ev: str | None, reason: str, returned: str | None
    ) -> None:
        """``tags`` None: all."""
        held = self._held
        if not len(held):
            return
        now_us = self._log.journal.now_us()
        runs = held.settle_all(now_us) if tags is None else held.settle(tags, now_us)
        for source, its_tags, ids, holds in runs:
            if ev is not None:
                template = source.templates.get((ev, reason, False))
                if template is None:
                    names = (b"msg", b"dtag", b"hold_us")
                    template = self._template(source, ev, reason, b"", names)
                self._log.write(now_us, template, (ids, its_tags, holds), len(ids))
            if returned is not None:
                self._return(source, ids, holds, returned, now_us)
            elif self._log.has_returns:
                for msg in ids:
                    self._log.done(msg, source.queue)

    def _return(
        self, source: _Source, ids: Numbers, holds: Numbers, reason: str, now_us: int
    ) -> None:
        log = self._log
        if source.is_gone:
            template = self._template(source, "drop", "queue_deleted", b"", (b"msg",))
            log.write(now_us, template, (ids,), len(ids))
            return
        template = source.templates.get(("requeue", reason, False)) or self._template(
            source, "requeue", reason, b"", (b"msg", b"delivery_count", b"hold_us")
        )
        counts = array("q", [log.returned(msg, source.queue) for msg in ids])
        log.write(now_us, template, (ids, counts, holds), len(ids))


def _subtract(waiting: deque[tuple[int, int, int]], settled: Sequence[Range]) -> int | None:
    """Take settled numbers out; the time of the oldest of those that were there, if any was."""
    oldest: int | None = None
    left: list[tuple[int, int, int]] = []
    at = 0
    while waiting and waiting[0][0] <= settled[-1][1]:
        first, last, since_us = waiting.popleft()
        while at < len(settled) and settled[at][1] < first:
            at += 1
        within = at
        while within < len(settled) and settled[within][0] <= last:
            low, high = settled[within]
            if oldest is None:
                oldest = since_us
            if first < low:
                left.append((first, low - 1, since_us))
            first = high + 1
            within += 1
        if first <= last:
            left.append((first, last, since_us))
    waiting.extendleft(reversed(left))
    return oldest


def make_channel_log(connection: ConnectionContext, channel: int) -> ChannelLog | None:
    log = connection.vhost.message_log
    if log is None:
        return None
    user = connection.access.user
    return ChannelLog(log, connection.vhost.name, connection.log_number, channel, user)
