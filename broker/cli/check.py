"""``leveret check``: is a data folder sound? Says what it found, and changes nothing unless asked.

With ``--move-aside`` a file that is damaged gets another name, so that the next start makes a new
one: nothing is ever deleted or overwritten. Downstream: ``storage/check.py``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from leveret.broker.cli import folder
from leveret.broker.config import SettingsError

if TYPE_CHECKING:
    from leveret.storage.check import Report


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "check",
        help="verify the data folder of a broker that is stopped",
        description="Compare the queue index with the message store and the counters with what "
        "is there, and let SQLite check its files. Exits with 0 if all is well, 1 if something is "
        "wrong or could not be checked, 2 if the settings are wrong.",
        allow_abbrev=False,
    )
    folder.add_flags(parser)
    parser.add_argument(
        "--move-aside",
        action="store_true",
        help="rename files that are damaged to NAME.damaged-..., to start without what they hold",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from leveret.storage.check import check_folder
    from leveret.storage.folder_lock import FolderInUse, FolderLock

    try:
        data = folder.data_folder(options)
    except SettingsError as error:
        return folder.fail(options, str(error), folder.BAD_SETTINGS)
    if not data.is_dir():
        return folder.fail(options, f"there is no data folder {data}")
    try:
        with FolderLock(data):
            report = check_folder(data)
            moved = _move_aside(data, report) if options.move_aside else {}
    except FolderInUse as error:
        return folder.fail(
            options, f"not checked: {error}. Stop it first, or check a backup of it once restored"
        )
    except OSError as error:
        return folder.fail(options, f"not checked: {error}")
    if options.json:
        _print_json(report, moved)
    else:
        _print_lines(report, moved, asked=options.move_aside)
    return 0 if report.is_sound else folder.FAILED


def _move_aside(data: Path, report: Report) -> dict[str, str]:
    from leveret.storage.data_folder import move_aside

    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    return {
        name: move_aside(data / name, stamp).relative_to(data).as_posix() for name in report.damaged
    }


def _print_json(report: Report, moved: dict[str, str]) -> None:
    print(
        json.dumps(
            {
                "ok": report.is_sound,
                "broker": [file._asdict() for file in report.broker],
                "files": [file._asdict() for file in report.files],
                "problems": [problem._asdict() for problem in report.problems],
                "remarks": [remark._asdict() for remark in report.remarks],
                "damaged": report.damaged,
                "moved_aside": moved,
            }
        )
    )


def _print_lines(report: Report, moved: dict[str, str], *, asked: bool) -> None:
    for broker in report.broker:
        print(f"{broker.file}: {broker.vhosts} vhosts, {broker.users} users")
    for file in report.files:
        end = "" if file.is_clean else "; not stopped in order, messages will be redelivered"
        print(
            f"{file.file}: vhost '{file.vhost}', {file.queues} queues, {file.messages} messages"
            f" ({folder.size(file.message_bytes)}), {file.bodies} separate bodies{end}"
        )
    for remark in report.remarks:
        print(f"remark: {remark}")
    for problem in report.problems:
        print(f"problem: {problem}", file=sys.stderr)
    count = len(report.problems)
    print(f"{count} {'problem' if count == 1 else 'problems'}" if count else "no problems")
    for name, aside in moved.items():
        print(f"{name} is now {aside}: the next start does without it")
    if report.damaged and not asked:
        names = ", ".join(report.damaged)
        print(f"to start without what is in {names}: leveret check --move-aside")
    elif asked and not moved:
        print("nothing was moved aside: no file is damaged")
