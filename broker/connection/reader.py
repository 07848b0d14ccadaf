"""One connection: socket bytes -> frames -> the right channel (hop 1).

Upstream: the transport puts chunks into the mailbox, behind each other and before the end of the
stream; channels, timers and the broker put notices into the urgent lane. Downstream: channel
mailboxes.

The reader owns the channel map and the channels' tasks, and it is where credit flow ends: it
spends credit for every run it hands to a channel and, when that is used up, stops cutting. The
rest of the chunk stays uncut and the socket is not read, so that the client's own send blocks.
The same happens at the first publish while memory or disk is short, until they no longer are.

Errors that end the connection are turned into connection.close here and nowhere else.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING

from pamqp import commands
from pamqp.base import Frame

from leveret.broker.alarms import AlarmsCleared
from leveret.broker.channel.channel import Channel
from leveret.broker.channel.context import (
    ChannelClosing,
    ChannelEnded,
    ConnectionContext,
    ConnectionFailed,
    Stop,
    Writable,
)
from leveret.broker.connection.blocking import Blocking
from leveret.broker.connection.errors import PeerGone, SilentClose
from leveret.broker.connection.facts import ConnectionFacts
from leveret.broker.connection.handshake import PROTOCOL_HEADER, shake_hands
from leveret.broker.connection.heartbeat import Heartbeat
from leveret.broker.connection.notices import Evicted, Expired, Lost, Shutdown
from leveret.broker.connection.writer import SocketWriter
from leveret.broker.events import ACTING_USER, ACTOR, Actor
from leveret.broker.flow import Bump, CreditFlow
from leveret.broker.mailbox import Mailbox
from leveret.protocol.assembler import Assembler
from leveret.protocol.codec import UnknownMethod, make, method_frame
from leveret.protocol.errors import (
    ConnectionException,
    channel_error,
    connection_forced,
    internal_error,
    not_allowed,
)
from leveret.protocol.framing import METHOD, misplaced_frame
from leveret.protocol.twin import AckRun, Item, PublishRun, RawFrame, cut

if TYPE_CHECKING:
    from leveret.broker.clock import Timer
    from leveret.broker.live_vhost import LiveVhost
    from leveret.broker.server import Broker

log = logging.getLogger(__name__)

# How long a client may take to answer connection.close, or to hang up after its own.
CLOSE_TIMEOUT_S = 30.0
# How long channels may take to finish what they were given when their connection ends.
END_CHANNELS_S = 10.0
# Chunks (of up to 256 KiB) taken from the socket ahead of the reader.
CHUNKS_AHEAD = 4
# Before tune-ok nothing larger is to be expected.
HANDSHAKE_FRAME_MAX = 4096
_PUBLISH_METHOD = (60, 40)
_OPEN, _CLOSE, _CLOSE_OK = (20, 10), (20, 40), (20, 41)


class Reader:
    def __init__(self, transport: asyncio.Transport, broker: Broker) -> None:
        self.broker = broker
        self.facts = ConnectionFacts.of(transport, int(broker.clock.now() * 1000))
        # What the event log calls it.
        self.log_number = broker.take_connection_number()
        self.name = self.facts.name
        self.mailbox = Mailbox(f"connection {self.name}", f"reader:{self.log_number}")
        self.writer = SocketWriter(transport)
        self._transport = transport
        settings = broker.settings
        self._flow = CreditFlow(
            self.mailbox, settings.credit_flow_initial, settings.credit_flow_more_after
        )
        self._assembler = Assembler(settings.max_message_size)
        self._frame_max = HANDSHAKE_FRAME_MAX
        self._channel_max = 0
        # Received and not yet cut, from _at on.
        self._data = b""
        self._at = 0
        # Cutting stopped for want of credit, not of data.
        self._has_more = False
        # Cut and not yet handed on.
        self._items: deque[Item] = deque()
        self._is_reading = True
        self._blocking = Blocking(broker, self.mailbox, self.writer)
        self.bytes_received = 0
        self._heartbeat: Heartbeat | None = None
        # Counts up while we do not read, see _signs_of_life.
        self._pulse = 0
        # Set once the connection is open.
        self._context: ConnectionContext | None = None
        self._channels: dict[int, Channel] = {}
        # Of all channels that have not ended, also those that are being closed.
        self._tasks: set[asyncio.Task[None]] = set()
        # Numbers that mean nothing for now. True: the client was sent channel.close and owes the
        # answer; False: the client has closed it, and the channel finishes what came before.
        self._closing: dict[int, bool] = {}
        self._group: asyncio.TaskGroup | None = None
        # Why it ended, for the event log.
        self._end_reason = ""

    # --- the life of a connection ----------------------------------------------------------------

    async def run(self) -> None:
        """Serve the connection to its end; never raises but for cancellation."""
        log.debug("%s: accepted", self.name)
        ACTOR.set(Actor(self.log_number, 0, self.facts.peer))
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                try:
                    await self._live()
                finally:
                    if self.writer.is_stuck:
                        # Nobody is to wait for a socket that we are about to close.
                        self._transport.abort()
                    await self._end_channels()
        except Exception:
            # Our own mistake: the client learns nothing of it, the log everything.
            log.exception("%s: bug", self.name)
        finally:
            self._stop_heartbeat()
            if self._context is not None:
                # Cancelled, maybe, before it came to that.
                self.broker.limits.leave(self._context.tenancy)
            self._blocking.end()
            self._flow.end()
            self.mailbox.close()
            self.writer.close(self.broker.clock, CLOSE_TIMEOUT_S)
            # Break what would else wait for the garbage collector.
            self._heartbeat = self._group = self._context = None
            if self.broker.events.is_heard and self.facts.client_properties is not None:
                self.facts.closed(self.broker.events, self._end_reason)
            log.debug("%s: ended", self.name)

    async def _live(self) -> None:
        try:
            await self._open_and_serve()
        except PeerGone as gone:
            # Port scans and health checks never open anything: not worth a line.
            level = logging.DEBUG if self._context is None else logging.INFO
            self._end_reason = str(gone)
            log.log(level, "%s: %s", self.name, gone)
        except SilentClose as silent:
            log.warning("%s: closed without a word: %s", self.name, silent)
            self._end_reason = str(silent)
            if silent.delay_s:
                await self._drain_until("silent close", silent.delay_s)
        except UnknownMethod as unknown:
            log.warning("%s: closed: %s", self.name, unknown)
            self._end_reason = str(unknown)
        except ConnectionException as error:
            await self._close_with(error)
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("%s: bug", self.name)
            await self._close_with(internal_error())

    async def _open_and_serve(self) -> None:
        timeout = self._deadline("handshake", self.broker.settings.handshake_timeout_s)
        try:
            opened = await shake_hands(self)
        finally:
            timeout.cancel()
        self._channel_max = opened.channel_max
        self._context = ConnectionContext(
            name=self.name,
            access=opened.access,
            vhost=opened.vhost,
            settings=self.broker.settings,
            clock=self.broker.clock,
            writer=self.writer,
            reader=self.mailbox,
            pid=self.facts.pid,
            log_number=self.log_number,
            tenancy=opened.tenancy,
            frame_max=self._frame_max,
            wants_cancel_notices="consumer_cancel_notify" in opened.capabilities,
            registries=self.broker.registries,
        )
        wants_notices = "connection.blocked" in opened.capabilities
        self._blocking.opened(self._context, wants_notices=wants_notices)
        self._flow.witness = opened.vhost.credit_log
        log.info("%s: user %s opened %s", self.name, opened.access.user, opened.vhost.name)
        ACTING_USER.set(opened.access.user)
        if self.broker.events.is_heard:
            self.facts.opened(self.broker.events, self._context, self._channel_max)
        # A client may have sent more without waiting.
        self._has_more = True
        while True:
            await self._dispatch()
            await self._take()
            if self._items or self._is_held:
                continue
            if self._at < len(self._data):
                self._cut(self._flow.lowest_credit())
            else:
                self._has_more = False

    async def _end_channels(self) -> None:
        """Let channels finish what they were given, then delete what was this connection's own."""
        for channel in self._channels.values():
            channel.mailbox.put(Stop())
        self._channels.clear()
        if self._tasks:
            await self._wait_channels(list(self._tasks))
        if self._context is not None and self._context.exclusive_queues:
            queues = list(self._context.exclusive_queues)
            self._context.exclusive_queues.clear()
            await self._context.vhost.delete_queues(queues)
        if self._context is not None:
            self.broker.limits.leave(self._context.tenancy)

    async def _wait_channels(self, tasks: list[asyncio.Task[None]]) -> None:
        """A channel may wait for a queue that does not answer: not for ever."""

        def cancel() -> None:
            for task in tasks:
                task.cancel()

        patience = self.broker.clock.call_later(END_CHANNELS_S, cancel)
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError:
            cancel()
            raise
        finally:
            patience.cancel()

    @property
    def vhost(self) -> LiveVhost | None:
        """The virtual host that was opened."""
        return None if self._context is None else self._context.vhost

    @property
    def user(self) -> str | None:
        """Who has opened it."""
        return None if self._context is None else self._context.access.user

    # --- bytes to items --------------------------------------------------------------------------

    def receive(self, chunk: bytes) -> None:
        """Called by the transport. One event may bring many chunks: they wait in the socket."""
        self.mailbox.put(chunk)
        if len(self.mailbox.ordinary) >= CHUNKS_AHEAD:
            self._pause_reading(pause=True)

    async def _take(self) -> None:
        """Wait for news; handle notices, add chunks to what is uncut.

        Raises PeerGone at the end of the stream, ConnectionException when told to.
        """
        mailbox = self.mailbox
        if self._flow.is_blocked:
            self._blocking.held_by_credit()
        held = self._is_held or self.writer.is_stuck
        self._pause_reading(pause=held)
        if self.writer.is_stuck:
            self.writer.call_when_writable(mailbox)
        if (self._has_more or self._items) and not held:
            await mailbox.pause()
        else:
            await mailbox.turn(urgent_only=held)
        for notice in mailbox.take_urgent():
            self._on_notice(notice)
        if self._is_held or self.writer.is_stuck:
            return
        lane = mailbox.ordinary
        while lane:
            chunk = lane.popleft()
            if not isinstance(chunk, bytes):
                # What came before the end still counts, as far as it is complete.
                if self._items or (self._at < len(self._data) and self._has_more):
                    lane.appendleft(chunk)
                    return
                raise PeerGone("the client closed the socket")
            self.bytes_received += len(chunk)
            if self._at == len(self._data):
                self._data, self._at = chunk, 0
            else:
                self._data = self._data[self._at :] + chunk
                self._at = 0
            if lane and not isinstance(lane[0], bytes):
                return
        self._pause_reading(pause=False)

    def _cut(self, budget: int) -> None:
        items: list[Item] = []
        try:
            self._at = cut(self._data, self._at, self._frame_max, budget, items)
        except ConnectionException as error:
            self._data, self._at = b"", 0
            self._has_more = False
            if not items:
                raise
            # What came before the bad frame is handled first.
            self._items.extend(items)
            self.mailbox.put_urgent(ConnectionFailed(error))
            return
        self._items.extend(items)
        spent = sum([item.cost for item in items if type(item) is PublishRun])
        self._has_more = spent >= budget and self._at < len(self._data)

    def _on_notice(self, notice: object) -> None:
        if isinstance(notice, Bump):
            self._flow.handle_bump(notice)
        elif isinstance(notice, ChannelClosing):
            self._forget_channel(notice.number)
            self._closing[notice.number] = True
        elif isinstance(notice, ChannelEnded):
            self._closing.pop(notice.number, None)
        elif isinstance(notice, ConnectionFailed):
            raise notice.error
        elif isinstance(notice, Expired):
            raise PeerGone(f"{notice.what} timed out")
        elif isinstance(notice, Shutdown):
            raise connection_forced("broker forced connection closure with reason 'shutdown'")
        elif isinstance(notice, Evicted):
            for task in self._tasks:
                task.cancel()
            raise connection_forced(notice.text)
        elif isinstance(notice, AlarmsCleared):
            self._blocking.alarms_cleared()
        elif isinstance(notice, Lost):
            if self._blocking.is_blocked:
                raise PeerGone("the socket was lost while the client was blocked")
        else:
            assert isinstance(notice, Writable)

    def _pause_reading(self, *, pause: bool) -> None:
        if pause == self._is_reading and not self._transport.is_closing():
            if pause:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()
            self._is_reading = not pause

    @property
    def _is_held(self) -> bool:
        """Nothing is to be handed on: for want of credit, or because of an alarm."""
        return self._blocking.is_blocked or self._flow.is_blocked

    # --- items to channels -----------------------------------------------------------------------

    async def _dispatch(self) -> None:
        """Hand on what was cut, as far as there is credit: methods cost some as well."""
        items = self._items
        while items and not self._is_held:
            item = items.popleft()
            if isinstance(item, RawFrame):
                await self._on_frame(item)
            else:
                self._on_run(item)

    def _on_run(self, run: PublishRun | AckRun) -> None:
        number = run.channel
        self._assembler.expect_method(number)
        channel = self._channels.get(number)
        if channel is None:
            if number not in self._closing:
                raise _not_open((60, run.method) if isinstance(run, AckRun) else _PUBLISH_METHOD)
            return
        if isinstance(run, PublishRun):
            self._flow.send(channel.mailbox, run.cost)
            if self.broker.alarms.active:
                self._blocking.published()
        channel.mailbox.put(run)

    async def _on_frame(self, frame: RawFrame) -> None:
        number = frame.channel
        if number in self._closing:
            self._on_closing_frame(frame)
            return
        item = self._assembler.feed(frame)
        if item is None:
            return
        if isinstance(item, PublishRun):
            self._on_run(item)
        elif number == 0:
            await self._on_connection_method(item)
        else:
            await self._on_channel_method(number, item)

    async def _on_channel_method(self, number: int, method: Frame) -> None:
        channel = self._channels.get(number)
        if isinstance(method, commands.Channel.Open):
            if channel is not None:
                raise _blame(channel_error("second 'channel.open' seen"), method)
            self._open_channel(number)
        elif channel is None:
            raise _not_open(_ids(method))
        else:
            self._flow.send(channel.mailbox, 1)
            is_put = channel.mailbox.put(method)
            if isinstance(method, commands.Channel.Close):
                if not is_put:
                    # It has failed, and its own close is under way: both are answered.
                    self.writer.write(method_frame(number, make(commands.Channel.CloseOk)))
                self._forget_channel(number)
                # Free again when the channel says that it has ended, or that it has failed.
                self._closing[number] = False

    def _open_channel(self, number: int) -> None:
        assert self._context is not None
        assert self._group is not None
        limit = self._channel_max
        if limit and len(self._channels) >= limit:
            raise not_allowed(
                f"number of channels opened ({limit}) has reached the negotiated channel_max"
                f" ({limit})"
            )
        self._context.tenancy.open_channel()
        channel = Channel(number, self._context)
        self._channels[number] = channel
        task = self._group.create_task(channel.run(), name=channel.mailbox.owner)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        channel.send(make(commands.Channel.OpenOk, channel_id=""))

    def _forget_channel(self, number: int) -> None:
        channel = self._channels.pop(number, None)
        if channel is not None:
            assert self._context is not None
            self._context.tenancy.close_channel()
            self._flow.peer_down(channel.mailbox)
        self._assembler.discard(number)

    def _on_closing_frame(self, frame: RawFrame) -> None:
        """A channel that is being closed: all the client may say on it is close-ok, or close."""
        ids = (
            (int.from_bytes(frame.payload[:2]), int.from_bytes(frame.payload[2:4]))
            if frame.kind == METHOD
            else None
        )
        if ids == _CLOSE_OK:
            if self._closing[frame.channel]:
                del self._closing[frame.channel]
        elif ids == _CLOSE:
            self.writer.write(method_frame(frame.channel, make(commands.Channel.CloseOk)))
        elif ids == _OPEN:
            error = channel_error("second 'channel.open' seen")
            error.method = _OPEN
            raise error

    async def _on_connection_method(self, method: Frame) -> None:
        if isinstance(method, commands.Connection.Close):
            await self._end_channels()
            self.send(make(commands.Connection.CloseOk))
            # The client closes the socket; should it forget, we do.
            await self._drain_until("close", CLOSE_TIMEOUT_S)
            raise PeerGone("closed by the client")
        if isinstance(method, commands.Connection.UpdateSecret):
            self.send(make(commands.Connection.UpdateSecretOk))
            return
        error = channel_error("unexpected method in connection state running")
        raise _blame(error, method)

    # --- for the handshake -----------------------------------------------------------------------

    async def read_header(self) -> bytes:
        """The first 8 bytes."""
        size = len(PROTOCOL_HEADER)
        while len(self._data) - self._at < size:
            await self._take()
        header = self._data[self._at : self._at + size]
        self._at += size
        return header

    async def read_method(self) -> Frame:
        """The next method on channel 0. Heartbeats may come between."""
        while True:
            while not self._items:
                if self._at < len(self._data):
                    self._cut(budget=1)
                if not self._items:
                    await self._take()
            item = self._items.popleft()
            if not isinstance(item, RawFrame):
                raise SilentClose("content before the connection was open")
            if item.channel:
                raise misplaced_frame(item.kind, item.payload)
            method = self._assembler.feed(item)
            if isinstance(method, Frame):
                return method

    def tuned(self, frame_max: int, heartbeat_s: int) -> None:
        """tune-ok has come: its limits hold from here on."""
        self._frame_max = frame_max
        self.facts.heartbeat_s = heartbeat_s
        self._heartbeat = Heartbeat(
            self.broker.clock,
            heartbeat_s,
            self.writer,
            self._signs_of_life,
            self._on_dead,
        )

    def _on_dead(self) -> None:
        # At once: channels may be waiting for the socket, and we for them.
        self._transport.abort()
        self.mailbox.put_urgent(Expired("heartbeat"))

    def _signs_of_life(self) -> int:
        """What changes while the peer lives, as far as we can see."""
        if self._is_reading:
            return self.bytes_received
        if self.writer.is_stuck:
            return self.writer.bytes_sent - self.writer.backlog
        # Held back by credit or an alarm: it is we who do not read, so silence means nothing.
        self._pulse += 1
        return self._pulse

    def send(self, command: Frame) -> None:
        self.writer.write(method_frame(0, command))

    # --- closing ---------------------------------------------------------------------------------

    async def _close_with(self, error: ConnectionException) -> None:
        """connection.close, then wait for the client to agree."""
        log.warning("%s: closed: %s", self.name, error.reply_text)
        self._end_reason = error.reply_text
        await self._end_channels()
        self.send(
            make(
                commands.Connection.Close,
                reply_code=error.code,
                reply_text=error.reply_text,
                class_id=error.method[0],
                method_id=error.method[1],
            )
        )
        self._data, self._at = b"", 0
        await self._drain_until("close", CLOSE_TIMEOUT_S, answer_close=True)

    async def _drain_until(self, what: str, seconds: float, *, answer_close: bool = False) -> None:
        """Read and forget until the client hangs up, agrees (close-ok), or time is up."""
        self._stop_heartbeat()
        self._pause_reading(pause=False)
        deadline = self._deadline(what, seconds)
        rest = b""
        try:
            while True:
                await self.mailbox.turn()
                if any(isinstance(n, Expired | Shutdown) for n in self.mailbox.take_urgent()):
                    return
                lane = self.mailbox.ordinary
                while lane:
                    chunk = lane.popleft()
                    if not isinstance(chunk, bytes):
                        return
                    if answer_close:
                        items: list[Item] = []
                        rest += chunk
                        rest = rest[cut(rest, 0, self._frame_max, 1 << 30, items) :]
                        if any(self._is_close_ok(item) for item in items):
                            return
        except ConnectionException:
            return  # whatever this is, it is not an answer
        finally:
            deadline.cancel()

    def _is_close_ok(self, item: Item) -> bool:
        if not isinstance(item, RawFrame) or item.channel or item.kind != METHOD:
            return False
        if item.payload[:4] == b"\x00\x0a\x00\x32":
            self.send(make(commands.Connection.CloseOk))
        return item.payload[:4] == b"\x00\x0a\x00\x33"

    def _deadline(self, what: str, seconds: float) -> Timer:
        return self.broker.clock.call_later(seconds, self.mailbox.put_urgent, Expired(what))

    def _stop_heartbeat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop()

    def statistics(self) -> dict[str, object]:
        return {
            "name": self.name,
            "state": self._blocking.state(is_short_of_credit=self._flow.is_blocked),
            "recv_oct": self.bytes_received,
            "send_oct": self.writer.bytes_sent,
            "send_pend": self.writer.backlog,
            "mailbox": len(self.mailbox),
            "channels": {n: channel.statistics() for n, channel in self._channels.items()},
        }


def _ids(method: Frame) -> tuple[int, int]:
    return method.index >> 16, method.index & 0xFFFF


def _blame(error: ConnectionException, method: Frame) -> ConnectionException:
    error.method = _ids(method)
    return error


def _not_open(method: tuple[int, int]) -> ConnectionException:
    error = channel_error("expected 'channel.open'")
    error.method = method
    return error
