"""What channels do to messages, written into the event log a run at a time.

Upstream: channels (``ChannelLog``: publish, enqueue, confirm, return, deliver, get, ack, nack,
reject, requeue); ``queue_log.py`` has what queues do by themselves. Downstream: ``journal.py``.

Events of a run share their names and their time: those are encoded once and kept (``Template``),
and the thread that writes puts the numbers between (``protocol/lines.py``). A message without a
number (``Message.log_id``) is not told; while the journal sheds, what would have been told is
counted and left out.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING

import msgspec

from leveret.broker.event_log.journal import readable
from leveret.broker.event_log.numbering import Numbering
from leveret.broker.event_log.returns import Returns
from leveret.protocol.lines import each_of
from leveret.protocol.twin import Held, Template, logged, stamp

if TYPE_CHECKING:
    from leveret.broker.channel.context import ConnectionContext
    from leveret.broker.event_log.journal import Journal
    from leveret.broker.event_log.returns import Place
    from leveret.broker.queues.record import Queue
    from leveret.protocol.lines import Column
    from leveret.protocol.twin import Message

# How many templates a channel or a queue keeps: each of them has the names of its lines.
KEPT_MAX = 64
# The same of the consumers that deliveries of a channel went to.
SOURCES_MAX = 1_000

# First and last of a range of sequence numbers.
Range = tuple[int, int]

_END = b"}\n"
# What is told of each answer.
_ANSWERED = (b"msg", b"dtag", b"hold_us")


@lru_cache(maxsize=8192)
def quoted(name: str) -> bytes:
    """A name as JSON, shown as events about objects show it; of any text, it never fails."""
    return msgspec.json.encode(readable(name))


def named(field: bytes, name: str) -> bytes:
    """A field, unless it is at its default."""
    return b',"%b":%b' % (field, quoted(name)) if name else b""


class MessageLog:
    """What all channels and queues of a broker share; only where messages are told at all."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.numbering = Numbering(journal.sample, journal.newest_us)
        self._boot = b',"boot":' + quoted(journal.boot) + b',"ev":'
        self.returns = Returns()

    def template(self, ev: str, shared: bytes, *names: bytes) -> Template:
        """For lines of a kind that have ``shared`` in common and differ in the numbers named."""
        pieces = [b',"%b":' % name for name in names]
        return Template((self._boot + quoted(ev) + shared + pieces[0], *pieces[1:], _END))


class _Way:
    """Where publishes go: what is told of them."""

    __slots__ = ("envelope", "is_mandatory", "persistent", "queues", "templates")

    def __init__(
        self,
        envelope: bytes,
        queues: Sequence[Queue],
        is_mandatory: bool,
        persistent: bool,
        templates: list[Template],
    ) -> None:
        self.envelope = envelope
        self.queues = queues
        self.is_mandatory = is_mandatory
        self.persistent = persistent
        # One for the publish, and one for each queue if there are several.
        self.templates = templates


class _Source:
    """Where deliveries come from; one for each consumer."""

    __slots__ = ("acks", "is_gone", "place", "shared", "templates")

    def __init__(self, place: Place, shared: bytes, acks: Template) -> None:
        self.place = place
        self.shared = shared
        # What is told of most of them.
        self.acks = acks
        # The queue was deleted: nothing goes back there.
        self.is_gone = False
        # By kind, reason and whether they were delivered before.
        self.templates: dict[tuple[str, str, bool], Template] = {}


