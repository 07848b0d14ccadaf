"""The hot shapes in pure Python: publishes and acks in, deliveries and acks out.

``cut`` turns what the socket gave into items, in order: runs of publishes, runs of acks, and raw
frames for all the rest, which assembler.py and codec.py take from there. The other way round,
``encode_deliveries`` and ``encode_acks`` write many frames in one piece.

_hot.pyx is the compiled twin: same interface, same items, same errors; twin.py picks one. What
is changed here must be changed there, and tests/protocol runs over both.

Invariants: nothing is consumed that is not cut; only publishes whose content follows at once,
complete and well-formed, are hot; whatever looks odd is left as raw frames to the slower modules,
which know the right error. Only errors of the frame layer itself are raised here, and items cut
before them stay in the list.
"""

from __future__ import annotations

import struct

from leveret.protocol.field_table import check_table
from leveret.protocol.framing import (
    BODY,
    COST_SHIFT,
    END,
    ENVELOPES_MAX,
    HEAD_SIZE,
    HEADER,
    HEARTBEAT,
    METHOD,
    OVERHEAD,
    RUN_MAX,
    WAIT_BYTES,
    WAIT_FRAMES,
    bad_frame_end,
    body_limit,
    frame_too_large,
    unknown_frame,
)
from leveret.protocol.items import AckRun, Item, PublishRun, RawFrame
from leveret.protocol.message import (
    NEEDS_EXPIRATION,
    NEEDS_HEADERS,
    NEEDS_MODE,
    NEEDS_PRIORITY,
    NEEDS_REPLY_TO,
    NEEDS_USER_ID,
    Message,
)

_HEAD = struct.Struct(">BHI")
# Frame head, class, weight, body size: a header frame up to its property flags.
_CONTENT = struct.Struct(">BHIHHQ")
# Whole frames of basic.ack, basic.reject and basic.nack, and of basic.deliver up to its tag.
_ACK = struct.Struct(">BHIHHQBB")
_ACK_SHAPE = struct.Struct(">11sQ2s")
_DELIVER = struct.Struct(">BHIHH")
_TAG = struct.Struct(">QB")

_BASIC = 60
_PUBLISH_IDS = b"\x00\x3c\x00\x28"
_DELIVER_ID = 60
_ACK_ID, _REJECT_ID = 80, 90
# basic.ack, basic.reject, basic.nack: all of them a tag and a byte of bits.
_SETTLE_IDS = frozenset((b"\x00\x3c\x00\x50", b"\x00\x3c\x00\x5a", b"\x00\x3c\x00\x78"))
_SETTLE_SIZE = 13
# Ids, ticket, two empty short strings, bits.
_PUBLISH_MIN = 9
# Class, weight, body size, property flags.
_CONTENT_MIN = 14
_KINDS = frozenset((METHOD, HEADER, BODY, HEARTBEAT))

# What ``_content`` found behind a publish.
_COMPLETE, _WAIT, _COLD = range(3)

# Property flags, in wire order.
_CONTENT_TYPE, _CONTENT_ENCODING, _HEADERS, _DELIVERY_MODE, _PRIORITY = (
    0x8000,
    0x4000,
    0x2000,
    0x1000,
    0x0800,
)
_TIMESTAMP = 0x0040
# Short strings behind the priority, the timestamp being among them.
_TAIL = (
    (0x0400, 0),
    (0x0200, NEEDS_REPLY_TO),
    (0x0100, NEEDS_EXPIRATION),
    (0x0080, 0),
    (_TIMESTAMP, 0),
    (0x0020, 0),
    (0x0010, NEEDS_USER_ID),
    (0x0008, 0),
    (0x0004, 0),
)
_TAIL_FLAGS = 0x07FC
_PERSISTENT = 2

# Equal pairs of names give the same objects.
_envelopes: dict[bytes, tuple[bytes, str, str]] = {}
# Content headers seen: the object to share, its needs, whether it is persistent. Most publishers
# send few different ones; long ones are not worth keeping.
_headers: dict[bytes, tuple[bytes, int, bool]] = {}
_HEADERS_MAX = 4096
_HEADER_KEPT = 64


