"""The journal over real files and its real thread; time and the disk are the test's."""

from __future__ import annotations

import logging
import threading
from array import array
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from leveret.broker.clock import VirtualClock
from leveret.broker.config import Settings
from leveret.broker.event_log.journal import BATCH_BYTES, FLUSH_S, RETRY_S, Journal
from leveret.broker.event_log.segments import Segments
from leveret.broker.event_log.writer import TOGETHER_BYTES
from leveret.broker.server import Broker
from leveret.protocol.twin import Template
from leveret.storage.memory_queue import MemoryQueue
from tests.broker.event_log.disk import Disk
from tests.broker.event_log.reading import (
    assert_no_gaps,
    hidden,
    of_kind,
    only,
    read,
    read_events,
    sealed,
)
from tests.support.waiting import wait_until

SEGMENT_S = 60.0


@pytest.fixture
def folder(settings: Settings) -> Path:
    return settings.data / "events"


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(monkeypatch)
    yield disk
    disk.release()


@pytest.fixture
async def journal(settings: Settings, clock: VirtualClock) -> AsyncIterator[Journal]:
    journal = Journal(replace(settings, event_log="all", event_log_buffer=1 << 20), clock)
    await journal.start()
    yield journal
    await journal.stop()


def write_lines(journal: Journal, count: int, *, size: int = 200) -> None:
    """As the message log does, lines of one run together; each as long as was asked for."""
    shared = b',"boot":"%b","ev":"ack","queue":"' % journal.boot.encode()
    known = len(b'{"ts":%d,"seq":' % journal.now_us()) + len(shared) + len(b'","msg":0}\n') + 3
    name = b"q" * (size - known)
    template = Template((shared + name + b'","msg":', b"}\n"))
    journal.buffer.add(journal.now_us(), template, (array("q", [0] * count),), count)


def publish_unless_shed(journal: Journal, count: int) -> None:
    if journal.buffer.is_shut:
        journal.shed(count)
    else:
        write_lines(journal, count)


async def test_first_and_last_line_of_a_boot(settings: Settings, clock: VirtualClock) -> None:
    journal = Journal(settings, clock)
    await journal.start()
    await journal.stop("because")
    events = read_events(settings.data / "events")
    assert [event.ev for event in events] == ["broker_start", "broker_stop"]
    assert events[0].attrs == {"version": "0.1.0", "level": "sampled", "sample": "0.01"}
    assert events[0].ts == int(clock.now() * 1_000_000)
    assert events[1].reason == "because"
    assert_no_gaps(events)


async def test_nothing_is_written_before_the_flush(
    journal: Journal, clock: VirtualClock, folder: Path
) -> None:
    journal.event("cancel", queue="a")
    assert hidden(folder) == []
    clock.advance(FLUSH_S)
    await wait_until(lambda: hidden(folder) and read(hidden(folder)[0]).count(b"\n") == 2)


