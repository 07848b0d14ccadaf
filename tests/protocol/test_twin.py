"""Which of the two codecs is used."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from leveret.protocol import twin as chosen
from tests.protocol.streams import COMPILED

REPORT = "from leveret.protocol import twin; print(twin.COMPILED, twin.cut.__module__)"


@pytest.mark.parametrize(
    ("setting", "is_pure"), [("1", True), ("0", COMPILED is None), ("", COMPILED is None)]
)
def test_the_environment_chooses(setting: str, is_pure: bool) -> None:
    printed = subprocess.run(
        [sys.executable, "-c", REPORT],
        env={**os.environ, "LEVERET_PURE_CODEC": setting},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    expected = ["False", "leveret.protocol.hot"] if is_pure else ["True", "leveret.protocol._hot"]
    assert printed == expected


def test_all_names_are_there() -> None:
    for name in chosen.__all__:
        assert hasattr(chosen, name)
