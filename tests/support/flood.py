"""A publisher that fills its socket until it takes no more."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence

from tests.support.raw_client import NO_PROPERTIES, RawClient, publish

# A socket that has taken nothing for so long is taken for blocked.
BLOCKED_S = 0.25
STEP_S = 0.01
# More than the kernel keeps for a socket that nobody reads.
FLOOD_BYTES = 96 << 20


class Flood:
    """Numbered messages for a socket, as many as it takes."""

    def __init__(
        self,
        client: RawClient,
        key: str,
        *,
        size: int,
        exchange: str = "",
        channels: Sequence[int] = (1,),
        header: bytes = NO_PROPERTIES,
    ) -> None:
        """Several ``channels`` take turns."""
        self._client = client
        self._size = size
        self._key, self._exchange, self._channels = key, exchange, channels
        self._header = header
        # Whole messages handed to the socket; of the next one, the part that was not.
        self.sent = 0
        self._rest = b""

    def _next(self) -> bytes:
        body = struct.pack(">Q", self.sent).ljust(self._size, b".")
        channel = self._channels[self.sent % len(self._channels)]
        return publish(channel, self._key, body, exchange=self._exchange, header=self._header)

    def press(self) -> bool:
        """Send what the socket takes now, a message at most; whether it took anything."""
        self._rest = self._rest or self._next()
        taken = self._client.send_some(self._rest)
        self._rest = self._rest[taken:]
        self.sent += not self._rest
        return taken > 0

    async def until_blocked(self) -> None:
        """Send until the socket takes nothing for a while; fails if it takes far too much."""
        quiet_s = 0.0
        while quiet_s < BLOCKED_S:
            if self.press():
                quiet_s = 0.0
                assert self.sent * self._size < FLOOD_BYTES, "the publisher is not slowed"
                if self.sent % 50 == 0:
                    await asyncio.sleep(0)
            else:
                await asyncio.sleep(STEP_S)
                quiet_s += STEP_S

    async def finish_message(self) -> None:
        """Send what is missing of the last message, which was begun."""
        if self._rest:
            await self._client.send(self._rest)
            self.sent += 1
            self._rest = b""

    async def send_more(self, count: int) -> None:
        await self.finish_message()
        for _ in range(count):
            await self._client.send(self._next())
            self.sent += 1
