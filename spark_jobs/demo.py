"""``leveret analytics demo``: the whole product in one command.

A broker that logs everything, clients that give it work and trouble (``demo_script.py``), then the
log through the pipeline to a report that names the trouble. This module plays; ``commands.py`` runs
the pipeline on what was played.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import webbrowser
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pika.exceptions import AMQPError  # type: ignore[import-untyped]

from leveret.spark_jobs.demo_actors import DemoError, play
from leveret.spark_jobs.demo_truth import Truth

_STOP_S: Final = 60.0


def new_folder(given: str | None) -> Path:
    """Where the demo keeps everything. Raises DemoError if there is something already."""
    if given is None:
        return Path(tempfile.mkdtemp(prefix="leveret-demo-"))
    folder = Path(given)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DemoError(f"{folder} is there already and not empty: name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def perform(folder: Path, seconds: int) -> Truth:
    """Play to a broker with its data in ``folder/data``. Raises DemoError.

    When this returns, the broker has stopped and its log is sealed.
    """
    shown = sys.stderr.isatty()

    def show(elapsed_s: float, truth: Truth) -> None:
        published, delivered = truth.so_far()
        print(
            f"\r\x1b[K{min(elapsed_s, seconds):.0f} of {seconds} s: {published:,} messages "
            f"published, {delivered:,} delivered",
            end="",
            file=sys.stderr,
            flush=True,
        )

    try:
        with running_broker(folder) as port:
            return play(port, seconds, show if shown else None)
    except AMQPError as error:
        raise DemoError(
            f"a client lost the broker ({str(error) or type(error).__name__}): look into "
            f"{folder / 'broker.log'}"
        ) from error
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@contextmanager
def running_broker(folder: Path) -> Iterator[int]:
    """The port of a broker that is stopped in order when the block ends. Raises DemoError."""
    log = folder / "broker.log"
    command = [sys.executable, "-m", "leveret.spark_jobs.demo_broker", str(folder / "data")]
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            # Ctrl-C is for this process, which then stops the broker.
            start_new_session=True,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line.strip().isdecimal():
                raise DemoError(f"the broker did not start: look into {log}")
            yield int(line)
        finally:
            process.stdin.close()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise DemoError(f"the broker did not stop: look into {log}") from None
    if process.returncode:
        raise DemoError(f"the broker failed: look into {log}")


def show_page(page: Path, environ: Mapping[str, str]) -> bool:
    """Open the report in a browser; false where there is no screen for one."""
    has_screen = sys.platform in ("darwin", "win32") or any(
        environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
    )
    # Without a screen a browser in text mode would take over the terminal.
    return has_screen and webbrowser.open(page.resolve().as_uri())