def cut(data: bytes, at: int, frame_max: int, budget: int, items: list[Item]) -> int:
    """Append what ``data`` holds from ``at`` on to ``items``; return where the rest begins.

    Stops before the first publish once ``budget`` is spent (a message costs 1 and 1 more for
    every 16 KiB of body); with no budget at all nothing is cut. Raises ConnectionException 501
    once the stream can no longer be trusted.
    """
    end = len(data)
    if not 0 <= at <= end:
        raise ValueError(f"position {at} is outside of the data")
    if budget <= 0:
        return at
    # What the next publish or ack may join; None after anything else.
    run: PublishRun | None = None
    acks: AckRun | None = None
    while end - at >= HEAD_SIZE:
        kind, channel, size = _HEAD.unpack_from(data, at)
        # Refuse before buffering: a hostile size must not cost us 4 GiB. The payload alone is
        # compared: like RabbitMQ, forgive 8 bytes over.
        if frame_max and size > frame_max:
            raise frame_too_large(kind, size, frame_max)
        after = at + OVERHEAD + size
        if after > end:
            break
        payload_at = at + HEAD_SIZE
        if data[after - 1] != END:
            raise bad_frame_end(kind, data[payload_at : after - 1], data[after - 1])
        if kind not in _KINDS:
            raise unknown_frame(kind, data[payload_at : after - 1])
        # Nothing is hot on channel 0: it has no content, and the connection knows what to say.
        if kind == METHOD and channel:
            ids = data[payload_at : payload_at + 4]
            if size == _SETTLE_SIZE and ids in _SETTLE_IDS:
                run = None
                acks, at = _cut_acks(data, at, acks, items)
                continue
            if ids == _PUBLISH_IDS:
                if budget <= 0:
                    return at
                acks = None
                names = _publish_names(data, payload_at, size)
                if names is not None:
                    flags = data[after - 2] & 3
                    if run is None or not (
                        run.channel == channel
                        and run.envelope == names[0]
                        and run.flags == flags
                        and len(run.messages) < RUN_MAX
                    ):
                        run = PublishRun(channel, *names, flags, [], 0, 0, 0, 0, 0)
                    is_new = not run.messages
                    found, at, cost = _cut_publishes(data, at, after, frame_max, budget, run)
                    budget -= cost
                    if is_new and run.messages:
                        items.append(run)
                    if found == _WAIT:
                        return at
                    if found == _COMPLETE:
                        continue
        run = acks = None
        items.append(RawFrame(kind, channel, data[payload_at : after - 1]))
        at = after
    return at


def encode_deliveries(
    channel: int,
    consumer_tag: bytes,
    first_tag: int,
    redelivered: bool,
    messages: list[Message],
    frame_max: int,
) -> bytes:
    """basic.deliver with content for each message, tags counting up from ``first_tag``.

    ``consumer_tag`` is a short string as on the wire, with its length.
    """
    limit = body_limit(frame_max)
    # Ids, tag and the redelivered bit; consumer tag and envelope come on top.
    fixed = 4 + 9 + len(consumer_tag)
    tag = first_tag
    parts: list[bytes] = []
    add = parts.append
    for message in messages:
        envelope, header, body = message.envelope, message.header, message.body
        size = len(body)
        add(_DELIVER.pack(METHOD, channel, fixed + len(envelope), _BASIC, _DELIVER_ID))
        add(consumer_tag)
        add(_TAG.pack(tag, redelivered))
        add(envelope)
        add(b"\xce")
        add(_CONTENT.pack(HEADER, channel, 12 + len(header), _BASIC, 0, size))
        add(header)
        if 0 < size <= limit:
            add(b"\xce" + _HEAD.pack(BODY, channel, size))
            add(body)
        elif size:
            for start in range(0, size, limit):
                part = body[start : start + limit]
                add(b"\xce" + _HEAD.pack(BODY, channel, len(part)))
                add(part)
        add(b"\xce")
        tag += 1
    return b"".join(parts)


def encode_acks(channel: int, tags: list[int], multiple: bool) -> bytes:
    """One basic.ack for each tag."""
    pack = _ACK.pack
    return b"".join(
        [pack(METHOD, channel, _SETTLE_SIZE, _BASIC, _ACK_ID, tag, multiple, END) for tag in tags]
    )


