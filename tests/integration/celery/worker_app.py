"""The Celery application that the tests' worker processes run; the tests call it by task name.

Started as ``celery -A worker_app worker``, never imported by a test: client and worker share
only the settings in LEVERET_CELERY_SETTINGS (JSON) and the task names, as two services would.
LEVERET_CELERY_READY_FD, if set, is a pipe that hears one byte when the worker takes tasks.
"""

# mypy: allow-untyped-calls
# (kombu says that it is typed, but few of its functions have signatures.)

import json
import os
import signal
import socket
import time
from typing import Any

from celery import Celery, Task  # type: ignore[import-untyped]
from celery.exceptions import Reject  # type: ignore[import-untyped]
from celery.signals import worker_ready  # type: ignore[import-untyped]
from kombu.entity import Exchange, Queue

SETTINGS = json.loads(os.environ["LEVERET_CELERY_SETTINGS"])
DEFAULT_QUEUE = SETTINGS["task_default_queue"]
TOPICS = Exchange(f"{DEFAULT_QUEUE}.topics", type="topic")

app = Celery("worker")
app.conf.update(SETTINGS)
app.conf.task_queues = [
    Queue(DEFAULT_QUEUE, Exchange(DEFAULT_QUEUE), routing_key=DEFAULT_QUEUE),
    Queue(f"{DEFAULT_QUEUE}.images", TOPICS, routing_key="images.#"),
    Queue(f"{DEFAULT_QUEUE}.resize", TOPICS, routing_key="*.resize"),
]


# The worker's own consumer, in its main process: how a task in a solo pool reaches the socket.
consumers: list[Any] = []


@worker_ready.connect
def report_ready(sender: Any, **_: Any) -> None:
    consumers.append(sender)
    pipe = int(os.environ["LEVERET_CELERY_READY_FD"])
    os.write(pipe, b"!")
    os.close(pipe)


@app.task(name="add")
def add(left: int, right: int) -> int:
    return left + right


@app.task(name="total")
def total(numbers: list[int]) -> int:
    return sum(numbers)


@app.task(name="reverse")
def reverse(text: str) -> str:
    return text[::-1]


@app.task(name="fail")
def fail(reason: str) -> None:
    raise ValueError(reason)


@app.task(name="started_at")
def started_at() -> float:
    return time.time()


@app.task(name="flaky", bind=True, max_retries=3)
def flaky(self: Task, failures: int) -> int:
    """Fail so many times, asking to be retried soon; return how many retries it took."""
    retries: int = self.request.retries
    if retries < failures:
        raise self.retry(countdown=0.05, exc=ValueError(f"failure {retries + 1}"))
    return retries


@app.task(name="refuse", acks_late=True)
def refuse(folder: str) -> None:
    """Leave a trace and go back to the queue, every time."""
    _leave_trace(folder)
    raise Reject("not by me", requeue=True)


@app.task(name="crash", acks_late=True)
def crash(folder: str) -> None:
    """Leave a trace and take the worker along; for a solo pool."""
    _leave_trace(folder)
    os.kill(os.getpid(), signal.SIGKILL)


def _leave_trace(folder: str) -> None:
    with open(os.path.join(folder, "traces"), "a") as traces:
        traces.write(f"{os.getpid()}\n")


@app.task(name="hold", bind=True, acks_late=True, reject_on_worker_lost=True)
def hold(self: Task, port: int) -> str:
    """Tell the test how this task was delivered, then do as it says: a task caught halfway.

    Told to ``cut``, it breaks its worker's connection to the broker before the late ack.
    """
    report = {
        "pid": os.getpid(),
        "task": self.request.id,
        "worker": self.request.hostname,
        "redelivered": self.request.delivery_info["redelivered"],
        "routing_key": self.request.delivery_info["routing_key"],
    }
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.sendall(json.dumps(report).encode() + b"\n")
        word = line.makefile().readline().strip() or "abandoned"
    if word == "cut":
        consumers[0].connection.connection.transport.sock.shutdown(socket.SHUT_RDWR)
    return word
