"""A backlog several times as large as the memory the broker may use: ``benchmarks/backlog.py``.

What a short test can show of the same is in ``test_alarms.py`` (paging under memory that the test
decides) and ``tests/storage/test_bounded_steps.py``.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# A turn or step that takes longer is noticed by everybody. CPU time: other tests do not count.
LONGEST_MS = 50.0


async def backlog(tmp_path: Path, *, messages: int, watermark: str) -> dict[str, Any]:
    file = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARKS / "backlog.py"), "--json", str(file)]
    command += ["--messages", str(messages), "--watermark", watermark]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
    try:
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    [result] = json.loads(file.read_text())
    assert isinstance(result, dict)
    return result


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_backlog_far_larger_than_memory(tmp_path: Path) -> None:
    """300,000 messages of 1 KB: memory stays below the watermark, all come back in order."""
    result = await backlog(tmp_path, messages=300_000, watermark="100MiB")
    assert result["in_order_and_complete"], result["drain"]["wrong"]
    assert result["states_seen"] == {"alpha": True, "beta": True, "delta": True}
    assert result["peak_resident_mib"] < 120
    for phase in ("fill", "drain"):
        assert result[phase]["longest_turn_cpu_ms"] < LONGEST_MS
        assert result[phase]["longest_store_step_cpu_ms"] < LONGEST_MS
    assert any(row["delta"] > 200_000 for row in result["samples"] if "delta" in row)
