"""``leveret status``: what a broker that runs says of itself, through its control socket."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from leveret.broker.cli import folder
from leveret.broker.config import SettingsError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "status",
        help="show what the broker of a data folder does",
        description="Ask the broker that runs on a data folder what it does. Exits with 0 if it "
        "answered, 1 if none did, 2 if the settings are wrong.",
        allow_abbrev=False,
    )
    folder.add_flags(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from leveret.broker.admin.client import ControlError, NotRunning, ask

    try:
        status = ask(folder.data_folder(options), {"command": "status"}, timeout_s=10.0)
    except SettingsError as error:
        return folder.fail(options, str(error), folder.BAD_SETTINGS)
    except (ControlError, NotRunning) as error:
        return folder.fail(options, str(error))
    if options.json:
        print(json.dumps({"ok": True, **status}))
    else:
        print("\n".join(describe(status)))
    return 0


def describe(status: dict[str, Any]) -> Iterator[str]:
    """The status in lines for people."""
    yield (
        f"Leveret {status['version']}, process {status['pid']},"
        f" up {_duration(status['uptime_s'])}, {status['codec']} codec"
    )
    yield f"data folder {status['data']}"
    for listener in status["listeners"]:
        yield (
            f"{listener['protocol']} on {listener['ip_address']}:{listener['port']},"
            f" {listener['state']}"
        )
    yield f"{status['connections']} connections"
    loop = status["loop"]
    yield (
        f"longest turn of the event loop {1000 * loop['longest_turn_cpu_s']:.0f} ms of CPU time,"
        f" {1000 * loop['longest_turn_wall_s']:.0f} ms by the clock"
    )
    for vhost in status["vhosts"]:
        yield (
            f"vhost '{vhost['name']}': {vhost['queues']} queues, {vhost['exchanges']} exchanges,"
            f" {vhost['consumers']} consumers, {vhost['messages']} messages"
            f" ({vhost['messages_ready']} ready, {vhost['messages_unacknowledged']} unacked)"
        )
        store = vhost["store"].get("persistent")
        if store:
            yield (
                f"  store: {store['commits']:.0f} commits, {store['rows']:.0f} rows,"
                f" {folder.size(store['bytes'])} written, {store['failures']:.0f} failures,"
                f" longest commit {1000 * store['longest_commit_s']:.0f} ms"
            )
    event_log = status["event_log"]
    if event_log:
        yield (
            f"event log ({event_log['level']}): {event_log['events']} events,"
            f" {folder.size(event_log['bytes'])} written, {event_log['segments']} segments sealed,"
            f" {event_log['shed']} events left out"
        )
        if event_log["trouble"]:
            yield f"  CANNOT BE WRITTEN: {event_log['trouble']}"
    for name, reason in status["vhosts_down"].items():
        yield f"vhost '{name}': DOWN. {reason}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    shown = [f"{number} {unit}" for number, unit in parts if number]
    return " ".join(shown[:2]) or "0 s"
