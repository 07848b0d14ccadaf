"""``leveret policy``: set, clear and list the policies of a broker that runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from leveret.broker.cli import asking, folder


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "policy",
        help="set, clear and list policies",
        description="Policies give settings to queues and exchanges by the pattern of their names.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    set_parser = actions.add_parser(
        "set",
        help="set a policy, or change it",
        description="Set a policy, or change the one of that name. It applies at once, also to what"
        " is there already.",
        epilog="""example: leveret policy set limited '^jobs\\.' '{"max-length": 10000}'"""
        " --apply-to queues",
        allow_abbrev=False,
    )
    set_parser.add_argument("name", metavar="NAME")
    set_parser.add_argument("pattern", metavar="PATTERN", help="regular expression for names")
    set_parser.add_argument("definition", metavar="DEFINITION", help="settings, a JSON object")
    set_parser.add_argument(
        "--priority", type=int, default=0, help="of several that match the highest wins"
    )
    set_parser.add_argument("--apply-to", choices=("all", "queues", "exchanges"), default="all")
    _add_flags(set_parser)
    set_parser.set_defaults(run=_set)

    clear_parser = actions.add_parser("clear", help="clear a policy", allow_abbrev=False)
    clear_parser.add_argument("name", metavar="NAME")
    _add_flags(clear_parser)
    clear_parser.set_defaults(run=_clear)

    list_parser = actions.add_parser(
        "list", help="list policies, the ones that are tried first at the top", allow_abbrev=False
    )
    _add_flags(list_parser)
    list_parser.set_defaults(run=_list)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-p", "--vhost", metavar="VHOST", default="/", help="default: /")
    parser.add_argument(
        "--operator", action="store_true", help="operator policies, which limit what others set"
    )
    folder.add_flags(parser)


def _kind(options: argparse.Namespace) -> str:
    return "operator policy" if options.operator else "policy"


def _set(options: argparse.Namespace) -> int:
    try:
        definition = json.loads(options.definition)
    except ValueError as error:
        return folder.fail(options, f"the definition is not JSON: {error}", folder.BAD_SETTINGS)
    request = {
        "command": "set_policy",
        "vhost": options.vhost,
        "operator": options.operator,
        "name": options.name,
        "pattern": options.pattern,
        "definition": definition,
        "priority": options.priority,
        "apply_to": options.apply_to,
    }
    done = f"{_kind(options)} '{options.name}' is set in vhost '{options.vhost}'"
    return asking.ask_and_tell(options, request, lambda result: [done])


def _clear(options: argparse.Namespace) -> int:
    request = {
        "command": "clear_policy",
        "vhost": options.vhost,
        "operator": options.operator,
        "name": options.name,
    }
    done = f"{_kind(options)} '{options.name}' is cleared in vhost '{options.vhost}'"
    return asking.ask_and_tell(options, request, lambda result: [done])


def _list(options: argparse.Namespace) -> int:
    request = {
        "command": "list_policies",
        "vhost": options.vhost,
        "operator": options.operator,
    }
    return asking.ask_and_tell(options, request, _table, key="policies")


def _table(policies: list[dict[str, Any]]) -> Iterator[str]:
    rows = [("name", "pattern", "apply-to", "priority", "definition")]
    for policy in policies:
        rows.append(
            (
                policy["name"],
                policy["pattern"],
                policy["apply-to"],
                f"{policy['priority']}",
                json.dumps(policy["definition"], ensure_ascii=False),
            )
        )
    yield from asking.columns(rows)
