"""The machine loses power: only what was synced is there, and any part of the rest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.durability.audit import audit
from tests.durability.disk import PowerCut
from tests.durability.trial import Trial

SEED = 1_965


async def run(target: PowerCut, cuts: int, seed: int) -> Trial:
    trial = Trial(target, seed)
    await trial.run(cuts)
    return trial


async def test_four_cuts(tmp_path: Path, disk_library: Path) -> None:
    target = PowerCut(tmp_path, disk_library, SEED, synchronous="full")
    (await run(target, 4, SEED)).assert_kept(4)
    assert audit(target.data) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_thirty_cuts(tmp_path: Path, disk_library: Path) -> None:
    target = PowerCut(tmp_path, disk_library, SEED + 1, synchronous="full")
    (await run(target, 30, SEED + 1)).assert_kept(30)
    assert audit(target.data) == []
    # Some cuts came while something was on its way.
    assert target.bytes_lost
    assert target.bytes_spared


@pytest.mark.parametrize("synchronous", ["off", "normal"])
async def test_less_than_full_is_noticed(
    tmp_path: Path, disk_library: Path, synchronous: str
) -> None:
    # The whole truth of a cut: nothing is there that was not synced.
    target = PowerCut(tmp_path, disk_library, SEED, synchronous=synchronous, shares=(0.0,))
    trial = await run(target, 6, SEED)
    assert "lost" in trial.ledger.kinds()


SCRIPT = """
import os, sys
def put(name, text, *, sync):
    fd = os.open(name, os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, text, 0)
    if sync:
        os.fsync(fd)
    return fd
os.mkdir("sub")
put("sub/synced", b"kept", sync=True)
put("never", b"lost", sync=False)
put("x-shm", b"memory", sync=True)
fd = put("partly", b"aaaaaaaa", sync=True)
os.pwrite(fd, b"bb", 2)
os.ftruncate(fd, 5)
fd = put("cut", b"12345678", sync=True)
os.ftruncate(fd, 2)
os.pwrite(fd, b"9", 6)
os.fdatasync(fd)
put("deleted", b"back again", sync=True)
os.unlink("deleted")
put("sub/deleted", b"gone", sync=True)
os.unlink("sub/deleted")
os.fsync(os.open("sub", os.O_RDONLY))
put("anew", b"old and long", sync=True)
os.unlink("anew")
put("anew", b"new", sync=True)
fd = os.open("written", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.write(fd, b"one ")
os.writev(fd, [b"two ", b"three"])
os.fsync(fd)
"""


def test_the_disk_keeps_what_was_synced(tmp_path: Path, disk_library: Path) -> None:
    data, shadow = tmp_path / "data", tmp_path / "shadow"
    data.mkdir()
    shadow.mkdir()
    env = {
        **os.environ,
        "LD_PRELOAD": str(disk_library),
        "LEVERET_TEST_DISK": f"{data.resolve()}/",
        "LEVERET_TEST_SHADOW": str(shadow),
    }
    subprocess.run([sys.executable, "-c", SCRIPT], cwd=data, env=env, check=True)
    kept = {
        str(path.relative_to(shadow)): path.read_bytes()
        for path in shadow.rglob("*")
        if path.is_file() and path.suffix != ".notes"
    }
    assert kept == {
        "sub/synced": b"kept",
        "partly": b"aaaaaaaa",
        "cut": b"12\0\0\0\x009",
        "deleted": b"back again",
        "anew": b"new",
        "written": b"one two three",
    }
