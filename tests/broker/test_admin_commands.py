"""``leveret status``, ``backup``, ``restore`` and ``check``: what they print and how they end."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import aio_pika
import pytest

from leveret import __version__
from leveret.broker.cli import status as status_module
from leveret.broker.cli.folder import ProgressLine, size
from leveret.broker.cli.main import main
from leveret.broker.config import Settings
from leveret.broker.server import Broker
from leveret.storage import backup as backup_module
from tests.storage.data_folder import FILE, contents, make_folder
from tests.support.waiting import wait_until

DEADLINE_S = 20.0


async def run(*arguments: object) -> int:
    """A command, beside the broker in this loop."""
    return await asyncio.to_thread(main, [str(argument) for argument in arguments])


def output(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The one JSON object that was printed."""
    printed, errors = capsys.readouterr()
    assert errors == ""
    answer = json.loads(printed)
    assert isinstance(answer, dict)
    return answer


async def publish(broker: Broker, queue: str, *bodies: bytes) -> None:
    async with await aio_pika.connect(broker.url) as connection:
        channel = await connection.channel()
        await channel.declare_queue(queue, durable=True)
        for body in bodies:
            await channel.default_exchange.publish(
                aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT), queue
            )


async def test_status_for_people(
    broker: Broker, settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    await publish(broker, "q", b"one", b"two")
    assert await run("status", "--data", settings.data) == 0
    printed = capsys.readouterr().out
    assert f"Leveret {__version__}, process" in printed
    assert f"amqp on 127.0.0.1:{broker.port}, listening" in printed
    assert "vhost '/': 1 queues" in printed
    assert "2 messages (2 ready, 0 unacked)" in printed


async def test_status_for_machines(
    broker: Broker, settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    await publish(broker, "q", b"one")
    assert await run("status", "--data", settings.data, "--json") == 0
    answer = output(capsys)
    assert answer["ok"] is True
    assert answer["vhosts"][0]["messages_ready"] == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (61.9, "1 min 1 s"), (90_061, "1 d 1 h"), (7200, "2 h")],
)
def test_uptime_is_short(seconds: float, text: str) -> None:
    assert status_module._duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB")]
)
def test_sizes_are_short(number: int, text: str) -> None:
    assert size(number) == text


def test_status_without_a_broker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--data", str(tmp_path)]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("leveret: no broker runs on")
    assert main(["status", "--data", str(tmp_path), "--json"]) == 1
    assert output(capsys)["ok"] is False


