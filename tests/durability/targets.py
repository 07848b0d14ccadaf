"""Brokers that can be killed: ours as a process of its own, and RabbitMQ beside it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.broker_process import ROOT, BrokerProcess

LAUNCHER = Path(__file__).with_name("sabotage.py")


class LeveretTarget:
    """``env`` is added to the broker's environment.

    ``sabotage`` names a fault of ``sabotage.py`` that the broker is to have.
    """

    def __init__(
        self, folder: Path, *, env: Mapping[str, str] | None = None, sabotage: str = ""
    ) -> None:
        self.data = folder / "data"
        self.log = folder / "broker.log"
        self.env = {"LEVERET_LOG_LEVEL": "warning", **(env or {})}
        self.program = [sys.executable, "-m", "leveret"]
        if sabotage:
            self.program = [sys.executable, str(LAUNCHER), sabotage]
        self._process: BrokerProcess | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing outlives a test that failed."""
        if self._process is not None and self._process.is_running:
            self._process.kill()

    def start(self) -> int:
        self._process = BrokerProcess(self.data, self.log, env=self.env, program=self.program)
        return self._process.port

    def start_in_vain(self, after_s: float) -> None:
        command = [*self.program, "serve", "--port", "0", "--data", str(self.data)]
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                command,
                stdout=subprocess.DEVNULL,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, **self.env},
            )
        try:
            status = process.wait(after_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        else:
            raise AssertionError(f"the broker ended with {status}:\n{self.log.read_text()}")

    def kill(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)

    def bury(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None

    def stop(self) -> None:
        if self._process is not None and self._process.is_running:
            self._process.stop()

    def read_log(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


RABBIT = Path("/usr/sbin/rabbitmq-server")


class RabbitTarget:
    """What the checker asks for is what RabbitMQ gives: this is how we know."""

    BOOT_S = 90.0

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        # It may run as a user of its own.
        folder.chmod(0o777)
        self._folder = folder
        self.port = _free_port()
        self._distribution_port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._node_pid = 0

    @staticmethod
    def is_here() -> bool:
        return RABBIT.exists() and shutil.which("erl") is not None

    def start(self) -> int:
        settings = {
            "NODE_PORT": self.port,
            "DIST_PORT": self._distribution_port,
            "NODENAME": f"durability{self.port}@localhost",
            "NODE_IP_ADDRESS": "127.0.0.1",
            "MNESIA_BASE": self._folder,
            "LOG_BASE": self._folder,
            "ENABLED_PLUGINS_FILE": self._folder / "plugins",
            "PID_FILE": self._folder / "pid",
        }
        self._process = subprocess.Popen(
            [RABBIT],
            env={**os.environ, **{f"RABBITMQ_{name}": str(v) for name, v in settings.items()}},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        end = time.monotonic() + self.BOOT_S
        while not _answers(self.port):
            assert time.monotonic() < end, "RabbitMQ did not start"
            time.sleep(0.1)
        self._node_pid = int((self._folder / "pid").read_text())
        return self.port

    def start_in_vain(self, after_s: float) -> None:
        """Its start takes seconds: nothing would be learnt."""

    def kill(self) -> None:
        if self._node_pid:
            os.kill(self._node_pid, signal.SIGKILL)

    def bury(self) -> None:
        if self._process is not None:
            self._process.wait(30)
        self._node_pid = 0

    def stop(self) -> None:
        self.kill()
        self.bury()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 1) as sock:
            sock.sendall(b"AMQP\x00\x00\x09\x01")
            return bool(sock.recv(8))
    except OSError:
        return False
