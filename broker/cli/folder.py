"""What the commands that work on a data folder have in common: its flag, where it is, how to say
things."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from leveret.broker.config import ENV_PREFIX, load_settings

FAILED = 1
BAD_SETTINGS = 2

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", metavar="FILE", help=f"TOML file of settings (or {ENV_PREFIX}CONFIG)"
    )
    parser.add_argument("--data", metavar="FOLDER", help="default: the one `serve` would use")
    parser.add_argument("--json", action="store_true", help="print one JSON object, also on errors")


def data_folder(options: argparse.Namespace) -> Path:
    """Raises SettingsError."""
    config_file = options.config or os.environ.get(f"{ENV_PREFIX}CONFIG") or None
    return load_settings(config_file, os.environ, {"data": options.data}).data


def fail(options: argparse.Namespace, text: str, status: int = FAILED) -> int:
    """Say what went wrong as the user wants to hear it; returns the exit status."""
    if options.json:
        print(json.dumps({"ok": False, "error": text}))
    else:
        for line in text.splitlines():
            print(f"leveret: {line}", file=sys.stderr)
    return status


def size(number: float) -> str:
    """Bytes for people."""
    for unit in _UNITS:
        if number < 1024 or unit == _UNITS[-1]:
            break
        number /= 1024
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"


class ProgressLine:
    """One line that is written over and over, where somebody looks at a terminal."""

    def __init__(self, *, wanted: bool) -> None:
        self._is_shown = wanted and sys.stderr.isatty()
        self._is_there = False

    def show(self, progress: dict[str, Any]) -> None:
        if self._is_shown:
            total = progress["total_bytes"] or 1
            share = 100 * progress["done_bytes"] // total
            text = f"{progress['stage']} {progress['file']} {share}% of {size(total)}"
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
            self._is_there = True

    def clear(self) -> None:
        if self._is_there:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._is_there = False
