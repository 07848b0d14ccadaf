"""What this broker calls itself, and names for what RabbitMQ would name by a process id.

Consumers of events tell connections and channels apart by their ``pid``. Ours have none, so each
gets a name of the same form that nothing else in this broker has.
"""

from __future__ import annotations

import os
import platform
from itertools import count

NODE_NAME = f"leveret@{platform.node()}"

_numbers = count(1)


def make_pid() -> str:
    """``<node.process.number.0>``, as RabbitMQ prints a process id."""
    return f"<{NODE_NAME}.{os.getpid()}.{next(_numbers)}.0>"
