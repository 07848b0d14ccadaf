# cython: language_level=3, boundscheck=False, wraparound=False, auto_pickle=False
"""The hot shapes, compiled. hot.py tells what they are and is kept the same, step by step.

Reads go through a plain pointer into ``data``: every one of them stands behind a comparison with
``end``. Sizes from the wire are unsigned and are compared with what is there, never added to a
position first. The garbage collector is kept away from messages: they hold bytes and strings and
can be in no cycle, and there are many of them.
"""

cimport cython
from cpython cimport array
from cpython.bytearray cimport (
    PyByteArray_AS_STRING,
    PyByteArray_GET_SIZE,
    PyByteArray_Resize,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.list cimport PyList_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcmp, memcpy
from posix.time cimport CLOCK_REALTIME, clock_gettime, timespec

import array

from leveret.protocol import field_table as _field_table
from leveret.protocol import framing as _framing
from leveret.protocol import message as _message
from leveret.protocol.framing import bad_frame_end, body_limit, frame_too_large, unknown_frame

cdef enum:
    METHOD = 1
    HEADER = 2
    BODY = 3
    HEARTBEAT = 8
    END = 0xCE
    HEAD_SIZE = 7
    OVERHEAD = 8
    BASIC = 60
    PUBLISH_ID = 40
    DELIVER_ID = 60
    ACK_ID = 80
    REJECT_ID = 90
    NACK_ID = 120
    SETTLE_SIZE = 13
    SETTLE_FRAME = 21
    PUBLISH_MIN = 9
    # Class, weight, body size; then at least the property flags.
    CONTENT_HEAD = 12
    CONTENT_MIN = 14
    PERSISTENT = 2

cdef enum:
    COMPLETE, WAIT, COLD

# Shared with the pure twin, read once.
cdef Py_ssize_t WAIT_BYTES = _framing.WAIT_BYTES
cdef Py_ssize_t WAIT_FRAMES = _framing.WAIT_FRAMES
cdef Py_ssize_t RUN_MAX = _framing.RUN_MAX
cdef Py_ssize_t ENVELOPES_MAX = _framing.ENVELOPES_MAX
cdef int COST_SHIFT = _framing.COST_SHIFT
cdef int MAX_DEPTH = _field_table.MAX_DEPTH
cdef unsigned int NEEDS_HEADERS = _message.NEEDS_HEADERS
cdef unsigned int NEEDS_PRIORITY = _message.NEEDS_PRIORITY
cdef unsigned int NEEDS_REPLY_TO = _message.NEEDS_REPLY_TO
cdef unsigned int NEEDS_EXPIRATION = _message.NEEDS_EXPIRATION
cdef unsigned int NEEDS_USER_ID = _message.NEEDS_USER_ID
cdef unsigned int NEEDS_MODE = _message.NEEDS_MODE

cdef dict _envelopes = {}


@cython.final
@cython.no_gc
@cython.freelist(512)
cdef class Message:
    """See message.py."""

    cdef public bytes envelope
    cdef public str exchange
    cdef public str routing_key
    cdef public bytes header
    cdef public bytes body
    cdef public unsigned int needs
    cdef public bint persistent
    cdef public tuple extra_keys
    cdef public long long body_id
    cdef public long long log_id
    cdef public long long stamp_us

    def __init__(
        self,
        bytes envelope not None,
        str exchange not None,
        str routing_key not None,
        bytes header not None,
        bytes body not None,
        unsigned int needs,
        bint persistent,
    ):
        self.envelope = envelope
        self.exchange = exchange
        self.routing_key = routing_key
        self.header = header
        self.body = body
        self.needs = needs
        self.persistent = persistent
        self.extra_keys = ()
        self.body_id = 0
        self.log_id = 0
        self.stamp_us = 0


@cython.final
@cython.no_gc
cdef class RawFrame:
    """See items.py."""

    cdef public int kind
    cdef public int channel
    cdef public bytes payload

    def __init__(self, int kind, int channel, bytes payload not None):
        self.kind = kind
        self.channel = channel
        self.payload = payload


@cython.final
cdef class PublishRun:
    """See items.py."""

    cdef public int channel
    cdef public bytes envelope
    cdef public str exchange
    cdef public str routing_key
    cdef public int flags
    cdef public list messages
    cdef public Py_ssize_t cost
    cdef public Py_ssize_t size
    # Announced by a client, so it can be anything.
    cdef public uint64_t largest
    cdef public unsigned int needs
    cdef public Py_ssize_t persistent

    def __init__(
        self,
        int channel,
        bytes envelope not None,
        str exchange not None,
        str routing_key not None,
        int flags,
        list messages not None,
        Py_ssize_t cost,
        Py_ssize_t size,
        uint64_t largest,
        unsigned int needs,
        Py_ssize_t persistent,
    ):
        self.channel = channel
        self.envelope = envelope
        self.exchange = exchange
        self.routing_key = routing_key
        self.flags = flags
        self.messages = messages
        self.cost = cost
        self.size = size
        self.largest = largest
        self.needs = needs
        self.persistent = persistent


@cython.final
cdef class AckRun:
    """See items.py."""

    cdef public int channel
    cdef public int method
    cdef public bint multiple
    cdef public bint requeue
    cdef public list tags

    def __init__(self, int channel, int method, bint multiple, bint requeue, list tags not None):
        self.channel = channel
        self.method = method
        self.multiple = multiple
        self.requeue = requeue
        self.tags = tags


cdef struct Content:
    # Where the properties (flags included) stand, and what scanning them gave.
    Py_ssize_t header_at
    Py_ssize_t header_size
    unsigned int needs
    bint persistent
    # First body frame, bytes of the body, and where all of it ends.
    Py_ssize_t body_at
    Py_ssize_t body_size
    Py_ssize_t stop


cdef inline uint32_t _read16(const unsigned char *at) noexcept nogil:
    return (<uint32_t>at[0] << 8) | at[1]


cdef inline uint32_t _read32(const unsigned char *at) noexcept nogil:
    return (_read16(at) << 16) | _read16(at + 2)


cdef inline uint64_t _read64(const unsigned char *at) noexcept nogil:
    return (<uint64_t>_read32(at) << 32) | _read32(at + 4)


cdef inline unsigned char *_write16(unsigned char *at, uint32_t value) noexcept nogil:
    at[0] = <unsigned char>(value >> 8)
    at[1] = <unsigned char>value
    return at + 2


cdef inline unsigned char *_write32(unsigned char *at, uint32_t value) noexcept nogil:
    return _write16(_write16(at, value >> 16), value & 0xFFFF)


cdef inline unsigned char *_write64(unsigned char *at, uint64_t value) noexcept nogil:
    return _write32(_write32(at, <uint32_t>(value >> 32)), <uint32_t>value)


cdef inline unsigned char *_write_head(
    unsigned char *at, int kind, uint32_t channel, uint32_t size
) noexcept nogil:
    at[0] = <unsigned char>kind
    return _write32(_write16(at + 1, channel), size)


cdef inline unsigned char *_write_bytes(unsigned char *at, bytes data) noexcept:
    memcpy(at, PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))
    return at + PyBytes_GET_SIZE(data)


