"""``leveret restart-vhost``: start a virtual host that went down, once its file was put right.

Downstream: the broker that runs, through its control socket.
"""

from __future__ import annotations

import argparse
import json

from leveret.broker.cli import folder
from leveret.broker.config import SettingsError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "restart-vhost",
        help="start a virtual host that is down",
        description="Start a virtual host that went down because its file was damaged or gone, "
        "after the file was restored or moved aside; the rest of the broker goes on meanwhile. "
        "Exits with 0 if it is up, 1 if not, 2 if the settings are wrong.",
        allow_abbrev=False,
    )
    parser.add_argument("vhost", metavar="NAME", help="the virtual host")
    folder.add_flags(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from leveret.broker.admin.client import ControlError, NotRunning, ask

    request: dict[str, object] = {"command": "restart_vhost", "vhost": options.vhost}
    try:
        started = ask(folder.data_folder(options), request)
    except SettingsError as error:
        return folder.fail(options, str(error), folder.BAD_SETTINGS)
    except (ControlError, NotRunning) as error:
        return folder.fail(options, str(error))
    if options.json:
        print(json.dumps({"ok": True, **started}))
    else:
        print(
            f"vhost '{started['name']}' is up: {started['queues']} queues,"
            f" {started['messages']} messages"
        )
    return 0
