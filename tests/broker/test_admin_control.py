"""The control socket: who may use it, what it answers, what it leaves behind."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from leveret import __version__
from leveret.broker.admin.client import ControlError, NotRunning, ask
from leveret.broker.admin.control import ControlSocket, Progress, Refused, socket_path
from leveret.broker.config import Settings
from leveret.broker.server import Broker
from leveret.storage.memory_queue import MemoryQueue
from tests.support.waiting import wait_until

DEADLINE_S = 20.0


class Handlers:
    """Commands for tests; ``wait`` ends when it is cancelled only."""

    def __init__(self) -> None:
        self.waiting = 0
        self.cancelled = 0

    async def echo(self, request: Mapping[str, Any], tell: Progress) -> object:
        for number in range(3):
            tell({"number": number})
        return dict(request)

    async def refuse(self, request: Mapping[str, Any], tell: Progress) -> object:
        raise Refused("not today")

    async def fail(self, request: Mapping[str, Any], tell: Progress) -> object:
        raise ZeroDivisionError

    async def wait(self, request: Mapping[str, Any], tell: Progress) -> object:
        self.waiting += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        raise AssertionError


@pytest.fixture
def handlers() -> Handlers:
    return Handlers()


@asynccontextmanager
async def listening(data: Path, handlers: Handlers) -> AsyncIterator[ControlSocket]:
    commands = {name: getattr(handlers, name) for name in ("echo", "refuse", "fail", "wait")}
    control = ControlSocket(data, commands)
    await control.start()
    yield control
    await control.stop()


@pytest.fixture
async def control(tmp_path: Path, handlers: Handlers) -> AsyncIterator[ControlSocket]:
    async with listening(tmp_path, handlers) as running:
        yield running


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def send(path: Path, data: bytes) -> list[dict[str, Any]]:
    """Send something, read all answers."""
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(data)
        answers = (await reader.read()).splitlines()
        writer.close()
        return [json.loads(answer) for answer in answers]


async def test_request_is_answered_after_its_progress(control: ControlSocket) -> None:
    answers = await send(control.path, b'{"command": "echo", "with": "this"}\n')
    assert answers == [
        *({"progress": {"number": number}} for number in range(3)),
        {"ok": True, "result": {"command": "echo", "with": "this"}},
    ]


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        pytest.param(b'{"command": "refuse"}\n', "not today", id="refused"),
        pytest.param(b'{"command": "dance"}\n', "echo, fail, refuse, wait", id="unknown"),
        pytest.param(b"{}\n", "unknown command", id="no-command"),
        pytest.param(b"[1]\n", "one JSON object", id="no-object"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", "one JSON object", id="http"),
        pytest.param(b"\xff\xfe\n", "one JSON object", id="no-text"),
        pytest.param(b"x" * 200_000 + b"\n", "one JSON object", id="too-long"),
    ],
)
async def test_bad_request_is_told_why(control: ControlSocket, request_: bytes, error: str) -> None:
    [answer] = await send(control.path, request_)
    assert answer["ok"] is False
    assert error in answer["error"]
    assert (await send(control.path, b'{"command": "echo"}\n'))[-1]["ok"] is True


async def test_failing_handler_is_logged_and_does_no_harm(
    control: ControlSocket, caplog: pytest.LogCaptureFixture
) -> None:
    [answer] = await send(control.path, b'{"command": "fail"}\n')
    assert answer["ok"] is False
    assert "ZeroDivisionError" in caplog.text
    assert (await send(control.path, b'{"command": "echo"}\n'))[-1]["ok"] is True


async def test_client_that_says_nothing_and_hangs_up_is_forgotten(control: ControlSocket) -> None:
    _, writer = await asyncio.open_unix_connection(control.path)
    await wait_until(lambda: control._tasks)
    writer.close()
    await wait_until(lambda: not control._tasks)


async def test_client_that_hangs_up_takes_its_request_back(
    control: ControlSocket, handlers: Handlers
) -> None:
    _, writer = await asyncio.open_unix_connection(control.path)
    writer.write(b'{"command": "wait"}\n')
    await wait_until(lambda: handlers.waiting)
    writer.close()
    await wait_until(lambda: handlers.cancelled and not control._tasks)


async def test_stop_ends_what_was_asked_for(tmp_path: Path, handlers: Handlers) -> None:
    async with listening(tmp_path, handlers) as control:
        asking = asyncio.create_task(send(control.path, b'{"command": "wait"}\n'))
        await wait_until(lambda: handlers.waiting)
    assert handlers.cancelled == 1
    assert await asking == [{"ok": False, "error": "the broker stops"}]
    assert names(tmp_path) == []


# --- the socket's file -----------------------------------------------------------------------


async def test_only_its_owner_may_use_it(control: ControlSocket, tmp_path: Path) -> None:
    mode = (tmp_path / "control.sock").stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600


async def test_stale_socket_is_replaced(tmp_path: Path, handlers: Handlers) -> None:
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with pytest.raises(NotRunning):
        ask(tmp_path, {"command": "echo"})
    async with listening(tmp_path, handlers):
        assert (await send(path, b'{"command": "echo"}\n'))[-1]["ok"] is True


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    """A data folder whose path is too long for a socket."""
    folder = tmp_path / ("x" * 60) / ("y" * 60)
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's folder for temporary files; a short one, as it is."""
    folder = tmp_path.parent / f"t{os.getpid()}"
    folder.mkdir(exist_ok=True)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(folder))
    return folder