class ChannelLog:
    """What one channel does to messages."""

    def __init__(
        self, log: MessageLog, vhost: str, connection: int, channel: int, user: str
    ) -> None:
        self._log = log
        self._now_us = log.journal.now_us
        self._buffer = log.journal.buffer
        self._choose = log.numbering.choose
        self._returns = log.returns
        self._vhost_name = vhost
        self._queue_prefix = f"queue:{vhost}/"
        self._vhost = b',"vhost":' + quoted(vhost)
        self._who = b'%b,"conn":%d,"ch":%d,"user":%b' % (
            self._vhost,
            connection,
            channel,
            quoted(user),
        )
        # None of the next so many publishes is told: they are done with.
        self.passes_over = log.numbering.passes_over
        # Publishes that wait for a confirm: sequence numbers of a run, and when; in order. False if
        # there are none: then confirms need not be told.
        self.unconfirmed: deque[tuple[int, int, int]] = deque()
        self._confirms = {
            is_refused: log.template(
                "confirm",
                self._who + (b',"reason":"nack"' if is_refused else b""),
                *(b"dtag", b"n", b"wait_us"),
            )
            for is_refused in (False, True)
        }
        # Deliveries that wait for their answer, by delivery tag, each with its _Source. False if
        # there are none: then answers need not be told.
        self.held = Held()
        self._sources: dict[tuple[str, str], _Source] = {}
        # By envelope, names of queues, mandatory, persistent.
        self._ways: dict[tuple[bytes, tuple[str, ...], bool, bool], _Way] = {}
        # The last one; mostly it is the next one as well.
        self._way: _Way | None = None
        # Template and source of deliveries, by queue, consumer, kind, reason and redelivered.
        self._delivered: dict[tuple[str, str | None, bool, bool], tuple[_Source, Template]] = {}

    # --- publishing ------------------------------------------------------------------------------

    def publish(
        self,
        messages: Sequence[Message],
        queues: Sequence[Queue],
        confirm_first: int,
        persistent: int,
        *,
        is_mandatory: bool,
    ) -> None:
        """A run was accepted; before queues are given it, so that they know the numbers."""
        count = len(messages)
        now_us = self._now_us()
        chosen = self._choose(count, now_us)
        if chosen is None:
            return
        first, places = chosen
        if self._buffer.is_shut:
            # Without a number, so that the rest of their lives is not told either.
            self._log.journal.shed(count if places is None else len(places))
            return
        if places is not None:
            messages = [messages[at] for at in places]
            if confirm_first:
                # Neighbours, mostly.
                for low, high in _ranges(places):
                    self.unconfirmed.append((confirm_first + low, confirm_first + high, now_us))
        elif confirm_first:
            self.unconfirmed.append((confirm_first, confirm_first + count - 1, now_us))
        if 0 < persistent < count:
            for _, part in groupby(messages, attrgetter("persistent")):
                run = list(part)
                self._published(run, first, queues, is_mandatory, now_us)
                first += len(run)
        else:
            self._published(messages, first, queues, is_mandatory, now_us)

    def _published(
        self,
        messages: Sequence[Message],
        first: int,
        queues: Sequence[Queue],
        is_mandatory: bool,
        now_us: int,
    ) -> None:
        """All of them persistent, or none."""
        one = messages[0]
        way = self._way
        if (
            way is None
            or way.queues is not queues
            or way.envelope is not one.envelope
            or way.is_mandatory is not is_mandatory
            or way.persistent is not one.persistent
        ):
            way = self._way = self._way_of(one, queues, is_mandatory)
        columns = (first, stamp(messages, first, now_us))
        for template in way.templates:
            self._buffer.add(now_us, template, columns, len(messages))

    def _way_of(self, message: Message, queues: Sequence[Queue], is_mandatory: bool) -> _Way:
        names = tuple([queue.name.name for queue in queues])
        key = (message.envelope, names, is_mandatory, message.persistent)
        way = self._ways.get(key)
        if way is None:
            if len(self._ways) >= KEPT_MAX:
                self._ways.clear()
            address = named(b"exchange", message.exchange) + named(b"rk", message.routing_key)
            if message.persistent:
                address += b',"persistent":true'
            shared = b"%b%b%b%b%b" % (
                self._who,
                address,
                b',"routed":%d' % len(names) if names else b"",
                named(b"queue", names[0]) if len(names) == 1 else b"",
                b',"mandatory":true' if is_mandatory else b"",
            )
            templates = [self._log.template("publish", shared, b"msg", b"size")]
            for name in names if len(names) > 1 else ():
                shared = self._vhost + address + named(b"queue", name)
                templates.append(self._log.template("enqueue", shared, b"msg", b"size"))
            way = _Way(message.envelope, queues, is_mandatory, message.persistent, templates)
            self._ways[key] = way
        # The route may have been worked out anew since.
        way.queues = queues
        return way

    def confirm(self, settled: Sequence[Range], *, is_refused: bool) -> None:
        """The publisher was told of these; the first of ``unconfirmed`` is not behind them."""
        waiting = self.unconfirmed
        if not waiting:
            return
        last = settled[-1][1]
        first, end, since_us = waiting[0]
        low = settled[0][0]
        is_next = len(waiting) == 1 or waiting[1][0] > last
        if len(settled) == 1 and low <= first and end <= last and is_next:
            # What was published first, whole, and nothing else.
            waiting.popleft()
            count = end - first + 1
        else:
            count, since_us = _subtract(waiting, settled)
            if not count:
                return
        now_us = self._now_us()
        # The clock may have been set back.
        wait_us = now_us - since_us if now_us > since_us else 0
        self._buffer.add(now_us, self._confirms[is_refused], (last, count, wait_us), 1)

    def unroutable(self, messages: Sequence[Message], *, is_returned: bool) -> None:
        now_us = self._now_us()
        found = logged(messages, now_us)
        if found is None:
            return
        count, _, ids, sizes, _ = found
        one = messages[0]
        shared = b'%b%b%b,"reason":%b' % (
            self._who,
            named(b"exchange", one.exchange),
            named(b"rk", one.routing_key),
            b'"NO_ROUTE"' if is_returned else b'"unroutable"',
        )
        template = self._log.template("return" if is_returned else "drop", shared, b"msg", b"size")
        self._buffer.add(now_us, template, (ids, sizes), count)

    def withdrawn(
        self, messages: Sequence[Message], queues: Sequence[str], reason: str = "refused"
    ) -> None:
        """A run that was published in a transaction that some queue refused, or whose channel ended
        before its commit began."""
        one = messages[0]
        address = named(b"exchange", one.exchange) + named(b"rk", one.routing_key)
        self._lost(messages, queues, reason, address)

    def _lost(
        self, messages: Sequence[Message], queues: Sequence[str], reason: str, address: bytes = b""
    ) -> None:
        now_us = self._now_us()
        found = logged(messages, now_us)
        if found is None:
            return
        count, _, ids, sizes, _ = found
        for queue in queues:
            shared = self._who + address + named(b"queue", queue) + named(b"reason", reason)
            template = self._log.template("drop", shared, b"msg", b"size")
            self._buffer.add(now_us, template, (ids, sizes), count)

    def unsent(self, messages: Sequence[Message], log_name: str) -> None:
        """Deliveries that needed no answer, and that the channel did not live to send.

        They may have come from anywhere. No consumer is named: the log's readers would take it that
        the consumer had them, and that they were not ready.
        """
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
        now_us = self._now_us()
        found = logged(messages, now_us)
        if found is None:
            return
        count, places, ids, sizes, waits = found
        tags: Column = first_tag
        if count < len(messages):
            tags = array("q", [first_tag + place for place in each_of(places, count)])
        key = (queue, consumer_tag, no_ack, redelivered)
        known = self._delivered.get(key)
        if known is None:
            known = self._delivery(*key)
        source, template = known
        if redelivered:
            all_ids = each_of(ids, count)
            times = [self._returns.deliveries(msg, source.place) for msg in all_ids]
            columns: tuple[Column, ...] = (ids, tags, sizes, waits, array("q", times))
            if no_ack:
                self._returns.done(all_ids, source.place)
        else:
            columns = (ids, tags, sizes, waits)
        self._buffer.add(now_us, template, columns, count, depth)
        if not no_ack:
            self.held.add(tags, ids, count, now_us, source)

    def _delivery(
        self, queue: str, consumer_tag: str | None, no_ack: bool, redelivered: bool
    ) -> tuple[_Source, Template]:
        source = self._source(queue, consumer_tag or "")
        names = [b"msg", b"dtag", b"size", b"wait_us"]
        mark = b""
        if redelivered:
            names.append(b"delivery_count")
            mark = b',"redelivered":true'
        ev, reason = "get" if consumer_tag is None else "deliver", "auto_ack" if no_ack else ""
        template = self._template(source, ev, reason, mark, names, is_mark=redelivered)
        if len(self._delivered) >= SOURCES_MAX:
            self._delivered.clear()
        known = self._delivered[queue, consumer_tag, no_ack, redelivered] = (source, template)
        return known

    def _source(self, queue: str, consumer_tag: str) -> _Source:
        source = self._sources.get((queue, consumer_tag))
        if source is None:
            if len(self._sources) >= SOURCES_MAX:
                self._sources.clear()
                self._delivered.clear()
            shared = self._who + named(b"queue", queue) + named(b"ctag", consumer_tag)
            acks = self._log.template("ack", shared, *_ANSWERED)
            source = _Source((self._vhost_name, queue), shared, acks)
            self._sources[queue, consumer_tag] = source
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

    def acked(self, tags: Sequence[int]) -> None:
        now_us = self._now_us()
        for source, count, its_tags, ids, holds in self.held.settle(tags, now_us):
            self._buffer.add(now_us, source.acks, (ids, its_tags, holds), count)
            if self._returns.by_queue:
                self._returns.done(each_of(ids, count), source.place)

    def refused(self, tags: Sequence[int], *, is_nack: bool, requeue: bool) -> None:
        ev = "nack" if is_nack else "reject"
        self._settle(tags, ev, "requeue" if requeue else "discard", ev if requeue else None)

    def returned(self, tags: Sequence[int], reason: str) -> None:
        """Back to their queues without the client's having said so of each."""
        self._settle(tags, None, "", reason)

    def end(self, left_out: Sequence[int] = ()) -> None:
        """The channel is closed: what it held goes back.

        Tags that are ``left_out`` stay held until a commit that is under way has acked them.
        """
        held = self.held
        now_us = self._now_us()
        kept = held.settle(sorted(left_out), now_us) if left_out else []
        self._settle(None, None, "", "channel_closed")
        for source, count, *columns in kept:
            for tag, msg, hold_us in zip(*[each_of(one, count) for one in columns], strict=True):
                held.add(tag, msg, 1, now_us - hold_us, source)

    def queue_deleted(self, log_name: str) -> None:
        """What is held of it has nowhere to go back to; ``log_name`` is its mailbox's."""
        queue = log_name.removeprefix(self._queue_prefix)
        for key in [key for key in self._sources if key[0] == queue]:
            self._sources.pop(key).is_gone = True
        self._delivered.clear()

    def _settle(
        self, tags: Sequence[int] | None, ev: str | None, reason: str, returned: str | None
    ) -> None:
        """``tags`` None: all."""
        held = self.held
        if not len(held):
            return
        now_us = self._now_us()
        runs = held.settle_all(now_us) if tags is None else held.settle(tags, now_us)
        for source, count, its_tags, ids, holds in runs:
            if ev is not None:
                template = source.templates.get((ev, reason, False))
                if template is None:
                    template = self._template(source, ev, reason, b"", _ANSWERED)
                self._buffer.add(now_us, template, (ids, its_tags, holds), count)
            if returned is not None:
                self._return(source, count, ids, holds, returned, now_us)
            elif self._returns.by_queue:
                self._returns.done(each_of(ids, count), source.place)

    def _return(
        self, source: _Source, count: int, ids: Column, holds: Column, reason: str, now_us: int
    ) -> None:
        if source.is_gone:
            template = self._template(source, "drop", "queue_deleted", b"", (b"msg",))
            self._buffer.add(now_us, template, (ids,), count)
            return
        template = source.templates.get(("requeue", reason, False)) or self._template(
            source, "requeue", reason, b"", (b"msg", b"delivery_count", b"hold_us")
        )
        came_back, place = self._returns.came_back, source.place
        times = array("q", [came_back(msg, place) for msg in each_of(ids, count)])
        self._buffer.add(now_us, template, (ids, times, holds), count)


