"""Connections, channels and the transcript a scenario leaves behind.

A scenario is a function taking one argument `t` (a Run).  Everything it sends
and everything the broker answers is appended to `t.log`, one entry per event:

    {"at": "A.1", "send": "queue.declare", "queue": "q", "passive": true}
    {"at": "A.1", "recv": "channel.close", "reply_code": 404, ...}

"A" is the first connection of the scenario, ".1" the channel.  Frames are
logged when the scenario consumes them, per channel and in arrival order, so
the transcript does not depend on how channels and connections interleave.
"""

import os
import re
import select
import socket
import struct
import time

from . import codec
from .codec import BODY, HEADER, HEARTBEAT, METHOD, T  # noqa: F401


class Abort(Exception):
    """The scenario cannot go on; the reason is part of the transcript."""


REGISTRY = []


class Scenario:
    def __init__(self, func, needs=(), any_ending=False):
        self.func = func
        self.any_ending = any_ending
        self.name = func.__name__
        self.doc = " ".join((func.__doc__ or "").split())
        self.needs = (needs,) if isinstance(needs, str) else tuple(needs)
        self.topic = self.set = None


def scenario(func=None, **options):
    def register(f):
        REGISTRY.append(Scenario(f, **options))
        return f
    return register(func) if func else register


CAPABILITIES = {
    "publisher_confirms": True,
    "exchange_exchange_bindings": True,
    "basic.nack": True,
    "consumer_cancel_notify": True,
    "connection.blocked": True,
    "authentication_failure_close": True,
}

CLIENT_PROPERTIES = {
    "product": "wiredrive",
    "version": "1.0",
    "capabilities": CAPABILITIES,
}


class Event:
    """One thing received: a method (with content, if it has one), a heartbeat,
    a protocol header, an end of stream."""

    def __init__(self, name, args=None, props=None, body=None, **extra):
        self.name = name
        self.args = args or {}
        self.props = props
        self.body = body
        self.extra = extra

    def __getitem__(self, key):
        return self.args[key]

    def __repr__(self):
        return f"<{self.name} {self.args}>"


CONTENT = {"basic.deliver", "basic.get-ok", "basic.return"}


