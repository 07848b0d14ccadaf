"""The event log as its readers see it: sealed segments, each line an event of the schema."""

from __future__ import annotations

from pathlib import Path

import msgspec
from backports import zstd

from leveret.broker.event_log.schema import KINDS, REQUIRED, Event

# Takes nothing that the schema does not know, and every value as the type it says.
_decoder = msgspec.json.Decoder(Event, strict=True)


def sealed(folder: Path) -> list[Path]:
    """By the order they were written in."""
    files = [path for path in folder.glob("date=*/*.jsonl*") if not path.name.startswith("_")]
    return sorted(files, key=lambda path: path.name)


def hidden(folder: Path) -> list[Path]:
    return sorted(folder.glob("date=*/_*"))


def read(path: Path) -> bytes:
    data = path.read_bytes()
    return zstd.decompress(data) if path.suffix == ".zst" else data


def read_events(folder: Path) -> list[Event]:
    """Everything in sealed segments; fails for a line that the schema does not describe."""
    events = []
    for path in sealed(folder):
        data = read(path)
        assert data.endswith(b"\n"), path
        for line in data.splitlines():
            event = _decoder.decode(line)
            given = set(msgspec.json.decode(line)) - set(REQUIRED)
            assert given <= set(KINDS[event.ev].fields), line
            events.append(event)
    return events


def assert_no_gaps(events: list[Event]) -> None:
    """Of one boot: numbers from 1, in order."""
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert len({event.boot for event in events}) == 1


def of_kind(events: list[Event], ev: str) -> list[Event]:
    return [event for event in events if event.ev == ev]


def only(events: list[Event], ev: str) -> Event:
    """The one event of a kind."""
    found = of_kind(events, ev)
    assert len(found) == 1, (ev, found)
    return found[0]
