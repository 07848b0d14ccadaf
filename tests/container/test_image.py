"""The container image: what is in it, and a broker that runs, stops and comes back in it.

The image is built beforehand (docs/container.md): its name is ``LEVERET_TEST_IMAGE``, else
``localhost/leveret``. Where there is none, or no engine that can run it, or where it is not of
this source, the tests are skipped; where the variable is set, they fail. The engine is
``LEVERET_TEST_ENGINE``, else podman, else docker. Containers use the host's network.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NoReturn

import aio_pika
import pytest

from leveret import __version__
from leveret.broker.cli.ping import PingError, ping

ROOT = Path(__file__).parents[2]
IMAGE = os.environ.get("LEVERET_TEST_IMAGE") or "localhost/leveret"
# As docker-compose.yml runs it: what works so works with less care, too.
LOCKED_DOWN = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges")
START_S = 30.0
STOP_S = 20
ENGINE_S = 60.0

DIGEST = """
import hashlib, pathlib, leveret
digest = hashlib.sha256()
root = pathlib.Path(leveret.__file__).parent
# Folder by folder: in the sources they are links, which rglob does not follow.
for folder in (root, *(root / name for name in ("broker", "protocol", "spark_jobs", "storage"))):
    for file in sorted((*folder.rglob("*.py"), *folder.rglob("*.sql"))):
        if folder != root or file.parent == root:
            digest.update(str(file.relative_to(root)).encode() + b"\\0" + file.read_bytes())
