"""Every setting of the broker: one frozen ``Settings``, and the one place that reads them.

A setting is a field of ``Settings``; the kind in its metadata says how it is read, what is allowed
and what the documentation says. File, environment and flags all go through that table, so a new
setting is one new field (and its row in docs/configuration.md, which a test compares).

Order, the later one wins: defaults, TOML file, environment ``LEVERET_<NAME>``, flags.
Invariant: a ``Settings`` that exists is valid, however it was made.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol

ENV_PREFIX = "LEVERET_"
# Read elsewhere, or by the test suite: not settings, and not mistakes either.
_ENV_NOT_SETTINGS = re.compile(r"PURE_CODEC|CONFIG|TEST_.*")
# Kubernetes writes these into every container beside a service called "leveret".
_ENV_SERVICE_LINK = re.compile(r"SERVICE_.*|PORT_\d+_.*")

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "kib": 1024,
    "mib": 1024**2,
    "gib": 1024**3,
}


# No setting allows larger messages.
MESSAGE_SIZE_CAP = 512 * 1024**2


class SettingsError(ValueError):
    """Settings that cannot be used; the text is made for people, one line per mistake."""


class Kind(Protocol):
    """How a setting is read and what it may be."""

    @property
    def allowed(self) -> str:
        """What is allowed, to follow "must be"."""

    def read(self, raw: object) -> object:
        """The value, or ValueError."""

    def write(self, value: Any) -> str:
        """The value as a person would write it."""


@dataclass(frozen=True, slots=True)
class Whole:
    low: int
    high: int
    zero: str = ""  # what 0 stands for, where 0 is allowed beside the range

    @property
    def allowed(self) -> str:
        span = f"a whole number from {self.low} to {self.high}"
        return f"{span}, or 0 ({self.zero})" if self.zero else span

    def read(self, raw: object) -> int:
        if isinstance(raw, str) and re.fullmatch(r"[+-]?[0-9]{1,18}", raw.strip()):
            raw = int(raw)
        # bool is an int to Python, never to a person who wrote `port = true`.
        if not isinstance(raw, int) or isinstance(raw, bool):
            raise ValueError
        if not self.low <= raw <= self.high and not (self.zero and raw == 0):
            raise ValueError
        return raw

    def write(self, value: int) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes, as a number or with a unit."""

    low: int
    high: int
    zero: str = ""

    @property
    def allowed(self) -> str:
        span = f'bytes or a size like "16MiB", from {self.write(self.low)} to'
        span = f"{span} {self.write(self.high)}"
        return f"{span}, or 0 ({self.zero})" if self.zero else span

    def read(self, raw: object) -> int:
        if isinstance(raw, str):
            match = re.fullmatch(r"([0-9]{1,18})\s*([a-z]*)", raw.strip().lower())
            if match is None or match[2] not in _UNITS:
                raise ValueError
            raw = int(match[1]) * _UNITS[match[2]]
        return Whole(self.low, self.high, self.zero).read(raw)

    def write(self, value: int) -> str:
        for unit in ("GiB", "MiB", "KiB", "GB", "MB"):
            factor = _UNITS[unit.lower()]
            if value and value % factor == 0:
                return f"{value // factor}{unit}"
        return str(value)


@dataclass(frozen=True, slots=True)
class Share:
    """A share of something, up to 1; or, where a share says too little, bytes."""

    low_size: int
    high_size: int

    @property
    def allowed(self) -> str:
        return f"a share from 0 to 1, or {self._size.allowed}"

    @property
    def _size(self) -> Size:
        return Size(self.low_size, self.high_size)

    def read(self, raw: object) -> float:
        share = raw
        if isinstance(raw, str):
            try:
                share = float(raw)
            except ValueError:
                return self._size.read(raw)
        if not isinstance(share, int | float) or isinstance(share, bool):
            raise ValueError
        if 0 <= share <= 1:
            return float(share)
        if isinstance(share, float):
            if not share.is_integer():  # nor is infinity
                raise ValueError
            share = int(share)
        return self._size.read(share)

    def write(self, value: float) -> str:
        return f"{value:g}" if value <= 1 else self._size.write(int(value))


