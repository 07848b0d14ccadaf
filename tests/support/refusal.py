"""How a broker refuses a virtual host: its connection.close, as clients rarely show it."""

from __future__ import annotations

from pamqp import commands

from tests.support.raw_client import RawClient, handshake


async def refusal(port: int, vhost: str) -> tuple[int, str, int, int]:
    """Code, text and method of the connection.close that answers connection.open."""
    answers = (commands.Connection.Start, commands.Connection.Tune, commands.Connection.Close)
    async with await RawClient.connect(port) as client:
        for part, answer in zip(handshake(vhost=vhost), answers, strict=True):
            await client.send(part)
            close = await client.expect(answer)
    assert isinstance(close, commands.Connection.Close)
    return (
        close.reply_code or 0,
        close.reply_text or "",
        close.class_id or 0,
        close.method_id or 0,
    )
