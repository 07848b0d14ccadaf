"""``leveret limits``: what virtual hosts and users of a broker that runs may have."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from leveret.broker.cli import asking, folder


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "limits",
        help="set, clear and list limits of virtual hosts and users",
        description="Limits: max-connections, max-channels, max-queues and max-consumers of a"
        " virtual host; max-connections, max-channels and max-consumers of a user.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    set_parser = actions.add_parser(
        "set",
        help="set limits, and leave the others",
        epilog="""example: leveret limits set '{"max-connections": 100}' --user app""",
        allow_abbrev=False,
    )
    set_parser.add_argument(
        "definition", metavar="LIMITS", help="a JSON object of numbers; a negative one is no limit"
    )
    _add_flags(set_parser)
    set_parser.set_defaults(run=_set)

    clear_parser = actions.add_parser("clear", help="clear a limit, or all", allow_abbrev=False)
    clear_parser.add_argument("limit", metavar="LIMIT", nargs="?", help="default: all of them")
    _add_flags(clear_parser)
    clear_parser.set_defaults(run=_clear)

    list_parser = actions.add_parser(
        "list", help="list limits, of one virtual host or user, or of all", allow_abbrev=False
    )
    _add_flags(list_parser)
    list_parser.set_defaults(run=_list)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    whose = parser.add_mutually_exclusive_group()
    whose.add_argument("-p", "--vhost", metavar="VHOST", help="default: /")
    whose.add_argument("--user", metavar="USER")
    folder.add_flags(parser)


def _whose(options: argparse.Namespace) -> tuple[dict[str, object], str]:
    if options.user is not None:
        return {"user": options.user}, f"user '{options.user}'"
    vhost = "/" if options.vhost is None else options.vhost
    return {"vhost": vhost}, f"vhost '{vhost}'"


def _set(options: argparse.Namespace) -> int:
    try:
        limits = json.loads(options.definition)
    except ValueError as error:
        return folder.fail(options, f"the limits are not JSON: {error}", folder.BAD_SETTINGS)
    whose, name = _whose(options)
    request = {"command": "set_limits", "limits": limits, **whose}
    return asking.ask_and_tell(options, request, lambda result: [f"limits of {name} are set"])


def _clear(options: argparse.Namespace) -> int:
    whose, name = _whose(options)
    request = {"command": "clear_limits", "limit": options.limit, **whose}
    what = "limits" if options.limit is None else options.limit
    return asking.ask_and_tell(options, request, lambda result: [f"{what} of {name} cleared"])


def _list(options: argparse.Namespace) -> int:
    given = options.user is not None or options.vhost is not None
    whose, _ = _whose(options) if given else ({}, "")
    return asking.ask_and_tell(options, {"command": "list_limits", **whose}, _table)


def _table(limits: dict[str, dict[str, dict[str, Any]]]) -> Iterator[str]:
    rows = [("of", "name", "limit", "number")]
    for of, by_name in (("vhost", limits["vhosts"]), ("user", limits["users"])):
        rows += [
            (of, name, limit, f"{number}")
            for name, numbers in by_name.items()
            for limit, number in numbers.items()
        ]
    yield from asking.columns(rows)