def _ranges(places: Sequence[int]) -> list[Range]:
    """The same, as first and last of those that follow each other."""
    first, last = places[0], places[-1]
    if last - first == len(places) - 1:
        return [(first, last)]
    ends = [at for at in range(1, len(places)) if places[at] != places[at - 1] + 1]
    return [(places[begin], places[end - 1]) for begin, end in pairwise([0, *ends, len(places)])]


def _subtract(waiting: deque[tuple[int, int, int]], settled: Sequence[Range]) -> tuple[int, int]:
    """Take settled numbers out; how many were there, and the time of the oldest of them."""
    count = oldest = 0
    left: list[tuple[int, int, int]] = []
    at = 0
    while waiting and waiting[0][0] <= settled[-1][1]:
        first, last, since_us = waiting.popleft()
        while at < len(settled) and settled[at][1] < first:
            at += 1
        within = at
        while within < len(settled) and settled[within][0] <= last:
            low, high = settled[within]
            if not count:
                oldest = since_us
            count += min(last, high) - max(first, low) + 1
            if first < low:
                left.append((first, low - 1, since_us))
            first = high + 1
            within += 1
        if first <= last:
            left.append((first, last, since_us))
    waiting.extendleft(reversed(left))
    return count, oldest


def make_channel_log(connection: ConnectionContext, channel: int) -> ChannelLog | None:
    log = connection.vhost.message_log
    if log is None:
        return None
    user = connection.access.user
    return ChannelLog(log, connection.vhost.name, connection.log_number, channel, user)
