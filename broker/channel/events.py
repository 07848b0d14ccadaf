"""Channels and consumers that come and go, told as events (``broker/events.py``).

Who calls looks first whether anybody listens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from leveret.broker.events import WHO

if TYPE_CHECKING:
    from leveret.broker.channel.channel import Channel
    from leveret.broker.resource import Resource
    from leveret.protocol.field_table import Table


def channel_created(channel: Channel) -> None:
    connection = channel.connection
    user = connection.access.user
    connection.vhost.events.notify(
        "channel.created",
        {
            "pid": channel.pid,
            "name": f"{connection.name} ({channel.number})",
            "connection": connection.pid,
            "number": channel.number,
            "user": user,
            "vhost": connection.vhost.name,
            WHO: user,
        },
    )


def channel_closed(channel: Channel, reason: str) -> None:
    connection = channel.connection
    connection.vhost.events.notify(
        "channel.closed", {"pid": channel.pid, WHO: connection.access.user}, reason
    )


def consumer_created(
    channel: Channel,
    tag: str,
    queue: Resource,
    arguments: Table,
    prefetch: int,
    *,
    exclusive: bool,
    no_ack: bool,
) -> None:
    connection = channel.connection
    connection.vhost.events.notify(
        "consumer.created",
        {
            "consumer_tag": tag,
            "exclusive": exclusive,
            "ack_required": not no_ack,
            "channel": channel.pid,
            "queue": queue,
            "prefetch_count": prefetch,
            "arguments": arguments,
            WHO: connection.access.user,
        },
    )


def consumer_deleted(
    channel: Channel, tag: str, queue: Resource, user: str, reason: str = ""
) -> None:
    channel.connection.vhost.events.notify(
        "consumer.deleted",
        {"consumer_tag": tag, "channel": channel.pid, "queue": queue, WHO: user},
        reason,
    )