cdef inline bytes _slice(const unsigned char *raw, Py_ssize_t start, Py_ssize_t stop):
    return PyBytes_FromStringAndSize(<const char *>raw + start, stop - start)


def cut(bytes data not None, Py_ssize_t at, Py_ssize_t frame_max, Py_ssize_t budget,
        list items not None):
    """See hot.py."""
    cdef const unsigned char *raw = <const unsigned char *>PyBytes_AS_STRING(data)
    cdef Py_ssize_t end = PyBytes_GET_SIZE(data)
    cdef Py_ssize_t after, payload_at, cost
    cdef uint32_t size
    cdef int kind, channel, flags, method, found
    cdef PublishRun run = None
    cdef AckRun acks = None
    cdef tuple names
    cdef bint is_new
    if at < 0 or at > end:
        raise ValueError(f"position {at} is outside of the data")
    if budget <= 0:
        return at
    while end - at >= HEAD_SIZE:
        kind = raw[at]
        channel = _read16(raw + at + 1)
        size = _read32(raw + at + 3)
        if frame_max and size > <uint64_t>frame_max:
            raise frame_too_large(kind, size, frame_max)
        if <uint64_t>size + OVERHEAD > <uint64_t>(end - at):
            break
        after = at + OVERHEAD + <Py_ssize_t>size
        payload_at = at + HEAD_SIZE
        if raw[after - 1] != END:
            raise bad_frame_end(kind, _slice(raw, payload_at, after - 1), raw[after - 1])
        if kind != METHOD and kind != HEADER and kind != BODY and kind != HEARTBEAT:
            raise unknown_frame(kind, _slice(raw, payload_at, after - 1))
        if kind == METHOD and channel and size >= 4 and _read16(raw + payload_at) == BASIC:
            method = _read16(raw + payload_at + 2)
            if size == SETTLE_SIZE and (
                method == ACK_ID or method == REJECT_ID or method == NACK_ID
            ):
                run = None
                acks = _join_acks(raw + payload_at, channel, method, acks, items)
                at = _cut_acks(raw, at, end, acks.tags)
                continue
            if method == PUBLISH_ID:
                if budget <= 0:
                    return at
                acks = None
                names = _publish_names(raw + payload_at, <Py_ssize_t>size)
                if names is not None:
                    flags = raw[after - 2] & 3
                    if run is None or not (
                        run.channel == channel
                        and run.envelope == <bytes>names[0]
                        and run.flags == flags
                        and PyList_GET_SIZE(run.messages) < RUN_MAX
                    ):
                        run = PublishRun.__new__(PublishRun)
                        run.channel = channel
                        run.envelope, run.exchange, run.routing_key = names
                        run.flags = flags
                        run.messages = []
                    is_new = PyList_GET_SIZE(run.messages) == 0
                    found = _cut_publishes(raw, &at, after, end, frame_max, budget, run, &cost)
                    budget -= cost
                    if is_new and PyList_GET_SIZE(run.messages):
                        items.append(run)
                    if found == WAIT:
                        return at
                    if found == COMPLETE:
                        continue
        run = None
        acks = None
        items.append(_raw_frame(kind, channel, _slice(raw, payload_at, after - 1)))
        at = after
    return at


