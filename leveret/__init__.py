"""Leveret: an AMQP 0-9-1 broker.

``from leveret import Broker`` embeds one in a program of your own. ``Broker`` is imported when it
is first asked for, so that ``leveret --version`` and the codec do not pay for the whole broker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leveret.broker.server import Broker

__all__ = ["Broker", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "Broker":
        from leveret.broker.server import Broker

        return Broker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
