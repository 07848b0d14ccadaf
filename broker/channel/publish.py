"""basic.publish: permission, checks, routing, enqueueing, returns (hops 2 to 5) [41-51, 62-70].

A run (consecutive publishes with one exchange, routing key and flags) is checked, routed and
handed over once. Only messages that ask for a closer look (``needs``) are taken one by one, in
the order of the seeds' pipeline. Nothing here waits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pamqp import commands

from leveret.broker import delegate
from leveret.broker.channel.consume import REPLY_TO
from leveret.broker.channel.transactions import Publication
from leveret.broker.config import MESSAGE_SIZE_CAP
from leveret.broker.exchanges.router import sender_selected_keys, without_bcc
from leveret.broker.queues import commands as q
from leveret.broker.queues.argument_checks import MAX_EXPIRY_MS
from leveret.broker.queues.arguments import QueueArguments
from leveret.broker.queues.record import Queue
from leveret.broker.resource import Resource
from leveret.protocol.codec import (
    content_frames,
    make,
    pick_delivery_mode,
    pick_expiration,
    pick_headers,
    pick_reply_to,
    pick_user_id,
    read_properties,
    write_properties,
)
from leveret.protocol.errors import ChannelException, not_implemented, precondition_failed
from leveret.protocol.hot import scan_properties
from leveret.protocol.message import (
    NEEDS_EXPIRATION,
    NEEDS_HEADERS,
    NEEDS_MODE,
    NEEDS_REPLY_TO,
    NEEDS_USER_ID,
)
from leveret.protocol.twin import Message, PublishRun

if TYPE_CHECKING:
    from leveret.broker.channel.channel import Channel
    from leveret.broker.exchanges.base import Exchange
    from leveret.broker.mailbox import Mailbox
    from leveret.protocol.field_table import Table

MANDATORY, IMMEDIATE = 1, 2
_PUBLISH = (60, 40)
_ONE_BY_ONE = NEEDS_USER_ID | NEEDS_REPLY_TO | NEEDS_MODE
_LARGE = 14
# What the event log calls the queue of direct replies, which are in none.
_REPLIES = Queue(Resource("", "queue", REPLY_TO), False, False, None, {}, QueueArguments())
_REPLIES_ALONE = (_REPLIES,)


class PublishMethods:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        settings = channel.connection.settings
        self._max_size = settings.max_message_size
        # Deliveries that cost nothing take no part in credit flow [34].
        self._has_flow = settings.classic_queue_flow_control == "on"
        self._vhost = channel.connection.vhost
        self._topology = channel.connection.vhost.topology

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        return {
            PublishRun: self.on_run,
            q.Unreceived: self._on_unreceived,
        }

    def on_run(self, run: PublishRun) -> None:
        """Publish a run, and only then grant the reader more for it.

        RabbitMQ grants first, message by message; a whole run may use up a queue's credit, and
        what is granted before that would come on top of it.
        """
        channel = self._channel
        channel.current_method = _PUBLISH
        self._publish_run(run)
        channel.flow.ack(channel.connection.reader, run.cost)

    def _publish_run(self, run: PublishRun) -> None:
        channel = self._channel
        if channel.interceptors.sees_publishes:
            self._intercept(run)
            return
        if run.flags & IMMEDIATE:
            raise not_implemented("immediate=true")
        if (
            run.needs & _ONE_BY_ONE
            or run.largest > self._max_size
            or _selects_keys(run)
            or (run.needs & NEEDS_EXPIRATION and not _expirations_are_valid(run))
        ):
            for message in run.messages:
                size = run.largest if len(run.messages) == 1 else len(message.body)
                self._publish_one(message, size, is_mandatory=bool(run.flags & MANDATORY))
            return
        self._check_write(run.exchange)
        route = self._topology.cached_route(run.envelope, run.exchange, run.routing_key)
        mandatory = bool(run.flags & MANDATORY)
        if route is None:
            for message in run.messages:
                self._publish_one(message, len(message.body), is_mandatory=mandatory)
            return
        exchange, queues = route
        replies = 0
        if not queues and not run.exchange:
            replies = self._reply(run.routing_key, run.messages, is_mandatory=mandatory)
        if self._vhost.tracer is not None:
            self._vhost.tracer.published(channel, run.messages, queues)
        if channel.transaction is not None:
            channel.transaction.publish(
                Publication(exchange, run.messages, queues, mandatory, replies > 0)
            )
        else:
            self._deliver_run(
                exchange,
                run.messages,
                queues,
                run.cost,
                run.size,
                run.largest,
                run.persistent,
                is_mandatory=mandatory,
                needs=run.needs,
                replies=replies,
            )

    def _intercept(self, run: PublishRun) -> None:
        channel = self._channel
        if len(run.messages) == 1:
            # Before anybody sees it: of a body that is far too large nothing was kept.
            self._check_size(run.largest)
        for message in run.messages:
            header = message.header
            method = make(
                commands.Basic.Publish,
                exchange=run.exchange,
                routing_key=run.routing_key,
                mandatory=bool(run.flags & MANDATORY),
                immediate=bool(run.flags & IMMEDIATE),
            )
            seen, changed = channel.interceptors.intercept(method, message)
            assert isinstance(seen, commands.Basic.Publish)
            assert changed is not None
            if changed.header is not header:
                changed.needs, changed.persistent = scan_properties(
                    changed.header, 0, len(changed.header)
                )
            if (seen.exchange, seen.routing_key) != (changed.exchange, changed.routing_key):
                changed = _readdressed(changed, seen.exchange or "", seen.routing_key or "")
            if seen.immediate:
                raise not_implemented("immediate=true")
            self._publish_one(changed, len(changed.body), is_mandatory=bool(seen.mandatory))

    # --- one message that wants a closer look ----------------------------------------------------

    def _publish_one(self, message: Message, size: int, *, is_mandatory: bool) -> None:
        self._check_size(size)
        self._check_write(message.exchange)
        exchange = self._topology.exchange_for_publish(message.exchange)
        if message.needs & (_ONE_BY_ONE | NEEDS_EXPIRATION):
            self._check_properties(message)
        headers: Table | None = None
        if message.needs & NEEDS_HEADERS:
            headers = self._sender_selected(message)
        if message.needs & NEEDS_MODE:
            mode = pick_delivery_mode(message.header)
            raise precondition_failed(f"invalid message: {{delivery_mode_unknown,{mode}}}")
        replies = 0
        if not message.exchange:
            for key in dict.fromkeys((message.routing_key, *message.extra_keys)):
                replies += self._reply(key, [message], is_mandatory=is_mandatory)
        found = headers
        queues = self._topology.route(
            exchange, message.routing_key, message.extra_keys, lambda: found or {}
        )
        self._routed(exchange, [message], queues, is_mandatory=is_mandatory, replies=replies)

    def _check_size(self, size: int) -> None:
        if size > self._max_size:
            configured = "" if self._max_size == MESSAGE_SIZE_CAP else "configured "
            raise precondition_failed(
                f"message size {size} is larger than {configured}max size {self._max_size}"
            )

    def _check_properties(self, message: Message) -> None:
        header = message.header
        if message.needs & NEEDS_REPLY_TO and pick_reply_to(header) == REPLY_TO:
            self._set_fast_reply_to(message)
            header = message.header
        if message.needs & NEEDS_USER_ID:
            claimed = pick_user_id(header)
            access = self._channel.connection.access
            if claimed is not None and claimed != access.user and not access.may_impersonate:
                raise precondition_failed(
                    f"user_id property set to '{claimed}' but authenticated user"
                    f" was '{access.user}'"
                )
        if message.needs & NEEDS_EXPIRATION:
            check_expiration(pick_expiration(header) or "")

    def _sender_selected(self, message: Message) -> Table:
        """Read CC and BCC; receivers must not see BCC."""
        headers = pick_headers(message.header) or {}
        cc, bcc = sender_selected_keys(headers)
        message.extra_keys = cc + bcc
        if "BCC" in headers:
            headers = without_bcc(headers)
            properties = read_properties(message.header)
            properties.headers = headers
            message.header = write_properties(properties)
        return headers

    def _set_fast_reply_to(self, message: Message) -> None:
        name = self._channel.replies.name
        if name is None:
            raise precondition_failed("fast reply consumer does not exist")
        properties = read_properties(message.header)
        properties.reply_to = name
        message.header = write_properties(properties)

    def _check_write(self, exchange: str) -> None:
        # The default exchange goes by this name where permissions are concerned.
        name = Resource(self._topology.name, "exchange", exchange or "amq.default")
        self._channel.check_permission(name, "write")

    # --- routed ----------------------------------------------------------------------------------

    def _routed(
        self,
        exchange: Exchange,
        messages: Sequence[Message],
        queues: Sequence[Queue],
        *,
        is_mandatory: bool,
        replies: int,
    ) -> None:
        if self._vhost.tracer is not None:
            self._vhost.tracer.published(self._channel, messages, queues)
        transaction = self._channel.transaction
        if transaction is not None:
            transaction.publish(Publication(exchange, messages, queues, is_mandatory, replies > 0))
        else:
            self._deliver(exchange, messages, queues, is_mandatory=is_mandatory, replies=replies)

    def _deliver(
        self,
        exchange: Exchange,
        messages: Sequence[Message],
        queues: Sequence[Queue],
        *,
        is_mandatory: bool,
        replies: int,
    ) -> None:
        """Hand routed messages to their queues, or return them."""
        sizes = [len(message.body) for message in messages]
        self._deliver_run(
            exchange,
            messages,
            queues,
            len(messages) + sum([size >> _LARGE for size in sizes]),
            sum(sizes),
            max(sizes),
            sum([message.persistent for message in messages]),
            is_mandatory=is_mandatory,
            needs=messages[0].needs,
            replies=replies,
        )

    def _deliver_run(
        self,
        exchange: Exchange,
        messages: Sequence[Message],
        queues: Sequence[Queue],
        cost: int,
        size: int,
        largest: int,
        persistent: int,
        *,
        is_mandatory: bool,
        needs: int,
        replies: int,
    ) -> None:
        """``replies`` requesters were given them already."""
        channel = self._channel
        count = len(messages)
        first = channel.confirms.take_numbers(count) if channel.is_confirming else 0
        delivery = q.Delivery(
            messages,
            channel.mailbox,
            first,
            cost if self._has_flow else 0,
            size,
            largest,
            persistent,
            is_mandatory=is_mandatory,
            needs=needs,
        )
        if channel.log is not None and not channel.log.passes_over(count):
            channel.log.publish(
                messages,
                _takers(queues, replies) if replies else queues,
                first,
                persistent,
                is_mandatory=is_mandatory,
            )
        if not queues:
            self.unroutable(messages, is_mandatory=is_mandatory, is_told=not replies)
            if first:
                channel.confirms.confirm(first, first + count - 1)
        else:
            if first:
                channel.confirms.expect(
                    first, first + count - 1, [queue.mailbox for queue in queues]
                )
            for queue in queues:
                channel.touched.add(queue.mailbox)
            delegate.deliver(queues, delivery, channel.flow)
        # Last of all [70], so that what a transaction rolls back is not counted.
        exchange.publish_in += count
        exchange.publish_out += count * len(queues)
        channel.counters.publish += count

    def _reply(self, key: str, messages: Sequence[Message], *, is_mandatory: bool) -> bool:
        """To the channel that waits for replies under this name; whether there is one.

        At once, also in a transaction, and beside whatever else becomes of the messages: that
        there is no queue of that name makes mandatory ones come back, as they do in RabbitMQ.
        """
        channel = self._channel
        requester = channel.connection.vhost.reply_consumers.get(key)
        if requester is None:
            return False
        if channel.transaction is None or channel.log is None:
            return requester.put(q.Reply(messages))
        # Told as messages of their own: a rollback does not take them back, nor does a commit
        # number them anew before the requester has told of them.
        messages = [_copied(message) for message in messages]
        is_taken = requester.put(q.Reply(messages))
        if is_taken:
            persistent = sum([message.persistent for message in messages])
            channel.log.publish(messages, _REPLIES_ALONE, 0, persistent, is_mandatory=is_mandatory)
        return is_taken

    def unroutable(
        self, messages: Sequence[Message], *, is_mandatory: bool, is_told: bool = True
    ) -> None:
        """``is_told``: in the event log; a reply that was taken is not lost."""
        channel = self._channel
        if channel.log is not None and is_told:
            channel.log.unroutable(messages, is_returned=is_mandatory)
        if not is_mandatory:
            channel.counters.drop_unroutable += len(messages)
            return
        channel.counters.return_unroutable += len(messages)
        connection = channel.connection
        for message in messages:
            returned = make(
                commands.Basic.Return,
                reply_code=312,
                reply_text="NO_ROUTE",
                exchange=message.exchange,
                routing_key=message.routing_key,
            )
            connection.writer.write(
                content_frames(channel.number, returned, message, connection.frame_max)
            )

    def _on_unreceived(self, unreceived: q.Unreceived) -> None:
        """A queue ended before it took a delivery; if all did, nobody got it [63]."""
        delivery = unreceived.delivery
        delivery.unreceived += 1
        channel = self._channel
        if delivery.is_mandatory and delivery.unreceived == delivery.targets:
            self.unroutable(delivery.messages, is_mandatory=True)
        self._queue_gone(unreceived.queue)
        first = delivery.confirm_first
        if first and not unreceived.crashed:
            channel.confirms.confirmed_by(
                unreceived.queue, first, first + len(delivery.messages) - 1
            )

    def _queue_gone(self, queue: Mailbox) -> None:
        self._channel.touched.discard(queue)
        self._channel.flow.peer_down(queue)


def _takers(queues: Sequence[Queue], replies: int) -> Sequence[Queue]:
    """Who was given a message, as the event log tells it."""
    if not queues and replies == 1:
        # Always the same object, by which the log knows it again.
        return _REPLIES_ALONE
    return [*queues, *_REPLIES_ALONE * replies]


def _selects_keys(run: PublishRun) -> bool:
    """Whether a message may carry CC or BCC: only then must its headers be read to route it."""
    return bool(run.needs & NEEDS_HEADERS) and any(
        b"CC" in message.header for message in run.messages
    )


def _expirations_are_valid(run: PublishRun) -> bool:
    """If not, the run is taken one by one: what comes before the wrong one counts."""
    try:
        for message in run.messages:
            if message.needs & NEEDS_EXPIRATION:
                _check_header(message.header)
    except ChannelException:
        return False
    return True


@lru_cache(maxsize=4096)
def _check_header(header: bytes) -> None:
    """Publishers mostly send the same header again and again."""
    check_expiration(pick_expiration(header) or "")


def check_expiration(text: str) -> None:
    """Decimal digits, nothing else; raises 406 in RabbitMQ's words."""
    match = re.match(r"[+-]?[0-9]+", text)
    if match is None:
        why = "no_integer"
    elif match.end() < len(text):
        why = f'{{leftover_string,"{text[match.end() :]}"}}'
    elif int(match[0]) < 0:
        why = f"{{value_negative,{int(match[0])}}}"
    elif int(match[0]) > MAX_EXPIRY_MS:
        why = f"{{value_too_large,{int(match[0])}}}"
    else:
        return
    raise precondition_failed(f"invalid expiration '{text}': {why}")


def _copied(message: Message) -> Message:
    return Message(
        message.envelope,
        message.exchange,
        message.routing_key,
        message.header,
        message.body,
        message.needs,
        message.persistent,
    )


def _readdressed(message: Message, exchange: str, routing_key: str) -> Message:
    """The same message as if it had been published elsewhere."""
    names = [name.encode("utf-8", "surrogateescape") for name in (exchange, routing_key)]
    envelope = b"".join(bytes((len(name),)) + name for name in names)
    return Message(
        envelope,
        exchange,
        routing_key,
        message.header,
        message.body,
        message.needs,
        message.persistent,
    )
