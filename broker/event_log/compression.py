"""zstd for sealed segments; there only where somebody asks for it.

Python has it from 3.14 on; for older ones the extra ``zstd`` brings the same module.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

# Fast, and nearly as small as it gets: names and times repeat from line to line.
LEVEL = 3
# Large: a busy event loop makes this thread wait for the GIL after each.
_CHUNK = 8 << 20


class EventLogError(Exception):
    """The event log cannot be kept as asked; the text tells a person what to do."""


def load_zstd() -> Any:
    """Python's zstd module. Raises EventLogError where there is none."""
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise EventLogError(
        "event_log_compression = zstd needs a package that is not installed:"
        " pip install 'leveret[zstd]', or set event_log_compression = none"
    )


def compress_file(source: Path, target: Path) -> None:
    """Write a compressed copy and fsync it. Raises OSError, and may then leave part of it."""
    compressor = load_zstd().ZstdCompressor(level=LEVEL)
    with source.open("rb") as lines, target.open("wb") as compressed:
        while chunk := lines.read(_CHUNK):
            compressed.write(compressor.compress(chunk))
        compressed.write(compressor.flush())
        compressed.flush()
        os.fsync(compressed.fileno())