async def test_path_that_is_too_long_is_replaced(
    deep: Path, temporary: Path, handlers: Handlers
) -> None:
    async with listening(deep, handlers) as control:
        assert control.path.parent.parent == temporary
        assert socket_path(deep) == control.path
        assert names(deep) == ["control.path"]
        parent = control.path.parent.stat()
        assert stat.S_IMODE(parent.st_mode) == 0o700
        request: dict[str, object] = {"command": "echo"}
        assert await asyncio.to_thread(ask, deep, request) == request
    assert names(deep) == []
    assert names(temporary) == []


async def test_replacement_of_a_killed_broker_is_removed(
    deep: Path, temporary: Path, handlers: Handlers
) -> None:
    left = temporary / "leveret-old"
    left.mkdir()
    (left / "control.sock").touch()
    (deep / "control.path").write_text(f"{left}/control.sock\n")
    async with listening(deep, handlers):
        assert not left.exists()
    assert names(temporary) == []


async def test_foreign_file_named_as_replacement_is_kept(
    tmp_path: Path, temporary: Path, handlers: Handlers
) -> None:
    precious = temporary / "precious"
    precious.touch()
    (tmp_path / "control.path").write_text(f"{precious}\n")
    async with listening(tmp_path, handlers):
        pass
    assert precious.exists()
    precious.unlink()


async def test_broker_runs_without_a_socket_where_none_can_be_made(
    tmp_path: Path, handlers: Handlers, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening(tmp_path / "missing", handlers):
        pass
    assert "no control socket" in caplog.text


# --- the client -------------------------------------------------------------------------------


async def test_client_hears_of_progress_and_refusal(control: ControlSocket, tmp_path: Path) -> None:
    told: list[object] = []
    await asyncio.to_thread(ask, tmp_path, {"command": "echo"}, told.append)
    assert told == [{"number": number} for number in range(3)]
    with pytest.raises(ControlError, match="not today"):
        await asyncio.to_thread(ask, tmp_path, {"command": "refuse"})


async def test_client_does_not_wait_for_ever(control: ControlSocket, tmp_path: Path) -> None:
    with pytest.raises(ControlError, match=r"said nothing for 0\.05 s"):
        await asyncio.to_thread(ask, tmp_path, {"command": "wait"}, timeout_s=0.05)


@pytest.mark.parametrize("folder", ["", "missing", "x" * 200])
def test_no_broker_is_told_from_a_broken_one(tmp_path: Path, folder: str) -> None:
    with pytest.raises(NotRunning, match="no broker runs"):
        ask(tmp_path / folder, {"command": "status"})


# --- in a broker ------------------------------------------------------------------------------


async def test_status_of_a_broker(broker: Broker, settings: Settings) -> None:
    status = await asyncio.to_thread(ask, settings.data, {"command": "status"})
    assert status["version"] == __version__
    assert status["pid"] == os.getpid()
    assert status["uptime_s"] >= 0
    assert status["codec"] in ("compiled", "pure")
    assert status["listeners"][0]["port"] == broker.port
    assert status["connections"] == 0
    [vhost] = status["vhosts"]
    assert (vhost["name"], vhost["queues"], vhost["messages"]) == ("/", 0, 0)
    assert vhost["store"]["persistent"]["failures"] == 0


async def test_socket_goes_with_the_broker(settings: Settings) -> None:
    async with Broker(settings):
        assert (settings.data / "control.sock").exists()
    assert names(settings.data) == ["broker.db", "events", "lock", "vhosts"]


async def test_broker_that_writes_nothing_has_no_socket(settings: Settings) -> None:
    async with Broker(settings, make_backing=MemoryQueue):
        assert not settings.data.exists()


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        pytest.param({"file": "relative.tar"}, "whole path", id="relative"),
        pytest.param({}, "whole path", id="no-file"),
        pytest.param({"file": "/x", "wal_max_bytes": "much"}, "number of bytes", id="limit"),
        pytest.param({"file": "/nowhere/at/all/x.tar"}, "No such file", id="no-folder"),
    ],
)
async def test_backup_that_cannot_be_made_is_refused(
    broker: Broker, settings: Settings, request_: dict[str, object], error: str
) -> None:
    with pytest.raises(ControlError, match=error):
        await asyncio.to_thread(ask, settings.data, {"command": "backup", **request_})
