"""Scenarios the broker does not yet play as RabbitMQ does, and why.

Each is expected to fail: the day one passes the suite says so, and its line goes.
"""

from __future__ import annotations

# "topic/scenario" -> the reason
PENDING: dict[str, str] = {}
