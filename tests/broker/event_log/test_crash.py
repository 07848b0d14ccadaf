"""The log of a broker process: killed without a word, started again, asked for its status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pika  # type: ignore[import-untyped]
import pytest

from tests.broker.event_log.reading import (
    assert_no_gaps,
    hidden,
    of_kind,
    read,
    read_events,
    sealed,
)
from tests.support.broker_process import ROOT, BrokerProcess, running_broker
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(60)

QUEUES = 50


def declare_queues(process: BrokerProcess) -> None:
    connection = pika.BlockingConnection(pika.URLParameters(process.url))
    channel = connection.channel()
    for number in range(QUEUES):
        channel.queue_declare(f"q{number}")
    connection.close()


def lines_on_disk(folder: Path) -> int:
    return sum(read(path).count(b'"queue_declare"') for path in hidden(folder))


async def test_a_torn_line_is_cut_and_the_segment_sealed(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "events"
    with running_broker(tmp_path, "--event-log", "objects") as killed:
        declare_queues(killed)
        await wait_until(lambda: lines_on_disk(folder) == QUEUES)
        killed.kill()
    (left,) = hidden(folder)
    # What a power cut in the middle of a write leaves.
    with left.open("ab") as torn:
        torn.write(b'{"ts":17000000')
    assert sealed(folder) == []
    with running_broker(tmp_path, "--event-log", "objects") as again:
        await wait_until(lambda: len(sealed(folder)) == 1)
        assert again.stop() == 0
    assert hidden(folder) == []
    events = read_events(folder)
    first = [event for event in events if event.boot == events[0].boot]
    second = [event for event in events if event.boot != events[0].boot]
    assert first[0].boot < second[0].boot
    assert len(of_kind(first, "queue_declare")) == QUEUES
    assert not of_kind(first, "broker_stop")
    assert_no_gaps(first)
    assert_no_gaps(second)
    assert [event.ev for event in second] == ["broker_start", "broker_stop"]


def test_status_tells_of_the_log(tmp_path: Path) -> None:
    with running_broker(tmp_path, "--event-log", "all") as process:
        command = [sys.executable, "-m", "leveret", "status", "--data", str(process.data)]
        shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        asked = subprocess.run(
            [*command, "--json"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    assert "event log (all): 1 events," in shown.stdout
    assert json.loads(asked.stdout)["event_log"]["level"] == "all"


def test_an_unknown_level_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "leveret", "serve", "--data", str(tmp_path)]
    refused = subprocess.run(
        [*command, "--event-log", "some"], cwd=ROOT, capture_output=True, text=True
    )
    assert refused.returncode == 2
    assert "must be one of off, objects, sampled, all" in refused.stderr
