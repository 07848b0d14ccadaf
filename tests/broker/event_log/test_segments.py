"""Segments on a real disk: sealed, kept for a while, found again after a crash."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from leveret.broker.event_log import segments as segments_module
from leveret.broker.event_log.compression import EventLogError, compress_file, load_zstd
from leveret.broker.event_log.segments import Segments, SegmentSettings
from tests.broker.event_log.reading import hidden, read, sealed

DAY_US = 86_400_000_000
# 2023-11-14, 22:13:20.
NOW_US = 1_700_000_000_000_000

Make = Callable[..., Segments]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def make(
        boot: str = "b1",
        *,
        segment_bytes: int = 1000,
        retention_s: int = 0,
        retention_bytes: int = 0,
        is_compressed: bool = False,
    ) -> Segments:
        settings = SegmentSettings(
            tmp_path, segment_bytes, retention_s, retention_bytes, is_compressed
        )
        return Segments(settings, boot)

    return make


def names(paths: list[Path]) -> list[str]:
    return [f"{path.parent.name}/{path.name}" for path in paths]


def test_a_segment_is_hidden_until_it_is_sealed(make: Make, tmp_path: Path) -> None:
    segments = make()
    segments.write(b"one\n", NOW_US, NOW_US)
    assert sealed(tmp_path) == []
    assert names(hidden(tmp_path)) == ["date=2023-11-14/_open-b1-000001.jsonl"]
    segments.seal(NOW_US)
    assert names(sealed(tmp_path)) == ["date=2023-11-14/b1-000001.jsonl"]
    assert hidden(tmp_path) == []
    assert read(sealed(tmp_path)[0]) == b"one\n"


def test_what_another_broker_is_compressing_is_left_to_it(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both share a folder: one starts while the other seals."""
    pytest.importorskip("backports.zstd")
    working = make("b1", is_compressed=True)
    working.write(b"one\n", NOW_US, NOW_US)

    def compress_and_start(source: Path, target: Path) -> None:
        compress_file(source, target)
        make("b2", is_compressed=True).recover(NOW_US)

    monkeypatch.setattr(segments_module, "compress_file", compress_and_start)
    working.seal(NOW_US)
    assert names(sealed(tmp_path)) == ["date=2023-11-14/b1-000001.jsonl.zst"]
    assert hidden(tmp_path) == []
    assert read(sealed(tmp_path)[0]) == b"one\n"


