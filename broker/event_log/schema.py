"""What a line of the event log holds: the one definition that broker and analytics share.

An event is a flat record; fields at their default are left out of the line, so that most lines
carry a handful of them. ``Event`` names the fields and their types: the broker encodes it with
msgspec, ``spark_jobs/schema.py`` derives Spark's schema from it. ``KINDS`` says which events there
are, when each is written and what it carries.

What readers rely on:

- ``seq`` counts the lines of one ``boot`` without gaps, in the order things happened. A number that
  is missing is a line that was lost; events that were shed on purpose are counted in ``log_gap``
  and take no number.
- ``msg`` is given to a message when it is published and is unique across boots. All copies of it,
  in every queue and after dead-lettering, keep it: a life is the pair (``msg``, ``queue``).
- Which queue took a message is told once: by ``publish`` if there was exactly one, else by an
  ``enqueue`` for each. Direct replies are in no queue: ``amq.rabbitmq.reply-to`` stands for it.
- A new field or kind may come at any time and is no new version; readers ignore what they do not
  know. ``v`` changes when the meaning of a field does.

Nothing but msgspec is imported here, so that neither side loads the other.
"""

from __future__ import annotations

from typing import Annotated, Final, NamedTuple

import msgspec

VERSION: Final = 1

# A number that four bytes hold; all others may need eight.
Small = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class Event(msgspec.Struct, omit_defaults=True):
    """One line. Unless a kind says otherwise:"""

    # Microseconds since 1970, UTC, by the broker's clock.
    ts: int
    # The number of the line within its boot, from 1.
    seq: int
    # One start of a broker; names the segment files, too.
    boot: str
    # One of KINDS.
    ev: str
    v: Small = VERSION
    vhost: str = ""
    # The connection's number within its boot, and the channel's on it.
    conn: int = 0
    ch: Small = 0
    user: str = ""
    exchange: str = ""
    # Routing key, or binding key.
    rk: str = ""
    queue: str = ""
    msg: int = 0
    dtag: int = 0
    # Consumer tag.
    ctag: str = ""
    # Bytes of the message's body.
    size: int = 0
    redelivered: bool = False
    # How often the message was delivered before this time.
    delivery_count: Small = 0
    persistent: bool = False
    mandatory: bool = False
    # How many queues took the message.
    routed: Small = 0
    # How many things this event stands for.
    n: int = 1
    # Since the message came into the queue, or was published.
    wait_us: int | None = None
    # Between the delivery and this answer to it; for *_close and credit_unblocked, since the
    # opening or the block.
    hold_us: int | None = None
    # Messages that are ready in the queue after this event; None where the writer cannot know.
    depth: int | None = None
    reason: str = ""
    # Address and port of the client.
    peer: str = ""
    # What only rare events tell, as text.
    attrs: dict[str, str] = msgspec.field(default_factory=dict)


class Kind(NamedTuple):
    """One sort of event: when it is written, and which fields it gives beside ts, seq, boot, ev.

    Of ``fields`` any may be at its default and so be left out of the line.
    """

    name: str
    meaning: str
    fields: tuple[str, ...]


_CHANNEL = ("vhost", "conn", "ch", "user")
_CONNECTION = ("vhost", "conn", "user", "peer")

# What happens to messages; sampling leaves out whole messages, never parts of one.
MESSAGE_KINDS: Final = (
    Kind(
        "publish",
        "A channel accepted a message. `queue` is given if exactly one took it.",
        (
            *_CHANNEL,
            *("exchange", "rk", "queue", "msg", "size"),
            *("persistent", "mandatory", "routed"),
        ),
    ),
    Kind(
        "enqueue",
        "A queue took a message whose publish did not name it: one of several queues, or the "
        "target of dead-lettering (`reason` is `dead_letter`).",
        ("vhost", "exchange", "rk", "queue", "msg", "size", "persistent", "reason"),
    ),
    Kind(
        "confirm",
        "The publisher was sent confirms, at one time, for `n` messages that are told here; `dtag` "
        "is the highest that was confirmed, and lower ones may still wait; `wait_us` since the "
        "oldest of them was published; `reason` is `nack` if they were refused.",
        (*_CHANNEL, "dtag", "n", "wait_us", "reason"),
    ),
    Kind(
        "return",
        "A mandatory message went back to its publisher.",
        (*_CHANNEL, "exchange", "rk", "msg", "size", "reason"),
    ),
    Kind(
        "drop",
        "A message is gone: `reason` is `unroutable` (no `queue`), `maxlen`, `refused` (the queue "
        "was full and does not take more, or its transaction failed), `delivery_limit` (it came "
        "back too often, and there is no dead-letter exchange), `queue_deleted` (of a large queue "
        "only the first are told; `queue_delete` ends all), `queue_crashed` (it had not yet taken "
        "it) or `channel_closed` (on its way to a consumer that does not answer, or in a "
        "transaction that was not committed any more). Without `msg`: `n` messages that were on "
        "disk, and of which nothing was read.",
        (*_CHANNEL, "exchange", "rk", "queue", "ctag", "msg", "n", "size", "depth", "reason"),
    ),
    Kind(
        "deliver",
        "A consumer was sent a message; `reason` is `auto_ack` if no answer is expected.",
        (
            *_CHANNEL,
            *("queue", "ctag", "msg", "dtag", "size"),
            *("redelivered", "delivery_count", "wait_us", "depth", "reason"),
        ),
    ),
    Kind(
        "get",
        "The same by basic.get.",
        (
            *_CHANNEL,
            *("queue", "msg", "dtag", "size"),
            *("redelivered", "delivery_count", "wait_us", "depth", "reason"),
        ),
    ),
    Kind("ack", "A message is done.", (*_CHANNEL, "queue", "ctag", "msg", "dtag", "hold_us")),
    Kind(
        "nack",
        "basic.nack; `reason` is `requeue` or `discard`. A requeue, or a dead_letter if the queue "
        "has where to, follows.",
        (*_CHANNEL, "queue", "ctag", "msg", "dtag", "hold_us", "reason"),
    ),
    Kind(
        "reject",
        "basic.reject; as nack.",
        (*_CHANNEL, "queue", "ctag", "msg", "dtag", "hold_us", "reason"),
    ),
    Kind(
        "requeue",
        "A delivered message is back in its place; `reason` is `nack`, `reject`, `recover`, "
        "`consumer_timeout` or `channel_closed`; the channel is the one that had it.",
        (*_CHANNEL, "queue", "ctag", "msg", "delivery_count", "hold_us", "reason"),
    ),
    Kind(
        "expire",
        "A message's time to live ended; a dead_letter follows if the queue has where to. Without "
        "`msg`: `n` messages that were on disk, as for drop.",
        ("vhost", "queue", "msg", "n", "size", "wait_us", "depth"),
    ),
    Kind(
        "dead_letter",
        "A message left `queue` for the dead-letter exchange `exchange` with key `rk`; `reason` "
        "is `rejected`, `expired`, `maxlen` or `delivery_limit`; it went to `routed` queues, none "
        "if it led back to where it came from or there is no such exchange.",
        (
            *("vhost", "queue", "exchange", "rk", "msg", "size"),
            *("delivery_count", "routed", "depth", "reason"),
        ),
    ),
    Kind("purge", "`n` ready messages were purged.", (*_CHANNEL, "queue", "n", "depth")),
    Kind(
        "paged_out",
        "`n` messages (`size` bytes) of a queue left memory for the disk.",
        ("vhost", "queue", "n", "size", "depth"),
    ),
    Kind(
        "paged_in",
        "`n` messages (`size` bytes) of a queue came back into memory.",
        ("vhost", "queue", "n", "size", "depth"),
    ),
)

