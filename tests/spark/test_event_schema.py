"""One definition of an event for the broker, the analytics and the generator."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from pyspark.sql.types import StructField

from leveret.broker.event_log.schema import KINDS, REQUIRED, Event, encode_lines
from leveret.spark_jobs.generator import Plan, generate
from leveret.spark_jobs.lake import BRONZE
from leveret.spark_jobs.schema import EVENT

# What Spark is told of each field. A change here changes what lakes that exist hold: new fields go
# to the end of the definition, and none changes its type.
WRITTEN = (
    "ts bigint, seq bigint, boot string, ev string, v int, vhost string, conn bigint, ch int, "
    "user string, exchange string, rk string, queue string, msg bigint, dtag bigint, ctag string, "
    "size bigint, redelivered boolean, delivery_count int, persistent boolean, mandatory boolean, "
    "routed int, n bigint, wait_us bigint, hold_us bigint, depth bigint, reason string, "
    "peer string, attrs map<string,string>"
)


def described(field: StructField) -> str:
    return f"{field.name} {field.dataType.simpleString()}"


def test_spark_reads_what_the_broker_writes() -> None:
    assert EVENT.names == [field.name for field in msgspec.structs.fields(Event)]
    assert ", ".join(map(described, EVENT.fields)) == WRITTEN
    assert BRONZE.fields[: len(EVENT.fields)] == EVENT.fields


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_kinds_have_fields_that_exist(kind: object) -> None:
    assert isinstance(kind, tuple)
    name, _, fields = kind
    assert set(fields) <= set(Event.__struct_fields__) - set(REQUIRED)
    assert len(set(fields)) == len(fields), name


def test_what_is_at_its_default_is_left_out() -> None:
    (line,) = encode_lines([Event(1, 2, "b", "deliver", wait_us=0, depth=0, n=1)]).splitlines()
    # 0 microseconds are something else than unknown.
    assert line == b'{"ts":1,"seq":2,"boot":"b","ev":"deliver","wait_us":0,"depth":0}'


def test_the_generator_writes_events(tmp_path: Path) -> None:
    """Lines that a broker might have written: known kinds, their fields, numbered in order."""
    truth = generate(tmp_path, Plan(messages=300, segment_lines=500))
    decode = msgspec.json.Decoder(Event).decode
    last = (0, 0)
    for file in truth.files:
        for line in file.read_bytes().splitlines():
            event = decode(line)
            given = msgspec.json.decode(line).keys() - set(REQUIRED)
            assert given <= set(KINDS[event.ev].fields), line
            assert (event.ts, event.seq) > last
            assert event.seq == last[1] + 1
            last = (event.ts, event.seq)
    assert last[1] == truth.events


def test_the_generator_repeats_itself(tmp_path: Path) -> None:
    plan = Plan(messages=200)
    files = [generate(tmp_path / name, plan).files for name in ("one", "two")]
    assert [a.read_bytes() for a in files[0]] == [b.read_bytes() for b in files[1]]


def test_long_logs_come_in_chapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leveret.spark_jobs.generator.CHAPTER_MESSAGES", 500)
    truth = generate(tmp_path, Plan(messages=2000, problems=frozenset({"poison"})))
    lines = [line for file in truth.files for line in file.read_bytes().splitlines()]
    numbers = [msgspec.json.decode(line) for line in lines]
    assert [one["seq"] for one in numbers] == list(range(1, truth.events + 1))
    times = [one["ts"] for one in numbers]
    assert times == sorted(times)
    published = [one["msg"] for one in numbers if one["ev"] == "publish"]
    assert len(published) == len(set(published))
