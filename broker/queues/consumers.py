"""Who consumes from a queue, in which turn, and how much each may be given.

Owned by the queue's actor. A consumer is either *ready* (it stands in the ring of its priority),
*blocked* (its prefetch, its channel's shared limit or its channel's delivery window is used up)
or, with a single active consumer, *waiting*. The highest priority that has a ready consumer is
served, in turn, in order of arrival [91]; one that is unblocked joins at the rear.

The delivery window [36] is what the queue may have under way to one channel: it is opened again
(``Sent``) only while the channel's socket takes what it is given, so a client that does not read
costs a bounded amount of memory and nobody else's time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from leveret.broker.mailbox import Mailbox
from leveret.broker.queues.commands import Consume, Deliver
from leveret.broker.queues.limiter import Limiter
from leveret.protocol.errors import access_refused

UNLIMITED = 1 << 60


class ChannelState:
    """What a queue knows of one channel that consumes or gets from it."""

    __slots__ = ("consumers", "last", "limiter", "mailbox", "unacked", "window")

    def __init__(self, mailbox: Mailbox, limiter: Limiter | None, window: int) -> None:
        self.mailbox = mailbox
        # The channel's shared prefetch limit; None until it consumes.
        self.limiter = limiter
        # Credit left of the delivery window.
        self.window = window
        # Delivered and not settled, with the consumer it went to (None: basic.get).
        self.unacked: dict[int, Consumer | None] = {}
        self.consumers: list[Consumer] = []
        # The channel's last Deliver of the present batch: not taken yet, so it may be extended.
        self.last: Deliver | None = None


class Consumer:
    """One basic.consume, as the queue sees it."""

    __slots__ = (
        "channel",
        "credit",
        "exclusive",
        "is_ready",
        "is_waiting",
        "no_ack",
        "prefetch",
        "priority",
        "tag",
    )

    def __init__(self, channel: ChannelState, consume: Consume) -> None:
        self.channel = channel
        self.tag = consume.tag
        self.no_ack = consume.no_ack
        self.exclusive = consume.exclusive
        self.prefetch = consume.prefetch
        self.priority = consume.priority
        # How many more deliveries before an ack is due.
        limited = consume.prefetch and not consume.no_ack
        self.credit = consume.prefetch if limited else UNLIMITED
        # Stands in a ring.
        self.is_ready = False
        # Behind a single active consumer.
        self.is_waiting = False


class Consumers:
    __slots__ = (
        "_all",
        "_queue",
        "_rings",
        "_single_active",
        "_window",
        "active",
        "channels",
        "exclusive",
    )

    def __init__(self, queue: Mailbox, window: int, *, single_active: bool) -> None:
        self._queue = queue
        self._window = window
        self._single_active = single_active
        # Every consumer, in order of arrival.
        self._all: dict[tuple[Mailbox, str], Consumer] = {}
        # Ready ones by priority, highest first; rings are never empty.
        self._rings: list[tuple[int, deque[Consumer]]] = []
        # The one that gets everything, where there is to be only one.
        self.active: Consumer | None = None
        self.exclusive: Consumer | None = None
        self.channels: dict[Mailbox, ChannelState] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Consumer]:
        return iter(self._all.values())

    @property
    def has_ready(self) -> bool:
        return bool(self._rings)

    def max_active_priority(self) -> int | None:
        return self._rings[0][0] if self._rings else None

    # --- coming and going ------------------------------------------------------------------------

    def channel(self, mailbox: Mailbox) -> ChannelState:
        """The state kept for a channel; made on first use."""
        state = self.channels.get(mailbox)
        if state is None:
            state = self.channels[mailbox] = ChannelState(mailbox, None, self._window)
        return state

    def add(self, consume: Consume, resource: object) -> Consumer:
        """Raises access_refused where exclusive use stands against it."""
        refused = self.exclusive is not None or (
            consume.exclusive and (self._single_active or bool(self._all))
        )
        if refused:
            raise access_refused(f"{resource} in exclusive use")
        state = self.channel(consume.channel)
        state.limiter = consume.limiter
        consumer = Consumer(state, consume)
        self._all[consume.channel, consume.tag] = consumer
        state.consumers.append(consumer)
        if consume.exclusive:
            self.exclusive = consumer
        if self._single_active and self.active is not None:
            consumer.is_waiting = True
        else:
            if self._single_active:
                self.active = consumer
            self._enter(consumer)
        return consumer

    def remove(self, mailbox: Mailbox, tag: str) -> Consumer | None:
        consumer = self._all.pop((mailbox, tag), None)
        if consumer is None:
            return None
        self._leave(consumer)
        consumer.channel.consumers.remove(consumer)
        if consumer is self.exclusive:
            self.exclusive = None
        if consumer is self.active:
            self.active = None
            self._promote()
        # Never to be made ready again, although acks of its deliveries may still come.
        consumer.is_waiting = True
        self.drop_idle_channel(consumer.channel)
        return consumer

    def remove_channel(self, mailbox: Mailbox) -> ChannelState | None:
        """Everything of a channel that is gone; the caller requeues what it held."""
        state = self.channels.pop(mailbox, None)
        if state is None:
            return None
        for consumer in list(state.consumers):
            self.remove(mailbox, consumer.tag)
        if state.limiter is not None:
            state.limiter.forget(self._queue)
        return state

    def drop_idle_channel(self, state: ChannelState) -> None:
        """Forget a channel that neither consumes nor holds anything."""
        if not state.consumers and not state.unacked and state.window >= self._window:
            self.channels.pop(state.mailbox, None)

    def _promote(self) -> None:
        # Of those with the highest priority, who came first.
        consumer = max(self._all.values(), key=lambda each: each.priority, default=None)
        if consumer is not None:
            consumer.is_waiting = False
            self.active = consumer
            self._enter(consumer)

    def fall_apart(self) -> None:
        """Break the cycles between channels and consumers of a queue that is gone."""
        for state in self.channels.values():
            state.consumers.clear()
            state.unacked.clear()

    # --- turns -----------------------------------------------------------------------------------

    def next_ready(self, wanted: int) -> tuple[Consumer, int] | None:
        """Whose turn it is, and how many messages (1 to ``wanted``) it may be given at once.

        More than one only where nobody else has a turn. What is returned has been counted:
        the caller must deliver exactly that many.
        """
        while self._rings:
            ring = self._rings[0][1]
            consumer = ring[0]
            count = wanted if len(ring) == 1 else 1
            channel = consumer.channel
            if channel.window < count:
                count = channel.window
            if consumer.credit < count:
                count = consumer.credit
            limiter = channel.limiter
            if count > 0 and limiter is not None and limiter.limit and not consumer.no_ack:
                count = limiter.take(self._queue, count)
            if count <= 0:
                self._leave(consumer)
                continue
            if len(ring) > 1:
                ring.rotate(-1)
            if not consumer.no_ack:
                consumer.credit -= count
            return consumer, count
        return None

    def unused(self, consumer: Consumer, count: int) -> None:
        """``count`` of what next_ready granted was not delivered after all."""
        if not consumer.no_ack:
            consumer.credit += count
            if consumer.channel.limiter is not None:
                consumer.channel.limiter.give_back(count)

    def unblock(self, consumers: Iterable[Consumer]) -> None:
        """They may be able to take again: acked, written out, or told to resume."""
        for consumer in consumers:
            if (
                not consumer.is_ready
                and not consumer.is_waiting
                and consumer.credit > 0
                and consumer.channel.window > 0
            ):
                self._enter(consumer)

    def _enter(self, consumer: Consumer) -> None:
        consumer.is_ready = True
        rings = self._rings
        priority = consumer.priority
        for place, (there, ring) in enumerate(rings):
            if there == priority:
                ring.append(consumer)
                return
            if there < priority:
                rings.insert(place, (priority, deque((consumer,))))
                return
        rings.append((priority, deque((consumer,))))

    def _leave(self, consumer: Consumer) -> None:
        if not consumer.is_ready:
            return
        consumer.is_ready = False
        for place, (priority, ring) in enumerate(self._rings):
            if priority == consumer.priority:
                ring.remove(consumer)
                if not ring:
                    del self._rings[place]
                return
