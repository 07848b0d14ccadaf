"""What the kombu and Celery tests start from: names, a connection, and waits with a deadline.

Upstream: ``amqp_url`` of tests/integration, the broker under test.
Downstream: the test modules of this folder. What is made here goes away by itself (queues
expire, exchanges are auto-deleted), so that one broker can serve many runs at once.
"""

# mypy: allow-untyped-calls
# (kombu says that it is typed, but few of its functions have signatures.)

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import pytest
from celery import Celery  # type: ignore[import-untyped]
from kombu.connection import Connection
from kombu.entity import Queue
from kombu.message import Message
from kombu.messaging import Consumer

DEADLINE_S = 10.0
WORKER_DEADLINE_S = 30.0
BACKENDS = ("rpc", "file")


@pytest.fixture
def fresh(request: pytest.FixtureRequest) -> Callable[[str], str]:
    """Names no other test or run uses: ``fresh("jobs")`` is the same name all test long."""
    mark = f"{request.node.originalname}-{uuid4().hex[:12]}"
    return lambda name: f"{mark}.{name}"


@pytest.fixture
def connection(amqp_url: str) -> Iterator[Connection]:
    """A connection whose publishes return once confirmed: the message is then in its queues."""
    confirmed = {"confirm_publish": True}
    with Connection(amqp_url, connect_timeout=DEADLINE_S, transport_options=confirmed) as opened:
        opened.connect()
        yield opened


@pytest.fixture
def jobs(fresh: Callable[[str], str]) -> Queue:
    """A queue, not yet declared, that any connection may use and that expires by itself."""
    return Queue(fresh("jobs"), durable=False, expires=60)


@pytest.fixture
def drain(connection: Connection) -> Callable[..., None]:
    """``drain(until=condition)`` handles events until the condition holds.

    A broker that stays silent raises TimeoutError. ``on=`` names another connection.
    """

    def drain_until(*, until: Callable[[], bool], on: Connection = connection) -> None:
        end = time.monotonic() + DEADLINE_S
        while not until():
            on.drain_events(timeout=max(end - time.monotonic(), 0.01))

    return drain_until


@pytest.fixture
def collect(
    connection: Connection, drain: Callable[..., None]
) -> Callable[[Queue, int], list[Message]]:
    """``collect(queue, count)`` consumes, acknowledges and returns exactly so many messages."""

    def collect_messages(source: Queue, count: int) -> list[Message]:
        taken: list[Message] = []

        def on_message(message: Message) -> None:
            message.ack()
            taken.append(message)

        with Consumer(connection.channel(), source, on_message=on_message):
            drain(until=lambda: len(taken) >= count)
        assert len(taken) == count
        return taken

    return collect_messages


@pytest.fixture(scope="module")
def celery_prefix(amqp_url: str) -> Iterator[str]:
    """What all names of this module's Celery begin with; removes what Celery leaves behind."""
    prefix = f"celery-{uuid4().hex[:12]}"
    yield prefix
    queues = [f"{prefix}.{kind}{part}" for kind in BACKENDS for part in ("", ".images", ".resize")]
    exchanges = [f"{prefix}.{kind}{part}" for kind in BACKENDS for part in ("", ".topics")]
    exchanges += [f"{prefix}.pidbox", f"reply.{prefix}.pidbox", f"{prefix}.events"]
    exchanges += [f"{prefix}.rpc.added"]
    with Connection(amqp_url) as connection:
        for name in queues:
            connection.default_channel.queue_delete(name)
        for name in exchanges:
            connection.default_channel.exchange_delete(name)


@pytest.fixture(scope="module")
def celery_settings(
    amqp_url: str, celery_prefix: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, object]]:
    """Settings for client and worker alike, by result backend.

    ``rpc`` returns results over the broker. It cannot do chords, so ``file`` is there as well;
    each has its own queue, for a worker can only answer in its own backend's way.
    """
    results = tmp_path_factory.mktemp("results")
    backends = {"rpc": "rpc://", "file": f"file://{results}"}
    return {
        kind: {
            "broker_url": amqp_url,
            # A broker that is not there is a failed test, not something to wait for.
            "broker_connection_retry_on_startup": False,
            "result_backend": backends[kind],
            "result_chord_retry_interval": 0.1,
            # Also how long a queue for replies outlives its client.
            "result_expires": 60,
            "task_default_queue": f"{celery_prefix}.{kind}",
            "control_exchange": celery_prefix,
            "event_exchange": f"{celery_prefix}.events",
            "event_queue_prefix": f"{celery_prefix}.events",
            "worker_prefetch_multiplier": 1,
        }
        for kind in BACKENDS
    }


@pytest.fixture(scope="module")
def start_worker(
    celery_settings: dict[str, dict[str, object]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., "subprocess.Popen[bytes]"]]:
    """``start_worker(kind, *options)`` returns a worker process that takes tasks already.

    All of them are gone when the module ends; one that will not stop when asked fails it.
    """
    folder = tmp_path_factory.mktemp("workers")
    workers: list[subprocess.Popen[bytes]] = []

    def start(kind: str, *options: str) -> "subprocess.Popen[bytes]":
        log = folder / f"{len(workers)}.log"
        ready, pipe = os.pipe()
        environment = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parent),
            "LEVERET_CELERY_SETTINGS": json.dumps(celery_settings[kind]),
            "LEVERET_CELERY_READY_FD": str(pipe),
        }
        command = [sys.executable, "-m", "celery", "-A", "worker_app", "worker", "-l", "INFO"]
        with log.open("wb") as output:
            worker = subprocess.Popen(
                [*command, *options],
                cwd=folder,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[pipe],
                start_new_session=True,
            )
        workers.append(worker)
        os.close(pipe)
        with os.fdopen(ready, "rb") as listening:
            heard, _, _ = select.select([listening], [], [], WORKER_DEADLINE_S)
            assert heard, f"no worker in {WORKER_DEADLINE_S} s: {log.read_text()}"
            assert listening.read(1) == b"!", f"the worker ended: {log.read_text()}"
        return worker

    yield start
    for worker in workers:
        worker.terminate()
    stubborn = [worker for worker in workers if not _has_ended(worker)]
    for worker in workers:
        # Whatever a killed worker's pool left running shares its process group.
        with suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
    assert not stubborn, "".join(path.read_text() for path in sorted(folder.iterdir()))


def _has_ended(worker: "subprocess.Popen[bytes]") -> bool:
    try:
        worker.wait(timeout=WORKER_DEADLINE_S)
    except subprocess.TimeoutExpired:
        return False
    return True


@pytest.fixture(scope="module")
def clients(celery_settings: dict[str, dict[str, object]]) -> Iterator[dict[str, Celery]]:
    """The calling side of each backend's application: it knows tasks by their names alone."""
    applications = {}
    for kind, settings in celery_settings.items():
        applications[kind] = Celery(f"client-{kind}", set_as_current=False)
        applications[kind].conf.update(settings)
    yield applications
    results = applications["rpc"].backend.result_consumer
    # Nobody may have asked for a result.
    if results._connection is not None:
        results.stop()
    for application in applications.values():
        application.close()
