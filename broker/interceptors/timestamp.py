"""Stamps messages with the time of their arrival, as RabbitMQ's message-timestamp plug-in does.

Active with the setting ``message_timestamp``: ``stamp`` leaves a timestamp the publisher set,
``overwrite`` replaces it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pamqp.base import Frame

from leveret.broker.interceptors.chain import PUBLISH, Interceptor
from leveret.protocol.codec import read_properties, write_properties

if TYPE_CHECKING:
    from leveret.broker.channel.context import ConnectionContext
    from leveret.protocol.message import Message


class TimestampInterceptor(Interceptor):
    description = "sets the timestamp property of published messages"

    def __init__(self, connection: ConnectionContext) -> None:
        self._clock = connection.clock
        self._mode = connection.settings.message_timestamp

    def applies_to(self) -> Iterable[str]:
        return () if self._mode == "off" else (PUBLISH,)

    def intercept(self, method: Frame, message: Message | None) -> tuple[Frame, Message | None]:
        if message is not None:
            properties = read_properties(message.header)
            if properties.timestamp is None or self._mode == "overwrite":
                properties.timestamp = int(self._clock.now())
                message.header = write_properties(properties)
        return method, message
