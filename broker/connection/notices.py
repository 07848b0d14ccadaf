"""What a connection's mailbox gets beside chunks and what its channels send (``context.py``)."""

from __future__ import annotations

from typing import NamedTuple


class EndOfStream(NamedTuple):
    """In the ordinary lane, behind the last chunk."""


class Expired(NamedTuple):
    """A deadline has passed: handshake, heartbeat or close."""

    what: str


class Shutdown(NamedTuple):
    """The broker stops."""


class Evicted(NamedTuple):
    """Its virtual host or its user is gone: it ends now, whatever its channels wait for."""

    text: str


class Lost(NamedTuple):
    """The socket is gone, as we noticed although we do not read it."""
