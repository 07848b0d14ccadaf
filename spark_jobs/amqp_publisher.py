"""Publishing with confirms that are not waited for one by one.

Messages go out ahead of their confirms, up to a number and a size; ``flush`` returns when the
broker has taken responsibility for every one of them. A message that is refused, or returned
because no queue takes it, makes the next call raise.

Upstream: the data source's writer and the alerts. Downstream: ``amqp_link.py``.
Invariant: what was published before a ``flush`` that returned is safe in its queues.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Any, Final

from pika import BasicProperties  # type: ignore[import-untyped]
from pika.spec import Basic  # type: ignore[import-untyped]

from leveret.spark_jobs.amqp_link import Link, LinkError, LinkLost

# How far publishing may be ahead of the confirms.
WINDOW_BYTES: Final = 8 << 20
# A broker that is short of memory or disk stops reading, for as long as it takes.
CONFIRM_S: Final = 300.0


class Publisher:
    """Publishes through a link that nobody else publishes through."""

    def __init__(self, link: Link, *, window: int) -> None:
        """Raises LinkError if the broker does not confirm."""
        self._link = link
        self._window = window
        self._next_tag = 1
        # Sizes by sequence number of what is not confirmed, and their sum.
        self._unconfirmed: dict[int, int] = {}
        self._unconfirmed_bytes = 0
        self._refusal: str | None = None
        self.published = 0
        with link.lock:
            link.channel.add_on_return_callback(self._on_return)
            link.ask(
                lambda answered: link.channel.confirm_delivery(self._on_confirm, answered),
                "confirm.select",
            )

    def publish(
        self,
        exchange: str,
        routing_key: str,
        body: bytes,
        properties: BasicProperties,
        *,
        mandatory: bool,
    ) -> None:
        """Send a message; waits while too many are unconfirmed. Raises LinkError."""
        with self._link.lock:
            self._link.channel.basic_publish(
                exchange, routing_key, body, properties, mandatory=mandatory
            )
            self._unconfirmed[self._next_tag] = len(body)
            self._unconfirmed_bytes += len(body)
            self._next_tag += 1
            if self._is_ahead():
                # Down to half, so that confirms are not waited for at every message from here on.
                self._wait(self._window // 2, WINDOW_BYTES // 2)

    def flush(self) -> None:
        """Return once everything is confirmed. Raises LinkError."""
        self._wait(0, 0)

    def _is_ahead(self) -> bool:
        return len(self._unconfirmed) >= self._window or self._unconfirmed_bytes >= WINDOW_BYTES

    def _wait(self, count: int, size: int) -> None:
        def is_done() -> bool:
            return self._refusal is not None or (
                len(self._unconfirmed) <= count and self._unconfirmed_bytes <= size
            )

        if not self._link.wait(is_done, CONFIRM_S):
            raise LinkLost(
                f"{len(self._unconfirmed)} messages were not confirmed within {CONFIRM_S:.0f} s: "
                f"is the broker short of memory or disk?"
            )
        if self._refusal is not None:
            raise LinkError(self._refusal)

    def _on_confirm(self, frame: Any) -> None:
        method = frame.method
        tag = method.delivery_tag
        settled = self._up_to(tag) if method.multiple else [tag]
        for one in settled:
            self._unconfirmed_bytes -= self._unconfirmed.pop(one)
        if isinstance(method, Basic.Nack):
            self._refusal = self._refusal or (
                "the broker refused a message (basic.nack): a queue it goes to may be full "
                "(overflow reject-publish)"
            )
        else:
            self.published += len(settled)

    def _up_to(self, tag: int) -> list[int]:
        return list(takewhile(lambda one: one <= tag, self._unconfirmed))

    def _on_return(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        self._refusal = self._refusal or (
            f"no queue takes a message with routing key '{method.routing_key}' published to "
            f"exchange '{method.exchange}' ({method.reply_text}): bind a queue, or set the option "
            f"mandatory to false to let such messages go"
        )
