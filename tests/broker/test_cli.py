"""``leveret serve``: what it prints, how it stops, what it says when it cannot start."""

from __future__ import annotations

import errno
import gc
import os
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from leveret import __version__
from leveret.broker.cli import serve
from leveret.broker.cli.main import main
from leveret.broker.config import Settings
from tests.support.broker_process import BrokerProcess, running_broker


class FakeBroker:
    """Starts as the test says and is interrupted at once."""

    started: list[Settings]
    on_start: Callable[[], None]
    stops: int

    def __init__(self, settings: Settings) -> None:
        self.port = 5999
        self.vhosts = types.SimpleNamespace(down={})
        FakeBroker.started.append(settings)

    async def start(self) -> None:
        FakeBroker.on_start()

    async def stop(self) -> None:
        FakeBroker.stops += 1


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def fake_broker(monkeypatch: pytest.MonkeyPatch) -> type[FakeBroker]:
    server = types.ModuleType("leveret.broker.server")
    server.Broker = FakeBroker  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "leveret.broker.server", server)
    monkeypatch.setattr(serve, "spare_the_collector", lambda: None)
    # The suite's own handlers must survive what serve() sets up for itself.
    monkeypatch.setattr("logging.basicConfig", lambda **_: None)
    FakeBroker.started, FakeBroker.stops = [], 0
    FakeBroker.on_start = staticmethod(interrupt)
    return FakeBroker


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"leveret {__version__}\n"


def test_no_command_is_an_error_that_shows_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_serve_tells_what_a_person_needs_and_stops_in_order(
    fake_broker: type[FakeBroker], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "deep" / "data"
    assert main(["serve", "--data", str(data), "--port", "0"]) == 0
    out = capsys.readouterr().out
    assert f"Leveret {__version__} listening on 127.0.0.1:5999\n" in out
    assert "amqp://guest:guest@127.0.0.1:5999/%2F\n" in out
    assert f"{data}\n" in out
    assert "Ctrl-C" in out
    assert out.endswith("leveret: stopped\n")
    assert fake_broker.stops == 1
    assert data.is_dir()


def test_serve_reads_flags_environment_and_file(
    fake_broker: type[FakeBroker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "leveret.toml"
    file.write_text("heartbeat = 7\nchannel_max = 9\nframe_max = '8KiB'\n")
    monkeypatch.setenv("LEVERET_CONFIG", str(file))
    monkeypatch.setenv("LEVERET_CHANNEL_MAX", "10")
    main(["serve", "--data", str(tmp_path), "--frame-max", "16KiB"])
    [settings] = fake_broker.started
    assert (settings.heartbeat, settings.channel_max, settings.frame_max) == (7, 10, 16384)


def test_password_that_is_not_well_known_is_not_printed(
    fake_broker: type[FakeBroker],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LEVERET_DEFAULT_PASS", "hush")
    main(["serve", "--data", str(tmp_path), "--default-user", "a/b"])
    printed = "".join(capsys.readouterr())
    assert "amqp://a%2Fb@127.0.0.1:5999/%2F" in printed
    assert "hush" not in printed


def test_wrong_settings_are_refused_before_anything_starts(
    fake_broker: type[FakeBroker], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    assert main(["serve", "--data", str(data), "--port", "http", "--heartbeat", "x"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[:2] for line in lines] == [["leveret:", "port"], ["leveret:", "heartbeat"]]
    assert fake_broker.started == []
    assert not data.exists()


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        pytest.param(OSError(errno.EADDRINUSE, "in use"), "--port", id="port-in-use"),
        pytest.param(PermissionError(errno.EACCES, "no"), "above 1023", id="privileged-port"),
        pytest.param(OSError(errno.EADDRNOTAVAIL, "no"), "--host", id="not-our-address"),
        pytest.param(socket.gaierror(-2, "unknown"), "--host", id="no-such-name"),
        pytest.param(OSError(errno.EMFILE, "Too many open files"), "Too many", id="anything-else"),
    ],
)
def test_broker_that_cannot_start_gives_one_line_of_advice(
    fake_broker: type[FakeBroker],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    error: OSError,
    advice: str,
) -> None:
    def fail() -> None:
        raise error

    fake_broker.on_start = staticmethod(fail)
    assert main(["serve", "--data", str(tmp_path)]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("leveret: ")
    assert advice in line


def test_data_folder_that_is_a_file_is_refused(
    fake_broker: type[FakeBroker], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    for data in (file, file / "below"):
        assert main(["serve", "--data", str(data)]) == 1
        [line] = capsys.readouterr().err.splitlines()
        assert str(data) in line
        assert "--data" in line
    assert fake_broker.started == []


def test_data_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tests may run as root, whom no permission stops: ask as the system would answer others.
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(serve.ServeError, match="cannot write"):
        serve.prepare_data_folder(tmp_path)


def test_ipv6_address_is_written_in_brackets() -> None:
    assert serve.shown_url(Settings(host="::"), 5672) == "amqp://guest:guest@[::1]:5672/%2F"


def test_collector_is_spared() -> None:
    """In a process of its own: frozen objects stay so."""
    code = (
        "import gc; from leveret.broker.cli.serve import spare_the_collector;"
        "spare_the_collector(); print(gc.get_freeze_count() > 1000, *gc.get_threshold())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    frozen, first, *_ = done.stdout.split()
    assert frozen == "True"
    assert int(first) > gc.get_threshold()[0]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_process_stops_cleanly_on_a_signal(tmp_path: Path, signum: signal.Signals) -> None:
    with running_broker(tmp_path) as process:
        with socket.create_connection(("127.0.0.1", process.port), timeout=5) as peer:
            peer.sendall(b"AMQP\x00\x00\x09\x01")
            assert peer.recv(7)[:3] == b"\x01\x00\x00"
        process.send_signal(signum)
        assert process.reap() == 0
        assert process.printed.endswith("leveret: stopped\n")
        assert "Traceback" not in process.read_log()


STUCK_BROKER = """
import asyncio, sys, types
class Broker:
    port = 1
    vhosts = types.SimpleNamespace(down={})
    def __init__(self, settings): pass
    async def start(self): pass
    async def stop(self): await asyncio.Event().wait()
server = types.ModuleType("leveret.broker.server")
server.Broker = Broker
sys.modules["leveret.broker.server"] = server
from leveret.broker.cli.main import main
main(["serve", "--data", sys.argv[1]])
"""


def test_second_signal_ends_a_broker_that_does_not_stop(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STUCK_BROKER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "Ctrl-C" in line or "stopping" in line:
                process.terminate()
        assert process.wait(20) == 128 + signal.SIGTERM


def test_port_in_use_is_said_in_one_line(broker_process: BrokerProcess, tmp_path: Path) -> None:
    port = str(broker_process.port)
    command = [sys.executable, "-m", "leveret", "serve", "--port", port, "--data", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 1
    [line] = [line for line in done.stderr.splitlines() if line.startswith("leveret: ")]
    assert f"port {port} is in use" in line
    assert "Traceback" not in done.stderr