def encode_deliveries(
    int channel,
    bytes consumer_tag not None,
    uint64_t first_tag,
    bint redelivered,
    list messages not None,
    Py_ssize_t frame_max,
):
    """See hot.py."""
    cdef uint64_t limit = body_limit(frame_max)
    # Ids, tag and the redelivered bit; consumer tag and envelope come on top.
    cdef Py_ssize_t fixed = 4 + 9 + PyBytes_GET_SIZE(consumer_tag)
    cdef Py_ssize_t total = 0
    cdef Py_ssize_t size, part, start
    cdef Message message
    cdef unsigned char *at
    cdef bytes result
    for message in messages:
        # Attributes may be set from Python, and there are no bytes in None.
        if (
            message is None
            or message.envelope is None
            or message.header is None
            or message.body is None
        ):
            raise TypeError("a message is incomplete")
        size = PyBytes_GET_SIZE(message.body)
        total += (
            2 * OVERHEAD + fixed + CONTENT_HEAD
            + PyBytes_GET_SIZE(message.envelope) + PyBytes_GET_SIZE(message.header) + size
        )
        if size:
            total += OVERHEAD * <Py_ssize_t>((<uint64_t>size - 1) // limit + 1)
    result = PyBytes_FromStringAndSize(NULL, total)
    at = <unsigned char *>PyBytes_AS_STRING(result)
    for message in messages:
        at = _write_head(
            at, METHOD, channel, <uint32_t>(fixed + PyBytes_GET_SIZE(message.envelope))
        )
        at = _write32(at, BASIC << 16 | DELIVER_ID)
        at = _write_bytes(at, consumer_tag)
        at = _write64(at, first_tag)
        at[0] = redelivered
        at = _write_bytes(at + 1, message.envelope)
        at[0] = END
        size = PyBytes_GET_SIZE(message.body)
        at = _write_head(
            at + 1, HEADER, channel, <uint32_t>(CONTENT_HEAD + PyBytes_GET_SIZE(message.header))
        )
        at = _write32(at, BASIC << 16)
        at = _write64(at, <uint64_t>size)
        at = _write_bytes(at, message.header)
        at[0] = END
        at += 1
        start = 0
        while start < size:
            part = size - start
            if <uint64_t>part > limit:
                part = <Py_ssize_t>limit
            at = _write_head(at, BODY, channel, <uint32_t>part)
            memcpy(at, PyBytes_AS_STRING(message.body) + start, part)
            at[part] = END
            at += part + 1
            start += part
        first_tag += 1
    return result


def encode_acks(int channel, list tags not None, bint multiple):
    """See hot.py."""
    cdef bytes result = PyBytes_FromStringAndSize(NULL, SETTLE_FRAME * PyList_GET_SIZE(tags))
    cdef unsigned char *at = <unsigned char *>PyBytes_AS_STRING(result)
    cdef uint64_t tag
    for tag in tags:
        at = _write_head(at, METHOD, channel, SETTLE_SIZE)
        at = _write32(at, BASIC << 16 | ACK_ID)
        at = _write64(at, tag)
        at[0] = multiple
        at[1] = END
        at += 2
    return result


# --- the event log (lines.py) --------------------------------------------------------------------

cdef enum:
    ID_BITS = 11
    COLUMNS_MAX = 8
    DEAD_RUNS = 32
    LINE_BYTES = 40
    NUMBER_BYTES = 8
    ENTRY_BYTES = 200
    # With the sign.
    DIGITS_MAX = 20

cdef array.array _NUMBERS = array.array("q")
cdef bytes _PAIRS = b"".join([b"%02d" % pair for pair in range(100)])
cdef const char *_pairs = PyBytes_AS_STRING(_PAIRS)


cdef inline array.array _numbers(Py_ssize_t count):
    return array.clone(_NUMBERS, count, False)


cdef inline unsigned char *_write_number(unsigned char *at, long long value) noexcept nogil:
    cdef unsigned char digits[DIGITS_MAX]
    cdef int first = DIGITS_MAX
    cdef unsigned long long rest
    cdef unsigned int pair
    if value < 0:
        at[0] = 45
        at += 1
        rest = <unsigned long long>(-(value + 1)) + 1
    else:
        rest = <unsigned long long>value
    while rest >= 10:
        pair = <unsigned int>(rest % 100)
        rest //= 100
        first -= 2
        memcpy(digits + first, _pairs + 2 * pair, 2)
    if rest or first == DIGITS_MAX:
        first -= 1
        digits[first] = <unsigned char>(48 + rest)
    memcpy(at, digits + first, DIGITS_MAX - first)
    return at + DIGITS_MAX - first


cdef struct _Lines:
    # What a run of lines is made of: see lines.Entry.
    const unsigned char *texts[COLUMNS_MAX + 1]
    Py_ssize_t lengths[COLUMNS_MAX + 1]
    # Of columns that are no array (NULL): the first number.
    long long firsts[COLUMNS_MAX]
    const long long *numbers[COLUMNS_MAX]
    # -1: the first text, as it is.
    int width
    Py_ssize_t count
    long long now_us
    long long depth
    long long seq


cdef enum:
    # {"ts":,"depth":,"seq": and two numbers.
    HEAD_MAX = 23 + 2 * DIGITS_MAX


cdef Py_ssize_t _read_entry(object given_entry, _Lines *lines) except -1:
    """Point at what an entry has; how long its lines are at most."""
    cdef tuple entry, pieces, columns
    cdef Py_ssize_t width, i, size = HEAD_MAX + DIGITS_MAX
    cdef bytes piece
    cdef array.array given
    if isinstance(given_entry, bytes):
        lines.width = -1
        lines.texts[0] = <const unsigned char *>PyBytes_AS_STRING(given_entry)
        lines.lengths[0] = PyBytes_GET_SIZE(given_entry)
        return lines.lengths[0]
    entry = <tuple?>given_entry
    pieces = <tuple?>entry[3]
    columns = <tuple?>entry[4]
    width = len(columns)
    lines.now_us, lines.depth, lines.seq, lines.count = entry[0], entry[1], entry[2], entry[5]
    if width > COLUMNS_MAX or len(pieces) != width + 1:
        raise ValueError("too many columns, or not one piece more")
    lines.width = <int>width
    for i in range(width + 1):
        piece = <bytes?>pieces[i]
        lines.texts[i] = <const unsigned char *>PyBytes_AS_STRING(piece)
        lines.lengths[i] = PyBytes_GET_SIZE(piece)
        size += lines.lengths[i]
    for i in range(width):
        item = columns[i]
        lines.numbers[i] = NULL
        lines.firsts[i] = 0
        if isinstance(item, array.array):
            given = item
            if given.ob_descr.typecode != c"q":
                raise ValueError("a column is an array of 'q'")
            if len(given) < lines.count:
                raise ValueError("a column is too short")
            lines.numbers[i] = given.data.as_longlongs
        else:
            lines.firsts[i] = item
    return max(0, lines.count) * (size + DIGITS_MAX * width)


cdef inline unsigned char *_write_text(
    unsigned char *at, const char *text, Py_ssize_t size
) noexcept nogil:
    memcpy(at, text, size)
    return at + size


cdef unsigned char *_write_lines(unsigned char *at, const _Lines *lines) noexcept nogil:
    cdef unsigned char head[HEAD_MAX]
    cdef unsigned char *end
    cdef Py_ssize_t head_size, i
    cdef int column
    if lines.width < 0:
        memcpy(at, lines.texts[0], lines.lengths[0])
        return at + lines.lengths[0]
    end = _write_number(_write_text(head, b'{"ts":', 6), lines.now_us)
    if lines.depth >= 0:
        end = _write_number(_write_text(end, b',"depth":', 9), lines.depth)
    end = _write_text(end, b',"seq":', 7)
    head_size = end - head
    for i in range(lines.count):
        memcpy(at, head, head_size)
        at = _write_number(at + head_size, lines.seq + i)
        for column in range(lines.width):
            memcpy(at, lines.texts[column], lines.lengths[column])
            at += lines.lengths[column]
            if lines.numbers[column] != NULL:
                at = _write_number(at, lines.numbers[column][i])
            else:
                at = _write_number(at, lines.firsts[column] + i)
        memcpy(at, lines.texts[lines.width], lines.lengths[lines.width])
        at += lines.lengths[lines.width]
    return at


def format_lines(list entries not None, bytearray into not None):
    cdef Py_ssize_t size = 0, i, count = PyList_GET_SIZE(entries)
    cdef _Lines *all_lines = <_Lines *>PyMem_Malloc(max(1, count) * sizeof(_Lines))
    cdef unsigned char *at
    cdef unsigned char *start
    if all_lines == NULL:
        raise MemoryError()
    try:
        for i in range(count):
            size += _read_entry(entries[i], &all_lines[i])
        if PyByteArray_GET_SIZE(into) < size:
            PyByteArray_Resize(into, size)
        start = at = <unsigned char *>PyByteArray_AS_STRING(into)
        # The entries keep what is pointed at, and nobody changes it: the event loop goes on.
        with nogil:
            for i in range(count):
                at = _write_lines(at, &all_lines[i])
        return at - start
    finally:
        PyMem_Free(all_lines)


def now_us():
    cdef timespec now
    clock_gettime(CLOCK_REALTIME, &now)
    return <long long>now.tv_sec * 1000000 + now.tv_nsec // 1000


@cython.final
cdef class Template:
    """See lines.py."""

    cdef readonly tuple pieces
    cdef readonly Py_ssize_t size

    def __init__(self, tuple pieces not None):
        cdef bytes piece
        self.pieces = pieces
        self.size = LINE_BYTES
        for piece in pieces:
            self.size += len(piece) + NUMBER_BYTES


@cython.final
cdef class LineBuffer:
    """See lines.py."""

    cdef readonly list entries
    cdef readonly Py_ssize_t size
    cdef readonly long long next_seq
    cdef public bint is_shut
    cdef Py_ssize_t _full_size
    cdef object _on_first
    cdef object _on_full
    cdef object _on_shed

    def __init__(self, Py_ssize_t full_size, on_first, on_full, on_shed):
        self._full_size = full_size
        self._on_first = on_first
        self._on_full = on_full
        self._on_shed = on_shed
        self.entries = []
        self.size = 0
        self.next_seq = 1
        self.is_shut = False

    def add(self, now_us, Template template not None, tuple columns not None, Py_ssize_t count,
            depth=-1):
        if self.is_shut:
            self._on_shed(count)
            return
        if PyList_GET_SIZE(self.entries) == 0:
            self._on_first(now_us)
        cdef long long seq = self.next_seq
        self.next_seq = seq + count
        self.entries.append((now_us, depth, seq, template.pieces, columns, count))
        self.size += ENTRY_BYTES + template.size * count
        if self.size >= self._full_size:
            self._on_full()

    def add_line(self, now_us, bytes line not None):
        if PyList_GET_SIZE(self.entries) == 0:
            self._on_first(now_us)
        self.next_seq += 1
        self.entries.append(line)
        self.size += PyBytes_GET_SIZE(line)
        if self.size >= self._full_size:
            self._on_full()

    def take(self):
        cdef list entries = self.entries
        self.entries = []
        self.size = 0
        return entries


def stamp(messages not None, long long first_id, long long now_us):
    cdef Message message
    cdef Py_ssize_t at = 0, count = len(messages)
    cdef array.array sizes
    cdef bint is_ahead = first_id >> ID_BITS > now_us
    if count == 1:
        message = messages[0]
        message.log_id = first_id
        if is_ahead:
            message.stamp_us = now_us
        return PyBytes_GET_SIZE(message.body)
    sizes = _numbers(count)
    for message in messages:
        if at == count:
            break
        message.log_id = first_id + at
        if is_ahead:
            message.stamp_us = now_us
        sizes.data.as_longlongs[at] = PyBytes_GET_SIZE(message.body)
        at += 1
    return sizes


cdef inline long long _age(Message message, long long now_us):
    cdef long long age = now_us - (
        message.stamp_us if message.stamp_us else message.log_id >> ID_BITS
    )
    return age if age > 0 else 0


def is_told(messages not None):
    cdef Message message
    for message in messages:
        if message.log_id:
            return True
    return False


def logged(messages not None, long long now_us):
    cdef Message message
    cdef Py_ssize_t at = 0, found = 0, count = len(messages)
    cdef array.array places = None, ids = None, sizes = None, ages = None
    if count == 1:
        message = messages[0]
        if not message.log_id:
            return None
        return 1, 0, message.log_id, PyBytes_GET_SIZE(message.body), _age(message, now_us)
    for message in messages:
        if message.log_id and found < count:
            if places is None:
                places = _numbers(count)
                ids = _numbers(count)
                sizes = _numbers(count)
                ages = _numbers(count)
            places.data.as_longlongs[found] = at
            ids.data.as_longlongs[found] = message.log_id
            sizes.data.as_longlongs[found] = PyBytes_GET_SIZE(message.body)
            ages.data.as_longlongs[found] = _age(message, now_us)
            found += 1
        at += 1
    if places is None:
        return None
    if found < count:
        for given in (places, ids, sizes, ages):
            array.resize(given, found)
    return found, places, ids, sizes, ages


@cython.final
cdef class _Run:
    cdef unsigned long long first
    cdef unsigned long long last
    # None: consecutive.
    cdef array.array tags
    # Of the messages; 0 once it was answered. A run of one has it in ``only``.
    cdef long long *ids
    cdef long long only
    cdef Py_ssize_t count
    cdef Py_ssize_t left
    cdef long long since_us
    cdef object source

    def __dealloc__(self):
        if self.ids != &self.only:
            PyMem_Free(self.ids)


@cython.final
cdef class Held:
    """See lines.py."""

    cdef list _runs
    cdef Py_ssize_t _dead
    cdef Py_ssize_t _count

    def __init__(self):
        self._runs = []
        self._dead = 0
        self._count = 0

    def __len__(self):
        return self._count

    def add(self, tags, ids, Py_ssize_t count, long long since_us, source):
        cdef _Run run = _Run.__new__(_Run)
        cdef array.array given
        cdef Py_ssize_t at
        if count == 1:
            run.ids = &run.only
        else:
            run.ids = <long long *>PyMem_Malloc(max(1, count) * sizeof(long long))
            if run.ids == NULL:
                raise MemoryError()
        if isinstance(ids, array.array):
            given = ids
            if len(given) != count:
                raise ValueError("as many messages as there are")
            memcpy(run.ids, given.data.as_longlongs, count * sizeof(long long))
        else:
            for at in range(count):
                run.ids[at] = <long long>ids + at
        if isinstance(tags, array.array):
            run.tags = tags
            if len(run.tags) != count:
                raise ValueError("as many tags as messages")
            run.first = run.tags.data.as_longlongs[0]
            run.last = run.tags.data.as_longlongs[count - 1]
        else:
            run.first = tags
            run.last = run.first + count - 1
        run.count = run.left = count
        run.since_us = since_us
        run.source = source
        self._runs.append(run)
        self._count += count

    def may_hold(self, list tags not None):
        cdef unsigned long long first, last, tag
        if self._count == 0:
            return False
        first = (<_Run>self._runs[0]).first
        last = (<_Run>self._runs[PyList_GET_SIZE(self._runs) - 1]).last
        for tag in tags:
            if first <= tag <= last:
                return True
        return False

    def settle(self, tags not None, long long now_us):
        cdef list found = []
        cdef _Run run = None
        cdef object source = None
        cdef array.array its_tags = None, ids = None, holds = None
        # Tags in between are not held.
        cdef unsigned long long tag, gap_low = 1, gap_high = 0
        cdef Py_ssize_t at, count = len(tags), written = 0
        # Where those of the source begin.
        cdef Py_ssize_t start = 0
        for tag in tags:
            if gap_low <= tag <= gap_high:
                continue
            if run is None or not run.first <= tag <= run.last:
                run = self._run_of(tag, &gap_low, &gap_high)
                if run is None:
                    continue
            at = _place(run, tag)
            if at < 0 or run.ids[at] == 0:
                continue
            if count == 1:
                found.append((run.source, 1, tag, run.ids[at], _hold(run, now_us)))
            else:
                if its_tags is None:
                    its_tags = _numbers(count)
                    ids = _numbers(count)
                    holds = _numbers(count)
                elif source is not run.source:
                    found.append(_settled(source, its_tags, ids, holds, start, written))
                    start = written
                source = run.source
                its_tags.data.as_longlongs[written] = tag
                ids.data.as_longlongs[written] = run.ids[at]
                holds.data.as_longlongs[written] = _hold(run, now_us)
                written += 1
            run.ids[at] = 0
            run.left -= 1
            self._count -= 1
            if run.left == 0:
                self._dead += 1
        if its_tags is not None:
            found.append(_settled(source, its_tags, ids, holds, start, written))
        if self._dead:
            self._bury()
        return found

    def settle_all(self, long long now_us):
        cdef _Run run
        cdef list tags = []
        for run in self._runs:
            tags.extend(range(run.first, run.last + 1) if run.tags is None else run.tags)
        return self.settle(tags, now_us)

    cdef _Run _run_of(
        self, unsigned long long tag, unsigned long long *gap_low, unsigned long long *gap_high
    ):
        """None, and the gap that the tag is in, if it is in no run."""
        cdef Py_ssize_t low = 0, high = PyList_GET_SIZE(self._runs), middle
        cdef _Run run
        while low < high:
            middle = (low + high) // 2
            run = <_Run>self._runs[middle]
            if run.last < tag:
                low = middle + 1
            else:
                high = middle
        gap_high[0] = <unsigned long long>-1
        if low < PyList_GET_SIZE(self._runs):
            run = <_Run>self._runs[low]
            if run.first <= tag:
                gap_low[0], gap_high[0] = 1, 0
                return run
            gap_high[0] = run.first - 1
        gap_low[0] = 0
        if low > 0:
            gap_low[0] = (<_Run>self._runs[low - 1]).last + 1
        return None

    cdef int _bury(self) except -1:
        if self._count == 0:
            self._runs.clear()
        elif self._dead > DEAD_RUNS + PyList_GET_SIZE(self._runs) // 2:
            self._runs = [each for each in self._runs if (<_Run>each).left]
        else:
            return 0
        self._dead = 0
        return 0


cdef inline long long _hold(_Run run, long long now_us):
    return now_us - run.since_us if now_us > run.since_us else 0


cdef tuple _settled(
    source, array.array tags, array.array ids, array.array holds, Py_ssize_t start, Py_ssize_t stop
):
    if start == 0 and stop == len(tags):
        return source, stop, tags, ids, holds
    return source, stop - start, tags[start:stop], ids[start:stop], holds[start:stop]


cdef Py_ssize_t _place(_Run run, unsigned long long tag):
    """Of a tag between the first and the last of the run; -1 if it is not among them."""
    cdef Py_ssize_t low = 0, high, middle
    cdef unsigned long long there
    if run.tags is None:
        return <Py_ssize_t>(tag - run.first)
    high = run.count - 1
    while low < high:
        middle = (low + high) // 2
        there = run.tags.data.as_longlongs[middle]
        if there < tag:
            low = middle + 1
        else:
            high = middle
    there = run.tags.data.as_longlongs[low]
    return low if there == tag else -1


# --- within ------------------------------------------------------------------------------------

cdef RawFrame _raw_frame(int kind, int channel, bytes payload):
    cdef RawFrame frame = RawFrame.__new__(RawFrame)
    frame.kind = kind
    frame.channel = channel
    frame.payload = payload
    return frame


cdef tuple _publish_names(const unsigned char *payload, Py_ssize_t size):
    """Envelope, exchange and routing key; None if the arguments are malformed."""
    cdef Py_ssize_t last = size - 1
    cdef Py_ssize_t key_at
    cdef bytes envelope
    cdef object names
    if size < PUBLISH_MIN:
        return None
    key_at = 6 + 1 + payload[6]
    if key_at >= last or key_at + 1 + payload[key_at] != last:
        return None
    envelope = _slice(payload, 6, last)
    names = _envelopes.get(envelope)
    if names is None:
        if len(_envelopes) >= ENVELOPES_MAX:
            _envelopes.clear()
        names = (
            envelope,
            PyUnicode_DecodeUTF8(<const char *>payload + 7, payload[6], "surrogateescape"),
            PyUnicode_DecodeUTF8(
                <const char *>payload + key_at + 1, payload[key_at], "surrogateescape"
            ),
        )
        _envelopes[envelope] = names
    return <tuple>names


cdef int _cut_publishes(
    const unsigned char *raw,
    Py_ssize_t *position,
    Py_ssize_t after,
    Py_ssize_t end,
    Py_ssize_t frame_max,
    Py_ssize_t budget,
    PublishRun run,
    Py_ssize_t *spent,
) except -1:
    """Cut the publish at ``position`` and those behind it with the very same method frame."""
    cdef Py_ssize_t at = position[0]
    cdef Py_ssize_t length = after - at
    cdef const unsigned char *method = raw + at
    cdef list messages = run.messages
    cdef Py_ssize_t cost = 0
    cdef Content content
    # The header of the message before: publishers tend to send the same one again.
    cdef bytes header = None
    cdef Py_ssize_t known_at = 0
    cdef Py_ssize_t known_size = -1
    cdef Message message
    cdef int found
    content.needs = 0
    content.persistent = False
    spent[0] = 0
    while True:
        found = _content(
            raw, at, at + length, end, run.channel, frame_max, known_at, known_size, &content
        )
        if found != COMPLETE:
            if found == COLD and cost:
                found = COMPLETE
            break
        if header is None or content.header_at != known_at:
            header = _slice(raw, content.header_at, content.header_at + content.header_size)
            known_at = content.header_at
            known_size = content.header_size
        message = Message.__new__(Message)
        message.envelope = run.envelope
        message.exchange = run.exchange
        message.routing_key = run.routing_key
        message.header = header
        message.body = _body(raw, &content)
        message.needs = content.needs
        message.persistent = content.persistent
        message.extra_keys = ()
        messages.append(message)
        cost += 1 + (content.body_size >> COST_SHIFT)
        run.size += content.body_size
        if <uint64_t>content.body_size > run.largest:
            run.largest = <uint64_t>content.body_size
        run.needs |= content.needs
        run.persistent += content.persistent
        at = content.stop
        if (
            cost >= budget
            or PyList_GET_SIZE(messages) >= RUN_MAX
            or end - at < length
            or memcmp(method, raw + at, length) != 0
        ):
            break
    run.cost += cost
    spent[0] = cost
    position[0] = at
    return found


cdef int _content(
    const unsigned char *raw,
    Py_ssize_t start,
    Py_ssize_t at,
    Py_ssize_t end,
    int channel,
    Py_ssize_t frame_max,
    Py_ssize_t known_at,
    Py_ssize_t known_size,
    Content *content,
) noexcept nogil:
    """Walk the content at ``at`` of the publish at ``start``.

    Properties equal to those at ``known_at`` are not scanned again: ``content`` still has what
    they gave, and is made to point at them.
    """
    cdef uint64_t left
    cdef uint32_t size
    cdef Py_ssize_t header_at, header_size
    cdef Py_ssize_t frames = 0
    if end - at < HEAD_SIZE:
        return WAIT
    size = _read32(raw + at + 3)
    if (
        raw[at] != HEADER
        or <int>_read16(raw + at + 1) != channel
        or size < CONTENT_MIN
        or (frame_max and size > <uint64_t>frame_max)
    ):
        return COLD
    if <uint64_t>size + OVERHEAD > <uint64_t>(end - at):
        if <uint64_t>size + OVERHEAD + <uint64_t>(at - start) <= <uint64_t>WAIT_BYTES:
            return WAIT
        return COLD
    header_at = at + HEAD_SIZE + CONTENT_HEAD
    header_size = <Py_ssize_t>size - CONTENT_HEAD
    # Class and weight in one look.
    if (
        raw[at + HEAD_SIZE + <Py_ssize_t>size] != END
        or _read32(raw + at + HEAD_SIZE) != (BASIC << 16)
    ):
        return COLD
    left = _read64(raw + at + HEAD_SIZE + 4)
    if header_size == known_size and memcmp(raw + header_at, raw + known_at, header_size) == 0:
        header_at = known_at
    elif not _scan_properties(
        raw + header_at, raw + header_at + header_size, &content.needs, &content.persistent
    ):
        return COLD
    at += OVERHEAD + <Py_ssize_t>size
    content.header_at = header_at
    content.header_size = header_size
    content.body_at = at
    content.body_size = 0
    while left:
        if end - at < HEAD_SIZE:
            break
        size = _read32(raw + at + 3)
        if (
            raw[at] != BODY
            or <int>_read16(raw + at + 1) != channel
            or size > left
            or (frame_max and size > <uint64_t>frame_max)
        ):
            return COLD
        if <uint64_t>size + OVERHEAD > <uint64_t>(end - at):
            break
        if raw[at + HEAD_SIZE + <Py_ssize_t>size] != END:
            return COLD
        left -= size
        frames += 1
        content.body_size += <Py_ssize_t>size
        at += OVERHEAD + <Py_ssize_t>size
    content.stop = at
    if not left:
        return COMPLETE
    if (
        left <= <uint64_t>WAIT_BYTES
        and <uint64_t>(at - start) + left + OVERHEAD <= <uint64_t>WAIT_BYTES
        and frames <= WAIT_FRAMES
    ):
        return WAIT
    return COLD


cdef bytes _body(const unsigned char *raw, Content *content):
    """Join the body frames that ``_content`` has walked."""
    cdef Py_ssize_t at = content.body_at
    cdef Py_ssize_t size
    cdef bytes body
    cdef char *to
    if content.stop - at == content.body_size + OVERHEAD:
        return _slice(raw, at + HEAD_SIZE, content.stop - 1)
    body = PyBytes_FromStringAndSize(NULL, content.body_size)
    to = PyBytes_AS_STRING(body)
    while at < content.stop:
        size = <Py_ssize_t>_read32(raw + at + 3)
        memcpy(to, raw + at + HEAD_SIZE, size)
        to += size
        at += OVERHEAD + size
    return body


cdef AckRun _join_acks(
    const unsigned char *payload, int channel, int method, AckRun acks, list items
):
    """The run that the settling method in ``payload`` belongs to: ``acks``, or a new one."""
    cdef int bits = payload[SETTLE_SIZE - 1]
    cdef bint multiple = method != REJECT_ID and (bits & 1) != 0
    cdef bint requeue = method != ACK_ID and (bits & (1 if method == REJECT_ID else 2)) != 0
    if acks is None or not (
        acks.channel == channel
        and acks.method == method
        and acks.multiple == multiple
        and acks.requeue == requeue
    ):
        acks = AckRun.__new__(AckRun)
        acks.channel = channel
        acks.method = method
        acks.multiple = multiple
        acks.requeue = requeue
        acks.tags = []
        items.append(acks)
    return acks


cdef Py_ssize_t _cut_acks(
    const unsigned char *raw, Py_ssize_t at, Py_ssize_t end, list tags
) except -1:
    """Append the tag of the frame at ``at``, and of those behind it that differ in nothing else."""
    cdef const unsigned char *first = raw + at
    while True:
        tags.append(_read64(raw + at + 11))
        at += SETTLE_FRAME
        if (
            end - at < SETTLE_FRAME
            or memcmp(first, raw + at, 11) != 0
            or memcmp(first + 19, raw + at + 19, 2) != 0
        ):
            return at


cdef bint _scan_properties(
    const unsigned char *at, const unsigned char *end, unsigned int *needs, bint *persistent
) noexcept nogil:
    """Whether flags and properties fill the span exactly; the span has room for the flags."""
    cdef unsigned int flags = _read16(at)
    cdef unsigned int found = 0
    cdef bint is_persistent = False
    cdef unsigned int flag = 0x8000
    at += 2
    while flag > 0x0002:
        if flags & flag:
            if flag == 0x2000:
                found |= NEEDS_HEADERS
                at = _scan_table(at, end, 1, True)
                if at == NULL:
                    return False
            elif flag == 0x1000 or flag == 0x0800:
                if at >= end:
                    return False
                if flag == 0x0800:
                    found |= NEEDS_PRIORITY
                elif at[0] == PERSISTENT:
                    is_persistent = True
                elif at[0] != 1:
                    found |= NEEDS_MODE
                at += 1
            elif flag == 0x0040:
                if end - at < 8:
                    return False
                at += 8
            else:
                if at >= end or end - at < 1 + at[0]:
                    return False
                at += 1 + at[0]
                if flag == 0x0200:
                    found |= NEEDS_REPLY_TO
                elif flag == 0x0100:
                    found |= NEEDS_EXPIRATION
                elif flag == 0x0010:
                    found |= NEEDS_USER_ID
        flag >>= 1
    needs[0] = found
    persistent[0] = is_persistent
    return at == end


cdef const unsigned char *_scan_table(
    const unsigned char *at, const unsigned char *end, int depth, bint has_keys
) noexcept nogil:
    """Walk a table, or an array (no keys), from its length on. Where it ends; NULL if malformed."""
    cdef uint32_t size
    cdef unsigned char tag
    cdef Py_ssize_t fixed
    if depth > MAX_DEPTH or end - at < 4:
        return NULL
    size = _read32(at)
    at += 4
    if size > <uint64_t>(end - at):
        return NULL
    end = at + size
    while at < end:
        if has_keys:
            # The key, and at least a tag behind it.
            if end - at < 2 + at[0]:
                return NULL
            at += 1 + at[0]
        tag = at[0]
        at += 1
        if tag == c"S" or tag == c"x":
            if end - at < 4 or _read32(at) > <uint64_t>(end - at - 4):
                return NULL
            at += 4 + <Py_ssize_t>_read32(at)
        elif tag == c"F" or tag == c"A":
            at = _scan_table(at, end, depth + 1, tag == c"F")
            if at == NULL:
                return NULL
        else:
            fixed = _fixed_size(tag)
            if fixed < 0 or fixed > end - at:
                return NULL
            at += fixed
    return at


cdef inline Py_ssize_t _fixed_size(unsigned char tag) noexcept nogil:
    """Bytes behind a tag that is followed by no length; -1 for an unknown one."""
    if tag == c"I" or tag == c"i" or tag == c"f":
        return 4
    if tag == c"l" or tag == c"L" or tag == c"d" or tag == c"T":
        return 8
    if tag == c"t" or tag == c"b" or tag == c"B":
        return 1
    if tag == c"s" or tag == c"u":
        return 2
    if tag == c"D":
        return 5
    if tag == c"V":
        return 0
    return -1
