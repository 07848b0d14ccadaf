"""What is where in a data folder, for whoever works on the files of a broker that does not run.

Upstream: ``check.py``, ``backup.py``, ``leveret check --move-aside`` and the first start of a
broker. ``broker.db`` is the broker's, ``vhosts/NAME.db`` a virtual host's; each may have a WAL and
an index of it (``-wal``, ``-shm``) beside it, and belongs together with them.
"""

from __future__ import annotations

import logging
import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote

from leveret.storage.broker_store import BROKER_FILE
from leveret.storage.connections import open_read_only
from leveret.storage.folder_sync import sync_folder
from leveret.storage.vhost_store import TRANSIENT_SUFFIX, file_stem

log = logging.getLogger(__name__)

# The WAL goes first wherever files are moved: SQLite deletes one that it finds beside a new file.
_PARTS = ("-wal", "-shm", "")


def database_files(data: Path) -> list[Path]:
    """The files of a data folder that hold what must survive."""
    found = [data / BROKER_FILE] if (data / BROKER_FILE).exists() else []
    return found + vhost_files(data)


def vhost_files(data: Path) -> list[Path]:
    found = sorted((data / "vhosts").glob("*.db"))
    return [path for path in found if not path.name.endswith(TRANSIENT_SUFFIX)]


def found_vhosts(data: Path) -> list[str]:
    """The names of the virtual hosts that have a file; also of one that is damaged."""
    names = (_vhost_name(path) for path in vhost_files(data))
    return [name for name in names if name is not None]


def _vhost_name(path: Path) -> str | None:
    try:
        with closing(open_read_only(path, is_in_use=False)) as connection:
            [(name,)] = connection.execute("SELECT value FROM meta WHERE name = 'vhost'")
            return bytes(name).decode("utf-8", "surrogateescape")
    except (sqlite3.Error, ValueError, TypeError):
        # Most names can be told from that of the file.
        name = unquote(path.stem, errors="surrogateescape")
        if file_stem(name) == path.stem:
            return name
        log.error("%s: cannot be read, and whose file it is cannot be told: left alone", path)
        return None


def move_aside(path: Path, stamp: str) -> Path:
    """Give a damaged file and what belongs to it another name; returns it.

    Nothing is overwritten: where the name is taken, it gets a number.
    """
    number, aside = 1, Path(f"{path}.damaged-{stamp}")
    while any(Path(f"{aside}{part}").exists() for part in _PARTS):
        number += 1
        aside = Path(f"{path}.damaged-{stamp}-{number}")
    for part in _PARTS:
        if Path(f"{path}{part}").exists():
            Path(f"{path}{part}").rename(f"{aside}{part}")
    sync_folder(path.parent)
    return aside