class Conn:
    def __init__(self, run, label, quiet=False):
        self.run = run
        self.label = label
        self.silent = quiet
        self.sock = socket.create_connection((run.host, run.port), timeout=10)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buf = bytearray()
        self.inbox = {0: []}
        self.partial = {}
        self.channels = {}
        self.eof = False
        self.closed = None        # name of what ended the connection
        self.frame_max = 131072
        self.heartbeats = 0
        self.opened = False
        self.last_write_error = None

    # -- sending

    def note(self, _at=None, **entry):
        if not self.silent:
            self.run.note(at=_at or self.label, **entry)

    def raw(self, data, what=None):
        """Send bytes as they are; `what` describes them in the transcript."""
        if what:
            self.note(send=what)
        try:
            self.sock.settimeout(10)
            self.sock.sendall(data)
        except OSError as exc:
            self.last_write_error = exc
            self.pump(0)

    def frame(self, kind, channel, payload, end=codec.FRAME_END, what=None):
        self.raw(codec.enc_frame(kind, channel, payload, end),
                 what or f"frame type={kind} channel={channel}")

    def send(self, method, _channel=0, **args):
        self.note(_at=self.at(_channel), send=method, **self.run.plain(args))
        self.run.remember(method, args)
        self.raw(codec.enc_frame(METHOD, _channel, codec.enc_method(method, args)))

    def at(self, channel):
        return f"{self.label}.{channel}" if channel else self.label

    # -- receiving

    def pump(self, timeout):
        """Read once from the socket; False if nothing came in time."""
        if self.eof:
            return False
        try:
            ready, _, _ = select.select([self.sock], [], [], max(0, timeout))
            if not ready:
                return False
            data = self.sock.recv(1 << 18)
        except OSError:
            data = b""
        if not data:
            self.eof = True
            if self.buf:
                self.push(0, Event("trailing-bytes", {"hex": bytes(self.buf[:32]).hex()}))
            return True
        self.buf += data
        self.parse()
        return True

    def push(self, channel, event):
        self.inbox.setdefault(channel, []).append(event)

    def parse(self):
        buf = self.buf
        while True:
            if buf[:4] == b"AMQP":
                if len(buf) < 8:
                    return
                self.push(0, Event("protocol-header", {"bytes": list(buf[4:8])}))
                del buf[:8]
                continue
            if len(buf) < 7:
                return
            kind, channel, size = struct.unpack(">BHI", buf[:7])
            if size > (1 << 26):
                self.push(0, Event("unparseable", {"hex": bytes(buf[:32]).hex()}))
                buf.clear()
                return
            if len(buf) < size + 8:
                return
            payload, end = bytes(buf[7:7 + size]), buf[7 + size]
            del buf[:size + 8]
            if end != codec.FRAME_END:
                self.push(0, Event("bad-frame-end", {"end": end}))
            oversize = bool(self.opened and self.frame_max and size + 8 > self.frame_max)
            self.on_frame(kind, channel, payload, oversize)

    def on_frame(self, kind, channel, payload, oversize):
        if oversize:
            self.push(channel, Event("oversize-frame", {"size": len(payload) + 8}))
        part = self.partial.get(channel)
        if kind == HEARTBEAT:
            self.heartbeats += 1
            if channel or payload:
                self.push(0, Event("odd-heartbeat", {"channel": channel}))
            return
        if kind == METHOD:
            if part:
                self.push(channel, Event("incomplete-content", {"of": part.name}))
                del self.partial[channel]
            try:
                name, args = codec.dec_method(payload)
            except (ValueError, struct.error) as exc:
                self.push(channel, Event("undecodable-method", {"why": str(exc)}))
                return
            event = Event(name, args)
            if name in CONTENT:
                event.extra["need"] = None
                self.partial[channel] = event
            else:
                self.push(channel, event)
        elif kind == HEADER:
            if not part or part.extra["need"] is not None:
                self.push(channel, Event("unexpected-header"))
                return
            size, part.props = codec.dec_header(payload)
            part.body, part.extra["need"] = b"", size
            part.extra["frames"] = 0
            self.content_done(channel, part)
        elif kind == BODY:
            if not part or part.extra["need"] is None:
                self.push(channel, Event("unexpected-body", {"size": len(payload)}))
                return
            part.body += payload
            part.extra["frames"] += 1
            self.content_done(channel, part)
        else:
            self.push(channel, Event("unknown-frame-type", {"type": kind}))

    def content_done(self, channel, part):
        if len(part.body) >= part.extra["need"]:
            del self.partial[channel]
            self.push(channel, part)

    def next(self, channel=0, timeout=None):
        """The next event for a channel; falls back to connection-level events
        (a connection.close or the end of the stream).  None on time-out."""
        deadline = time.monotonic() + (self.run.timeout if timeout is None else timeout)
        while True:
            box = self.inbox.setdefault(channel, [])
            if box:
                return channel, box.pop(0)
            zero = self.inbox[0]
            if zero and zero[0].name in ("connection.close", "protocol-header"):
                return 0, zero.pop(0)
            if self.eof:
                if zero:
                    return 0, zero.pop(0)
                return 0, Event("eof")
            left = deadline - time.monotonic()
            if left <= 0 and not self.pump(0):
                return channel, None
            self.pump(max(0, left))

    def take(self, channel=0, timeout=None):
        """Consume and log the next event."""
        ch, event = self.next(channel, timeout)
        if event is None:
            self.note(_at=self.at(channel), recv="(nothing, timed out)")
            return None
        if event.name == "eof" and self.closed:
            raise Abort(f"{self.label}: connection is gone")
        self.log_event(ch, event)
        self.react(ch, event)
        return event

    def log_event(self, channel, event):
        self.note(_at=self.at(channel), recv=event.name, **self.run.describe(event))

    def react(self, channel, event):
        """Do what every client must do at once."""
        if event.name == "eof":
            self.closed = "eof"
        elif event.name == "connection.close" and channel == 0:
            if self.run.manual_close:
                return
            self.closed = "connection.close"
            self.raw(codec.enc_frame(METHOD, 0, codec.enc_method("connection.close-ok", {})))
            self.finish_close()
        elif event.name == "connection.close-ok":
            self.closed = "connection.close-ok"
        elif event.name == "channel.close" and channel in self.channels:
            if self.run.manual_close:
                return
            self.channels[channel].closed = True
            self.raw(codec.enc_frame(METHOD, channel, codec.enc_method("channel.close-ok", {})))
        elif event.name == "channel.close-ok" and channel in self.channels:
            self.channels[channel].closed = True

    def finish_close(self):
        deadline = time.monotonic() + max(self.run.timeout, 5)
        while not self.eof and time.monotonic() < deadline:
            self.pump(deadline - time.monotonic())
        self.note(recv="eof" if self.eof else "(socket still open)")

    def expect(self, *names, channel=0, timeout=None):
        """Consume events until one of `names` (or a closure) arrives."""
        while True:
            event = self.take(channel, timeout)
            if event is None or not names or event.name in names:
                return event
            if event.name in ("channel.close", "connection.close", "eof"):
                return event

    def call(self, method, _channel=0, _timeout=None, **args):
        self.send(method, _channel, **args)
        return self.expect(*codec.METHODS[method].replies, channel=_channel,
                           timeout=_timeout)

    def expect_eof(self, timeout=10):
        """The broker must end the connection; log whatever it sends before."""
        while not self.closed:
            if self.take(0, timeout) is None:
                return

    # -- ordinary life

    def handshake(self, user=None, password=None, vhost=None, frame_max=None,
                  channel_max=None, heartbeat=0, properties=None, response=None,
                  mechanism="PLAIN", locale="en_US"):
        """Open the connection, logging nothing unless it fails."""
        run = self.run
        silent, self.silent = self.silent, True
        user = run.user if user is None else user
        password = run.password if password is None else password
        self.raw(b"AMQP\x00\x00\x09\x01")
        start = self.take()
        self.check(start, "connection.start", silent)
        if response is None:
            response = f"\0{user}\0{password}"
        self.send("connection.start-ok", mechanism=mechanism, response=response,
                  locale=locale,
                  client_properties=CLIENT_PROPERTIES if properties is None else properties)
        tune = self.take()
        self.check(tune, "connection.tune", silent)
        self.tuned = tune
        self.frame_max = tune["frame_max"] if frame_max is None else frame_max
        self.channel_max = tune["channel_max"] if channel_max is None else channel_max
        self.send("connection.tune-ok", frame_max=self.frame_max,
                  channel_max=self.channel_max, heartbeat=heartbeat)
        self.opened = True
        ok = self.call("connection.open", virtual_host=run.vhost if vhost is None else vhost)
        self.check(ok, "connection.open-ok", silent)
        self.silent = silent
        return self

    def check(self, event, wanted, silent):
        if event is None or event.name != wanted:
            self.silent = silent
            got = "nothing" if event is None else \
                f"{event.name} {event.args.get('reply_code', '')} {event.args.get('reply_text', '')}"
            raise Abort(f"{self.label}: wanted {wanted}, got {got.strip()}")

    def channel(self, number=None, confirm=False):
        """Open a channel, logging nothing unless it fails."""
        number = number or max(self.channels, default=0) + 1
        ch = Channel(self, number)
        self.channels[number] = ch
        silent, self.silent = self.silent, True
        self.check(self.call("channel.open", number), "channel.open-ok", silent)
        if confirm:
            self.check(ch.call("confirm.select"), "confirm.select-ok", silent)
        self.silent = silent
        return ch

    def leftovers(self, wait):
        """Log what nobody asked for."""
        deadline = time.monotonic() + wait
        while not self.eof and self.pump(deadline - time.monotonic()):
            pass
        for channel in sorted(self.inbox):
            while self.inbox[channel]:
                event = self.inbox[channel].pop(0)
                self.note(_at=self.at(channel), unclaimed=event.name,
                          **self.run.describe(event))
                self.react(channel, event)

    def close(self):
        """Close as a client should, and log how it went."""
        if self.closed:
            return
        self.leftovers(0.02)
        if self.closed:
            return
        if not self.opened:
            self.note(end="connection still open before it was established"
                      if not self.eof else "eof")
            self.drop()
            return
        silent, self.silent = self.silent, True
        self.send("connection.close", reply_code=200, reply_text="bye")
        while True:
            _, event = self.next(0)
            if event is None or event.name in ("connection.close-ok", "eof"):
                break
            self.silent = silent
            self.note(unclaimed=event.name, **self.run.describe(event))
            self.silent = True
        self.silent = silent
        self.closed = "closed"
        self.note(end="no answer to connection.close" if event is None else
                  "closed" if event.name == "connection.close-ok" else "eof")
        self.drop()

    def drop(self):
        """Close the socket without a word."""
        self.closed = self.closed or "dropped"
        self.eof = True
        self.sock.close()