@dataclass(frozen=True, slots=True)
class Fraction:
    """A share of something, and nothing else."""

    allowed: str = "a share from 0 to 1"

    def read(self, raw: object) -> float:
        share = float(raw) if isinstance(raw, str) else raw
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0 <= share <= 1:
            raise ValueError
        return float(share)

    def write(self, value: float) -> str:
        return f"{value:g}"


@dataclass(frozen=True, slots=True)
class Seconds:
    low: float
    high: float

    @property
    def allowed(self) -> str:
        return f"seconds from {self.low:g} to {self.high:g}"

    def read(self, raw: object) -> float:
        if isinstance(raw, str):
            raw = float(raw.strip().removesuffix("s"))
        if not isinstance(raw, int | float) or isinstance(raw, bool):
            raise ValueError
        # Also refuses "nan", which compares with nothing.
        if not self.low <= raw <= self.high:
            raise ValueError
        return float(raw)

    def write(self, value: float) -> str:
        return f"{value:g}"


@dataclass(frozen=True, slots=True)
class Text:
    # User names, passwords and virtual hosts travel as AMQP short strings.
    max_bytes: int = 255
    empty: str = ""  # what no text at all stands for, where that is allowed

    @property
    def allowed(self) -> str:
        span = f"text of 1 to {self.max_bytes} bytes"
        return f"{span}, or nothing ({self.empty})" if self.empty else span

    def read(self, raw: object) -> str:
        if not isinstance(raw, str) or "\0" in raw:
            raise ValueError
        if self.empty and not raw:
            return raw
        if not 1 <= len(raw.encode("utf-8", "surrogateescape")) <= self.max_bytes:
            raise ValueError
        return raw

    def write(self, value: str) -> str:
        return value


@dataclass(frozen=True, slots=True)
class Choice:
    options: tuple[str, ...]

    @property
    def allowed(self) -> str:
        return f"one of {', '.join(self.options)}"

    def read(self, raw: object) -> str:
        if not isinstance(raw, str) or raw.lower() not in self.options:
            raise ValueError
        return raw.lower()

    def write(self, value: str) -> str:
        return value


@dataclass(frozen=True, slots=True)
class Folder:
    allowed: str = "the path of a folder"

    def read(self, raw: object) -> Path:
        if not isinstance(raw, str | Path) or not str(raw) or "\0" in str(raw):
            raise ValueError
        try:
            return Path(raw).expanduser()
        except RuntimeError as error:  # ~somebody who does not exist
            raise ValueError from error

    def write(self, value: Path) -> str:
        return str(value)


