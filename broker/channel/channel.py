"""One channel: method -> handler table, channel state, errors -> channel.close (hop 2).

Upstream: ``connection/reader.py`` puts runs and methods into the ordinary lane, in the order the
client sent them; queues put deliveries, confirms and answers into the urgent one. Downstream:
``delegate.py`` and the connection's writer.

A method that needs an answer from a queue *holds* the channel: the ordinary lane waits until the
answer comes, so methods take effect in order, while deliveries and confirms go on. What a batch
produced (confirms, delivery credit) leaves once, at its end.

Errors: a ChannelException closes the channel here; a ConnectionException is handed to the reader;
anything else is a bug, is logged, and ends the connection with 541.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from pamqp import commands
from pamqp.base import Frame

from leveret.broker.channel import events
from leveret.broker.channel.acks import AckMethods
from leveret.broker.channel.confirms import Confirms, split_at
from leveret.broker.channel.consume import REPLY_TO, ConsumeMethods, Replies
from leveret.broker.channel.context import (
    ChannelClosing,
    ChannelEnded,
    ConnectionContext,
    ConnectionFailed,
    Stop,
    Writable,
)
from leveret.broker.channel.counters import ChannelCounters
from leveret.broker.channel.declare import DeclareMethods
from leveret.broker.channel.publish import PublishMethods
from leveret.broker.channel.transactions import Transaction, TransactionMethods
from leveret.broker.event_log.messages import make_channel_log
from leveret.broker.events import ACTOR
from leveret.broker.flow import Bump, CreditFlow
from leveret.broker.interceptors.chain import InterceptorChain
from leveret.broker.mailbox import Mailbox
from leveret.broker.node import make_pid
from leveret.broker.queues import commands as q
from leveret.broker.queues.arguments import locked
from leveret.broker.queues.limiter import Limiter
from leveret.broker.resource import Resource
from leveret.protocol import access
from leveret.protocol.codec import make, method_frame
from leveret.protocol.errors import (
    ChannelException,
    ConnectionException,
    command_invalid,
    internal_error,
    not_found,
    not_implemented,
    precondition_failed,
)
from leveret.protocol.twin import AckRun, PublishRun, encode_acks

if TYPE_CHECKING:
    from leveret.broker.queues.record import Queue
    from leveret.protocol.field_table import Table

log = logging.getLogger(__name__)

Answered = Callable[[object], None]


class Channel:
    def __init__(self, number: int, connection: ConnectionContext) -> None:
        self.number = number
        self.connection = connection
        # What events call it.
        self.pid = make_pid()
        self.mailbox = Mailbox(
            f"channel {number} of {connection.name}", f"channel:{connection.log_number}/{number}"
        )
        settings = connection.settings
        self.flow = CreditFlow(
            self.mailbox,
            settings.credit_flow_initial,
            settings.credit_flow_more_after,
            connection.vhost.credit_log,
        )
        self.limiter = Limiter(self.mailbox)
        self.counters = ChannelCounters()
        self.confirms = Confirms()
        self.interceptors = InterceptorChain(
            factory(connection) for factory in connection.registries.interceptors.things()
        )
        # What happens to messages here, for the event log; None if it does not want to know.
        self.log = make_channel_log(connection, number)
        # Set by confirm.select, and by tx.select: never both.
        self.is_confirming = False
        self.transaction: Transaction | None = None
        # The queue declared last, which an empty name stands for.
        self.last_queue: str | None = None
        # Queues that know of this channel and must hear of its end.
        self.touched: set[Mailbox] = set()
        # Addresses of queues that have crashed: what they had delivered is delivered again.
        self.crashed: set[Mailbox] = set()
        # Class and method id of what is being handled, for errors.
        self.current_method = (0, 0)
        # False from the moment it is closed by either side, or its connection ends.
        self.is_open = True
        # While true the ordinary lane waits for an answer.
        self._is_held = False
        # What to do with the answer.
        self._answered: Answered | None = None
        # Why it ended, for the event log, unless it is known better; empty if the client said so.
        self._end_reason = "connection_closed"

        self.acks = AckMethods(self)
        self.replies = Replies(self)
        self.consuming = ConsumeMethods(self)
        self.publishing = PublishMethods(self)
        self.transactions = TransactionMethods(self)
        self._handlers: dict[type, Callable[[Any], None]] = {
            AckRun: self.acks.on_run,
            **self.acks.handlers(),
            **self.publishing.handlers(),
            **self.consuming.handlers(),
            **self.transactions.handlers(),
            **DeclareMethods(self).handlers(),
            commands.Channel.Close: self._on_close,
            commands.Channel.Flow: self._on_flow,
            commands.Confirm.Select: self._on_confirm_select,
            access.Request: self._on_access_request,
            q.Confirmed: self._on_confirmed,
            q.Refused: self._on_refused,
            q.QueueDown: self._on_queue_down,
            Bump: self.flow.handle_bump,
            Writable: lambda _: None,  # the end of the batch does what there is to do
            Stop: self._on_stop,
            **dict.fromkeys(
                (q.GetOk, q.GetEmpty, q.CountOk, q.Done, q.Failed, q.Gone), self._on_answer
            ),
        }

    # --- the loop --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Handle batches until the channel ends; then give back all it held."""
        ACTOR.set(ACTOR.get()._replace(ch=self.number))
        if self.connection.vhost.events.is_heard:
            events.channel_created(self)
        try:
            while self.is_open:
                await self.mailbox.turn(urgent_only=self._is_held)
                if self.connection.writer.is_stuck:
                    await self.connection.writer.wait_unstuck()
                try:
                    self._handle_batch()
                except ChannelException as error:
                    self._fail(error)
                except ConnectionException as error:
                    self._fail_connection(error)
                except Exception:
                    log.exception("%r: bug", self.mailbox)
                    self._fail_connection(internal_error())
        finally:
            self._leave()
            self._fall_apart()

    def _fall_apart(self) -> None:
        """Break the cycles of a channel that has ended, or it waits for the garbage collector."""
        self._handlers.clear()
        for part in (
            self.acks,
            self.replies,
            self.consuming,
            self.publishing,
            self.transactions,
            self.transaction,
        ):
            if part is not None:
                del part._channel

    def _handle_batch(self) -> None:
        mailbox, handlers = self.mailbox, self._handlers
        writer = self.connection.writer
        urgent = mailbox.take_urgent()
        at = 0
        try:
            for at, item in enumerate(urgent):
                if writer.is_stuck:
                    # Each may be a window full of large messages.
                    mailbox.urgent[:0] = urgent[at:]
                    return
                handlers[type(item)](item)
        except Exception:
            # Whoever sent the rest may wait for something: _leave sees to it.
            mailbox.urgent[:0] = urgent[at + 1 :]
            raise
        lane = mailbox.ordinary
        while lane and not self._is_held and self.is_open and not writer.is_stuck:
            item = lane.popleft()
            kind = type(item)
            if kind is PublishRun or kind is AckRun:
                handlers[kind](item)
            else:
                self._handle_method(item)
        if self.is_open:
            if self.confirms.has_news:
                self._flush_confirms()
            self.consuming.open_windows()

    def _handle_method(self, item: object) -> None:
        if isinstance(item, Frame):
            self.current_method = (item.index >> 16, item.index & 0xFFFF)
            if self.interceptors.is_active:
                item, _ = self.interceptors.intercept(item)
        handler = self._handlers.get(type(item))
        if handler is None:
            raise command_invalid("unimplemented method")
        handler(item)
        if isinstance(item, Frame):
            self.flow.ack(self.connection.reader, 1)

    # --- asking queues ---------------------------------------------------------------------------

    def ask(
        self, queue: Queue, question: object, answered: Answered, *, urgent: bool = False
    ) -> None:
        self.ask_mailbox(queue.mailbox, question, answered, urgent=urgent)

    def ask_mailbox(
        self, queue: Mailbox, question: object, answered: Answered, *, urgent: bool = False
    ) -> None:
        """Put a question to a queue and hold the channel until ``answered`` has been called."""
        put = queue.put_urgent if urgent else queue.put
        if not put(question):
            answered(q.Gone())
            return
        self.touched.add(queue)

        def forgetting(answer: object) -> None:
            if isinstance(answer, q.Gone):
                self.touched.discard(queue)
            answered(answer)

        self._answered = forgetting
        self.hold()

    def when_saved(self, then: Callable[[], None]) -> None:
        """Call ``then`` once what was declared or deleted so far is on disk."""
        vhost = self.connection.vhost
        if not vhost.has_unsaved:
            then()
            return
        self._answered = lambda _: then()
        self.hold()
        vhost.call_when_saved(lambda: self.mailbox.put_urgent(q.Done()))

    def answer_when_saved(self, answer: Frame, *, nowait: bool) -> None:
        """For methods that change the topology: no -ok before it is on disk."""
        self.when_saved(lambda: None if nowait else self.send(answer))

    def hold(self) -> None:
        self._is_held = True

    def release(self) -> None:
        self._is_held = False

    def _on_answer(self, answer: object) -> None:
        answered, self._answered = self._answered, None
        self.release()
        if isinstance(answer, q.Failed):
            raise answer.error
        if answered is not None:
            answered(answer)

    # --- what methods have in common -------------------------------------------------------------

    def send(self, command: Frame) -> None:
        self.connection.writer.write(method_frame(self.number, command))

    def queue_name(self, name: str | None) -> str:
        """The name given, or the queue declared last."""
        if name:
            return name
        if self.last_queue is None:
            raise not_found("no previously declared queue")
        return self.last_queue

    def queue(self, name: str | None) -> Queue:
        return self.connection.vhost.topology.queue(self.queue_name(name))

    def queue_to_read(self, name: str | None) -> Queue:
        """The same for who wants its messages; permission is looked at before existence."""
        resource = Resource(self.connection.vhost.name, "queue", self.queue_name(name))
        self.check_permission(resource, "read")
        return self.connection.vhost.topology.queue(resource.name)

    def check_exclusive(self, queue: Queue) -> None:
        """Raises 405 if the queue is another connection's own."""
        if queue.owner is not None and queue.owner is not self.connection:
            raise locked(queue.name)

    def check_permission(self, resource: Resource, permission: str) -> None:
        self.connection.access.check(resource, permission)

    @staticmethod
    def table(arguments: object) -> Table:
        """The argument table of a decoded method (pamqp's annotations know only plain dicts)."""
        return cast("Table", arguments or {})

    # --- confirms --------------------------------------------------------------------------------

    def _on_confirm_select(self, select: commands.Confirm.Select) -> None:
        if self.transaction is not None:
            raise precondition_failed("cannot switch from tx to confirm mode")
        self.is_confirming = True
        if not select.nowait:
            self.send(make(commands.Confirm.SelectOk))

    def _on_confirmed(self, confirmed: q.Confirmed) -> None:
        self.confirms.confirmed_by(confirmed.queue, confirmed.first, confirmed.last)

    def _on_refused(self, refused: q.Refused) -> None:
        self.confirms.refused_by(refused.queue, refused.first, refused.last)

    def _on_queue_down(self, down: q.QueueDown) -> None:
        self.touched.discard(down.queue)
        self.limiter.forget(down.queue)
        self.flow.peer_down(down.queue)
        if down.crashed:
            self.crashed.add(down.queue)
        elif self.log is not None:
            self.log.queue_deleted(down.queue.log_name)
        if self.is_confirming:
            self.confirms.queue_down(down.queue, crashed=down.crashed)

    def _flush_confirms(self) -> None:
        """Coalesced as RabbitMQ does it [68]: one for all below the first that still waits."""
        confirmed, refused = self.confirms.take_settled()
        waiting = self.confirms.oldest_waiting()
        write = self.connection.writer.write
        if refused:
            first_other = confirmed[0][0] if confirmed else waiting
            below, rest = split_at(refused, min(waiting, first_other))
            for tag, multiple in [(below, True)] * bool(below) + [(tag, False) for tag in rest]:
                self.send(
                    make(commands.Basic.Nack, delivery_tag=tag, multiple=multiple, requeue=True)
                )
        if self.log is not None and self.log.unconfirmed:
            told_from = self.log.unconfirmed[0][0]
            for settled, is_refused in ((refused, True), (confirmed, False)):
                if settled and settled[-1][1] >= told_from:
                    self.log.confirm(settled, is_refused=is_refused)
        if not confirmed:
            return
        self.counters.confirm += sum([last - first + 1 for first, last in confirmed])
        if len(confirmed) == 1 and confirmed[0][0] == confirmed[0][1]:
            write(encode_acks(self.number, [confirmed[0][0]], False))
            return
        first_other = refused[0][0] if refused else waiting
        below, rest = split_at(confirmed, min(waiting, first_other))
        if below:
            write(encode_acks(self.number, [below], True))
        if rest:
            write(encode_acks(self.number, rest, False))

    # --- flow and the end ------------------------------------------------------------------------

    def _on_flow(self, flow: commands.Channel.Flow) -> None:
        if not flow.active:
            raise not_implemented("active=false")
        self.send(make(commands.Channel.FlowOk, active=True))

    def _on_access_request(self, request: access.Request) -> None:
        # One ticket for everybody: nothing looks at it.
        self.send(make(access.RequestOk, ticket=1))

    def _on_close(self, close: commands.Channel.Close) -> None:
        self.is_open = False
        self._end_reason = ""
        self._leave()
        # The reader must know before the client can open the number again.
        self.connection.reader.put_urgent(ChannelEnded(self.number))
        self.send(make(commands.Channel.CloseOk))

    def _on_stop(self, stop: Stop) -> None:
        self.is_open = False

    def _fail(self, error: ChannelException) -> None:
        if not self.is_open:
            return
        self.is_open = False
        class_id, method_id = error.method if error.method != (0, 0) else self.current_method
        if self.confirms.has_news:
            self._flush_confirms()
        log.info("%s: channel %s closed: %s", self.connection.name, self.number, error.reply_text)
        self._end_reason = error.reply_text
        crosses = any(isinstance(item, commands.Channel.Close) for item in self.mailbox.ordinary)
        self._leave()
        # The reader must know before the client can answer.
        self.connection.reader.put_urgent(ChannelClosing(self.number, self.mailbox))
        self.send(
            make(
                commands.Channel.Close,
                reply_code=error.code,
                reply_text=error.reply_text,
                class_id=class_id,
                method_id=method_id,
            )
        )
        if crosses:
            # The client's own close is under way already, and waits for its answer.
            self.send(make(commands.Channel.CloseOk))

    def _fail_connection(self, error: ConnectionException) -> None:
        self.is_open = False
        if error.method == (0, 0) and error.code != 541:
            error.method = self.current_method
        self.connection.reader.put_urgent(ConnectionFailed(error))

    def _leave(self) -> None:
        """Give back what the channel held; done once, whatever ended it."""
        if self.mailbox.is_closed:
            return
        unread = self.mailbox.close()
        # A commit that is under way may yet ack them.
        undecided = () if self.transaction is None else self.transaction.withdraw()
        if self.log is not None:
            for item in unread:
                if isinstance(item, q.Deliver) and item.seq_ids is None:
                    self.log.unsent(item.messages, item.queue.log_name)
                elif isinstance(item, q.GetOk) and item.seq_id is None:
                    self.log.unsent([item.message], item.queue.log_name)
                elif isinstance(item, q.Reply):
                    self.log.unsent(item.messages, REPLY_TO)
            self.log.end(undecided)
        self.acks.timeout.stop()
        self.consuming.leave()
        self.replies.cancel()
        self.flow.end()
        down = q.ChannelDown(self.mailbox)
        for queue in self.touched:
            queue.put_urgent(down)
        self.touched.clear()
        if self.connection.vhost.events.is_heard:
            events.channel_closed(self, self._end_reason)

    def statistics(self) -> dict[str, object]:
        return {
            "number": self.number,
            "user": self.connection.access.user,
            "vhost": self.connection.vhost.name,
            "confirm": self.is_confirming,
            "transactional": self.transaction is not None,
            "consumer_count": len(self.consuming),
            "messages_unacknowledged": len(self.acks.ledger),
            "messages_unconfirmed": self.confirms.unconfirmed,
            "global_prefetch_count": self.limiter.limit,
            "is_blocked": self.flow.is_blocked,
            "mailbox": len(self.mailbox),
            **{f"{name}_count": value for name, value in self.counters.statistics().items()},
        }
