"""basic.consume, cancel, get, qos, and the deliveries that come of them.

Owns the channel's consumers by tag. A delivery from a queue gets its tag here, goes into the
unacked ledger and to the writer; the queue's delivery window is opened again (``Sent``) only
while the socket takes what it is given.
"""

from __future__ import annotations

import secrets
from base64 import urlsafe_b64encode
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pamqp import commands

from leveret.broker.channel import events
from leveret.broker.channel.acks import Source
from leveret.broker.channel.context import ReplyPort
from leveret.broker.events import INTERNAL_USER
from leveret.broker.queues import commands as q
from leveret.broker.queues.arguments import check_consumer_arguments
from leveret.broker.resource import Resource
from leveret.protocol.codec import content_frames, make
from leveret.protocol.errors import not_allowed, not_found, not_implemented, precondition_failed
from leveret.protocol.twin import encode_deliveries, is_told

if TYPE_CHECKING:
    from leveret.broker.channel.channel import Channel
    from leveret.broker.mailbox import Mailbox
    from leveret.broker.queues.record import Queue

REPLY_TO = "amq.rabbitmq.reply-to"


def generated_name(prefix: str) -> str:
    """``amq.gen-`` or ``amq.ctag-`` and 22 characters, as RabbitMQ makes them."""
    return prefix + urlsafe_b64encode(secrets.token_bytes(16)).rstrip(b"=").decode()


class _Consumer:
    """A consumer as its channel sees it."""

    __slots__ = ("name", "queue", "source", "wire_tag")

    def __init__(self, name: Resource, queue: Mailbox, tag: str) -> None:
        # The queue's.
        self.name = name
        self.queue = queue
        self.source = Source(queue, tag)
        raw = tag.encode("utf-8", "surrogateescape")
        self.wire_tag = bytes((len(raw),)) + raw


