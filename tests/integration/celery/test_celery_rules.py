"""Celery on queues with rules: priorities, delayed retries, and tasks that no worker survives.

The queue has x-max-priority; a policy gives it a dead-letter queue and, as only Leveret can for a
classic queue, a limit to how often a message may come back.
"""

# mypy: allow-untyped-calls
# (kombu says that it is typed, but few of its functions have signatures.)

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery  # type: ignore[import-untyped]
from kombu.connection import Connection

from tests.integration.celery.test_celery_workers import Gate
from tests.support.broker_process import BrokerProcess

DEADLINE_S = 20.0
DELIVERY_LIMIT = 3
SOLO = ("--pool=solo", "-c", "1", "--without-gossip", "--without-mingle")

StartWorker = Callable[..., "subprocess.Popen[bytes]"]

pytestmark = pytest.mark.skipif(
    "LEVERET_TEST_AMQP_URL" in os.environ, reason="policies are set by Leveret's command line"
)


@pytest.fixture(scope="module")
def celery_settings(celery_settings: dict[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    for settings in celery_settings.values():
        settings["task_queue_max_priority"] = 9
        settings["task_default_priority"] = 4
    return celery_settings


@pytest.fixture(scope="module")
def dead_queue(amqp_url: str, broker_process: BrokerProcess, celery_prefix: str) -> Iterator[str]:
    """Where tasks of this module go when they came back too often."""
    name = f"{celery_prefix}.dead"
    definition = (
        f'{{"delivery-limit": {DELIVERY_LIMIT}, "dead-letter-exchange": "",'
        f' "dead-letter-routing-key": "{name}"}}'
    )
    policy = [sys.executable, "-m", "leveret", "policy"]
    data = ["--data", str(broker_process.data)]
    pattern = rf"^{celery_prefix}\.rpc$"
    subprocess.run([*policy, "set", celery_prefix, pattern, definition, *data], check=True)
    with Connection(amqp_url) as connection:
        connection.default_channel.queue_declare(name, durable=True, auto_delete=False)
        yield name
        connection.default_channel.queue_delete(name)
    subprocess.run([*policy, "clear", celery_prefix, *data], check=True)


@pytest.fixture(scope="module")
def rpc(clients: dict[str, Celery], start_worker: StartWorker, dead_queue: str) -> Celery:
    start_worker("rpc", *SOLO, "-n", "rules@tests")
    return clients["rpc"]


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.close()


def wait_for_dead(amqp_url: str, name: str) -> Any:
    """The message at the head of the dead-letter queue, taken out of it."""
    end = time.monotonic() + DEADLINE_S
    with Connection(amqp_url) as connection:
        while time.monotonic() < end:
            message = connection.default_channel.basic_get(name, no_ack=True)
            if message is not None:
                return message
            # Nobody tells a client that a queue is not empty any more but by a consumer.
            time.sleep(0.02)
    raise AssertionError("nothing has died")


def test_tasks_of_higher_priority_run_first(rpc: Celery, gate: Gate) -> None:
    held_up = rpc.send_task("hold", (gate.port,))
    held = gate.wait_for_task()
    priorities = [0, 9, 3, 9, 5, 1]
    waiting = [rpc.send_task("started_at", priority=priority) for priority in priorities]
    held.release()
    starts = [result.get(timeout=DEADLINE_S) for result in waiting]
    assert held_up.get(timeout=DEADLINE_S) == "released"

    in_order = [priority for _, priority in sorted(zip(starts, priorities, strict=True))]
    assert in_order == sorted(priorities, reverse=True)


def test_a_retry_with_a_countdown_comes_back_through_the_queue(rpc: Celery) -> None:
    """Retries are new messages: they are not what the delivery limit counts."""
    retries = DELIVERY_LIMIT
    before = time.monotonic()
    result = rpc.send_task("flaky", (retries,), priority=2)
    assert result.get(timeout=DEADLINE_S) == retries
    assert time.monotonic() - before >= 0.05 * retries


def test_a_task_that_is_always_refused_ends_in_the_dead_letter_queue(
    rpc: Celery, amqp_url: str, dead_queue: str, tmp_path: Path
) -> None:
    task = rpc.send_task("refuse", (str(tmp_path),))
    # What comes behind it is not held up.
    assert rpc.send_task("add", (1, 2)).get(timeout=DEADLINE_S) == 3
    message = wait_for_dead(amqp_url, dead_queue)
    assert message.headers["id"] == task.id
    [death] = message.headers["x-death"]
    assert (death["reason"], death["count"]) == ("delivery_limit", 1)
    runs = (tmp_path / "traces").read_text().splitlines()
    assert len(runs) == DELIVERY_LIMIT + 1


@pytest.mark.slow
def test_a_task_that_kills_its_workers_ends_in_the_dead_letter_queue(
    rpc: Celery, start_worker: StartWorker, amqp_url: str, dead_queue: str, tmp_path: Path
) -> None:
    """Last in this module: no worker is left."""
    for number in range(DELIVERY_LIMIT):
        start_worker("rpc", *SOLO, "-n", f"victim{number}@tests")
    task = rpc.send_task("crash", (str(tmp_path),))
    message = wait_for_dead(amqp_url, dead_queue)
    assert message.headers["id"] == task.id
    assert message.headers["x-first-death-reason"] == "delivery_limit"
    assert len(set((tmp_path / "traces").read_text().splitlines())) == DELIVERY_LIMIT + 1
