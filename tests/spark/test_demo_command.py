"""``leveret analytics demo`` as a user runs it, long enough for the burst to be unlike the rest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from leveret.spark_jobs import demo_script
from tests.spark.test_demo import NAMED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

COMMAND_S = 500.0
PLANTED = [
    *(text for _, text in NAMED),
    "queue alerts in vhost telemetry: p99 wait rose from",
    "queue audit in vhost billing grows by",
]


def test_the_demo_names_everything_planted(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    command = [sys.executable, "-m", "leveret", "analytics", "demo", "--no-open"]
    command += ["--seconds", str(demo_script.SECONDS_FOR_BURST), "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for text in PLANTED:
        assert text in done.stdout
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 5
    assert f"written: {folder / 'report.html'}" in done.stdout
