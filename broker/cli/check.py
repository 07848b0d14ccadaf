"""``leveret check``: is a data folder sound? Says what it found, changes nothing.

Downstream: ``storage/check.py``.
"""

from __future__ import annotations

import argparse
import json
import sys

from leveret.broker.cli import folder
from leveret.broker.config import SettingsError


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
    except FolderInUse as error:
        return folder.fail(
            options, f"not checked: {error}. Stop it first, or check a backup of it once restored"
        )
    except OSError as error:
        return folder.fail(options, f"not checked: {error}")
    if options.json:
        print(
            json.dumps(
                {
                    "ok": report.is_sound,
                    "files": [file._asdict() for file in report.files],
                    "problems": [problem._asdict() for problem in report.problems],
                    "remarks": [remark._asdict() for remark in report.remarks],
                }
            )
        )
        return 0 if report.is_sound else folder.FAILED
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
    return 0 if report.is_sound else folder.FAILED
