"""The disk of ``disk.c``: compiled, put under a broker, cut off and filled up."""

from __future__ import annotations

import errno
import os
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from tests.durability.targets import LeveretTarget

SOURCE = Path(__file__).with_name("disk.c")
NOTES = ".notes"
SECTOR = 512

_RANGE = struct.Struct("=QQ")


def compile_disk(folder: Path) -> Path | None:
    """The library to preload; None where there is no C compiler."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return None
    library = folder / "disk.so"
    command = [compiler, "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    subprocess.run([*command, "-o", library, SOURCE, "-ldl"], check=True)
    return library


class FailingDisk(LeveretTarget):
    """A broker whose writes fail from ``fail`` to ``recover``."""

    def __init__(self, folder: Path, library: Path) -> None:
        super().__init__(folder)
        self._fault = folder / "fault"
        self.data.mkdir()
        self.env |= {
            "LD_PRELOAD": str(library),
            "LEVERET_TEST_DISK": f"{self.data.resolve()}/",
            "LEVERET_TEST_FAULT": str(self._fault),
        }

    def fail(self, error: int = errno.ENOSPC) -> None:
        self._fault.write_text(str(error))

    @property
    def failures(self) -> int:
        """How many writes of the store have failed so far; those of the event log do not count."""
        met = self._fault.with_name(f"{self._fault.name}.met")
        return met.read_bytes().count(b"d") if met.exists() else 0

    def recover(self) -> None:
        self._fault.unlink(missing_ok=True)


class PowerCut(LeveretTarget):
    """A broker whose machine loses power when it is killed.

    Of what was written and not synced, each sector is there or not as ``seed`` has it; what part
    of them is there is chosen from ``shares`` at each cut, for a disk may be quick or slow.
    """

    def __init__(
        self,
        folder: Path,
        library: Path,
        seed: int,
        *,
        synchronous: str,
        shares: Sequence[float] = (0.0, 0.02, 0.5, 0.98),
    ) -> None:
        super().__init__(folder, env={"LEVERET_SYNCHRONOUS": synchronous})
        self._random = random.Random(f"{seed} power")
        self._shares = shares
        self._shadow = folder / "shadow"
        self.data.mkdir()
        # Bytes that the last cut took away, and those that it left though nobody had asked.
        self.bytes_lost = 0
        self.bytes_spared = 0
        self.env |= {
            "LD_PRELOAD": str(library),
            "LEVERET_TEST_DISK": f"{self.data.resolve()}/",
            "LEVERET_TEST_SHADOW": str(self._shadow),
            # Else the power would nearly always go while nothing is on its way.
            "LEVERET_TEST_SYNC_US": "8000",
        }

    def start(self) -> int:
        self._copy_to_shadow()
        return super().start()

    def start_in_vain(self, after_s: float) -> None:
        self._copy_to_shadow()
        super().start_in_vain(after_s)

    def bury(self) -> None:
        super().bury()
        share = self._random.choice(self._shares)
        for notes in sorted(self._shadow.rglob(f"*{NOTES}")):
            self._spare(notes, share)
            notes.unlink()
        shutil.rmtree(self.data)
        self._shadow.rename(self.data)

    def _copy_to_shadow(self) -> None:
        shutil.rmtree(self._shadow, ignore_errors=True)
        self._shadow.mkdir()
        for path in self.data.rglob("*"):
            if path.is_file() and not path.name.endswith("-shm"):
                shadow = self._shadow / path.relative_to(self.data)
                shadow.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, shadow)

    def _spare(self, notes: Path, share: float) -> None:
        """Some sectors reached the disk before they had to, in any order."""
        kept = notes.with_name(notes.name.removesuffix(NOTES))
        written = self.data / kept.relative_to(self._shadow)
        ranges = sorted(set(_RANGE.iter_unpack(notes.read_bytes()[: _whole(notes)])))
        # A file that was never synced need not be there at all.
        if not written.exists() or not ranges or not (kept.exists() or share):
            return
        content = written.read_bytes()
        descriptor = os.open(kept, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            for at, size in ranges:
                end = min(at + size, len(content))
                while at < end:
                    after = min(end, (at // SECTOR + 1) * SECTOR)
                    if self._random.random() < share:
                        os.pwrite(descriptor, content[at:after], at)
                        self.bytes_spared += after - at
                    else:
                        self.bytes_lost += after - at
                    at = after
        finally:
            os.close(descriptor)


def _whole(notes: Path) -> int:
    size = notes.stat().st_size
    return size - size % _RANGE.size


class SmallDisk(LeveretTarget):
    """A broker on a filesystem of its own, which has little room.

    The filesystem is in memory and seen by the broker alone: no rights are needed where users may
    have namespaces of their own, else the test is skipped.
    """

    SIZE = 64 << 20
    _ROOM = 3 << 20
    _STEP = 1 << 19

    def __init__(self, folder: Path) -> None:
        # Publishers would be blocked long before the disk is full.
        super().__init__(folder, env={"LEVERET_DISK_FREE_LIMIT": "0"})
        self.data.mkdir()
        self._folder = folder

    def __enter__(self) -> Self:
        if shutil.which("unshare") is None or shutil.which("nsenter") is None:
            pytest.skip("no unshare, or no nsenter")
        mount = (
            f"mount -t tmpfs -o size={self.SIZE} leveret {self.data} && echo mounted && exec cat"
        )
        self._holder = subprocess.Popen(
            ["unshare", "--map-root-user", "--mount", "sh", "-c", mount],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"mounted\n":
            self.__exit__(None, None, None)
            pytest.skip("not allowed to mount a filesystem")
        # As the broker sees it, for those who are outside.
        self._inside = Path(f"/proc/{self._holder.pid}/root{self.data.resolve()}")
        enter = ["nsenter", "--target", str(self._holder.pid), "--user", "--mount"]
        self.program = [*enter, "--preserve-credentials", sys.executable, "-m", "leveret"]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        self._holder.communicate()

    def fill(self) -> None:
        """Leave little room. The broker may be writing meanwhile: step by step."""
        size = 0
        with (self._inside / "ballast").open("wb") as ballast, suppress(OSError):
            while self._free_bytes() > self._ROOM:
                os.posix_fallocate(ballast.fileno(), size, self._STEP)
                size += self._STEP

    def _free_bytes(self) -> int:
        status = os.statvfs(self._inside)
        return status.f_bavail * status.f_frsize

    def free(self) -> None:
        (self._inside / "ballast").unlink()
