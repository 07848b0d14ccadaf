"""The unacked ledger of a channel, and ack, nack, reject and recover.

Owns which delivery tag stands for which message of which queue. A queue owns the message itself
and learns what became of it through Ack, Reject and Requeue, one command per queue and batch.
What nobody settles in time (``delivery_timeout.py``) ends the channel, or, where the setting says
so, goes back to its queue alone: what the client says about it later is then listened to politely
and means nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from itertools import repeat, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from pamqp import commands
from pamqp.base import Frame

from leveret.broker.channel.delivery_timeout import DeliveriesTimedOut, DeliveryTimeout
from leveret.broker.queues.commands import Ack, Reject, Requeue
from leveret.protocol.codec import make
from leveret.protocol.errors import ChannelException, not_implemented, precondition_failed
from leveret.protocol.twin import AckRun

if TYPE_CHECKING:
    from leveret.broker.channel.channel import Channel
    from leveret.broker.mailbox import Mailbox

log = logging.getLogger(__name__)

ACK, REJECT, NACK = 80, 90, 120
# So many tags that were taken back are known singly; of older ones, that there were some.
TAKEN_BACK_KNOWN = 10_000


class Source(NamedTuple):
    """Where a delivery came from; one object per consumer, shared by all its deliveries."""

    queue: Mailbox
    # None: basic.get.
    tag: str | None


Entry = tuple[Source, int]


class UnackedLedger:
    """Delivery tag -> (source, position in the queue)."""

    def __init__(self) -> None:
        # In order of tags.
        self._entries: dict[int, Entry] = {}
        # Tags are one sequence per channel, shared by deliveries and gets, no-ack ones included.
        self.next_tag = 1
        # No tag below this one is outstanding.
        self._lowest = 1
        # Taken back by the broker, and not yet settled by the client, which does not know; in
        # order. Below the second, too, an unknown tag is no mistake.
        self._taken_back: dict[int, None] = {}
        self._forgiven_below = 0

    def __len__(self) -> int:
        return len(self._entries)

    def take_tags(self, count: int) -> int:
        first = self.next_tag
        self.next_tag += count
        return first

    def add(self, first_tag: int, source: Source, seq_ids: list[int]) -> None:
        self._entries.update(
            zip(
                range(first_tag, first_tag + len(seq_ids)),
                zip(repeat(source), seq_ids),
                strict=True,
            )
        )

    def pop(self, tag: int, *, multiple: bool) -> list[tuple[int, Entry]]:
        """What an ack of ``tag`` settles. Raises precondition_failed if it is not outstanding."""
        entries = self._entries
        if not multiple:
            entry = entries.pop(tag, None)
            if entry is None:
                self._check_taken_back(tag)
                return []
            return [(tag, entry)]
        if tag == 0:
            return self.pop_all()
        if tag not in entries:
            self._check_taken_back(tag)
        if self._taken_back:
            self._taken_back = {each: None for each in self._taken_back if each > tag}
        low, self._lowest = self._lowest, tag + 1
        if tag - low > 2 * len(entries):
            # Most tags in between were settled one by one: look at those that are left.
            below = sorted(each for each in entries if each <= tag)
        else:
            below = [each for each in range(low, tag + 1) if each in entries]
        return [(each, entries.pop(each)) for each in below]

    def pop_each(self, tags: Iterable[int], settled: list[Entry]) -> None:
        """As pop for single tags, quickly; what was settled before an error is in ``settled``."""
        pop = self._entries.pop
        append = settled.append
        for tag in tags:
            entry = pop(tag, None)
            if entry is None:
                self._check_taken_back(tag)
            else:
                append(entry)

    def pop_all(self) -> list[tuple[int, Entry]]:
        everything = list(self._entries.items())
        self._entries = {}
        self._lowest = self.next_tag
        return everything

    def put_back(self, entries: Iterable[tuple[int, Entry]]) -> None:
        """After a rollback: they are outstanding again, under the same tags."""
        for tag, entry in entries:
            self._entries[tag] = entry
            self._lowest = min(self._lowest, tag)
        self._entries = dict(sorted(self._entries.items()))

    def has(self, tag: int) -> bool:
        return tag in self._entries

    def has_below(self, tag: int) -> bool:
        return next(iter(self._entries), tag) < tag

    def take_back_below(self, tag: int) -> list[tuple[int, Entry]]:
        """They are outstanding no more; that the client settles them later is no error."""
        chosen = list(takewhile(lambda each: each < tag, self._entries))
        taken = [(each, self._entries.pop(each)) for each in chosen]
        self._taken_back.update(dict.fromkeys(chosen))
        while len(self._taken_back) > TAKEN_BACK_KNOWN:
            oldest = next(iter(self._taken_back))
            del self._taken_back[oldest]
            self._forgiven_below = oldest + 1
        return taken

    def _check_taken_back(self, tag: int) -> None:
        """Raises precondition_failed for a tag the client has no right to settle."""
        if tag in self._taken_back:
            del self._taken_back[tag]
        elif not 0 < tag < self._forgiven_below:
            raise unknown_tag(tag)


def unknown_tag(tag: int) -> ChannelException:
    return precondition_failed(f"unknown delivery tag {tag}")


class AckMethods:
    """basic.ack, nack, reject, recover, recover-async."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.ledger = UnackedLedger()
        connection = channel.connection
        self.timeout = DeliveryTimeout(
            self.ledger, connection.clock, channel.mailbox, connection.settings.consumer_timeout
        )

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        return {
            commands.Basic.Recover: self._on_recover,
            commands.Basic.RecoverAsync: self._on_recover_async,
            DeliveriesTimedOut: self._on_timed_out,
        }

    def on_run(self, run: AckRun) -> None:
        channel = self._channel
        channel.current_method = (60, run.method)
        if channel.interceptors.sees_acks:
            for tag in run.tags:
                seen, _ = channel.interceptors.intercept(_method_of(run, tag))
                self._settle(_run_of(seen, run.channel))
        else:
            self._settle(run)

    def _settle(self, run: AckRun) -> None:
        channel = self._channel
        if channel.transaction is not None:
            channel.transaction.settle(run)
            return
        requeue = run.method != ACK and run.requeue
        settled: list[Entry] = []
        tags = run.tags
        held = None if channel.log is None else channel.log.held
        try:
            if run.multiple:
                tags = []
                for tag in run.tags:
                    popped = self.ledger.pop(tag, multiple=True)
                    settled += [entry for _, entry in popped]
                    if held:
                        tags += [each for each, _ in popped]
            else:
                self.ledger.pop_each(run.tags, settled)
        finally:
            # What came before an unknown tag counts.
            if held is not None and held.may_hold(tags):
                if len(settled) < len(tags):
                    tags = [tag for tag in tags if not self.ledger.has(tag)]
                self.tell_log(run.method, tags, requeue=requeue)
            self.tell_queues(run.method, settled, requeue=requeue)

    def tell_log(self, method: int, tags: list[int], *, requeue: bool) -> None:
        """Those that are told in the event log; ones that are not held do no harm."""
        log = self._channel.log
        assert log is not None
        if method == ACK:
            log.acked(tags)
        else:
            log.refused(tags, is_nack=method == NACK, requeue=requeue)

    def tell_queues(self, method: int, settled: list[Entry], *, requeue: bool) -> None:
        """Pass on what became of deliveries, one command per queue."""
        if not settled:
            return
        channel = self._channel
        by_queue: dict[Mailbox, list[int]] = {}
        last: Source | None = None
        seq_ids: list[int] = []
        counted = 0
        for source, seq_id in settled:
            if source is not last:
                last = source
                seq_ids = by_queue.setdefault(source.queue, [])
            seq_ids.append(seq_id)
            if source.tag is not None:
                counted += 1
        address = channel.mailbox
        for queue, numbers in by_queue.items():
            if requeue:
                # Before the limiter's Resume below: what comes back goes out first again.
                queue.put_urgent(Requeue(address, numbers))
            elif method == ACK:
                queue.put_urgent(Ack(address, numbers))
            else:
                queue.put_urgent(Reject(address, numbers))
        if method == ACK:
            channel.counters.ack += len(settled)
        channel.limiter.give_back(counted)

    def note_acked(self, settled: list[Entry]) -> None:
        """A transaction has acked them: its unit told the queues."""
        channel = self._channel
        channel.counters.ack += len(settled)
        channel.limiter.give_back(sum([source.tag is not None for source, _ in settled]))

    def _on_recover(self, recover: commands.Basic.Recover) -> None:
        self._recover(requeue=bool(recover.requeue))
        self._channel.send(make(commands.Basic.RecoverOk))

    def _on_recover_async(self, recover: commands.Basic.RecoverAsync) -> None:
        self._recover(requeue=bool(recover.requeue))

    def _recover(self, *, requeue: bool) -> None:
        if not requeue:
            raise not_implemented("requeue=false")
        outstanding = self.ledger.pop_all()
        if self._channel.log is not None:
            self._channel.log.returned([tag for tag, _ in outstanding], "recover")
        self.tell_queues(NACK, [entry for _, entry in outstanding], requeue=True)

    # --- deliveries nobody settles ---------------------------------------------------------------

    def _on_timed_out(self, timed_out: DeliveriesTimedOut) -> None:
        if not self.ledger.has_below(timed_out.below):
            return  # settled since
        channel = self._channel
        settings = channel.connection.settings
        timeout_ms = settings.consumer_timeout
        if settings.consumer_timeout_action == "requeue":
            late = self.ledger.take_back_below(timed_out.below)
            channel.counters.ack_timeout += len(late)
            log.warning(
                "%s: channel %s: %s deliveries unacknowledged for %s ms go back to their queues",
                channel.connection.name,
                channel.number,
                len(late),
                timeout_ms,
            )
            if channel.log is not None:
                channel.log.returned([tag for tag, _ in late], "consumer_timeout")
            self.tell_queues(NACK, [entry for _, entry in late], requeue=True)
            return
        # No method is to blame.
        channel.current_method = (0, 0)
        raise precondition_failed(
            f"delivery acknowledgement on channel {channel.number} timed out. Timeout value used:"
            f" {timeout_ms} ms. This timeout value can be configured, see consumers doc guide to"
            " learn more"
        )


def _method_of(run: AckRun, tag: int) -> Frame:
    """One method of a run as it came, for interceptors."""
    if run.method == ACK:
        return make(commands.Basic.Ack, delivery_tag=tag, multiple=run.multiple)
    if run.method == REJECT:
        return make(commands.Basic.Reject, delivery_tag=tag, requeue=run.requeue)
    return make(commands.Basic.Nack, delivery_tag=tag, multiple=run.multiple, requeue=run.requeue)


def _run_of(method: Frame, channel: int) -> AckRun:
    if isinstance(method, commands.Basic.Ack):
        return AckRun(channel, ACK, bool(method.multiple), False, [method.delivery_tag or 0])
    if isinstance(method, commands.Basic.Reject):
        return AckRun(channel, REJECT, False, bool(method.requeue), [method.delivery_tag or 0])
    assert isinstance(method, commands.Basic.Nack)
    return AckRun(
        channel, NACK, bool(method.multiple), bool(method.requeue), [method.delivery_tag or 0]
    )
