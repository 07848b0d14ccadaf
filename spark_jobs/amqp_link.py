"""One AMQP connection with one channel, driven by whoever calls it.

pika's blocking adapter waits for every confirm by itself; its asynchronous one wants the program to
be built around callbacks. Here the asynchronous one is turned by its caller: ``wait`` polls until a
condition holds, and what arrives meanwhile goes to callbacks that only append and count.

Spark may leave a connection alone for minutes while a batch is worked on. A thread that does
nothing but turn the loop now and then answers heartbeats in the meantime; a lock keeps it and the
caller apart.

Upstream: the data source's readers and writers, and the alerts of ``tail``. Downstream: pika.
Invariant: after a failure every call raises it; a link is never opened twice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

import pika  # type: ignore[import-untyped]
from pika.adapters.select_connection import IOLoop  # type: ignore[import-untyped]
from pika.exceptions import (  # type: ignore[import-untyped]
    AMQPError,
    ChannelClosedByBroker,
    ConnectionClosed,
    ProbableAuthenticationError,
)

# Answers to what is asked of the broker come within this, or the link is taken for broken.
ANSWER_S: Final = 30.0
_OPEN_S: Final = 30.0
_CLOSE_S: Final = 5.0
_TURN_EVERY_S: Final = 0.5


class LinkError(Exception):
    """The broker cannot be used; the text says what to do."""

    def __init__(self, text: str, code: int = 0) -> None:
        """``code`` is AMQP's, where the broker gave one."""
        super().__init__(text)
        self.code = code


class LinkLost(LinkError):
    """The connection could not be made, or is gone: trying again may help."""


