"""The demo's clients against a real broker, and every job on the log it wrote.

Here the play is short: enough for every finding but those that compare many windows, of the burst
and of the queue that grows. ``test_demo_command.py`` has the whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from leveret.spark_jobs import demo, demo_script
from leveret.spark_jobs.cli import main
from leveret.spark_jobs.demo_actors import DemoError
from leveret.spark_jobs.jobs import JOBS
from tests.spark.answers import assert_same, rows
from tests.spark.conftest import Played
from tests.spark.oracle import QUESTIONS, Oracle
from tests.spark.test_jobs_agree import KEYS

# All jobs run before the first test; on a busy machine that takes its time.
pytestmark = pytest.mark.timeout(300)

Answer = Callable[[str], list[dict[str, Any]]]

# What a short play is enough for.
NAMED = [
    ("slow_consumers", f"consumer {demo_script.SLOW.ctag} (user web"),
    ("poison", f"was delivered {demo_script.POISON_DELIVERIES} times to 1 consumer"),
    ("poison", "(then rejected and dead-lettered)"),
    ("unroutable", f"{demo_script.UNROUTABLE} messages of user web reached no queue (2 keys"),
    ("churn", f"user legacy from 127.0.0.1 opened {demo_script.CONNECTIONS} connections"),
    ("churn", f"{demo_script.BAD_LOGINS} logins as intruder from 127.0.0.1 were refused"),
    *(("unused", name) for _, _, name in demo_script.UNUSED),
]


@pytest.fixture(scope="module")
def answer(spark: SparkSession, played: Played) -> Answer:
    def read(name: str) -> list[dict[str, Any]]:
        job = JOBS[name]
        return rows(spark.read.schema(job.schema).parquet(played.lake.result(job.layer, name)))

    return read


@pytest.fixture(scope="module")
def oracle(played: Played) -> Oracle:
    return Oracle(played.files, played.inputs.options.window_s)


@pytest.mark.parametrize("job", QUESTIONS)
def test_job_agrees_with_duckdb(answer: Answer, oracle: Oracle, job: str) -> None:
    assert_same(answer(job), oracle.ask(job), KEYS[job])


def test_the_log_is_whole(answer: Answer) -> None:
    (quality,) = answer("quality")
    assert (quality["missing"], quality["duplicates"], quality["malformed"]) == (0, 0, 0)
    assert (quality["has_start"], quality["has_stop"], quality["sample"]) == (True, True, 1.0)


def test_what_was_published_is_in_the_log(played: Played, answer: Answer) -> None:
    found = {(row["vhost"], row["exchange"], row["rk"]): row["n"] for row in answer("hot_keys")}
    assert found == dict(played.truth.published)


def test_what_each_queue_took_and_finished_is_in_the_log(played: Played, answer: Answer) -> None:
    took: Counter[tuple[str, str]] = Counter()
    outcomes: Counter[tuple[str, str]] = Counter()
    for row in answer("lifecycle"):
        took[row["vhost"], row["queue"]] += 1
        outcomes[row["queue"], row["outcome"]] += 1
    truth = played.truth
    beside = Counter({("shop", ""): demo_script.UNROUTABLE, ("billing", "invoices.dead"): 1})
    assert took == truth.took + beside
    expected = Counter({(queue, "acked"): n for (_, queue), n in truth.done.items()})
    expected["invoices", "acked"] -= 1
    expected["invoices", "dead_lettered"] = 1
    expected["audit", "ready"] = truth.took["billing", "audit"]
    expected["invoices.dead", "ready"] = 1
    expected["", "returned"] = truth.returned.total()
    expected["", "dropped"] = truth.dropped.total()
    assert outcomes == expected


def test_what_each_consumer_got_is_in_the_log(played: Played, answer: Answer) -> None:
    found = answer("slow_consumers")
    keys = [(row["vhost"], row["queue"], row["ctag"]) for row in found]
    truth = played.truth
    assert dict(zip(keys, (row["deliveries"] for row in found), strict=True)) == truth.delivered
    answered = {key: row["answers"] for key, row in zip(keys, found, strict=True) if row["answers"]}
    assert answered == truth.answered
    assert {row["unacked"] for row in found} == {0}


def test_what_no_queue_took_is_in_the_log(played: Played, answer: Answer) -> None:
    found = {
        (row["vhost"], row["exchange"], row["rk"], row["user"]): row for row in answer("unroutable")
    }
    truth = played.truth
    assert {key: row["returned"] for key, row in found.items() if row["returned"]} == truth.returned
    assert {key: row["dropped"] for key, row in found.items() if row["dropped"]} == truth.dropped


def test_the_poison_message_is_in_the_log(played: Played, answer: Answer) -> None:
    (row,) = answer("poison")
    place = (row["vhost"], row["queue"])
    assert {place: row["deliveries"]} == played.truth.poison_deliveries
    assert (row["reasons"], row["acked"]) == ("discard, nack, rejected, requeue", False)
    (letter,) = answer("dead_letters")
    assert (letter["vhost"], letter["queue"]) == place
    assert (letter["exchange"], letter["reason"]) == ("billing.dead", "rejected")
    assert (letter["n"], letter["lost"]) == (played.truth.dead_lettered[place], 0)


def test_what_each_tenant_used_is_in_the_log(played: Played, answer: Answer) -> None:
    found = {
        (row["vhost"], row["user"]): (
            *(row["msgs_in"], row["bytes_in"], row["msgs_out"], row["bytes_out"]),
            row["connections"],
        )
        for row in answer("usage")
    }
    assert found == {
        tenant: (one.msgs_in, one.bytes_in, one.msgs_out, one.bytes_out, one.connections)
        for tenant, one in played.truth.traffic.items()
    }
    refused = {row["user"]: row["refused"] for row in answer("churn") if row["refused"]}
    assert refused == played.truth.refused_logins


def test_what_was_planted_is_named(played: Played) -> None:
    said = [(finding.job, finding.text) for finding in played.report.findings]
    for job, text in NAMED:
        assert any(job == one and text in words for one, words in said), (job, text, said)


def test_a_play_too_short_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "--seconds", str(demo_script.SECONDS_LEAST - 1)])
    assert "there is nothing to see in less than 5 s" in capsys.readouterr().err


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    assert demo.new_folder(str(tmp_path / "new")).is_dir()
    with pytest.raises(DemoError, match="not empty"):
        demo.new_folder(str(tmp_path))


def test_a_broker_that_does_not_start_is_told(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("this is no folder")
    with pytest.raises(DemoError, match=r"did not start: look into .*broker\.log"):
        demo.perform(tmp_path, demo_script.SECONDS_LEAST)


def test_without_a_screen_nothing_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    assert not demo.show_page(tmp_path / "report.html", {"TERM": "xterm"})
