"""A broker as its users run it: a process of its own, started by ``python -m leveret serve``.

Nothing of it is shared with the test but the socket, the data folder and the log.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
START_S = 20.0
STOP_S = 20.0

_LISTENING = re.compile(r"listening on \S+:(\d+)$")


class BrokerProcess:
    """A running broker. ``kill`` is what a crash looks like to it, ``stop`` what a user does."""

    def __init__(
        self,
        data: Path,
        log: Path,
        *flags: str,
        env: Mapping[str, str] | None = None,
        program: Sequence[str] = (sys.executable, "-m", "leveret"),
    ) -> None:
        """``env`` is added to the environment of the tests."""
        self.data = data
        self.log = log
        command = [*program, "serve", "--port", "0", "--data", str(data)]
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [*command, *flags],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env={**os.environ, **(env or {})},
            )
        self.pid = self._process.pid
        self.printed = ""  # what it has written to its standard output
        self.port = self._wait_port()

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/%2F"

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def _wait_port(self) -> int:
        """The port it chose, from the first line it prints."""
        stdout = self._process.stdout
        assert stdout is not None
        # A broker that neither starts nor fails must not hang the reader below.
        late = threading.Timer(START_S, self._process.kill)
        late.start()
        try:
            for line in stdout:
                self.printed += line
                if match := _LISTENING.search(line.rstrip()):
                    return int(match[1])
        finally:
            late.cancel()
        self.reap()
        raise AssertionError(f"the broker did not start:\n{self.printed}{self.read_log()}")

    def read_log(self) -> str:
        return self.log.read_text(errors="replace")

    def send_signal(self, signum: signal.Signals) -> None:
        os.kill(self.pid, signum)

    def reap(self) -> int:
        """Wait for its end, killing it if it takes too long; its exit status."""
        stdout = self._process.stdout
        assert stdout is not None
        try:
            if not stdout.closed:
                rest, _ = self._process.communicate(timeout=STOP_S)
                self.printed += rest
            return self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the broker did not stop:\n{self.read_log()}") from None

    def kill(self) -> None:
        """End it as a crash does."""
        self._process.kill()
        self._process.communicate()

    def stop(self) -> int:
        """End it as a user does; its exit status."""
        if self.is_running:
            self.send_signal(signal.SIGTERM)
        return self.reap()

    def assert_stopped_cleanly(self) -> None:
        status = self.stop()
        log = self.read_log()
        assert status == 0, f"the broker ended with {status}:\n{log}"
        assert "Traceback" not in log, log


@contextmanager
def running_broker(
    folder: Path, *flags: str, env: Mapping[str, str] | None = None
) -> Iterator[BrokerProcess]:
    """A broker with its data and log in ``folder``, which must end well unless it was killed."""
    process = BrokerProcess(folder / "data", folder / "broker.log", *flags, env=env)
    try:
        yield process
    except BaseException:
        # The test has failed already: its own error is the one to see.
        if process.is_running:
            process.kill()
        raise
    if process.is_running:
        process.assert_stopped_cleanly()
