"""A disk that is slow, or full, when the test says so: what the event log's writes meet."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.support.waiting import wait_until

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
        # What was asked for, in bytes.
        self.writes: list[int] = []
        monkeypatch.setattr(os, "pwrite", self._write)

    def hold(self) -> None:
        self._is_free.clear()

    def release(self) -> None:
        self._is_free.set()

    async def wait_refused(self, cause: Callable[[], object]) -> None:
        """Return once what ``cause`` makes the log try has been refused, at once or later."""
        before = self.refused

        def was_refused() -> bool:
            cause()
            return self.refused > before

        await wait_until(was_refused)

    def _write(self, descriptor: int, data: memoryview, offset: int) -> int:
        self.writes.append(len(data))
        assert self._is_free.wait(DEADLINE_S)
        if self.is_full:
            # As a real one does: some of it, then nothing.
            self.refused += 1
            if self.refused % 2 and len(data) > 1:
                return self._pwrite(descriptor, data[: len(data) // 2], offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._pwrite(descriptor, data, offset)