@pytest.mark.parametrize("command", [("status",), ("check",), ("backup", "x"), ("restore", "x")])
def test_wrong_settings_are_refused(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LEVERET_HEARTBEAT", "x")
    assert main([*command]) == 2
    assert "heartbeat" in capsys.readouterr().err


# --- backup and restore -----------------------------------------------------------------------


async def test_backup_restore_check_and_serve_again(
    broker: Broker, settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bodies = (b"small", b"L" * 10_000)
    await publish(broker, "q", *bodies)
    file, restored = tmp_path / "x.tar.gz", tmp_path / "restored"
    assert await run("backup", file, "--data", settings.data) == 0
    assert capsys.readouterr().out.startswith(f"{file}: ")
    await publish(broker, "q", b"later")
    assert await run("restore", file, "--data", restored) == 0
    assert "vhost '/': 1 queues, 2 messages" in capsys.readouterr().out
    assert await run("check", "--data", restored) == 0
    assert "no problems" in capsys.readouterr().out
    async with (
        Broker(Settings(port=0, data=restored)) as second,
        await aio_pika.connect(second.url) as connection,
    ):
        queue = await (await connection.channel()).get_queue("q")
        found = [await queue.get(no_ack=True, timeout=DEADLINE_S) for _ in bodies]
        assert [message.body for message in found if message] == [*bodies]
        assert await queue.get(no_ack=True, fail=False) is None


async def test_backup_for_machines(
    broker: Broker, settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.tar"
    assert await run("backup", file, "--data", settings.data, "--json") == 0
    answer = output(capsys)
    assert answer["ok"] is True
    assert answer["size_bytes"] == file.stat().st_size
    assert [entry["name"] for entry in answer["files"]] == ["broker.db", FILE]
    assert await run("restore", file, "--data", tmp_path / "new", "--json") == 0
    answer = output(capsys)
    assert (answer["ok"], answer["replaced"]) == (True, None)


async def test_file_is_where_the_user_is_not_where_the_broker_is(
    broker: Broker, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert await run("backup", "here.tar", "--data", settings.data) == 0
    assert (tmp_path / "here.tar").exists()


async def test_one_backup_at_a_time_and_none_survives_a_stop(
    broker: Broker,
    settings: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    reached, go_on = threading.Event(), threading.Event()
    copy = backup_module._Job._copy

    def held_copy(job: Any, snapshot: Any, to: Path) -> Path:
        reached.set()
        assert go_on.wait(DEADLINE_S)
        return copy(job, snapshot, to)

    monkeypatch.setattr(backup_module._Job, "_copy", held_copy)
    target = tmp_path / "to" / "x.tar"
    target.parent.mkdir()
    first = asyncio.create_task(run("backup", target, "--data", settings.data))
    await wait_until(reached.is_set)
    assert await run("backup", tmp_path / "y.tar", "--data", settings.data) == 1
    assert "another backup" in capsys.readouterr().err
    stopping = asyncio.create_task(broker.stop())
    # The client hears of it as soon as the thread has: which it does when it goes on.
    await wait_until(lambda: not broker._control or broker._control._server is None)
    go_on.set()
    await stopping
    assert await first == 1
    assert "the broker stops" in capsys.readouterr().err
    assert list(target.parent.iterdir()) == []


def test_folder_of_a_stopped_broker_is_backed_up_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_folder(tmp_path / "data")
    assert main(["backup", str(tmp_path / "x.tar"), "--data", str(data), "--json"]) == 0
    assert output(capsys)["held_s"] == 0
    assert main(["restore", str(tmp_path / "x.tar"), "--data", str(tmp_path / "new")]) == 0


def test_backup_of_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "missing"
    assert main(["backup", str(tmp_path / "x.tar"), "--data", str(data)]) == 1
    assert "no data folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_restore_of_a_missing_file_makes_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["restore", str(tmp_path / "x.tar"), "--data", str(tmp_path / "new")]) == 1
    assert "No such file" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_restore_asks_for_force_and_keeps_what_was_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_folder(tmp_path / "data")
    main(["backup", str(tmp_path / "x.tar"), "--data", str(data)])
    assert main(["restore", str(tmp_path / "x.tar"), "--data", str(data)]) == 1
    assert "--force" in capsys.readouterr().err
    assert main(["restore", str(tmp_path / "x.tar"), "--data", str(data), "--force"]) == 0
    assert f"is in {data}/replaced-" in capsys.readouterr().out


async def test_restore_into_a_broker_that_runs_is_refused(
    broker: Broker, settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.tar"
    await run("backup", file, "--data", settings.data)
    assert await run("restore", file, "--data", settings.data, "--force") == 1
    assert "in use" in capsys.readouterr().err


# --- check ------------------------------------------------------------------------------------


async def test_check_says_that_a_broker_runs(
    broker: Broker, settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await run("check", "--data", settings.data) == 1
    error = capsys.readouterr().err
    assert "not checked" in error
    assert "a broker runs on it" in error


def test_check_names_problems_and_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_folder(
        tmp_path, "UPDATE counter SET messages = 9; UPDATE meta SET value = 0 WHERE name = 'clean'"
    )
    before = contents(data)
    assert main(["check", "--data", str(data)]) == 1
    printed, errors = capsys.readouterr()
    assert "not stopped in order" in printed
    assert printed.endswith("2 problems\n")
    assert errors.splitlines() == [
        f"problem: {FILE}, queue 'jobs': counters that are wrong: 9 messages, there are 3",
        f"problem: {FILE}, queue 'mail': counters that are wrong: 9 messages, there are 1",
    ]
    after = contents(data)
    assert {name: after[name] for name in before} == before
    assert main(["check", "--data", str(data), "--json"]) == 1
    answer = output(capsys)
    assert answer["ok"] is False
    assert [problem["queue"] for problem in answer["problems"]] == ["jobs", "mail"]


def test_check_without_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--data", str(tmp_path / "missing")]) == 1
    assert "no data folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# --- the process ------------------------------------------------------------------------------


def test_progress_is_shown_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = {"stage": "copy", "file": "x.db", "done_bytes": 1024, "total_bytes": 4096}
    ProgressLine(wanted=True).show(progress)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    ProgressLine(wanted=False).show(progress)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    line = ProgressLine(wanted=True)
    line.show(progress)
    line.clear()
    assert "copy x.db 25% of 4.0 KiB" in capsys.readouterr().err


def test_second_broker_on_a_folder_is_refused_in_one_line(
    settings: Settings, tmp_path: Path
) -> None:
    async def start_second() -> subprocess.CompletedProcess[str]:
        async with Broker(settings):
            command = [sys.executable, "-m", "leveret", "serve", "--port", "0"]
            return await asyncio.to_thread(
                subprocess.run,
                [*command, "--data", str(settings.data)],
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
            )

    done = asyncio.run(start_second())
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("leveret: ")]
    assert "in use by process" in line
