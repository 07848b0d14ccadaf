"""``leveret trace``: turn the firehose of a virtual host on and off.

Downstream: the broker that runs, through its control socket.
"""

from __future__ import annotations

import argparse

from leveret.broker.cli import asking, folder


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "trace",
        help="turn the firehose of a virtual host on or off",
        description="While it is on, everything that is published and delivered is copied to the"
        " exchange amq.rabbitmq.trace. It is off after a restart.",
        allow_abbrev=False,
    )
    parser.add_argument("state", choices=("on", "off"))
    parser.add_argument("-p", "--vhost", metavar="VHOST", default="/", help="default: /")
    folder.add_flags(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    request: dict[str, object] = {"command": f"trace_{options.state}", "vhost": options.vhost}
    told = [f"tracing is {options.state} for vhost '{options.vhost}'"]
    return asking.ask_and_tell(options, request, lambda result: told)
