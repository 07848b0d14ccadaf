"""What happens to messages, written into the event log a run at a time.

Upstream: channels (``ChannelLog``: publish, confirm, return, deliver, get, ack, nack, reject,
requeue) and queue actors (``QueueLog``: expire, drop, dead_letter, purge, paging). Downstream:
``journal.py``.

Events of a run share their names and their time: those are encoded once, and the compiled codec
puts the numbers between (``protocol/lines.py``). A message without a number (``Message.log_id``)
is not told; while the journal sheds, what would have been told is counted and left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import groupby, repeat
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from leveret.broker.event_log.numbering import Numbering
from leveret.protocol.twin import fill_lines, logged

if TYPE_CHECKING:
    from leveret.broker.channel.context import ConnectionContext
    from leveret.broker.event_log.journal import Journal
    from leveret.protocol.lines import Column
    from leveret.protocol.twin import Message

# How many messages that came back are remembered with the number of their deliveries.
RETURNS_MAX = 100_000

_END = b"}\n"


@lru_cache(maxsize=8192)
def quoted(name: str) -> bytes:
    """A name as JSON; bytes that were no UTF-8 are shown as replacement characters."""
    return msgspec.json.encode(name.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))


class MessageLog:
    """What all channels and queues of a broker share; only where messages are told at all."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.numbering = Numbering(1.0 if journal.level == "all" else journal.sample)
        self._boot = b',"boot":' + quoted(journal.boot) + b',"ev":'
        # How often a message had been delivered when it came back to a queue.
        self._returns: dict[tuple[int, str], int] = {}

    def write(
        self,
        now_us: int,
        ev: bytes,
        shared: bytes,
        names: Sequence[bytes],
        columns: Sequence[Column],
        count: int,
    ) -> None:
        """``count`` lines; ``names`` are those of the numbers in ``columns``."""
        journal = self.journal
        if journal.is_shedding:
            journal.shed(count)
            return
        pieces = [
            b'{"ts":%d,"seq":' % now_us,
            self._boot + ev + shared + names[0],
            *names[1:],
            _END,
        ]
        first = journal.take_seq(count)
        journal.write(fill_lines(pieces, (first, *columns), count), count)

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


class _Source(NamedTuple):
    """Where deliveries come from; one for each consumer."""

    queue: str
    shared: bytes


# A delivery that waits for its answer: message, when it was sent, where from.
_Held = tuple[int, int, _Source]


