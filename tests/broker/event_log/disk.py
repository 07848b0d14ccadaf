"""A disk that is slow, or full, when the test says so: what the event log's writes meet."""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

DEADLINE_S = 20.0


class Disk:
    """Stands before the system's ``pwrite``, which nobody but the event log uses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._pwrite = os.pwrite
        self._is_free = threading.Event()
        self._is_free.set()
        self.is_full = False
        self.refused = 0
        monkeypatch.setattr(os, "pwrite", self._write)

    def hold(self) -> None:
        self._is_free.clear()

    def release(self) -> None:
        self._is_free.set()

    def _write(self, descriptor: int, data: memoryview, offset: int) -> int:
        assert self._is_free.wait(DEADLINE_S)
        if self.is_full:
            # As a real one does: some of it, then nothing.
            self.refused += 1
            if self.refused % 2 and len(data) > 1:
                return self._pwrite(descriptor, data[: len(data) // 2], offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._pwrite(descriptor, data, offset)