def scan_properties(data: bytes, at: int, end: int) -> tuple[int, bool]:
    """Check a content header from its property flags on; return its needs, and if it is persistent.

    Raises ValueError (TableError) unless flags and properties fill the span exactly.
    """
    if end - at < 2:
        raise ValueError("no property flags")
    flags = data[at] << 8 | data[at + 1]
    at += 2
    needs, persistent = 0, False
    for flag in (_CONTENT_TYPE, _CONTENT_ENCODING):
        if flags & flag:
            at = _skip_short(data, at, end)
    if flags & _HEADERS:
        needs |= NEEDS_HEADERS
        at = check_table(data, at, end)
    if flags & _DELIVERY_MODE:
        if at >= end:
            raise ValueError("delivery mode is cut short")
        persistent = data[at] == _PERSISTENT
        if not 1 <= data[at] <= 2:
            needs |= NEEDS_MODE
        at += 1
    if flags & _PRIORITY:
        needs |= NEEDS_PRIORITY
        at += 1
    if flags & _TAIL_FLAGS:
        for flag, need in _TAIL:
            if flags & flag:
                needs |= need
                at = at + 8 if flag == _TIMESTAMP else _skip_short(data, at, end)
    if at != end:
        raise ValueError("properties do not fill the header")
    return needs, persistent


def _skip_short(data: bytes, at: int, end: int) -> int:
    if at >= end:
        raise ValueError("short string is cut short")
    return at + 1 + data[at]


def _publish_names(data: bytes, at: int, size: int) -> tuple[bytes, str, str] | None:
    """Envelope, exchange and routing key of a publish; None if its arguments are malformed."""
    last = at + size - 1
    exchange_at = at + 6
    if size < _PUBLISH_MIN:
        return None
    key_at = exchange_at + 1 + data[exchange_at]
    if key_at >= last or key_at + 1 + data[key_at] != last:
        return None
    envelope = data[exchange_at:last]
    names = _envelopes.get(envelope)
    if names is None:
        if len(_envelopes) >= ENVELOPES_MAX:
            _envelopes.clear()
        names = _envelopes[envelope] = (
            envelope,
            data[exchange_at + 1 : key_at].decode("utf-8", "surrogateescape"),
            data[key_at + 1 : last].decode("utf-8", "surrogateescape"),
        )
    return names


def _cut_publishes(
    data: bytes, at: int, after: int, frame_max: int, budget: int, run: PublishRun
) -> tuple[int, int, int]:
    """Cut the publish at ``at`` and those behind it with the very same method frame into ``run``.

    Returns what stopped it, where, and the cost. Cold is an answer only for the first one.
    """
    end, length, channel = len(data), after - at, run.channel
    limit = frame_max or end
    method = data[at:after]
    envelope, exchange, routing_key = run.envelope, run.exchange, run.routing_key
    messages = run.messages
    cost = size = needs = persistent = 0
    largest = run.largest
    found = _COMPLETE
    while True:
        header_at = at + length
        body = None
        # The usual shape first: a header and one body frame, both there.
        if end - header_at >= 19:
            kind, on, header_size, class_id, weight, body_size = _CONTENT.unpack_from(
                data, header_at
            )
            body_at = header_at + OVERHEAD + header_size
            stop = body_at + OVERHEAD + body_size
            if (
                kind == HEADER
                and on == channel
                and class_id == _BASIC
                and not weight
                and _CONTENT_MIN <= header_size <= limit
                and 0 < body_size <= limit
                and stop <= end
                and data[body_at - 1] == END
                and data[stop - 1] == END
                and _HEAD.unpack_from(data, body_at) == (BODY, channel, body_size)
            ):
                known = _known_header(data[header_at + 19 : body_at - 1])
                if known is not None:
                    body = data[body_at + HEAD_SIZE : stop - 1]
        if body is None:
            found, stop, known, body = _content(data, at, header_at, channel, frame_max)
            if found != _COMPLETE:
                # Leave a cold one to the caller, who looks at it again as the first.
                if found == _COLD and cost:
                    found = _COMPLETE
                break
        assert known is not None
        header, need, is_persistent = known
        messages.append(Message(envelope, exchange, routing_key, header, body, need, is_persistent))
        body_size = len(body)
        cost += 1 + (body_size >> COST_SHIFT)
        size += body_size
        if body_size > largest:
            largest = body_size
        needs |= need
        persistent += is_persistent
        at = stop
        if cost >= budget or len(messages) >= RUN_MAX or not data.startswith(method, at):
            break
    run.cost += cost
    run.size += size
    run.largest = largest
    run.needs |= needs
    run.persistent += persistent
    return found, at, cost


