"""How a broker refuses or ends connections: its connection.close, as clients rarely show it."""

from __future__ import annotations

import asyncio

from aio_pika.abc import AbstractConnection
from pamqp import commands

from tests.support.raw_client import RawClient, handshake


async def refusal(port: int, vhost: str) -> tuple[int, str, int, int]:
    """Code, text and method of the connection.close that answers connection.open."""
    start_ok, tune_ok, opening = handshake(vhost=vhost)
    async with await RawClient.connect(port) as client:
        await client.send(start_ok)
        await client.expect(commands.Connection.Start)
        await client.send(tune_ok)
        await client.expect(commands.Connection.Tune)
        await client.send(opening)
        close = await client.expect(commands.Connection.Close)
    return (
        close.reply_code or 0,
        close.reply_text or "",
        close.class_id or 0,
        close.method_id or 0,
    )


def close_reason(connection: AbstractConnection) -> asyncio.Future[BaseException | None]:
    """Why the broker will have closed an open connection."""
    reason: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

    def on_close(_: object, error: BaseException | None) -> None:
        if not reason.done():
            reason.set_result(error)

    connection.close_callbacks.add(on_close)
    return reason