def test_what_another_broker_deletes_meanwhile_is_passed_over(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        earlier = make(f"a{number}")
        earlier.write(b"12345678\n", NOW_US + number, NOW_US + number)
        earlier.seal(NOW_US)
    files = Segments._files

    def list_and_delete(segments: Segments, prefix: str) -> Iterator[Path]:
        for path in files(segments, prefix):
            if not prefix and path.name.startswith("a1"):
                path.unlink()
            yield path

    monkeypatch.setattr(Segments, "_files", list_and_delete)
    make("b1", retention_bytes=10).recover(NOW_US)
    assert names(sealed(tmp_path)) == ["date=2023-11-14/a2-000001.jsonl"]


@pytest.mark.parametrize("error", [OSError("no room"), MemoryError(), RuntimeError("zstd")])
def test_what_cannot_be_compressed_is_sealed_as_it_is(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(source: Path, target: Path) -> None:
        target.write_bytes(b"half of it")
        raise error

    monkeypatch.setattr(segments_module, "compress_file", fail)
    segments = make(is_compressed=True)
    segments.write(b"one\n", NOW_US, NOW_US)
    segments.seal(NOW_US)
    assert names(sealed(tmp_path)) == ["date=2023-11-14/b1-000001.jsonl"]
    assert hidden(tmp_path) == []


def test_the_date_is_that_of_the_first_event(make: Make, tmp_path: Path) -> None:
    segments = make()
    segments.write(b"one\n", NOW_US, NOW_US + DAY_US)
    segments.seal(NOW_US + DAY_US)
    segments.write(b"two\n", NOW_US + DAY_US, NOW_US + DAY_US)
    segments.seal(NOW_US + DAY_US)
    assert names(sealed(tmp_path)) == [
        "date=2023-11-14/b1-000001.jsonl",
        "date=2023-11-15/b1-000002.jsonl",
    ]


def test_is_full_at_its_size(make: Make) -> None:
    segments = make(segment_bytes=8)
    segments.write(b"one\n", NOW_US, NOW_US)
    assert not segments.is_full
    segments.write(b"two\n", NOW_US, NOW_US)
    assert segments.is_full


def test_nothing_written_makes_no_segment(make: Make, tmp_path: Path) -> None:
    make().seal(NOW_US)
    assert list(tmp_path.iterdir()) == []


def test_the_oldest_go_by_age(make: Make, tmp_path: Path) -> None:
    segments = make(retention_s=10)
    for number in range(4):
        at_us = NOW_US + number * 6_000_000
        segments.write(b"line\n", at_us, at_us)
        segments.seal(at_us)
    assert names(sealed(tmp_path)) == [
        "date=2023-11-14/b1-000003.jsonl",
        "date=2023-11-14/b1-000004.jsonl",
    ]


def test_the_oldest_go_by_size_also_those_of_earlier_boots(make: Make, tmp_path: Path) -> None:
    earlier = make("b1")
    for number in range(3):
        earlier.write(b"12345678\n", NOW_US + number, NOW_US + number)
        earlier.seal(NOW_US)
    segments = make("b2", retention_bytes=20)
    segments.recover(NOW_US)
    assert names(sealed(tmp_path)) == [
        "date=2023-11-14/b1-000002.jsonl",
        "date=2023-11-14/b1-000003.jsonl",
    ]
    segments.write(b"12345678\n", NOW_US + 9, NOW_US + 9)
    assert len(sealed(tmp_path)) == 2  # the open one does not count
    segments.seal(NOW_US)
    assert names(sealed(tmp_path)) == [
        "date=2023-11-14/b1-000003.jsonl",
        "date=2023-11-14/b2-000001.jsonl",
    ]


def test_a_folder_whose_last_segment_goes_goes_too(make: Make, tmp_path: Path) -> None:
    segments = make(retention_s=1)
    segments.write(b"one\n", NOW_US, NOW_US)
    segments.seal(NOW_US)
    segments.write(b"two\n", NOW_US + DAY_US, NOW_US + DAY_US)
    segments.seal(NOW_US + DAY_US)
    assert [path.name for path in tmp_path.iterdir()] == ["date=2023-11-15"]


@pytest.mark.parametrize("is_compressed", [False, True], ids=["plain", "zstd"])
def test_what_a_crash_left_is_cut_and_sealed(
    make: Make, tmp_path: Path, *, is_compressed: bool
) -> None:
    crashed = make("b1")
    # Longer than one step of the search for the last line's end.
    torn = b"x" * 200_000
    crashed.write(b"one\ntwo\n" + torn, NOW_US, NOW_US)
    crashed.close()
    make("b2", is_compressed=is_compressed).recover(NOW_US)
    assert hidden(tmp_path) == []
    assert [read(path) for path in sealed(tmp_path)] == [b"one\ntwo\n"]
    assert sealed(tmp_path)[0].name.endswith(".zst") == is_compressed


def test_a_leftover_without_a_whole_line_is_deleted(make: Make, tmp_path: Path) -> None:
    crashed = make("b1")
    crashed.write(b"half a li", NOW_US, NOW_US)
    crashed.close()
    make("b2").recover(NOW_US)
    assert (hidden(tmp_path), sealed(tmp_path)) == ([], [])


def test_a_segment_another_broker_writes_is_left_alone(make: Make, tmp_path: Path) -> None:
    running = make("b1")
    running.write(b"one\n", NOW_US, NOW_US)
    make("b2").recover(NOW_US)
    assert len(hidden(tmp_path)) == 1
    running.seal(NOW_US)
    assert [read(path) for path in sealed(tmp_path)] == [b"one\n"]


def test_compressed_segments_are_complete_when_they_appear(make: Make, tmp_path: Path) -> None:
    segments = make(is_compressed=True)
    lines = b'{"ev":"publish"}\n' * 1000
    segments.write(lines, NOW_US, NOW_US)
    segments.seal(NOW_US)
    (path,) = sealed(tmp_path)
    assert path.name == "b1-000001.jsonl.zst"
    assert path.stat().st_size < len(lines) / 10
    assert read(path) == lines
    assert hidden(tmp_path) == []


def test_a_crash_while_compressing_leaves_one_copy(make: Make, tmp_path: Path) -> None:
    segments = make("b1", is_compressed=True)
    segments.write(b"one\n", NOW_US, NOW_US)
    segments.seal(NOW_US)
    (path,) = sealed(tmp_path)
    path.with_name("_open-b1-000001.jsonl").write_bytes(b"one\n")
    path.with_name("_sealing-b1-000002.jsonl.zst").write_bytes(b"half")
    path.with_name("_open-b1-000002.jsonl").write_bytes(b"two\n")
    make("b2", is_compressed=True).recover(NOW_US)
    assert hidden(tmp_path) == []
    assert [read(path) for path in sealed(tmp_path)] == [b"one\n", b"two\n"]


def test_without_room_for_a_copy_it_is_sealed_as_it_is(make: Make, tmp_path: Path) -> None:
    segments = make(is_compressed=True)
    segments.write(b"one\n", NOW_US, NOW_US)
    (hidden(tmp_path)[0].parent / "_sealing-b1-000001.jsonl.zst").symlink_to("/dev/full")
    segments.seal(NOW_US)
    assert hidden(tmp_path) == []
    assert names(sealed(tmp_path)) == ["date=2023-11-14/b1-000001.jsonl"]


def test_a_segment_that_was_deleted_does_not_stop_the_log(make: Make, tmp_path: Path) -> None:
    segments = make()
    segments.write(b"one\n", NOW_US, NOW_US)
    (path,) = hidden(tmp_path)
    path.unlink()
    path.parent.rmdir()
    segments.seal(NOW_US)
    segments.write(b"two\n", NOW_US, NOW_US)
    segments.seal(NOW_US)
    assert [read(path) for path in sealed(tmp_path)] == [b"two\n"]


def test_a_write_that_failed_halfway_can_be_tried_again(make: Make, tmp_path: Path) -> None:
    segments = make()
    segments.write(b"one\n", NOW_US, NOW_US)
    (path,) = hidden(tmp_path)
    with path.open("ab") as half:
        half.write(b"tw")
    segments.write(b"two\n", NOW_US, NOW_US)
    segments.seal(NOW_US)
    assert read(sealed(tmp_path)[0]) == b"one\ntwo\n"


def test_missing_zstd_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("compression", "compression.zstd", "backports.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(EventLogError, match=r"pip install 'leveret\[zstd\]'"):
        load_zstd()


def test_files_are_for_the_brokers_own_group(make: Make, tmp_path: Path) -> None:
    segments = make()
    segments.write(b"one\n", NOW_US, NOW_US)
    assert os.stat(hidden(tmp_path)[0]).st_mode & 0o007 == 0