print(digest.hexdigest())
"""


# --- the files, without an engine ------------------------------------------------------------


def test_context_holds_what_the_dockerfile_copies() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copies = [line.split()[1:-1] for line in lines if line.startswith("COPY ")]
    copied = {name for names in copies for name in names if not names[0].startswith("--from")}
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignore
    sent = {line[1:] for line in ignore if line.startswith("!")}
    assert copied == sent
    missing = [name for name in sent if not (ROOT / name).exists()]
    assert missing == []
    # What was built for another Python must not get in.
    built_here = [line.removeprefix("**/") for line in ignore if line.startswith("**/")]
    for name in ("_hot.cpython-311-x86_64-linux-gnu.so", "_hot.c", "x.pyc", "__pycache__"):
        assert any(fnmatch(name, pattern) for pattern in built_here)


def test_folders_of_the_import_name_are_copied() -> None:
    """A link whose target is left out would make a package with a hole."""
    copied = set(re.findall(r"^COPY (\w+) \1$", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    links = {link.name for link in (ROOT / "leveret").iterdir() if link.is_symlink()}
    assert links < copied


def test_signal_sent_before_the_broker_handles_it_is_kept(tmp_path: Path) -> None:
    """The image's entry point blocks SIGTERM, and ``leveret serve`` lets it through in time."""
    command = [sys.executable, "-m", "leveret", "serve", "--port", "0", "--data", str(tmp_path)]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with process:
        process.terminate()
        try:
            printed, _ = process.communicate(timeout=START_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert process.returncode == 0
    assert printed.endswith("leveret: stopped\n")


# --- the image -------------------------------------------------------------------------------


class Engine:
    """Docker's command line, as docker and podman understand it."""

    def __init__(self, command: str) -> None:
        self._command = command

    def try_run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self._command, *words], capture_output=True, text=True, timeout=ENGINE_S, check=False
        )

    def run(self, *words: str) -> str:
        done = self.try_run(*words)
        assert done.returncode == 0, f"{self._command} {' '.join(words)}:\n{done.stderr}"
        return done.stdout

    def run_once(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Options, image and arguments of a container that ends by itself, and goes if not."""
        name = f"leveret-test-{uuid.uuid4().hex[:12]}"
        try:
            return self.try_run("run", "--name", name, "--network=host", *words)
        finally:
            # Not --rm: that leaves one that does not end running when we lose patience.
            self.try_run("rm", "-f", "-v", name)

    def in_image(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the image instead of the broker."""
        program, *arguments = words
        return self.run_once(f"--entrypoint={program}", IMAGE, *arguments)


def refuse(reason: str) -> NoReturn:
    """Who names an image wants it tested; others may be without one."""
    if "LEVERET_TEST_IMAGE" in os.environ:
        pytest.fail(reason)
    pytest.skip(f"{reason} (docs/container.md)")


@pytest.fixture(scope="session")
def engine() -> Engine:
    """An engine that has the image, of this source, and can run it."""
    asked = os.environ.get("LEVERET_TEST_ENGINE")
    command = asked or shutil.which("podman") or shutil.which("docker")
    if command is None:
        refuse("neither podman nor docker is here")
    engine = Engine(command)
    if engine.try_run("image", "inspect", IMAGE).returncode != 0:
        refuse(f"{command} has no image {IMAGE}")
    there = engine.in_image("python", "-c", DIGEST)
    if there.returncode != 0:
        refuse(f"{command} cannot run {IMAGE} here: {there.stderr.strip()}")
    here = subprocess.run(
        [sys.executable, "-c", DIGEST], capture_output=True, text=True, check=True, cwd=ROOT
    )
    if there.stdout != here.stdout:
        refuse(f"{IMAGE} was built from another source: build it again")
    return engine


@pytest.fixture
def volume(engine: Engine) -> Iterator[str]:
    name = f"leveret-test-{uuid.uuid4().hex[:12]}"
    engine.run("volume", "create", name)
    yield name
    engine.run("volume", "rm", "-f", name)


class Container:
    """A broker in a container that is there, running or not."""

    def __init__(self, engine: Engine, name: str, port: int) -> None:
        self._engine = engine
        self.name = name
        self.port = port

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/"

    def wait_answers(self) -> None:
        def answers() -> bool:
            with suppress(PingError):
                ping("127.0.0.1", self.port, 1.0)
                return True
            assert self.state()["Running"], f"the container ended:\n{self.logs()}"
            return False

        wait_until(answers)

    def state(self) -> Any:
        return json.loads(self._engine.run("container", "inspect", self.name))[0]["State"]

    def logs(self) -> str:
        done = self._engine.try_run("logs", self.name)
        return done.stdout + done.stderr

    def execute(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self._engine.try_run("exec", self.name, *words)

    def start(self) -> None:
        self._engine.run("start", self.name)
        self.wait_answers()

    def stop(self) -> int:
        """Its exit status: 137 if it had to be killed."""
        self._engine.run("stop", "-t", str(STOP_S), self.name)
        status: int = self.state()["ExitCode"]
        return status

    def send(self, signum: signal.Signals) -> None:
        self._engine.run("kill", "--signal", signum.name.removeprefix("SIG"), self.name)

    def wait_ended(self) -> int:
        wait_until(lambda: not self.state()["Running"])
        status: int = self.state()["ExitCode"]
        return status


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running(engine: Engine, volume: str, *options: str) -> Iterator[Container]:
    container = Container(engine, f"leveret-test-{uuid.uuid4().hex[:12]}", free_port())
    port = f"LEVERET_PORT={container.port}"
    try:
        engine.run(
            *("run", "-d", "--name", container.name, "--network=host", "--pull=never"),
            *("-v", f"{volume}:/data", "-e", port, *LOCKED_DOWN, *options, IMAGE),
        )
        yield container
    finally:
        engine.try_run("rm", "-f", container.name)


@pytest.fixture
def container(engine: Engine, volume: str) -> Iterator[Container]:
    with running(engine, volume) as container:
        container.wait_answers()
        yield container


async def _publish(url: str, queue: str, bodies: list[bytes]) -> None:
    async with await aio_pika.connect(url) as connection:
        channel = await connection.channel()
        await channel.declare_queue(queue, durable=True)
        for body in bodies:
            message = aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
            await channel.default_exchange.publish(message, routing_key=queue)


async def _take(url: str, queue: str) -> list[bytes]:
    bodies = []
    async with await aio_pika.connect(url) as connection:
        channel = await connection.channel()
        there = await channel.declare_queue(queue, durable=True, passive=True)
        while message := await there.get(fail=False):
            bodies.append(message.body)
            await message.ack()
    return bodies


def publish(container: Container, queue: str, bodies: list[bytes]) -> None:
    """Persistent, and confirmed when this returns."""
    asyncio.run(_publish(container.url, queue, bodies))


def take(container: Container, queue: str) -> list[bytes]:
    """All that is in a queue that must be there."""
    return asyncio.run(_take(container.url, queue))


@pytest.mark.slow
def test_image_says_how_it_is_run(engine: Engine) -> None:
    [image] = json.loads(engine.run("image", "inspect", IMAGE))
    config = image["Config"]
    assert config["User"] == "5672:5672"
    assert list(config["Volumes"]) == ["/data"]
    assert list(config["ExposedPorts"]) == ["5672/tcp"]
    assert {"LEVERET_HOST=0.0.0.0", "LEVERET_DATA=/data"} <= set(config["Env"])
    assert config["Cmd"] == ["serve"]
    assert health_check(engine) == ["leveret", "ping"]


def health_check(engine: Engine) -> list[str]:
    [image] = json.loads(engine.run("image", "inspect", IMAGE))
    # podman keeps it beside the rest, docker within.
    check = image.get("Healthcheck") or image["Config"]["Healthcheck"]
    kind, *words = check["Test"]
    assert kind == "CMD"
    return list(words)


@pytest.mark.slow
def test_arguments_are_those_of_the_command(engine: Engine) -> None:
    done = engine.run_once(IMAGE, "--version")
    assert done.stdout == f"leveret {__version__}\n", done.stderr


@pytest.mark.slow
def test_image_has_the_compiled_codec_and_nothing_that_built_it(engine: Engine) -> None:
    code = (
        "import importlib.util, shutil; from leveret.protocol.twin import COMPILED;"
        "print(COMPILED, *filter(shutil.which, ('gcc', 'cc', 'ld', 'cython')),"
        "*filter(importlib.util.find_spec, ('Cython', 'setuptools', 'pip')))"
    )
    done = engine.in_image("python", "-c", code)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.slow
def test_dependencies_are_those_the_tests_ran_with(engine: Engine) -> None:
    code = (
        "import importlib.metadata as m;"
        "print(*sorted(f'{d.name}=={d.version}' for d in m.distributions()), sep='\\n')"
    )
    done = engine.in_image("python", "-I", "-c", code)
    installed = set(done.stdout.split())
    constraints = set((ROOT / "constraints.txt").read_text().splitlines())
    assert installed - constraints == {f"leveret=={__version__}"}
    assert {name.split("==")[0] for name in installed} == {
        "aiosqlite",
        "leveret",
        "msgspec",
        "pamqp",
        "uvloop",
    }


@pytest.mark.slow
def test_broker_is_process_one_and_not_root(container: Container) -> None:
    read = "print(open('/proc/1/cmdline').read().split(chr(0))[1:3]); import os; print(os.getuid())"
    done = container.execute("python", "-c", read)
    assert done.stdout == "['/opt/leveret/bin/leveret', 'serve']\n5672\n"


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_the_broker_in_order(container: Container, signum: signal.Signals) -> None:
    container.send(signum)
    assert container.wait_ended() == 0
    logs = container.logs()
    assert "leveret: stopped\n" in logs
    assert "Traceback" not in logs


@pytest.mark.slow
def test_stop_right_after_the_start_is_not_lost(engine: Engine, volume: str) -> None:
    """Process 1 loses signals that it does not handle yet: it would have to be killed."""
    with running(engine, volume) as container:
        assert container.stop() == 0
        assert "leveret: stopped\n" in container.logs()


@pytest.mark.slow
def test_messages_are_there_after_stop_and_start(container: Container) -> None:
    bodies = [b"one", b"two" * 10_000, b"three"]
    publish(container, "kept", bodies)
    assert container.stop() == 0
    container.start()
    assert take(container, "kept") == bodies


@pytest.mark.slow
def test_confirmed_messages_are_there_after_a_kill(container: Container) -> None:
    bodies = [f"message {number}".encode() for number in range(100)]
    publish(container, "kept", bodies)
    container.send(signal.SIGKILL)
    assert container.wait_ended() == 137
    container.start()
    assert take(container, "kept") == bodies


@pytest.mark.slow
def test_messages_are_in_the_volume_not_in_the_container(engine: Engine, volume: str) -> None:
    with running(engine, volume) as first:
        first.wait_answers()
        publish(first, "kept", [b"moved"])
        assert first.stop() == 0
    with running(engine, volume) as second:
        second.wait_answers()
        assert take(second, "kept") == [b"moved"]


@pytest.mark.slow
def test_health_check_tells_a_broker_that_works_from_one_that_does_not(
    engine: Engine, container: Container
) -> None:
    check = health_check(engine)
    well = container.execute(*check)
    assert well.returncode == 0
    assert well.stdout.startswith(f"127.0.0.1:{container.port} answered in ")
    # Its socket still accepts: a check that only connects would be content.
    container.send(signal.SIGSTOP)
    try:
        ill = container.execute(*check)
    finally:
        container.send(signal.SIGCONT)
    assert ill.returncode == 1
    assert "no answer within" in ill.stderr
    assert container.execute(*check).returncode == 0


@pytest.mark.slow
def test_data_folder_of_somebody_else_is_said_in_one_line(engine: Engine, volume: str) -> None:
    with running(engine, volume, "--user=4711:4711") as container:
        assert container.wait_ended() == 1
        [line] = [line for line in container.logs().splitlines() if line.startswith("leveret: ")]
        assert "cannot write to the data folder /data" in line