def _known_header(header: bytes) -> tuple[bytes, int, bool] | None:
    """The header, one object for equal ones, with what scanning it gave; None if malformed."""
    known = _headers.get(header)
    if known is not None:
        return known
    try:
        known = (header, *scan_properties(header, 0, len(header)))
    except ValueError:
        return None
    if len(header) <= _HEADER_KEPT:
        if len(_headers) >= _HEADERS_MAX:
            _headers.clear()
        _headers[header] = known
    return known


def _content(
    data: bytes, start: int, at: int, channel: int, frame_max: int
) -> tuple[int, int, tuple[bytes, int, bool] | None, bytes]:
    """Content of any shape at ``at`` for the publish at ``start``, walked frame by frame.

    Returns what was found and, if complete, where it ends, the known header and the body.
    """
    end = len(data)
    wait, cold = (_WAIT, start, None, b""), (_COLD, start, None, b"")
    if end - at < HEAD_SIZE:
        return wait
    kind, on, size = _HEAD.unpack_from(data, at)
    if kind != HEADER or on != channel or size < _CONTENT_MIN or (frame_max and size > frame_max):
        return cold
    after = at + OVERHEAD + size
    if after > end:
        return wait if after - start <= WAIT_BYTES else cold
    class_id, weight, left = struct.unpack_from(">HHQ", data, at + HEAD_SIZE)
    if data[after - 1] != END or class_id != _BASIC or weight:
        return cold
    known = _known_header(data[at + 19 : after - 1])
    if known is None:
        return cold
    parts: list[bytes] = []
    frames = 0
    at = after
    while left:
        if end - at < HEAD_SIZE:
            break
        kind, on, size = _HEAD.unpack_from(data, at)
        if kind != BODY or on != channel or size > left or (frame_max and size > frame_max):
            return cold
        after = at + OVERHEAD + size
        if after > end:
            break
        if data[after - 1] != END:
            return cold
        parts.append(data[at + HEAD_SIZE : after - 1])
        left -= size
        frames += 1
        at = after
    if left:
        is_small = at - start + left + OVERHEAD <= WAIT_BYTES and frames <= WAIT_FRAMES
        return wait if is_small else cold
    return _COMPLETE, at, known, b"".join(parts)


def _cut_acks(data: bytes, at: int, acks: AckRun | None, items: list[Item]) -> tuple[AckRun, int]:
    """Cut the ack, reject or nack at ``at``, which is whole, and those behind it that join it."""
    _, channel, _, _, method, tag, bits, _ = _ACK.unpack_from(data, at)
    multiple = method != _REJECT_ID and bits & 1 != 0
    requeue = bits & (1 if method == _REJECT_ID else 2) != 0 and method != _ACK_ID
    if acks is None or not (
        acks.channel == channel
        and acks.method == method
        and acks.multiple == multiple
        and acks.requeue == requeue
    ):
        acks = AckRun(channel, method, multiple, requeue, [])
        items.append(acks)
    tags = acks.tags
    tags.append(tag)
    at += _ACK.size
    # Frames that differ in nothing but their tags need no second look.
    first, last = data[at - _ACK.size : at - 10], data[at - 2 : at]
    whole = (len(data) - at) // _ACK.size * _ACK.size
    for head, tag, tail in _ACK_SHAPE.iter_unpack(memoryview(data)[at : at + whole]):
        if head != first or tail != last:
            break
        tags.append(tag)
        at += _ACK.size
    return acks, at
