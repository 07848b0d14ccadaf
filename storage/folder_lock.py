"""One process at a time works on a data folder: an advisory lock on the file ``lock`` in it.

The kernel gives the lock back when the process ends, however it ends, so a stale one does not
exist. The file itself stays: whoever deleted it would let two processes lock two files.
"""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path

from leveret.storage.vhost_store import StoreError

log = logging.getLogger(__name__)

LOCK_FILE = "lock"


class FolderInUse(StoreError):
    """Another process works on the folder."""


class FolderLock:
    """``take`` at once or not at all; ``with`` does both ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor = -1

    def take(self) -> None:
        """Raises FolderInUse, or OSError where the file cannot be made."""
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            by = f"process {owner}" if owner.isdigit() else "another process"
            raise FolderInUse(
                f"the data folder {self._folder} is in use by {by}: a broker runs on it, or a"
                " command works on it"
            ) from None
        except OSError as error:
            # Some network file systems know no locks; a broker on one is better than none.
            log.warning("%s: cannot be locked, be sure to use it once: %s", self._folder, error)
        self._descriptor = descriptor
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except OSError:
            pass  # a full disk: the lock holds all the same, only its owner is not named

    def release(self) -> None:
        """Twice is fine."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> FolderLock:
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