async def test_a_batch_does_not_wait_for_the_flush(journal: Journal, folder: Path) -> None:
    write_lines(journal, BATCH_BYTES // 200 + 1)
    await wait_until(lambda: hidden(folder) and hidden(folder)[0].stat().st_size > BATCH_BYTES)


async def test_sealed_by_size(settings: Settings, clock: VirtualClock, folder: Path) -> None:
    journal = Journal(replace(settings, event_log="all", event_log_segment_bytes=600_000), clock)
    await journal.start()
    for _ in range(10):
        write_lines(journal, 1000)
    await journal.stop()
    assert len(sealed(folder)) == 3
    assert all(path.stat().st_size >= 600_000 for path in sealed(folder)[:-1])
    assert_no_gaps(read_events(folder))
    assert journal.statistics()["segments"] == 3


async def test_a_seal_that_fails_is_tried_again(
    settings: Settings, clock: VirtualClock, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it failed with: the thread goes on, and no line is lost."""
    seal = Segments.seal
    failures = [RuntimeError("a bug"), MemoryError()]

    def seal_later(segments: Segments, now_us: int) -> None:
        if failures:
            raise failures.pop()
        seal(segments, now_us)

    monkeypatch.setattr(Segments, "seal", seal_later)
    journal = Journal(replace(settings, event_log="all", event_log_segment_bytes=300_000), clock)
    await journal.start()
    for _ in range(10):
        write_lines(journal, 2000)
        await wait_until(lambda: journal.statistics()["pending"] == 0)
    await journal.stop()
    assert not failures
    assert len(sealed(folder)) >= 3
    events = read_events(folder)
    assert_no_gaps(events)
    assert len(events) == 20_002


async def test_sealed_by_time(journal: Journal, clock: VirtualClock, folder: Path) -> None:
    clock.advance(FLUSH_S)
    clock.advance(SEGMENT_S - 1)
    journal.event("cancel", queue="a")
    assert sealed(folder) == []
    clock.advance(1)
    await wait_until(lambda: len(sealed(folder)) == 1)
    assert [event.ev for event in read_events(folder)] == ["broker_start", "cancel"]
    # Nothing to tell: no segment, however long that lasts.
    clock.advance(10 * SEGMENT_S)
    journal.event("cancel", queue="b")
    clock.advance(FLUSH_S)
    await wait_until(lambda: len(hidden(folder)) == 1)
    assert len(sealed(folder)) == 1
    clock.advance(SEGMENT_S)
    await wait_until(lambda: len(sealed(folder)) == 2)


async def test_a_slow_disk_sheds_and_says_so(
    journal: Journal, disk: Disk, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk.hold()
    for _ in range(20):
        publish_unless_shed(journal, 1000)
    assert journal.buffer.is_shut
    journal.event("cancel", queue="a")
    shed = journal.statistics()["shed"]
    assert shed == 20_000 - (journal.statistics()["events"] - 1) + 1  # type: ignore[operator]
    assert len([r for r in caplog.records if "left out" in r.message]) == 1
    disk.release()
    await wait_until(lambda: not journal.buffer.is_shut)
    publish_unless_shed(journal, 10)
    await journal.stop()
    events = read_events(folder)
    assert_no_gaps(events)
    assert only(events, "log_gap").n == shed
    assert events.index(only(events, "log_gap")) == len(events) - 12
    assert journal.statistics()["pending"] == 0


async def test_what_has_waited_is_written_together(
    settings: Settings, clock: VirtualClock, disk: Disk, folder: Path
) -> None:
    """Or the thread would take as many turns at the GIL as there are batches."""
    journal = Journal(replace(settings, event_log="all", event_log_buffer=2**30), clock)
    await journal.start()
    disk.hold()
    write_lines(journal, BATCH_BYTES // 200 + 1)
    await wait_until(lambda: disk.writes)
    for _ in range(40):
        write_lines(journal, BATCH_BYTES // 200 + 1)
    disk.release()
    await journal.stop()
    assert 3 <= len(disk.writes) <= 6
    assert max(disk.writes) > TOGETHER_BYTES / 2
    assert_no_gaps(read_events(folder))


async def test_a_stop_while_shedding_tells_the_gap(
    journal: Journal, disk: Disk, folder: Path
) -> None:
    disk.hold()
    for _ in range(20):
        publish_unless_shed(journal, 1000)
    disk.release()
    await journal.stop()
    events = read_events(folder)
    assert [event.ev for event in events[-2:]] == ["log_gap", "broker_stop"]
    assert events[-2].n == journal.statistics()["shed"]
    assert_no_gaps(events)


async def test_a_full_disk_is_tried_again_and_loses_nothing(
    journal: Journal,
    disk: Disk,
    clock: VirtualClock,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk.is_full = True
    write_lines(journal, 2000)
    await wait_until(lambda: journal.statistics()["trouble"])
    write_lines(journal, 2000)
    for _ in range(3):
        await disk.wait_refused(lambda: clock.advance(RETRY_S))
    disk.is_full = False

    def is_well() -> bool:
        clock.advance(RETRY_S)
        return journal.statistics()["pending"] == 0

    await wait_until(is_well)
    assert journal.statistics()["trouble"] is None
    await journal.stop()
    events = read_events(folder)
    assert len(events) == 4002
    assert_no_gaps(events)
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "No space left" in errors[0].getMessage()


async def test_a_machine_without_threads_left_is_tried_again(
    journal: Journal, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        write_lines(journal, 2000)
    write_lines(journal, 2000)
    await journal.stop()
    events = read_events(folder)
    assert len(events) == 4002
    assert_no_gaps(events)


async def test_a_stop_on_a_full_disk_ends(
    journal: Journal, disk: Disk, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk.is_full = True
    write_lines(journal, 2000)
    await journal.stop()
    assert sealed(folder) == []
    assert "last lines are lost" in caplog.text


def has_sealed(journal: Journal, count: int) -> bool:
    return journal.statistics()["segments"] == count


async def test_retention_counts_from_the_brokers_clock(
    settings: Settings, clock: VirtualClock, folder: Path
) -> None:
    journal = Journal(replace(settings, event_log_retention_s=130), clock)
    await journal.start()
    for number in range(4):
        journal.event("cancel", queue=str(number))
        clock.advance(FLUSH_S)
        clock.advance(SEGMENT_S)
        await wait_until(partial(has_sealed, journal, number + 1))
    assert [event.queue for event in read_events(folder)] == ["2", "3"]
    await journal.stop()


async def test_zstd(settings: Settings, clock: VirtualClock, folder: Path) -> None:
    journal = Journal(replace(settings, event_log_compression="zstd"), clock)
    await journal.start()
    write_lines(journal, 100)
    await journal.stop()
    (path,) = sealed(folder)
    assert path.name.endswith(".jsonl.zst")
    assert hidden(folder) == []
    assert len(read_events(folder)) == 102


@pytest.mark.parametrize("name", ["\udcff\udcfe", "a\ud800b"], ids=["bytes", "surrogate"])
async def test_a_name_that_is_no_utf8_is_told(
    journal: Journal, clock: VirtualClock, folder: Path, name: str
) -> None:
    journal.event("queue_declare", queue=name, attrs={name: name})
    clock.advance(FLUSH_S)
    clock.advance(SEGMENT_S)
    await wait_until(lambda: sealed(folder))
    assert "\ufffd" in only(read_events(folder), "queue_declare").queue


async def test_boots_are_sortable_and_differ(settings: Settings, clock: VirtualClock) -> None:
    first = [Journal(settings, clock).boot for _ in range(3)]
    clock.advance(0.001)
    assert len(set(first)) == 3
    assert max(first) < Journal(settings, clock).boot


async def test_samples_by_level(settings: Settings, clock: VirtualClock) -> None:
    found = {
        level: Journal(replace(settings, event_log=level), clock).sample
        for level in ("objects", "sampled", "all")
    }
    assert found == {"objects": 0.0, "sampled": 0.01, "all": 1.0}


async def test_off_writes_nothing(settings: Settings) -> None:
    async with Broker(replace(settings, event_log="off")) as broker:
        assert broker.event_log is None
        assert broker.statistics()["event_log"] == {}
    assert not (settings.data / "events").exists()


async def test_a_broker_without_files_has_no_log(settings: Settings) -> None:
    async with Broker(settings, make_backing=MemoryQueue) as broker:
        assert broker.event_log is None
    assert not settings.data.exists()


async def test_the_folder_can_be_another(settings: Settings, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    async with Broker(replace(settings, event_log_dir=str(elsewhere))):
        pass
    assert not (settings.data / "events").exists()
    assert of_kind(read_events(elsewhere), "broker_stop")
