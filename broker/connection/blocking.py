"""A connection that publishes while memory or disk is short [22, 23].

Owned by the reader, which asks ``is_blocked`` before it hands anything on. Nothing is read of the
client until all alarms are over; what it is sent goes on: deliveries, confirms, our heartbeats.
Clients that want to know are told once when it begins and once when it ends.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pamqp import commands

from leveret.broker.events import ACTOR
from leveret.protocol.codec import make, method_frame

if TYPE_CHECKING:
    from leveret.broker.channel.context import ConnectionContext
    from leveret.broker.connection.writer import SocketWriter
    from leveret.broker.mailbox import Mailbox
    from leveret.broker.server import Broker

# So long after credit held a connection back its state is still reported as flow.
FLOW_STATE_S = 1.0


class Blocking:
    def __init__(self, broker: Broker, mailbox: Mailbox, writer: SocketWriter) -> None:
        self._broker = broker
        self._mailbox = mailbox
        self._writer = writer
        # It published while an alarm was active; until all alarms are cleared.
        self.is_blocked = False
        self._since_us = 0
        # When credit held it back last.
        self._flow_at = -math.inf
        # Both are known once the connection is open.
        self._context: ConnectionContext | None = None
        self._wants_notices = False

    def opened(self, context: ConnectionContext, *, wants_notices: bool) -> None:
        self._context = context
        self._wants_notices = wants_notices

    def end(self) -> None:
        self._broker.alarms.forget(self._mailbox)
        self._context = None

    def published(self) -> None:
        """While an alarm is active; ``AlarmsCleared`` comes when it is over."""
        if self.is_blocked:
            return
        self.is_blocked = True
        alarms = self._broker.alarms
        alarms.call_when_cleared(self._mailbox)
        if self._broker.event_log is not None:
            self._since_us = self._broker.event_log.now_us()
            self._tell("blocked", reason=alarms.reason)
        if self._wants_notices:
            blocked = make(commands.Connection.Blocked, reason=alarms.reason)
            self._writer.write(method_frame(0, blocked))

    def alarms_cleared(self) -> None:
        if self._broker.alarms.active:
            # Another one since: for the client it is the same.
            self._broker.alarms.call_when_cleared(self._mailbox)
            return
        self.is_blocked = False
        if self._broker.event_log is not None:
            held_us = self._broker.event_log.now_us() - self._since_us
            self._tell("unblocked", hold_us=max(0, held_us))
        if self._wants_notices:
            self._writer.write(method_frame(0, make(commands.Connection.Unblocked)))

    def _tell(self, ev: str, **fields: Any) -> None:
        """To the event log alone: RabbitMQ has no event for it."""
        assert self._broker.event_log is not None
        assert self._context is not None
        conn, _, peer = ACTOR.get()
        self._broker.event_log.event(
            ev,
            vhost=self._context.vhost.name,
            conn=conn,
            user=self._context.access.user,
            peer=peer,
            **fields,
        )

    # --- what others may see ---------------------------------------------------------------------

    def held_by_credit(self) -> None:
        self._flow_at = self._broker.clock.monotonic()

    def state(self, *, is_short_of_credit: bool) -> str:
        """As RabbitMQ calls it: an alarm counts for more than credit."""
        if self.is_blocked:
            return "blocked"
        if self._broker.alarms.active:
            return "blocking"
        since_s = self._broker.clock.monotonic() - self._flow_at
        return "flow" if is_short_of_credit or since_s < FLOW_STATE_S else "running"
