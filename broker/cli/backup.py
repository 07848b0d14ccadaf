"""``leveret backup`` and ``leveret restore``: all of a data folder as one file, and back.

A broker that runs makes the backup itself, asked through its control socket; where none runs the
command does. Downstream: ``broker/admin/client.py``, ``storage/backup.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from leveret.broker.cli import folder
from leveret.broker.config import SettingsError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    backup = commands.add_parser(
        "backup",
        help="write all of a broker's data to one file, while it runs or not",
        description="Write everything that is durable to one file: all of the same moment, while "
        "the broker goes on serving. A file whose name ends in .gz or .tgz is compressed. One of "
        "that name is replaced when the new one is complete. Exits with 0 if the backup was made, "
        "1 if not, 2 if the settings are wrong.",
        allow_abbrev=False,
    )
    backup.add_argument("file", metavar="FILE", help="the archive to write")
    folder.add_flags(backup)
    backup.set_defaults(run=run_backup)
    restore = commands.add_parser(
        "restore",
        help="make a data folder of a backup",
        description="Unpack a backup, check it, and put it in place; no broker may run there. "
        "Exits with 0 if the data folder is as the backup was, 1 if nothing was changed, 2 if the "
        "settings are wrong.",
        allow_abbrev=False,
    )
    restore.add_argument("file", metavar="FILE", help="the archive to read")
    folder.add_flags(restore)
    restore.add_argument(
        "--force",
        action="store_true",
        help="also where there is data already; it is kept, in a folder replaced-...",
    )
    restore.set_defaults(run=run_restore)


def run_backup(options: argparse.Namespace) -> int:
    from leveret.broker.admin.client import ControlError, NotRunning, ask
    from leveret.storage.backup import BackupError
    from leveret.storage.vhost_store import StoreError

    line = folder.ProgressLine(wanted=not options.json)
    try:
        data = folder.data_folder(options)
        # The broker has a working directory of its own.
        file = os.path.abspath(options.file)
        try:
            made = ask(data, {"command": "backup", "file": file}, line.show, timeout_s=120.0)
        except NotRunning:
            made = _back_up_stopped(data, Path(file), line)
    except SettingsError as error:
        return folder.fail(options, str(error), folder.BAD_SETTINGS)
    except (BackupError, ControlError, StoreError, OSError) as error:
        line.clear()
        return folder.fail(options, str(error))
    line.clear()
    if options.json:
        print(json.dumps({"ok": True, **made}))
    else:
        count = len(made["files"])
        print(
            f"{made['file']}: {folder.size(made['size_bytes'])},"
            f" {count} {'file' if count == 1 else 'files'}, in {made['seconds']:.1f} s"
            f" (commits were held for {1000 * made['held_s']:.0f} ms)"
        )
        for name in made.get("left_out", ()):
            print(f"leveret: vhost '{name}' is down and NOT in the backup", file=sys.stderr)
    return 0


def _back_up_stopped(data: Path, file: Path, line: folder.ProgressLine) -> dict[str, Any]:
    from leveret.storage.backup import BackupError, back_up_folder
    from leveret.storage.folder_lock import FolderLock

    if not data.is_dir():
        raise BackupError(f"there is no data folder {data}, and no broker runs on it")
    with FolderLock(data):
        made = back_up_folder(
            data,
            file,
            created_at=time.time(),
            tell=lambda progress: line.show(progress._asdict()),
        )
    return made._asdict()


def run_restore(options: argparse.Namespace) -> int:
    from leveret.storage.backup import BackupError, restore
    from leveret.storage.folder_lock import FolderLock
    from leveret.storage.vhost_store import StoreError

    line = folder.ProgressLine(wanted=not options.json)
    try:
        data = folder.data_folder(options)
        # First: who mistypes the file's name should not find a new folder.
        with Path(options.file).open("rb"):
            pass
        with FolderLock(data):
            report, aside = restore(
                Path(options.file),
                data,
                force=options.force,
                tell=lambda progress: line.show(progress._asdict()),
            )
    except SettingsError as error:
        return folder.fail(options, str(error), folder.BAD_SETTINGS)
    except (BackupError, StoreError, OSError) as error:
        line.clear()
        return folder.fail(options, str(error))
    line.clear()
    if options.json:
        files = [file._asdict() for file in report.files]
        shown = None if aside is None else str(aside)
        print(json.dumps({"ok": True, "data": str(data), "files": files, "replaced": shown}))
        return 0
    for broker in report.broker:
        print(f"{broker.vhosts} vhosts, {broker.users} users")
    for file in report.files:
        print(f"vhost '{file.vhost}': {file.queues} queues, {file.messages} messages")
    if aside is not None:
        print(f"what was there before is in {aside}: delete it when you no longer need it")
    print(f"restored to {data}")
    return 0