class ConsumeMethods:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._consumers: dict[str, _Consumer] = {}
        # Of these and of one that is being started, what the connection's tenancy has counted.
        self._counted = 0
        # Prefetch for consumers that are started from now on.
        self._prefetch = 0
        # Delivery credit to give back to queues: at the end of the batch, or once the socket takes.
        self._sent: dict[Mailbox, int] = {}

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        return {
            commands.Basic.Consume: self._on_consume,
            commands.Basic.Cancel: self._on_cancel,
            commands.Basic.Get: self._on_get,
            commands.Basic.Qos: self._on_qos,
            q.Deliver: self._on_deliver,
            q.ConsumerCancelled: self._on_cancelled,
            q.Reply: self._channel.replies.on_reply,
        }

    def __len__(self) -> int:
        return len(self._consumers)

    # --- deliveries ------------------------------------------------------------------------------

    def _on_deliver(self, deliver: q.Deliver) -> None:
        channel = self._channel
        consumer = self._consumers.get(deliver.tag)
        if consumer is None or consumer.queue is not deliver.queue:
            return  # ended by a crash of its queue, which forgot the delivery as well
        messages = deliver.messages
        count = len(messages)
        ledger = channel.acks.ledger
        first_tag = ledger.take_tags(count)
        if deliver.seq_ids is None:
            channel.counters.deliver_no_ack += count
        else:
            ledger.add(first_tag, consumer.source, deliver.seq_ids)
            channel.counters.deliver += count
            if not channel.acks.timeout.is_watching:
                channel.acks.timeout.begin()
        if deliver.redelivered:
            channel.counters.redeliver += count
        connection = channel.connection
        connection.writer.write(
            encode_deliveries(
                channel.number,
                consumer.wire_tag,
                first_tag,
                deliver.redelivered,
                messages,
                connection.frame_max,
            )
        )
        self._sent[deliver.queue] = self._sent.get(deliver.queue, 0) + deliver.cost
        if channel.log is not None and is_told(messages):
            channel.log.deliver(
                messages,
                consumer.name.name,
                deliver.tag,
                first_tag,
                deliver.depth,
                no_ack=deliver.seq_ids is None,
                redelivered=deliver.redelivered,
            )
        if connection.vhost.tracer is not None:
            connection.vhost.tracer.delivered(
                channel, consumer.name.name, messages, redelivered=deliver.redelivered
            )

    def open_windows(self) -> None:
        """Tell queues that their deliveries are out, unless the socket is full."""
        if not self._sent:
            return
        channel = self._channel
        writer = channel.connection.writer
        if writer.is_paused:
            writer.call_when_writable(channel.mailbox)
            return
        if channel.connection.vhost.tracer is not None and channel.flow.is_blocked:
            return  # copies of what was delivered are not yet taken: a Bump comes when they are
        for queue, cost in self._sent.items():
            queue.put_urgent(q.Sent(channel.mailbox, cost))
        self._sent = {}

    def _on_cancelled(self, cancelled: q.ConsumerCancelled) -> None:
        """The queue has ended the consumer: deleted, or crashed."""
        consumer = self._consumers.pop(cancelled.tag, None)
        if consumer is None:
            return
        self._uncount(1)
        if self._channel.connection.vhost.events.is_heard:
            events.consumer_deleted(
                self._channel, cancelled.tag, consumer.name, INTERNAL_USER, "queue_gone"
            )
        if self._channel.connection.wants_cancel_notices:
            self._channel.send(make(commands.Basic.Cancel, consumer_tag=cancelled.tag, nowait=True))

    # --- consume and cancel ----------------------------------------------------------------------

    def _on_consume(self, consume: commands.Basic.Consume) -> None:
        channel = self._channel
        nowait = bool(consume.nowait)
        tag = consume.consumer_tag or ""
        limit = channel.connection.settings.consumer_max_per_channel
        if limit and len(self._consumers) >= limit and tag not in self._consumers:
            raise not_allowed(f"reached maximum ({limit}) of consumers per channel")
        if consume.queue == REPLY_TO:
            self._consume_replies(tag, no_ack=bool(consume.no_ack), nowait=nowait)
            return
        if tag in self._consumers:
            raise not_allowed(f"attempt to reuse consumer tag '{tag}'")
        queue = channel.queue_to_read(consume.queue)
        tag = tag or generated_name("amq.ctag-")
        arguments = channel.table(consume.arguments)
        priority = check_consumer_arguments(queue.name, arguments, queue.options.queue_type)
        channel.check_exclusive(queue)
        question = q.Consume(
            channel.mailbox,
            channel.limiter,
            tag,
            bool(consume.no_ack),
            bool(consume.exclusive),
            self._prefetch,
            priority,
        )

        channel.connection.tenancy.add_consumer()
        self._counted += 1

        def answered(answer: object) -> None:
            if isinstance(answer, q.Gone):
                raise not_found(f"no {queue.name}")
            self._consumers[tag] = _Consumer(queue.name, queue.mailbox, tag)
            if not nowait:
                channel.send(make(commands.Basic.ConsumeOk, consumer_tag=tag))
            if channel.connection.vhost.events.is_heard:
                events.consumer_created(
                    channel,
                    tag,
                    queue.name,
                    arguments,
                    question.prefetch,
                    exclusive=question.exclusive,
                    no_ack=question.no_ack,
                )

        channel.ask(queue, question, answered, urgent=True)

    def _consume_replies(self, tag: str, *, no_ack: bool, nowait: bool) -> None:
        tag = tag or generated_name("amq.ctag-")
        if tag in self._consumers:
            raise not_allowed(f"attempt to reuse consumer tag '{tag}'")
        self._channel.replies.consume(tag, no_ack=no_ack)
        if not nowait:
            self._channel.send(make(commands.Basic.ConsumeOk, consumer_tag=tag))

    def _on_cancel(self, cancel: commands.Basic.Cancel) -> None:
        channel = self._channel
        tag = cancel.consumer_tag or ""
        nowait = bool(cancel.nowait)

        def answered(answer: object) -> None:
            if self._consumers.pop(tag, None) is not None:
                assert consumer is not None
                self._uncount(1)
                self._tell_deleted(tag, consumer)
            if not nowait:
                channel.send(make(commands.Basic.CancelOk, consumer_tag=tag))

        if tag == channel.replies.tag:
            channel.replies.cancel()
        consumer = self._consumers.get(tag)
        if consumer is None:
            answered(q.Done())
        else:
            channel.ask_mailbox(consumer.queue, q.Cancel(channel.mailbox, tag), answered)

    def _uncount(self, consumers: int) -> None:
        self._counted -= consumers
        self._channel.connection.tenancy.remove_consumers(consumers)

    def leave(self) -> None:
        """The channel has ended, and its consumers with it."""
        self._uncount(self._counted)
        for tag, consumer in self._consumers.items():
            self._tell_deleted(tag, consumer, "channel_closed")

    def _tell_deleted(self, tag: str, consumer: _Consumer, reason: str = "") -> None:
        connection = self._channel.connection
        if connection.vhost.events.is_heard:
            user = connection.access.user
            events.consumer_deleted(self._channel, tag, consumer.name, user, reason)

    # --- get -------------------------------------------------------------------------------------

    def _on_get(self, get: commands.Basic.Get) -> None:
        channel = self._channel
        queue = channel.queue_to_read(get.queue)
        channel.check_exclusive(queue)
        no_ack = bool(get.no_ack)

        def answered(answer: object) -> None:
            self._answer_get(queue, answer)

        channel.ask(queue, q.Get(channel.mailbox, no_ack), answered)

    def _answer_get(self, queue: Queue, answer: object) -> None:
        channel = self._channel
        if isinstance(answer, q.Gone):
            raise not_found(f"no {queue.name}")
        if not isinstance(answer, q.GetOk):
            channel.counters.get_empty += 1
            channel.send(make(commands.Basic.GetEmpty, cluster_id=""))
            return
        ledger = channel.acks.ledger
        tag = ledger.take_tags(1)
        if answer.seq_id is None:
            channel.counters.get_no_ack += 1
        else:
            ledger.add(tag, Source(answer.queue, None), [answer.seq_id])
            channel.counters.get += 1
            if not channel.acks.timeout.is_watching:
                channel.acks.timeout.begin()
        if answer.redelivered:
            channel.counters.redeliver += 1
        message = answer.message
        get_ok = make(
            commands.Basic.GetOk,
            delivery_tag=tag,
            redelivered=answer.redelivered,
            exchange=message.exchange,
            routing_key=message.routing_key,
            message_count=answer.ready,
        )
        connection = channel.connection
        connection.writer.write(
            content_frames(channel.number, get_ok, message, connection.frame_max)
        )
        if channel.log is not None:
            channel.log.deliver(
                [message],
                queue.name.name,
                None,
                tag,
                answer.ready,
                no_ack=answer.seq_id is None,
                redelivered=answer.redelivered,
            )
        if connection.vhost.tracer is not None:
            connection.vhost.tracer.delivered(
                channel, queue.name.name, [message], redelivered=answer.redelivered
            )

    # --- qos -------------------------------------------------------------------------------------

    def _on_qos(self, qos: commands.Basic.Qos) -> None:
        channel = self._channel
        if qos.prefetch_size:
            raise not_implemented(f"prefetch_size!=0 ({qos.prefetch_size})")
        count = qos.prefetch_count or 0
        if qos.global_:
            channel.limiter.set_limit(count, len(channel.acks.ledger))
        else:
            # For later consumers; it also ends a limit that was shared until now.
            self._prefetch = count
            channel.limiter.set_limit(0, 0)
        channel.send(make(commands.Basic.QosOk))