class Link:
    """A connection and its channel, which is there once ``open`` has returned."""

    def __init__(self, url: str, name: str) -> None:
        """``name`` is shown by the broker. Raises LinkError if the URL is none."""
        self._shown_url = without_password(url)
        self._parameters = parameters(url)
        self._parameters.client_properties = {"connection_name": name}
        self._loop = IOLoop()
        self._lock = threading.RLock()
        self._connection: Any = None
        self._channel: Any = None
        # Why it can no longer be used; set once.
        self._failure: LinkError | None = None
        self._closing = threading.Event()
        self._turner: threading.Thread | None = None

    @property
    def channel(self) -> Any:
        """Use it while ``lock`` is held only. Raises LinkError if it is gone."""
        if self._failure is not None:
            raise self._failure
        return self._channel

    @property
    def lock(self) -> threading.RLock:
        return self._lock

    def open(self) -> None:
        """Connect and open the channel. Raises LinkError."""
        with self._lock:
            self._loop.activate_poller()
            self._connection = pika.SelectConnection(
                self._parameters,
                on_open_callback=self._on_connection_open,
                on_open_error_callback=self._on_open_error,
                on_close_callback=self._on_connection_closed,
                custom_ioloop=self._loop,
            )
            try:
                if not self.wait(lambda: self._channel is not None, _OPEN_S):
                    raise LinkLost(f"{self._shown_url} did not answer within {_OPEN_S:.0f} s")
            except LinkError:
                self.close()
                raise
        self._turner = threading.Thread(target=self._turn, name="leveret-heartbeats", daemon=True)
        self._turner.start()

    def wait(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """Turn the connection until the condition holds; whether it did in time.

        Raises LinkError if the connection or the channel ends first.
        """
        with self._lock:
            deadline = time.monotonic() + timeout_s
            left = timeout_s
            while not is_done():
                if self._failure is not None:
                    raise self._failure
                if left < 0:
                    return False
                self._poll(left)
                left = deadline - time.monotonic()
            return True

    def push(self) -> None:
        """Send what was handed to the channel, as far as the socket takes it. Raises LinkError."""
        self.wait(lambda: False, 0)

    def ask(self, send: Callable[[Callable[[Any], None]], object], what: str) -> Any:
        """Send a method that is answered and return the answer. Raises LinkError."""
        answers: list[Any] = []
        with self._lock:
            send(answers.append)
            if not self.wait(lambda: bool(answers), ANSWER_S):
                raise LinkLost(f"{self._shown_url} did not answer {what} in {ANSWER_S:.0f} s")
        return answers[0]

    def close(self) -> None:
        """End the connection, in order if it is still there. Never raises; may be called again."""
        self._closing.set()
        with self._lock:
            if self._connection is None:
                return
            if self._connection.is_open:
                self._connection.close()
            deadline = time.monotonic() + _CLOSE_S
            while not self._connection.is_closed and time.monotonic() < deadline:
                self._poll(_CLOSE_S)
            # pika gives the socket back a turn later.
            self._poll(0)
            self._poll(0)
            self._connection = None
            self._failure = self._failure or LinkLost("the connection was closed")
            self._loop.close()
        if self._turner is not None:
            self._turner.join()

    def __enter__(self) -> Link:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _poll(self, longest_s: float) -> None:
        # pika's poll ends at its next timer, so one of our own bounds it.
        timer = self._loop.call_later(max(longest_s, 0), _nothing)
        try:
            self._loop.poll()
            self._loop.process_timeouts()
        except (AMQPError, OSError) as error:
            self._fail(LinkLost(f"{self._shown_url}: {_told(error)}"))
        finally:
            self._loop.remove_timeout(timer)

    def _turn(self) -> None:
        while not self._closing.wait(_TURN_EVERY_S):
            with self._lock:
                if self._closing.is_set() or self._failure is not None:
                    return
                # Twice: a heartbeat that falls due in the first goes out in the second.
                self._poll(0)
                self._poll(0)

    def _on_connection_open(self, connection: Any) -> None:
        connection.channel(on_open_callback=self._on_channel_open)

    def _on_channel_open(self, channel: Any) -> None:
        channel.add_on_close_callback(self._on_channel_closed)
        self._channel = channel

    def _on_open_error(self, connection: Any, error: BaseException) -> None:
        if isinstance(error, ProbableAuthenticationError | ConnectionClosed):
            # The broker has spoken: trying again would hear the same.
            self._fail(LinkError(f"{self._shown_url} refused the connection: {_told(error)}"))
        else:
            self._fail(LinkLost(f"{self._shown_url} cannot be reached: {_told(error)}"))

    def _on_connection_closed(self, connection: Any, error: BaseException) -> None:
        self._fail(LinkLost(f"the connection to {self._shown_url} ended: {_told(error)}"))

    def _on_channel_closed(self, channel: Any, error: BaseException) -> None:
        if isinstance(error, ChannelClosedByBroker):
            self._fail(
                LinkError(f"{self._shown_url} refused: {error.reply_text}", error.reply_code)
            )
        else:
            self._fail(LinkLost(f"the connection to {self._shown_url} ended: {_told(error)}"))

    def _fail(self, failure: LinkError) -> None:
        # What comes after the first is its consequence.
        self._failure = self._failure or failure


def parameters(url: str) -> Any:
    """What pika needs to connect. Raises LinkError if the URL is none."""
    parts = urlsplit(url)
    if parts.scheme not in ("amqp", "amqps") or not parts.hostname:
        raise LinkError(
            f"'{without_password(url)}' is no address of a broker: write "
            f"amqp://user:password@host:5672/vhost, with %2F for the virtual host /"
        )
    try:
        return pika.URLParameters(url)
    except (ValueError, TypeError) as error:
        raise LinkError(f"'{without_password(url)}' is no address of a broker: {error}") from error


def without_password(url: str) -> str:
    """The address as it may be shown."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    place = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{parts.username}:***@{place}"))


def _told(error: BaseException) -> str:
    """pika's exceptions often hide the one that says it, and some have no text at all."""
    inner = getattr(error, "exception", None)
    if isinstance(inner, BaseException):
        return _told(inner)
    if error.args and isinstance(error.args[0], BaseException):
        return _told(error.args[0])
    return str(error) or repr(error)


def _nothing() -> None:
    pass
