"""Celery with real worker processes: results, retries, schedules and workflows.

One worker for each result backend serves the whole module. The one that answers over the
broker has everything on that a default worker has: a process pool, gossip, mingle, events.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from celery import Celery, chain, chord, group  # type: ignore[import-untyped]
from celery.exceptions import ChordError  # type: ignore[import-untyped]

DEADLINE_S = 20.0


@pytest.fixture(scope="module")
def rpc(clients: dict[str, Celery], start_worker: Callable[..., object]) -> Celery:
    start_worker("rpc", "--pool=prefork", "-c", "2", "-E", "-n", "rpc@tests")
    return clients["rpc"]


@pytest.fixture(scope="module")
def file(clients: dict[str, Celery], start_worker: Callable[..., object]) -> Celery:
    start_worker("file", "--pool=solo", "--without-gossip", "--without-mingle", "-n", "file@tests")
    return clients["file"]


def test_task_returns_its_result(rpc: Celery) -> None:
    assert rpc.send_task("add", (2, 3)).get(timeout=DEADLINE_S) == 5


def test_exception_reaches_the_caller(rpc: Celery) -> None:
    result = rpc.send_task("fail", ("on purpose",))
    with pytest.raises(ValueError, match="on purpose"):
        result.get(timeout=DEADLINE_S)
    assert result.state == "FAILURE"


def test_arguments_larger_than_a_frame(rpc: Celery) -> None:
    text = "".join(chr(97 + number % 26) for number in range(500_000))
    assert rpc.send_task("reverse", (text,)).get(timeout=DEADLINE_S) == text[::-1]


def test_task_is_retried_until_it_succeeds(rpc: Celery) -> None:
    assert rpc.send_task("flaky", (2,)).get(timeout=DEADLINE_S) == 2


def test_task_that_never_succeeds_runs_out_of_retries(rpc: Celery) -> None:
    result = rpc.send_task("flaky", (100,))
    with pytest.raises(ValueError, match="failure 4"):
        result.get(timeout=DEADLINE_S)


def test_eta_is_kept_while_other_tasks_pass(rpc: Celery) -> None:
    eta = datetime.now(UTC) + timedelta(seconds=3)
    # More than the prefetch: the worker must raise it, or the scheduled tasks fill it up.
    scheduled = [rpc.send_task("started_at", eta=eta) for _ in range(4)]
    at_once = rpc.send_task("started_at").get(timeout=DEADLINE_S)
    starts = [result.get(timeout=DEADLINE_S) for result in scheduled]

    assert at_once < eta.timestamp() <= min(starts)


def test_countdown(rpc: Celery) -> None:
    before = time.time()
    assert rpc.send_task("started_at", countdown=0.5).get(timeout=DEADLINE_S) >= before + 0.5


def test_group_gathers_results_in_order(rpc: Celery) -> None:
    tasks = group([rpc.signature("add", (number, number)) for number in range(100)], app=rpc)
    assert tasks.apply_async().get(timeout=DEADLINE_S) == [2 * number for number in range(100)]


def test_chain_passes_each_result_on(rpc: Celery) -> None:
    tasks = chain(
        rpc.signature("add", (1, 2)),
        rpc.signature("add", (10,)),
        rpc.signature("add", (100,)),
        app=rpc,
    )
    assert tasks.apply_async().get(timeout=DEADLINE_S) == 113


def test_chord_runs_its_body_after_all_headers(file: Celery) -> None:
    headers = [file.signature("add", (number, 1)) for number in range(10)]
    result = chord(headers, file.signature("total"), app=file).apply_async()
    assert result.get(timeout=DEADLINE_S, interval=0.05) == sum(range(1, 11))


def test_chord_whose_header_fails_fails(file: Celery) -> None:
    headers = [file.signature("add", (1, 1)), file.signature("fail", ("in a header",))]
    result = chord(headers, file.signature("total"), app=file).apply_async()

    error = result.get(timeout=DEADLINE_S, interval=0.05, propagate=False)
    assert isinstance(error, ChordError)
    assert "in a header" in str(error)


def test_chain_into_a_chord(file: Celery) -> None:
    doubled = group([file.signature("add", (number,)) for number in (10, 20)], app=file)
    tasks = chain(
        file.signature("add", (1, 2)), chord(doubled, file.signature("total"), app=file), app=file
    )
    assert tasks.apply_async().get(timeout=DEADLINE_S, interval=0.05) == 13 + 23
