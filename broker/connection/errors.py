"""How a connection ends without a connection.close."""

from __future__ import annotations


class PeerGone(Exception):
    """The socket was closed, or the peer has been silent for too long."""


class SilentClose(Exception):
    """The broker hangs up without a word, after a while; the reason goes to the log."""

    def __init__(self, reason: str, delay_s: float = 3.0) -> None:
        super().__init__(reason)
        self.delay_s = delay_s
