"""``leveret …``: finds the command and runs it.

Each command is a module with ``add_parser`` and ``run``. What a command needs beyond parsing its
flags it imports when it runs, so that ``leveret --help`` does not load a broker.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from leveret import __version__
from leveret.broker.cli import (
    analytics,
    backup,
    check,
    limits,
    ping,
    policy,
    restart_vhost,
    serve,
    status,
    trace,
)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="leveret", description="An AMQP 0-9-1 broker that speaks as RabbitMQ does."
    )
    parser.add_argument("--version", action="version", version=f"leveret {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    serve.add_parser(commands)
    ping.add_parser(commands)
    status.add_parser(commands)
    backup.add_parser(commands)
    check.add_parser(commands)
    policy.add_parser(commands)
    limits.add_parser(commands)
    restart_vhost.add_parser(commands)
    trace.add_parser(commands)
    analytics.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0 well, 1 failed, 2 asked wrongly."""
    options = build_parser().parse_args(argv)
    status: int = options.run(options)
    return status