class Channel:
    def __init__(self, conn, number):
        self.conn = conn
        self.number = number
        self.closed = False
        self.published = 0
        self.confirming = False
        self.outstanding = set()

    def alive(self):
        if self.closed:
            raise Abort(f"{self.conn.at(self.number)}: channel is closed")
        if self.conn.closed:
            raise Abort(f"{self.conn.label}: connection is gone")

    def send(self, method, **args):
        self.alive()
        if method == "confirm.select":
            self.confirming = True
        self.conn.send(method, self.number, **args)

    def call(self, method, _timeout=None, **args):
        self.alive()
        if method == "confirm.select":
            self.confirming = True
        return self.conn.call(method, self.number, _timeout, **args)

    def expect(self, *names, timeout=None):
        return self.conn.expect(*names, channel=self.number, timeout=timeout)

    def publish(self, exchange="", routing_key="", body=b"", mandatory=False,
                immediate=False, **props):
        self.alive()
        data = codec.raw(body)
        entry = {"exchange": exchange, "routing_key": routing_key}
        if mandatory:
            entry["mandatory"] = True
        if immediate:
            entry["immediate"] = True
        shown = self.conn.run.plain(entry)
        if props:
            shown["props"] = self.conn.run.plain(props)
        shown["body"] = self.conn.run.body(data)
        self.conn.note(_at=self.conn.at(self.number), send="basic.publish", **shown)
        out = [codec.enc_frame(METHOD, self.number, codec.enc_method("basic.publish", entry)),
               codec.enc_frame(HEADER, self.number, codec.enc_header(len(data), props))]
        step = (self.conn.frame_max or (1 << 20)) - 8
        for i in range(0, len(data), step):
            out.append(codec.enc_frame(BODY, self.number, data[i:i + step]))
        self.published += 1
        if self.confirming:
            self.outstanding.add(self.published)
        self.conn.raw(b"".join(out))

    def confirms(self, timeout=None):
        """Wait for every outstanding confirm.  How the broker batches them is
        its own affair, so only the outcome per message is logged."""
        got = {"ack": set(), "nack": set()}
        while self.outstanding:
            ch, event = self.conn.next(self.number, timeout)
            if event is None:
                self.conn.note(_at=self.conn.at(self.number),
                               recv="(confirms missing, timed out)",
                               missing=sorted(self.outstanding))
                break
            if ch and event.name in ("basic.ack", "basic.nack"):
                tag = event["delivery_tag"]
                tags = {n for n in self.outstanding if n <= tag} \
                    if event["multiple"] else {tag} & self.outstanding
                if not tags:
                    self.conn.log_event(ch, event)
                got[event.name[6:]] |= tags
                self.outstanding -= tags
                continue
            self.conn.log_event(ch, event)
            self.conn.react(ch, event)
            if event.name in ("channel.close", "connection.close", "eof"):
                break
        self.conn.note(_at=self.conn.at(self.number), confirms={
            k: sorted(v) for k, v in got.items() if v})

    def quiet(self, seconds=0.15):
        """Log whatever comes within the time, or that nothing came."""
        deadline = time.monotonic() + seconds
        some = False
        while True:
            ch, event = self.conn.next(self.number, max(0, deadline - time.monotonic()))
            if event is None:
                break
            if event.name == "eof" and self.conn.closed:
                break
            some = True
            self.conn.log_event(ch, event)
            self.conn.react(ch, event)
            if self.conn.closed:
                return
        if not some:
            self.conn.note(_at=self.conn.at(self.number), recv="(nothing)")

    # -- shorthands

    def sync(self):
        """A round trip on this channel: earlier errors surface before it."""
        return self.call("exchange.declare", exchange="amq.direct", passive=True)

    def declare(self, queue, **args):
        return self.call("queue.declare", queue=queue, **args)

    def exchange(self, exchange, type="direct", **args):
        return self.call("exchange.declare", exchange=exchange, exchange_type=type, **args)

    def bind(self, queue, exchange, routing_key="", **args):
        return self.call("queue.bind", queue=queue, exchange=exchange,
                         routing_key=routing_key, **args)

    def get(self, queue, no_ack=True):
        return self.call("basic.get", queue=queue, no_ack=no_ack)

    def consume(self, queue, consumer_tag="c", **args):
        return self.call("basic.consume", queue=queue, consumer_tag=consumer_tag, **args)

    def deliver(self, count=1):
        event = None
        for _ in range(count):
            event = self.expect("basic.deliver")
        return event

    def count(self, queue):
        return self.call("queue.declare", queue=queue, passive=True)

    def ack(self, tag, multiple=False):
        self.send("basic.ack", delivery_tag=tag, multiple=multiple)

    def nack(self, tag, multiple=False, requeue=True):
        self.send("basic.nack", delivery_tag=tag, multiple=multiple, requeue=requeue)

    def reject(self, tag, requeue=True):
        self.send("basic.reject", delivery_tag=tag, requeue=requeue)

    def close(self):
        return self.call("channel.close", reply_code=200, reply_text="bye")