class ChannelLog:
    """What one channel does to messages."""

    def __init__(
        self, log: MessageLog, vhost: str, connection: int, channel: int, user: str
    ) -> None:
        self._log = log
        self._who = b',"vhost":%b,"conn":%d,"ch":%d,"user":%b' % (
            quoted(vhost),
            connection,
            channel,
            quoted(user),
        )
        # Publishes that wait for a confirm: the sequence number of the last of a run, and when.
        self._unconfirmed: deque[tuple[int, int]] = deque()
        # By delivery tag.
        self._held: dict[int, _Held] = {}
        self._sources: dict[tuple[str, str], _Source] = {}

    # --- publishing ------------------------------------------------------------------------------

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
        now_us = log.journal.now_us()
        if log.journal.is_shedding:
            log.journal.shed(len(messages))
            return
        numbered = log.numbering.number(messages, now_us)
        if numbered is None:
            return
        first, places = numbered
        chosen = messages if len(places) == len(messages) else [messages[at] for at in places]
        if confirm_first:
            self._unconfirmed.append((confirm_first + places[-1], now_us))
        one = chosen[0]
        shared = b'%b,"exchange":%b,"rk":%b,"routed":%d%b%b' % (
            self._who,
            quoted(one.exchange),
            quoted(one.routing_key),
            len(queues),
            b',"queue":' + quoted(queues[0]) if len(queues) == 1 else b"",
            b',"mandatory":true' if is_mandatory else b"",
        )
        parts: list[Sequence[Message]] = [chosen]
        if 0 < persistent < len(messages):
            parts = [list(run) for _, run in groupby(chosen, lambda each: each.persistent)]
        for part in parts:
            sizes: Column = [len(message.body) for message in part]
            marks = shared + b',"persistent":true' if part[0].persistent else shared
            names = (b',"msg":', b',"size":')
            log.write(now_us, b'"publish"', marks, names, (first, sizes), len(part))
            first += len(part)
        if len(queues) > 1:
            self._enqueue(now_us, chosen, queues)

    def _enqueue(self, now_us: int, messages: Sequence[Message], queues: Sequence[str]) -> None:
        ids = [message.log_id for message in messages]
        sizes = [len(message.body) for message in messages]
        one = messages[0]
        for queue in queues:
            shared = b'%b,"exchange":%b,"rk":%b,"queue":%b%b' % (
                self._who,
                quoted(one.exchange),
                quoted(one.routing_key),
                quoted(queue),
                b',"persistent":true' if one.persistent else b"",
            )
            names = (b',"msg":', b',"size":')
            self._log.write(now_us, b'"enqueue"', shared, names, (ids, sizes), len(ids))

    def confirm(self, last: int, count: int, *, is_refused: bool) -> None:
        """The publisher was told of ``count`` messages, up to sequence number ``last``."""
        waiting = self._unconfirmed
        if not waiting or waiting[0][0] > last:
            return
        now_us = self._log.journal.now_us()
        since_us = waiting[0][1]
        while waiting and waiting[0][0] <= last:
            waiting.popleft()
        shared = self._who + (b',"reason":"nack"' if is_refused else b"")
        names = (b',"dtag":', b',"n":', b',"wait_us":')
        wait_us = max(0, now_us - since_us)
        self._log.write(now_us, b'"confirm"', shared, names, (last, count, wait_us), 1)

    def unroutable(self, messages: Sequence[Message], *, is_returned: bool) -> None:
        now_us = self._log.journal.now_us()
        found = logged(messages, now_us)
        if found is None:
            return
        _, ids, sizes, _ = found
        one = messages[0]
        shared = b'%b,"exchange":%b,"rk":%b,"reason":%b' % (
            self._who,
            quoted(one.exchange),
            quoted(one.routing_key),
            b'"NO_ROUTE"' if is_returned else b'"unroutable"',
        )
        ev = b'"return"' if is_returned else b'"drop"'
        self._log.write(now_us, ev, shared, (b',"msg":', b',"size":'), (ids, sizes), len(ids))

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
        log = self._log
        now_us = log.journal.now_us()
        found = logged(messages, now_us)
        if found is None:
            return
        places, ids, sizes, waits = found
        count = len(ids)
        tags: list[int] | range
        if count == len(messages):
            tags = range(first_tag, first_tag + count)
        else:
            tags = [first_tag + place for place in places]
        source = self._source(queue, consumer_tag or "")
        if not no_ack:
            self._held.update(
                zip(tags, zip(ids, repeat(now_us), repeat(source), strict=False), strict=True)
            )
        shared = b'%b,"depth":%d%b' % (
            source.shared,
            depth,
            b',"reason":"auto_ack"' if no_ack else b"",
        )
        names = [b',"msg":', b',"dtag":', b',"size":', b',"wait_us":']
        dtags: Column = first_tag if isinstance(tags, range) else tags
        columns: list[Column] = [ids, dtags, sizes, waits]
        if redelivered:
            shared += b',"redelivered":true'
            names.append(b',"delivery_count":')
            columns.append([log.deliveries(msg, queue) for msg in ids])
        ev = b'"get"' if consumer_tag is None else b'"deliver"'
        log.write(now_us, ev, shared, names, columns, count)

    def _source(self, queue: str, consumer_tag: str) -> _Source:
        source = self._sources.get((queue, consumer_tag))
        if source is None:
            if len(self._sources) >= 1_000:
                self._sources.clear()
            tag = b',"ctag":' + quoted(consumer_tag) if consumer_tag else b""
            source = _Source(queue, self._who + b',"queue":' + quoted(queue) + tag)
            self._sources[queue, consumer_tag] = source
        return source

    # --- answers ---------------------------------------------------------------------------------

    @property
    def holds_any(self) -> bool:
        return bool(self._held)

    def acked(self, tags: Iterable[int]) -> None:
        self._settle(tags, b'"ack"', b"", None)

    def refused(self, tags: Iterable[int], *, is_nack: bool, requeue: bool) -> None:
        ev = b'"nack"' if is_nack else b'"reject"'
        reason = b',"reason":"requeue"' if requeue else b',"reason":"discard"'
        returned = ("nack" if is_nack else "reject") if requeue else None
        self._settle(tags, ev, reason, returned)

    def returned(self, tags: Iterable[int], reason: str) -> None:
        """Back to their queues without the client's having said so of each."""
        self._settle(tags, None, b"", reason)

    def end(self) -> None:
        """The channel is closed: what it held goes back."""
        self.returned(list(self._held), "channel_closed")

    def _settle(
        self, tags: Iterable[int], ev: bytes | None, reason: bytes, returned: str | None
    ) -> None:
        held = self._held
        if not held:
            return
        log = self._log
        now_us = log.journal.now_us()
        dtags = [tag for tag in tags if tag in held]
        settled = [held.pop(tag) for tag in dtags]
        if len(self._sources) == 1:
            runs = [(dtags, settled)] if settled else []
        else:
            runs = _by_source(dtags, settled)
        for tags_of, run in runs:
            source = run[0][2]
            ids = [msg for msg, _, _ in run]
            holds = [now_us - since_us for _, since_us, _ in run]
            if ev is not None:
                names = (b',"msg":', b',"dtag":', b',"hold_us":')
                columns = (ids, tags_of, holds)
                log.write(now_us, ev, source.shared + reason, names, columns, len(ids))
            if returned is not None:
                counts = [log.returned(msg, source.queue) for msg in ids]
                names = (b',"msg":', b',"delivery_count":', b',"hold_us":')
                shared = source.shared + b',"reason":' + quoted(returned)
                log.write(now_us, b'"requeue"', shared, names, (ids, counts, holds), len(ids))
            elif log.has_returns:
                for msg in ids:
                    log.done(msg, source.queue)


