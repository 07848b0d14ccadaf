"""What may go wrong on the wire, with the reply codes of AMQP 0-9-1.

``ChannelException`` closes a channel, ``ConnectionException`` the whole connection. They are
raised anywhere and turned into close frames in two places only: ``broker/channel/channel.py``
and ``broker/connection/reader.py``, which also fill in the method that failed.
"""

from __future__ import annotations

SYMBOLS = {
    311: "CONTENT_TOO_LARGE",
    312: "NO_ROUTE",
    313: "NO_CONSUMERS",
    320: "CONNECTION_FORCED",
    402: "INVALID_PATH",
    403: "ACCESS_REFUSED",
    404: "NOT_FOUND",
    405: "RESOURCE_LOCKED",
    406: "PRECONDITION_FAILED",
    501: "FRAME_ERROR",
    502: "SYNTAX_ERROR",
    503: "COMMAND_INVALID",
    504: "CHANNEL_ERROR",
    505: "UNEXPECTED_FRAME",
    506: "RESOURCE_ERROR",
    530: "NOT_ALLOWED",
    540: "NOT_IMPLEMENTED",
    541: "INTERNAL_ERROR",
}

_SHORT_STRING_MAX = 255


class AmqpError(Exception):
    """A reply code and a text; the method to blame is (0, 0) until somebody names it."""

    def __init__(self, code: int, text: str, method: tuple[int, int] = (0, 0)) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text
        self.method = method

    @property
    def reply_text(self) -> str:
        """``SYMBOL - text``, shortened as RabbitMQ does to what a short string holds."""
        symbol = SYMBOLS[self.code]
        whole = f"{symbol} - {self.text}" if self.text else symbol
        raw = whole.encode("utf-8", "surrogateescape")
        if len(raw) <= _SHORT_STRING_MAX:
            return whole
        return raw[: _SHORT_STRING_MAX - 3].decode("utf-8", "surrogateescape") + "..."


class ChannelException(AmqpError):
    """Closes the channel; the connection and its other channels go on."""


class ConnectionException(AmqpError):
    """Closes the connection."""


def access_refused(text: str) -> ChannelException:
    return ChannelException(403, text)


def not_found(text: str) -> ChannelException:
    return ChannelException(404, text)


def resource_locked(text: str) -> ChannelException:
    return ChannelException(405, text)


def precondition_failed(text: str) -> ChannelException:
    return ChannelException(406, text)


def connection_forced(text: str) -> ConnectionException:
    return ConnectionException(320, text)


def frame_error(text: str) -> ConnectionException:
    return ConnectionException(501, text)


def command_invalid(text: str) -> ConnectionException:
    return ConnectionException(503, text)


def channel_error(text: str) -> ConnectionException:
    return ConnectionException(504, text)


def unexpected_frame(text: str) -> ConnectionException:
    return ConnectionException(505, text)


def not_allowed(text: str) -> ConnectionException:
    return ConnectionException(530, text)


def not_implemented(text: str) -> ConnectionException:
    return ConnectionException(540, text)


def internal_error(text: str = "") -> ConnectionException:
    return ConnectionException(541, text)