class Run:
    """One execution of one scenario."""

    def __init__(self, options):
        self.host = options.host
        self.port = options.port
        self.user = options.user
        self.password = options.password
        self.vhost = options.vhost
        self.timeout = options.timeout
        self.limited = getattr(options, "limited", None)
        self.manual_close = False
        self.token = "-" + os.urandom(5).hex()
        self.log = []
        self.conns = []
        self.generated = {}
        self.counters = {}
        self.tags = set()
        self.used = []
        self._setup = None
        self._preparing = []  # every connection behind `setup`, to be closed at the end

    # -- names and normalisation

    def name(self, base):
        """A name no other run uses; the transcript shows only `base`."""
        return base + self.token

    def names(self, *bases):
        return [self.name(b) for b in bases]

    def alias(self, value, kind):
        """Show a server-chosen name as <kind-n> from now on."""
        if value and value not in self.generated:
            n = self.counters[kind] = self.counters.get(kind, 0) + 1
            self.generated[value] = f"<{kind}-{n}>"

    def clean(self, value):
        if isinstance(value, str):
            for real, shown in self.generated.items():
                value = value.replace(real, shown)
            value = value.replace(self.token, "")
            value = re.sub(r"amq\.gen-[\w-]{22}", "<queue-name>", value)
            value = re.sub(r"amq\.ctag-[\w-]{22}", "<consumer-tag>", value)
            if self.limited:
                value = value.replace(f"'{self.limited.split(':')[0]}'", "'<limited>'")
            if self.vhost != "/":
                value = value.replace(f"'{self.vhost}'", "'<vhost>'")
            return value.replace("vhost '/'", "vhost '<vhost>'")
        if isinstance(value, list):
            return [self.clean(v) for v in value]
        if isinstance(value, dict):
            return {self.clean(k): self.clean(v) for k, v in value.items()}
        return value

    def plain(self, value):
        """A readable form of arguments that are about to be sent."""
        if isinstance(value, T):
            if hide_times([value.tag, value.value]) == ["T", "<now>"]:
                return ["type T", "<now>"]
            return [f"type {value.tag}", self.plain(value.value)]
        if isinstance(value, dict):
            return {k: self.plain(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.plain(v) for v in value]
        if isinstance(value, (bytes, bytearray)):
            return codec.text(bytes(value))
        return value

    def body(self, data):
        if len(data) > 80:
            import zlib
            return f"{len(data)} bytes, crc {zlib.crc32(data):08x}"
        return codec.text(data)

    def describe(self, event):
        args = dict(event.args)
        if event.name == "queue.declare-ok":
            if "amq.gen" in args["queue"] or self.token not in args["queue"]:
                if args["queue"] and not args["queue"].startswith("amq.rabbitmq."):
                    self.alias(args["queue"], "queue-name")
        if event.name == "basic.consume-ok" and args["consumer_tag"] not in self.tags:
            self.alias(args["consumer_tag"], "consumer-tag")
        if event.name == "connection.start":
            caps = args["server_properties"].get("capabilities", ["F", {}])
            args["server_properties"] = {"capabilities": caps}
            args["mechanisms"] = sorted(args["mechanisms"].split())
            args["locales"] = args["locales"].split()
        out = {k: v for k, v in args.items()}
        if event.props is not None:
            props = dict(event.props)
            if "headers" in props:
                props["headers"] = hide_times(props["headers"])
            if props.get("reply_to", "").startswith("amq.rabbitmq.reply-to."):
                self.alias(props["reply_to"], "reply-to")
            out["props"] = props
            out["body"] = self.body(event.body)
        return out

    def note(self, **entry):
        self.log.append(self.clean(entry))

    # -- connections

    def dial(self):
        """A TCP connection on which nothing has been said yet."""
        label = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[len(self.conns)]
        conn = Conn(self, label)
        self.conns.append(conn)
        return conn

    def connect(self, **options):
        return self.dial().handshake(**options)

    def open(self, **options):
        """A connection and a channel, the usual beginning."""
        return self.connect(**options).channel()

    # -- silent preparation

    @property
    def setup(self):
        """A channel (in confirm mode) for work that is not under test."""
        if self._setup is None or self._setup.closed or self._setup.conn.closed:
            conn = Conn(self, "setup", quiet=True)
            self._preparing.append(conn)
            conn.handshake()
            self._setup = conn.channel(confirm=True)
        return self._setup

    def do(self, method, **args):
        """Call a method on the setup channel; abort unless it succeeds."""
        event = self.setup.call(method, **args)
        if event is None or event.name not in codec.METHODS[method].replies:
            raise Abort(f"setup: {method} got {event!r}")
        return event

    def queue(self, base="q", arguments=None, **args):
        """Declare a queue silently and return its name."""
        name = self.name(base)
        self.do("queue.declare", queue=name, arguments=arguments or {}, **args)
        return name

    def make_exchange(self, base="x", type="direct", **args):
        name = self.name(base)
        self.do("exchange.declare", exchange=name, exchange_type=type, **args)
        return name

    def put(self, queue, *bodies, exchange="", **props):
        """Publish silently and wait until the broker has confirmed."""
        ch = self.setup
        for body in bodies:
            ch.publish(exchange, queue, body, **props)
        ch.confirms()
        if ch.outstanding:
            raise Abort("setup: publish was not confirmed")

    def wait_count(self, queue, count, timeout=None):
        """Wait until a queue holds exactly `count` ready messages."""
        deadline = time.monotonic() + (timeout or max(self.timeout, 5))
        have = None
        while time.monotonic() < deadline:
            have = self.do("queue.declare", queue=queue, passive=True)["message_count"]
            if have == count:
                break
            time.sleep(0.02)
        self.note(count=queue, ready=have)

    def wait_gone(self, queue, timeout=None):
        """Wait until a queue has ceased to exist."""
        deadline = time.monotonic() + (timeout or max(self.timeout, 5))
        while time.monotonic() < deadline:
            event = self.setup.call("queue.declare", queue=queue, passive=True)
            if event is not None and event.name == "channel.close" \
                    and event["reply_code"] == 404:  # 405 while it is being deleted
                self.note(gone=queue)
                return
            time.sleep(0.02)
        self.note(still_there=queue)

    def pause(self, seconds):
        time.sleep(seconds)

    # -- the end

    def remember(self, method, args):
        if method == "queue.declare" and args.get("queue") and not args.get("passive"):
            self.used.append(("queue.delete", {"queue": args["queue"]}))
        if method == "basic.consume":
            self.tags.add(args.get("consumer_tag", ""))
        if method == "exchange.declare" and self.token in args.get("exchange", ""):
            self.used.append(("exchange.delete", {"exchange": args["exchange"]}))

    def execute(self, func):
        try:
            func(self)
        except Abort as exc:
            self.note(abort=str(exc))
        except OSError as exc:
            self.note(abort=f"socket error: {exc.__class__.__name__}")
        except Exception as exc:  # the scenario tripped over an unexpected answer
            self.note(abort=f"scenario failed: {exc.__class__.__name__}: {exc}")
        for conn in self.conns:
            try:
                conn.close()
            except (Abort, OSError) as exc:
                self.note(abort=str(exc))
        try:
            self.cleanup()
        except Exception:  # best effort: another broker may refuse any of it
            pass
        for conn in self.conns:
            conn.drop()
        for conn in self._preparing:
            conn.drop()
        return self.log

    def cleanup(self):
        seen = []
        for item in self.used:
            if item not in seen:
                seen.append(item)
        for method, args in seen:
            self.setup.call(method, **args)


def hide_times(value):
    if isinstance(value, dict):
        return {k: hide_times(v) for k, v in value.items()}
    if isinstance(value, list):
        if len(value) == 2 and value[0] == "T" and isinstance(value[1], int) \
                and abs(value[1] - time.time()) < 86400:
            return ["T", "<now>"]
        return [hide_times(v) for v in value]
    return value