def _setting(default: Any, kind: Kind, about: str, *, secret: bool = False) -> Any:
    metadata = {"kind": kind, "about": about, "secret": secret}
    return field(default=default, repr=not secret, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one broker. Raises SettingsError for a value that is not allowed."""

    host: str = _setting("127.0.0.1", Text(), "Address to listen on; `0.0.0.0` for all.")
    port: int = _setting(5672, Whole(0, 65535), "Port to listen on; 0 takes a free one.")
    data: Path = _setting(  # noqa: RUF009 - a Path never changes
        Path("data"), Folder(), "Folder for everything that must survive."
    )
    default_user: str = _setting("guest", Text(), "User made when the data folder is new.")
    default_pass: str = _setting("guest", Text(), "Password of that user.", secret=True)
    default_vhost: str = _setting("/", Text(), "Virtual host made when the data folder is new.")
    heartbeat: int = _setting(
        60, Whole(1, 65535, "no heartbeats"), "Seconds between heartbeats offered to clients."
    )
    frame_max: int = _setting(
        131072, Size(4096, 2**31 - 1, "no limit"), "Largest frame offered to clients."
    )
    channel_max: int = _setting(
        2047, Whole(1, 65535, "no limit"), "Channels per connection offered to clients."
    )
    handshake_timeout_s: float = _setting(
        10.0, Seconds(0.1, 3600), "How long a client may take to open its connection."
    )
    max_message_size: int = _setting(
        128 * 1024**2,
        Size(1, MESSAGE_SIZE_CAP),
        "Largest message body; a larger one closes the channel.",
    )
    consumer_max_per_channel: int = _setting(
        0, Whole(1, 1_000_000, "no limit"), "Consumers a channel may have."
    )
    consumer_timeout: int = _setting(
        1_800_000,
        Whole(100, 2**40, "none"),
        "Milliseconds a delivery may stay unacknowledged.",
    )
    consumer_timeout_action: str = _setting(
        "close",
        Choice(("close", "requeue")),
        "What becomes of a delivery that was not acknowledged in time: `close` closes its channel,"
        " as RabbitMQ does; `requeue` returns the delivery alone.",
    )
    credit_flow_initial: int = _setting(
        400, Whole(1, 1_000_000), "Messages a publisher may be ahead of its queues."
    )
    credit_flow_more_after: int = _setting(
        200, Whole(1, 1_000_000), "Messages handled before a publisher gets that many more."
    )
    classic_queue_flow_control: str = _setting(
        "on",
        Choice(("on", "off")),
        "Whether queues slow down their publishers; `off` lets a publisher fill memory.",
    )
    delivery_window: int = _setting(
        200, Whole(1, 1_000_000), "Deliveries that may wait for a slow consumer's socket."
    )
    synchronous: str = _setting(
        "full",
        Choice(("full", "normal", "off")),
        "What a confirm of a persistent message means, unless its consumers have acked it: `full`"
        " fsynced; `normal` survives a crash of the broker, not of the machine; `off` promises"
        " nothing.",
    )
    queue_index_embed_msgs_below: int = _setting(
        4096, Size(0, 1024**2), "Smaller messages are kept in the queue index itself."
    )
    store_credit: int = _setting(
        4000,
        Whole(100, 10_000_000),
        "How far a queue may be ahead of its store: a message costs 1, and 1 for each 2 KiB.",
    )
    store_close_timeout_s: float = _setting(
        10.0,
        Seconds(0.1, 3600),
        "How long a stop waits for a disk that takes nothing; what was not confirmed is then lost.",
    )
    memory_high_watermark: float = _setting(
        0.4,
        Share(1024**2, 2**50),
        "Memory from which on publishers are blocked, of the machine's or the container's; from"
        " half of it on messages are paged out.",
    )
    disk_free_limit: int = _setting(
        50_000_000,
        Size(1, 2**50, "no limit"),
        "Room on the data folder's disk below which publishers are blocked.",
    )
    event_exchange: str = _setting(
        "on",
        Choice(("on", "off")),
        "Whether there is an exchange `amq.rabbitmq.event`, which tells what happens here.",
    )
    event_exchange_vhost: str = _setting(
        "", Text(empty="that of `default_vhost`"), "Virtual host that has that exchange."
    )
    event_log: str = _setting(
        "sampled",
        Choice(("off", "objects", "sampled", "all")),
        "What the event log tells of: `objects` are connections, queues and the like, `sampled`"
        " these and a share of all messages, `all` everything.",
    )
    event_log_sample: float = _setting(
        0.01, Fraction(), "Share of messages whose whole life is in a `sampled` event log."
    )
    event_log_dir: str = _setting(
        "", Text(4096, "`events` in the data folder"), "Folder of the event log."
    )
    event_log_segment_bytes: int = _setting(
        64 * 1024**2, Size(1024, 2**36), "Size at which a segment of the event log is sealed."
    )
    event_log_segment_s: float = _setting(
        60.0, Seconds(1, 86_400), "Age at which a segment of the event log is sealed."
    )
    event_log_retention_s: int = _setting(
        604_800,
        Whole(1, 2**40, "for ever"),
        "Seconds for which sealed segments of the event log are kept; 604800 are 7 days.",
    )
    event_log_retention_bytes: int = _setting(
        10 * 1024**3,
        Size(1024, 2**60, "no limit"),
        "Size of all sealed segments above which the oldest are deleted.",
    )
    event_log_compression: str = _setting(
        "none",
        Choice(("none", "zstd")),
        "How sealed segments are compressed; `zstd` needs the extra `leveret[zstd]`.",
    )
    event_log_buffer: int = _setting(
        32 * 1024**2,
        Size(1024, 2**36),
        "Memory for events that wait for the disk; what is more is left out, and counted.",
    )
    message_timestamp: str = _setting(
        "off",
        Choice(("off", "stamp", "overwrite")),
        "Stamp messages with the time of their arrival; `overwrite` replaces the publisher's.",
    )
    log_level: str = _setting(
        "info", Choice(("debug", "info", "warning", "error")), "Least severity that is logged."
    )

    def __post_init__(self) -> None:
        mistakes = []
        for setting in SETTINGS:
            raw = getattr(self, setting.name)
            try:
                object.__setattr__(self, setting.name, setting.kind.read(raw))
            except ValueError:
                mistakes.append(setting.refuse(raw, "Settings"))
        if not mistakes and self.credit_flow_more_after > self.credit_flow_initial:
            # All credit would be spent before any more is granted: a standstill.
            mistakes.append(
                f"credit_flow_more_after = {self.credit_flow_more_after}: must not be larger than"
                f" credit_flow_initial = {self.credit_flow_initial}"
            )
        if mistakes:
            raise SettingsError("\n".join(mistakes))


class Setting(NamedTuple):
    """One row of the table."""

    name: str
    kind: Kind
    default: Any
    about: str
    secret: bool

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def refuse(self, raw: object, source: str) -> str:
        shown = "..." if self.secret else repr(str(raw) if isinstance(raw, Path) else raw)
        return f"{self.name} = {shown} (from {source}): must be {self.kind.allowed}"


SETTINGS = tuple(
    Setting(f.name, f.metadata["kind"], f.default, f.metadata["about"], f.metadata["secret"])
    for f in fields(Settings)
)
_BY_NAME = {setting.name: setting for setting in SETTINGS}


def load_settings(
    config_file: str | Path | None,
    env: Mapping[str, str],
    flags: Mapping[str, object],
) -> Settings:
    """Settings from everywhere; a flag that is None was not given.

    Raises SettingsError naming every mistake, where it stands and what is allowed there.
    """
    given = [*_from_file(config_file), *_from_env(env), *_from_flags(flags)]
    values: dict[str, Any] = {}
    mistakes = []
    for name, raw, source in given:
        setting = _BY_NAME.get(name)
        if setting is None:
            mistakes.append(_unknown(name, source))
            continue
        try:
            values[name] = setting.kind.read(raw)
        except ValueError:
            mistakes.append(setting.refuse(raw, source))
    if mistakes:
        raise SettingsError("\n".join(mistakes))
    return Settings(**values)


_Given = tuple[str, object, str]  # name, value as written, where


def _from_file(config_file: str | Path | None) -> Iterator[_Given]:
    if config_file is None:
        return
    try:
        table = tomllib.loads(Path(config_file).read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read {config_file}: {error.strerror}") from error
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError alike
        raise SettingsError(f"{config_file} is not TOML: {error}") from error
    for name, raw in table.items():
        yield name, raw, str(config_file)


def _from_env(env: Mapping[str, str]) -> Iterator[_Given]:
    for variable in sorted(env):
        name = variable.removeprefix(ENV_PREFIX)
        if name == variable or _ENV_NOT_SETTINGS.fullmatch(name):
            continue
        link = name == "PORT" and env[variable].startswith("tcp://")
        if link or _ENV_SERVICE_LINK.fullmatch(name):
            continue
        yield name.lower(), env[variable], variable


def _from_flags(flags: Mapping[str, object]) -> Iterator[_Given]:
    for name, raw in flags.items():
        if raw is not None:
            yield name, raw, _BY_NAME[name].flag if name in _BY_NAME else name


def _unknown(name: str, source: str) -> str:
    close = difflib.get_close_matches(name, _BY_NAME, n=1)
    hint = f"did you mean {close[0]}?" if close else f"the settings are {', '.join(_BY_NAME)}"
    return f"unknown setting {name} (from {source}): {hint}"
