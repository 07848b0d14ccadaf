"""``make soak``: kills and power cuts for hours, each trial with a new seed.

    python -m tests.durability.soak [--hours 8] [--seed N] [--kills 30]

Ends with status 1 at the first broken promise; data folder, log and seed are then named.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

import uvloop

from tests.durability.audit import audit
from tests.durability.disk import PowerCut, compile_disk
from tests.durability.targets import LeveretTarget
from tests.durability.trial import Trial


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--kills", type=int, default=30, help="in each trial")
    options = parser.parse_args()
    end = time.monotonic() + options.hours * 3600
    total, number = 0, 0
    while number == 0 or time.monotonic() < end:
        folder = Path(tempfile.mkdtemp(prefix="leveret-soak-"))
        seed = options.seed + number
        library = compile_disk(folder) if number % 2 else None
        target = (
            LeveretTarget(folder)
            if library is None
            else PowerCut(folder, library, seed, synchronous="full")
        )
        print(f"trial {number}: {type(target).__name__}, seed {seed}, in {folder}", flush=True)
        trial = Trial(target, seed)
        with target, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(trial.run(options.kills, tell=lambda line: print(" ", line, flush=True)))
        total += len(trial.rounds)
        if trial.ledger.complaints:
            print(f"broken promises, seed {seed}, kept in {folder}:\n{trial.ledger.report()}")
            return 1
        if wrong := audit(target.data):
            print(f"damaged files, seed {seed}, kept in {folder}:", *wrong, sep="\n    ")
            return 1
        shutil.rmtree(folder)
        number += 1
        print(f"{total} kills, every promise kept", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
