"""Celery's workers as processes: killed halfway, remote-controlled, talking to each other.

A task that must be caught halfway calls the test back over a socket and waits there (see
``hold`` in worker_app.py), so no test guesses how long something takes.
"""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery  # type: ignore[import-untyped]
from celery.exceptions import TaskRevokedError  # type: ignore[import-untyped]

DEADLINE_S = 20.0

StartWorker = Callable[..., "subprocess.Popen[bytes]"]

pytestmark = pytest.mark.slow


class HeldTask:
    """A ``hold`` task that waits for the test's word."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        with line.makefile() as lines:
            self.report: dict[str, Any] = json.loads(lines.readline())

    def release(self) -> None:
        self._line.sendall(b"released\n")

    def cut_connection(self) -> None:
        """Have the task break its worker's connection; for a solo pool only."""
        self._line.sendall(b"cut\n")


class Gate:
    """Where ``hold`` tasks report; hands them to the test one by one."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(DEADLINE_S)
        self._lines: list[socket.socket] = []
        self.port: int = self._listener.getsockname()[1]

    def wait_for_task(self) -> HeldTask:
        line, _ = self._listener.accept()
        line.settimeout(DEADLINE_S)
        self._lines.append(line)
        return HeldTask(line)

    def close(self) -> None:
        for line in [*self._lines, self._listener]:
            line.close()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.close()


@pytest.fixture(scope="module")
def rpc(clients: dict[str, Celery], start_worker: StartWorker) -> Celery:
    """A default worker in all but names: process pool, gossip, mingle, events."""
    start_worker("rpc", "--pool=prefork", "-c", "2", "-E", "-n", "first@tests")
    return clients["rpc"]


# --- remote control ---------------------------------------------------------------------


def test_ping_and_inspect(rpc: Celery, celery_prefix: str) -> None:
    inspect = rpc.control.inspect(destination=["first@tests"], limit=1, timeout=DEADLINE_S)

    assert inspect.ping() == {"first@tests": {"ok": "pong"}}
    assert "add" in inspect.registered()["first@tests"]
    assert {queue["name"] for queue in inspect.active_queues()["first@tests"]} == {
        f"{celery_prefix}.rpc",
        f"{celery_prefix}.rpc.images",
        f"{celery_prefix}.rpc.resize",
    }
    assert inspect.stats()["first@tests"]["pool"]["max-concurrency"] == 2


def test_running_task_shows_and_can_be_terminated(rpc: Celery, gate: Gate) -> None:
    result = rpc.send_task("hold", (gate.port,))
    held = gate.wait_for_task()
    inspect = rpc.control.inspect(destination=["first@tests"], limit=1, timeout=DEADLINE_S)

    active = {task["id"]: task["worker_pid"] for task in inspect.active()["first@tests"]}
    rpc.control.revoke(result.id, terminate=True, signal="SIGKILL")

    with pytest.raises(TaskRevokedError):
        result.get(timeout=DEADLINE_S)
    assert active[result.id] == held.report["pid"]


def test_revoked_task_never_runs(rpc: Celery) -> None:
    doomed = str(uuid4())
    # Revoked before it is sent: the only order that leaves nothing to chance.
    replies = rpc.control.revoke(
        doomed, reply=True, destination=["first@tests"], limit=1, timeout=DEADLINE_S
    )
    result = rpc.send_task("add", (1, 1), task_id=doomed)

    with pytest.raises(TaskRevokedError):
        result.get(timeout=DEADLINE_S)
    assert list(replies[0]) == ["first@tests"]


def test_consumer_added_and_cancelled_at_run_time(rpc: Celery, celery_prefix: str) -> None:
    name = f"{celery_prefix}.rpc.added"
    control: dict[str, Any] = {
        "destination": ["first@tests"], "reply": True, "limit": 1, "timeout": DEADLINE_S,
    }  # fmt: skip
    options = {"expires": 60, "durable": False}
    rpc.control.add_consumer(name, exchange_type="direct", options=options, **control)
    # Straight to the queue: asking Celery to send to it would declare it with other options.
    result = rpc.send_task("add", (20, 22), exchange="", routing_key=name)
    answer = result.get(timeout=DEADLINE_S)
    [cancelled] = rpc.control.cancel_consumer(name, **control)

    assert answer == 42
    assert cancelled == {"first@tests": {"ok": f"no longer consuming from {name}"}}


# --- routing and events -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "deliveries"),
    [
        pytest.param("images.crop", 1, id="one-queue"),
        pytest.param("images.resize", 2, id="two-queues"),
        pytest.param("video.resize", 1, id="the-other-queue"),
    ],
)
def test_topic_routing(
    rpc: Celery, celery_prefix: str, gate: Gate, key: str, deliveries: int
) -> None:
    """A worker on several queues runs a task once for every queue that its key reaches."""
    rpc.send_task("hold", (gate.port,), exchange=f"{celery_prefix}.rpc.topics", routing_key=key)
    held = [gate.wait_for_task() for _ in range(deliveries)]
    for task in held:
        task.release()
    # Whatever else the key had reached would be in a queue before this one is sent.
    rpc.send_task("hold", (gate.port,))
    last = gate.wait_for_task()
    last.release()

    assert [task.report["routing_key"] for task in held] == [key] * deliveries
    assert last.report["routing_key"] == f"{celery_prefix}.rpc"


def test_events_tell_the_life_of_a_task(rpc: Celery) -> None:
    task_id = str(uuid4())
    seen: list[str] = []

    def on_event(event: dict[str, Any]) -> None:
        if event.get("uuid") == task_id:
            seen.append(event["type"])
            receiver.should_stop = event["type"] == "task-succeeded"

    with rpc.connection_for_read() as connection:
        receiver = rpc.events.Receiver(connection, handlers={"*": on_event})
        # Sent once the receiver's queue is bound, or the first events would have no reader.
        receiver.on_consume_ready = lambda *_, **__: rpc.send_task("add", (1, 2), task_id=task_id)
        receiver.capture(timeout=DEADLINE_S, wakeup=False)

    assert seen == ["task-received", "task-started", "task-succeeded"]


def test_new_worker_learns_revocations_from_its_neighbours(
    rpc: Celery, celery_prefix: str, start_worker: StartWorker
) -> None:
    """mingle: a worker that starts asks the others what they know, over the broker."""
    revoked = str(uuid4())
    once: dict[str, Any] = {"limit": 1, "timeout": DEADLINE_S}
    rpc.control.revoke(revoked, reply=True, destination=["first@tests"], **once)

    # On a queue of its own, so that it takes no other test's tasks.
    aside = f"{celery_prefix}.file.images"
    start_worker("file", "--pool=solo", "-Q", aside, "-n", "second@tests")

    known = rpc.control.inspect(destination=["second@tests"], **once).revoked()
    assert revoked in known["second@tests"]


# --- losing a worker --------------------------------------------------------------------


def test_another_worker_gets_the_task_of_a_killed_one(
    clients: dict[str, Celery], celery_prefix: str, start_worker: StartWorker, gate: Gate
) -> None:
    """acks_late: an unacknowledged task outlives the worker that had it."""
    alike = ("-c", "1", "--without-gossip", "--without-mingle", "-Q", f"{celery_prefix}.file")
    victim = start_worker("file", *alike, "-n", "victim@tests")
    result = clients["file"].send_task("hold", (gate.port,))
    first = gate.wait_for_task()

    os.killpg(victim.pid, signal.SIGKILL)
    victim.wait(timeout=DEADLINE_S)
    start_worker("file", *alike, "-n", "rescuer@tests")
    second = gate.wait_for_task()
    second.release()

    assert result.get(timeout=DEADLINE_S, interval=0.05) == "released"
    assert (first.report["worker"], first.report["redelivered"]) == ("victim@tests", False)
    assert (second.report["worker"], second.report["redelivered"]) == ("rescuer@tests", True)
    assert first.report["task"] == second.report["task"] == result.id


def test_task_of_a_killed_pool_process_is_requeued(rpc: Celery, gate: Gate) -> None:
    """reject_on_worker_lost: the worker itself lives, and hands the task back."""
    result = rpc.send_task("hold", (gate.port,))
    first = gate.wait_for_task()

    os.kill(first.report["pid"], signal.SIGKILL)
    second = gate.wait_for_task()
    second.release()

    assert result.get(timeout=DEADLINE_S) == "released"
    assert (first.report["redelivered"], second.report["redelivered"]) == (False, True)
    assert first.report["pid"] != second.report["pid"]


def test_worker_reconnects_and_gets_its_unacknowledged_task_again(
    clients: dict[str, Celery], celery_prefix: str, start_worker: StartWorker, gate: Gate
) -> None:
    own_queue = f"{celery_prefix}.file.resize"
    start_worker("file", "--pool=solo", "--without-mingle", "-Q", own_queue, "-n", "cut@tests")
    route = {"exchange": f"{celery_prefix}.file.topics", "routing_key": "text.resize"}
    clients["file"].send_task("hold", (gate.port,), **route)
    first = gate.wait_for_task()

    first.cut_connection()
    second = gate.wait_for_task()
    second.release()
    after = clients["file"].send_task("add", (1, 2), **route)

    assert after.get(timeout=DEADLINE_S, interval=0.05) == 3
    assert (first.report["redelivered"], second.report["redelivered"]) == (False, True)
    assert first.report["pid"] == second.report["pid"]