def _by_source(tags: list[int], settled: list[_Held]) -> list[tuple[list[int], list[_Held]]]:
    """The same in runs that come from one queue and consumer."""
    runs = []
    pairs = zip(tags, settled, strict=True)
    for _, run in groupby(pairs, lambda pair: pair[1][2]):
        items = list(run)
        runs.append(([tag for tag, _ in items], [held for _, held in items]))
    return runs


def make_channel_log(connection: ConnectionContext, channel: int) -> ChannelLog | None:
    log = connection.vhost.message_log
    if log is None:
        return None
    user = connection.access.user
    return ChannelLog(log, connection.vhost.name, connection.log_number, channel, user)


class QueueLog:
    """What a queue does to its messages by itself."""

    def __init__(self, log: MessageLog, vhost: str, queue: str) -> None:
        self._log = log
        self._queue = queue
        self._who = b',"vhost":%b,"queue":%b' % (quoted(vhost), quoted(queue))
        # What the backing queue had paged when that was last told: out and in, messages and bytes.
        self._paged = (0, 0, 0, 0)

    def expired(self, messages: Sequence[Message], depth: int) -> None:
        self._gone(b'"expire"', b"", messages, depth)

    def dropped(self, messages: Sequence[Message], depth: int, reason: str = "maxlen") -> None:
        self._gone(b'"drop"', b',"reason":' + quoted(reason), messages, depth)

    def _gone(self, ev: bytes, reason: bytes, messages: Sequence[Message], depth: int) -> None:
        now_us = self._log.journal.now_us()
        found = logged(messages, now_us)
        if found is None:
            return
        _, ids, sizes, waits = found
        shared = b'%b,"depth":%d%b' % (self._who, depth, reason)
        names = [b',"msg":', b',"size":']
        columns: list[Column] = [ids, sizes]
        if ev == b'"expire"':
            names.append(b',"wait_us":')
            columns.append(waits)
        self._log.write(now_us, ev, shared, names, columns, len(ids))
        for msg in ids:
            self._log.done(msg, self._queue)

    def dead_lettered(
        self, message: Message, copy: Message, reason: str, queues: Sequence[str], depth: int
    ) -> None:
        """One that left for the dead-letter exchange; the copy goes on under the same number."""
        if not message.log_id:
            return
        now_us = self._log.journal.now_us()
        copy.log_id = message.log_id
        copy.stamp_us = now_us
        where = b',"exchange":%b,"rk":%b' % (quoted(copy.exchange), quoted(copy.routing_key))
        times = (
            self._log.deliveries(message.log_id, self._queue) if reason == "delivery_limit" else 0
        )
        shared = b'%b%b,"reason":%b' % (self._who, where, quoted(reason))
        names = (b',"msg":', b',"size":', b',"routed":', b',"delivery_count":', b',"depth":')
        numbers = (message.log_id, len(message.body), len(queues), times, depth)
        self._log.write(now_us, b'"dead_letter"', shared, names, numbers, 1)
        self._log.done(message.log_id, self._queue)
        vhost = self._who[: self._who.index(b',"queue":')]
        for queue in queues:
            shared = b'%b%b,"queue":%b,"reason":"dead_letter"%b' % (
                vhost,
                where,
                quoted(queue),
                b',"persistent":true' if copy.persistent else b"",
            )
            sizes = (message.log_id, len(copy.body))
            self._log.write(now_us, b'"enqueue"', shared, (b',"msg":', b',"size":'), sizes, 1)

    def purged(self, count: int) -> None:
        now_us = self._log.journal.now_us()
        self._log.write(now_us, b'"purge"', self._who + b',"depth":0', (b',"n":',), (count,), 1)

    def paged(self, paged: tuple[int, int, int, int], depth: int) -> None:
        """``paged``: messages and bytes that left memory and came back so far."""
        if paged == self._paged:
            return
        out, out_bytes, back, back_bytes = [
            now - before for now, before in zip(paged, self._paged, strict=True)
        ]
        self._paged = paged
        now_us = self._log.journal.now_us()
        shared = b'%b,"depth":%d' % (self._who, depth)
        names = (b',"n":', b',"size":')
        if out:
            self._log.write(now_us, b'"paged_out"', shared, names, (out, out_bytes), 1)
        if back:
            self._log.write(now_us, b'"paged_in"', shared, names, (back, back_bytes), 1)
