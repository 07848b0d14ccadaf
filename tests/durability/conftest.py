"""For the tests of durability: the disk of ``disk.c``, compiled once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.durability.disk import compile_disk


@pytest.fixture(scope="session")
def disk_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = compile_disk(tmp_path_factory.mktemp("disk"))
    if library is None:
        pytest.skip("no C compiler for a disk that can fail")
    return library