class Replies:
    """Direct reply-to: the channel itself receives, there is no queue.

    A requester consumes from ``amq.rabbitmq.reply-to`` and publishes with that reply-to, which
    becomes a name only the broker can make; what is published to that name goes straight to the
    requester's channel.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        # The reply consumer's tag and the name replies are sent to; None without a consumer.
        self.tag: str | None = None
        self.name: str | None = None

    def consume(self, tag: str, *, no_ack: bool) -> None:
        if self.tag is not None:
            raise precondition_failed("reply consumer already set")
        if not no_ack:
            raise precondition_failed("reply consumer cannot acknowledge")
        self.tag = tag
        self.name = generated_name(REPLY_TO + ".")
        connection = self._channel.connection
        connection.vhost.reply_consumers[self.name] = ReplyPort(
            self._channel.mailbox, connection.writer
        )

    def cancel(self) -> None:
        if self.name is not None:
            self._channel.connection.vhost.reply_consumers.pop(self.name, None)
        self.tag = self.name = None

    def on_reply(self, reply: q.Reply) -> None:
        """A reply, straight from the channel it was published on."""
        channel = self._channel
        if self.tag is None:
            if channel.log is not None:
                channel.log.unsent(reply.messages, REPLY_TO)
            return
        name = Resource(channel.connection.vhost.name, "queue", REPLY_TO)
        consumer = _Consumer(name, channel.mailbox, self.tag)
        connection = channel.connection
        for message in reply.messages:
            # The tag means nothing, as there is nothing to ack: it is always 1.
            connection.writer.write(
                encode_deliveries(
                    channel.number, consumer.wire_tag, 1, False, [message], connection.frame_max
                )
            )
        channel.counters.deliver_no_ack += len(reply.messages)
        if channel.log is not None and is_told(reply.messages):
            # By no consumer that was told of, and with no depth: there is no queue.
            for message in reply.messages:
                channel.log.deliver([message], REPLY_TO, "", 1, -1, no_ack=True, redelivered=False)
