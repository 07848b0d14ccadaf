"""From segments to the lake: each event once, whatever happens on the way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import duckdb
import pytest
from pyspark.sql import SparkSession

from leveret.spark_jobs.generator import Plan, generate
from leveret.spark_jobs.hadoop_files import create, read_text
from leveret.spark_jobs.ingest import forget, ingest
from leveret.spark_jobs.ingest_lock import alone, lock_of
from leveret.spark_jobs.lake import (
    Lake,
    LakeError,
    Selection,
    delete,
    read_events,
    read_quarantine,
)
from tests.spark.conftest import SESSION

SMALL = Plan(messages=200, problems=frozenset(), segment_lines=200)
KILL_DEADLINE_S = 90.0


def in_files(lake: Lake) -> tuple[int, int]:
    """Lines and different lines in the Parquet files themselves, as any other reader finds them."""
    (counted,) = duckdb.execute(
        f"SELECT count(*), count(DISTINCT (boot, seq)) FROM '{lake.bronze}/*/*/*.parquet'"
    ).fetchall()
    return counted[0], counted[1]


def test_all_kinds_of_lines(spark: SparkSession, tmp_path: Path) -> None:
    """Torn ones, ones that lack something, those of the future; open and compressed segments."""
    truth = generate(tmp_path / "log/events", Plan(messages=100, compress=True))
    folder = truth.files[0].parent
    (folder / "_open-x-1.jsonl").write_text("not yet\n", encoding="utf-8")
    odd = [
        '{"ts":1772438400000000,"seq":1,"boot":"x","ev":"publish","msg":1,"new_field":[1]}',
        '{"ts":1772438400000001,"seq":2,"boot":"x","ev":"kind_of_the_future","n":3}',
        '{"ts":1772438400000002,"seq":3,"boot":"x"}',
        '{"ts":"noon","seq":4,"boot":"x","ev":"publish"}',
        '{"ts":1772438400000003,"seq":5,"boot":"x","ev":"pub',
        '{"ts":1772438400000004,"seq":6,"boot":"x","ev":"publish","v":2}',
    ]
    (folder / "x-000001.jsonl").write_text("\n".join(odd), encoding="utf-8")
    lake = Lake(str(tmp_path / "lake"))

    done = ingest(spark, str(tmp_path / "log"), lake)

    assert (done.events, done.malformed) == (truth.events + 2, 4)
    events = read_events(spark, lake, Selection())
    strange = {row["ev"]: row for row in events.where("boot = 'x'").collect()}
    assert strange.keys() == {"publish", "kind_of_the_future"}
    # What was left out has its default, and null only where null means something.
    first = strange["publish"]
    assert (first["v"], first["n"], first["queue"], first["persistent"]) == (1, 1, "", False)
    assert first["wait_us"] is None
    refused = {row["line"]: row for row in read_quarantine(spark, lake).collect()}
    assert [refused[line]["reason"] for line in odd[3:5]] == [
        "not a JSON object of an event's fields"
    ] * 2
    reasons = sorted(row["reason"] for row in refused.values())
    assert (reasons[0], reasons[-1]) == ("no ev", "version 2, known is 1")
    assert all(row["file"].endswith("x-000001.jsonl") for row in refused.values())


def test_only_new_segments_are_taken_in(spark: SparkSession, tmp_path: Path) -> None:
    truth = generate(tmp_path / "aside", SMALL)
    events = tmp_path / "log/events"
    lake = Lake(str(tmp_path / "lake"))
    for file in truth.files[:1]:
        (events / file.parent.name).mkdir(parents=True)
        shutil.copy(file, events / file.parent.name)
    first = ingest(spark, str(tmp_path / "log"), lake)
    for file in truth.files[1:]:
        shutil.copy(file, events / file.parent.name)

    second = ingest(spark, str(tmp_path / "log"), lake)
    third = ingest(spark, str(tmp_path / "log"), lake)

    assert 0 < first.events < truth.events
    assert first.events + second.events == truth.events
    assert third.batches == 0

    # The same log in another place is not new, whatever its path.
    (tmp_path / "log").rename(tmp_path / "archive of logs")
    moved = ingest(spark, str(tmp_path / "archive of logs"), lake)

    assert moved.batches == 0
    assert in_files(lake) == (truth.events, truth.events)


def forget_that_it_was_done(lake: Lake) -> None:
    """What a kill between writing a batch and noting it leaves behind."""
    commits = Path(lake.checkpoint) / "commits"
    last = max(int(file.name) for file in commits.iterdir() if file.name.isdecimal())
    assert last > 0
    for name in (f"{last}", f".{last}.crc"):
        (commits / name).unlink()


def test_a_batch_that_was_not_noted_as_done_is_done_again(
    spark: SparkSession, tmp_path: Path
) -> None:
    truth = generate(tmp_path / "log/events", SMALL)
    lake = Lake(str(tmp_path / "lake"))
    ingest(spark, str(tmp_path / "log"), lake, files_per_batch=2)
    forget_that_it_was_done(lake)

    again = ingest(spark, str(tmp_path / "log"), lake, files_per_batch=2)

    assert again.batches == 1
    assert in_files(lake) == (truth.events, truth.events)

    # Now one of its segments is deleted as well: what is in the lake is more than what is left.
    forget_that_it_was_done(lake)
    truth.files[-1].unlink()
    with pytest.raises(LakeError, match=f"{truth.files[-1].name} was being .*--accept-gone"):
        ingest(spark, str(tmp_path / "log"), lake)
    accepted = ingest(spark, str(tmp_path / "log"), lake, accept_gone=True)

    assert (accepted.batches, accepted.gone) == (1, 1)
    assert in_files(lake) == (truth.events, truth.events)


def test_two_at_a_time_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    generate(tmp_path / "log/events", Plan(messages=20, problems=frozenset()))
    lake = Lake(str(tmp_path / "lake"))
    lock = Path(lock_of(lake))
    with alone(spark, lake):
        with pytest.raises(LakeError, match=f"process {os.getpid()} on .* delete {lock}"):
            ingest(spark, str(tmp_path / "log"), lake)
        assert lock.exists()
    assert not lock.exists()
    assert not Path(lake.bronze).exists()

    def note_as_done(_: object) -> None:
        """What another one does that got past the lock."""
        (Path(lake.checkpoint) / "commits/0").write_text("v1\n{}", encoding="utf-8")

    with pytest.raises(LakeError, match="another ingest works on"):
        ingest(spark, str(tmp_path / "log"), lake, on_batch=note_as_done)
    assert not lock.exists()


def test_of_many_at_once_one_gets_the_lock(spark: SparkSession, tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        for attempt in range(20):
            path = str(tmp_path / f"new/{attempt}.lock")
            tries = [pool.submit(create, spark, path, str(number)) for number in range(8)]
            (winner,) = (number for number, one in enumerate(tries) if one.result())
            assert read_text(spark, path) == str(winner)


def test_a_lock_outlives_its_process_only_elsewhere(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(str(tmp_path / "lake"))
    lock = Path(lock_of(lake))
    lock.parent.mkdir(parents=True)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    here = {"host": socket.gethostname(), "since": "2026-03-02T08:00:00+00:00"}
    for pid in (ended.pid, os.getpid()):
        # This process has its own number, but did not write that.
        lock.write_text(json.dumps({**here, "pid": pid}), encoding="utf-8")
        with alone(spark, lake):
            pass
        assert not lock.exists()
    for text in (json.dumps({**here, "host": "elsewhere", "pid": ended.pid}), ""):
        lock.write_text(text, encoding="utf-8")
        with pytest.raises(LakeError, match=f"delete {lock}"), alone(spark, lake):
            pass
        assert lock.read_text(encoding="utf-8") == text


@pytest.mark.slow
def test_resumes_after_being_killed(spark: SparkSession, tmp_path: Path) -> None:
    truth = generate(tmp_path / "log/events", Plan(messages=2000, segment_lines=300))
    assert len(truth.files) > 20
    lake = Lake(str(tmp_path / "lake"))
    command = [sys.executable, "-m", "leveret.spark_jobs", "ingest", "--batch-files", "1"]
    command += ["--log", str(tmp_path / "log"), "--lake", lake.root, "--master", "local[1]"]
    for key, value in SESSION.items():
        command += ["--conf", f"{key}={value}"]
    with (tmp_path / "output").open("wb") as output:
        # A group of its own, so that the JVM is killed along with it.
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    commits = Path(lake.checkpoint) / "commits"
    deadline = time.monotonic() + KILL_DEADLINE_S
    try:
        while not (commits / "2").exists():
            assert process.poll() is None, (tmp_path / "output").read_text()
            assert time.monotonic() < deadline, (tmp_path / "output").read_text()
            time.sleep(0.01)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert in_files(lake)[0] < truth.events, "it was done before it was killed"

    rest = ingest(spark, str(tmp_path / "log"), lake)

    assert 0 < rest.events < truth.events
    assert in_files(lake) == (truth.events, truth.events)


def test_events_are_filed_by_their_date(spark: SparkSession, tmp_path: Path) -> None:
    folder = tmp_path / "log/events/date=2026-03-02"
    folder.mkdir(parents=True)
    # A segment that was opened before midnight and has events from after it.
    lines = [
        f'{{"ts":{1772495999_999999 + number},"seq":{number},"boot":"x","ev":"publish"}}'
        for number in (0, 1)
    ]
    (folder / "x-1.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    lake = Lake(str(tmp_path / "lake"))

    ingest(spark, str(tmp_path / "log"), lake)

    dates = sorted(path.name for path in Path(lake.bronze).iterdir())
    assert dates == ["date=2026-03-02", "date=2026-03-03"]
    after = read_events(spark, lake, Selection(since=1772496000_000000))
    assert [row["seq"] for row in after.collect()] == [1]


def test_a_lake_without_its_record_is_not_added_to(spark: SparkSession, tmp_path: Path) -> None:
    """Everything would be in it twice."""
    truth = generate(tmp_path / "log/events", Plan(messages=50, problems=frozenset()))
    lake = Lake(str(tmp_path / "lake"))
    ingest(spark, str(tmp_path / "log"), lake)
    shutil.rmtree(lake.checkpoint)

    with pytest.raises(LakeError, match="--rebuild"):
        ingest(spark, str(tmp_path / "log"), lake)
    forget(spark, lake)
    ingest(spark, str(tmp_path / "log"), lake)

    assert in_files(lake) == (truth.events, truth.events)


class Killed(BaseException):
    """No exception that anything catches."""


def test_a_rebuild_that_was_interrupted_is_not_added_to(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it was: half of the lake is no lake."""
    truth = generate(tmp_path / "log/events", Plan(messages=50, problems=frozenset()))
    (truth.files[0].parent / "x-000001.jsonl").write_text("torn\n", encoding="utf-8")
    log, lake = str(tmp_path / "log"), Lake(str(tmp_path / "lake"))
    ingest(spark, log, lake)
    everything = [lake.checkpoint, lake.bronze, lake.quarantine]

    for done in range(len(everything) + 1):
        left = done

        def die(spark: SparkSession, path: str) -> None:
            nonlocal left
            if left == 0:
                # Half of a folder is gone, too.
                shutil.rmtree(Path(path) / "commits", ignore_errors=True)
                raise Killed
            left -= 1
            delete(spark, path)

        monkeypatch.setattr("leveret.spark_jobs.ingest.delete", die)
        with pytest.raises(Killed):
            ingest(spark, log, lake, rebuild=True)
        monkeypatch.undo()
        assert [Path(path).exists() for path in everything] == [
            number >= done for number in range(len(everything))
        ]
        with pytest.raises(LakeError, match="anew with --rebuild"):
            ingest(spark, log, lake)

    again = ingest(spark, log, lake, rebuild=True)
    assert (again.events, again.malformed) == (truth.events, 1)
    assert in_files(lake) == (truth.events, truth.events)
    assert read_quarantine(spark, lake).count() == 1
    assert ingest(spark, log, lake).batches == 0

    # By hand, and not all of it.
    shutil.rmtree(lake.checkpoint)
    shutil.rmtree(lake.bronze)
    with pytest.raises(LakeError, match="anew with --rebuild"):
        ingest(spark, log, lake)


def test_what_is_no_log_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(LakeError, match="no event log"):
        ingest(spark, str(tmp_path), Lake(str(tmp_path / "lake")))


def test_a_lake_without_events_says_what_to_do(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(LakeError, match="analytics ingest"):
        read_events(spark, Lake(str(tmp_path / "lake")), Selection())