# What happens to everything else; `reason` is `recovered` for what a start finds on disk.
OBJECT_KINDS: Final = (
    Kind("connection_open", "A client logged in.", (*_CONNECTION, "attrs")),
    Kind("connection_close", "It is gone.", (*_CONNECTION, "hold_us", "reason")),
    Kind("channel_open", "", (*_CHANNEL, "peer")),
    Kind("channel_close", "", (*_CHANNEL, "peer", "hold_us", "reason")),
    Kind("auth_fail", "A login was refused.", ("conn", "user", "peer", "reason")),
    Kind("blocked", "An alarm blocked a connection that publishes.", (*_CONNECTION, "reason")),
    Kind("unblocked", "The alarm is over.", (*_CONNECTION, "hold_us", "reason")),
    Kind(
        "queue_declare",
        "A queue came to be; one that was recovered, with `depth` messages.",
        (*_CHANNEL, "queue", "depth", "reason", "attrs"),
    ),
    Kind(
        "queue_delete",
        "It is gone, with all in it: `n` messages were ready. `reason` is `auto_delete`, "
        "`expired`, `exclusive`, `vhost_deleted`, or none, if a client deleted it.",
        (*_CHANNEL, "queue", "n", "reason"),
    ),
    Kind(
        "exchange_declare",
        "An exchange came to be; `attrs` has its `type`.",
        (*_CHANNEL, "exchange", "reason", "attrs"),
    ),
    Kind("exchange_delete", "", (*_CHANNEL, "exchange")),
    Kind(
        "bind",
        "From `exchange` with key `rk` to `queue`, or to the exchange `attrs.destination`.",
        (*_CHANNEL, "exchange", "rk", "queue", "reason", "attrs"),
    ),
    Kind("unbind", "As bind.", (*_CHANNEL, "exchange", "rk", "queue", "attrs")),
    Kind("consume", "A consumer registered.", (*_CHANNEL, "queue", "ctag", "attrs")),
    Kind("cancel", "It is gone.", (*_CHANNEL, "queue", "ctag", "reason")),
    Kind(
        "credit_blocked",
        "`attrs.who` has been out of credit from `attrs.by` for a while. Both are written as "
        "`reader:CONN`, `channel:CONN/CH`, `queue:VHOST/NAME` or `store:VHOST`.",
        ("vhost", "attrs"),
    ),
    Kind(
        "credit_unblocked",
        "`attrs.who` goes on. Also without a credit_blocked: `n` short blocks since the last one, "
        "`hold_us` together.",
        ("vhost", "n", "hold_us", "attrs"),
    ),
    Kind(
        "audit",
        "Something was changed or found: `reason` says what, as RabbitMQ's event exchange names "
        "it (`policy.set`, `user.created`, `vhost.deleted`, `alarm.set`), `attrs` the rest.",
        ("vhost", "user", "reason", "attrs"),
    ),
    Kind(
        "broker_start",
        "The first line of a boot; `attrs` has `version`, `level` and `sample`, the share of "
        "messages that are logged.",
        ("attrs",),
    ),
    Kind("broker_stop", "The last line of a boot that ended in order.", ("reason",)),
    Kind(
        "log_gap",
        "Events were shed here to keep messages moving, `n` of them or more: of a message that was "
        "published meanwhile its publish alone is counted. Lives that were under way may be cut.",
        ("n",),
    ),
)

KINDS: Final = {kind.name: kind for kind in (*MESSAGE_KINDS, *OBJECT_KINDS)}

# What no line can do without: the rest is at its default.
REQUIRED: Final = ("ts", "seq", "boot", "ev")

_encoder = msgspec.json.Encoder()


def encode_lines(events: list[Event]) -> bytes:
    """The events as lines of the log, in their order."""
    return _encoder.encode_lines(events)
