"""``leveret ping``: does a broker answer?

Sends the protocol header and reads connection.start, as every client begins. No user and no
password are needed, and nothing of the broker's state is touched, so it serves as a health check.
Where to ask it finds as ``serve`` finds where to listen: one environment, or one file, serves both.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import struct
import sys
import time
from typing import NamedTuple

from leveret.broker.config import ENV_PREFIX, SettingsError, load_settings

FAILED = 1
BAD_SETTINGS = 2
# Below what health checks commonly allow, so that the reason is printed before they give up.
DEFAULT_TIMEOUT_S = 3.0

_PROTOCOL_HEADER = b"AMQP\x00\x00\x09\x01"
_HEAD = struct.Struct(">BHI")
_METHOD = 1
_END = b"\xce"
_START = struct.pack(">HH", 10, 10)
# RabbitMQ's is half a KiB. Whatever answers there may not be a broker: do not read on for ever.
_START_MAX = 128 * 1024


class PingError(Exception):
    """No broker answered; the text tells a person what happened instead."""


class Answer(NamedTuple):
    """What a broker said of itself, and how long it took, connecting included."""

    latency_ms: float
    product: str
    version: str
    information: str


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "ping",
        help="ask whether a broker answers",
        description="Send the AMQP header, read connection.start and print how long it took. "
        "Exits with 0 if a broker answered, 1 if none did, 2 if the settings are wrong. "
        "Host and port are those of `leveret serve`: from flags, LEVERET_<NAME> variables or "
        "the file.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", metavar="FILE", help=f"TOML file of settings (or {ENV_PREFIX}CONFIG)"
    )
    parser.add_argument("--host", metavar="HOST", help="default: where `serve` would listen")
    parser.add_argument("--port", metavar="PORT", help="default: where `serve` would listen")
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=_seconds,
        default=DEFAULT_TIMEOUT_S,
        help=f"how long to wait in all. Default: {DEFAULT_TIMEOUT_S:g}",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, also on errors")
    parser.set_defaults(run=run)


def _seconds(text: str) -> float:
    value = float(text)
    # Written so that nan is refused, too.
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError("must be above 0 and at most 3600")
    return value


def run(options: argparse.Namespace) -> int:
    config_file = options.config or os.environ.get(f"{ENV_PREFIX}CONFIG") or None
    flags = {"host": options.host, "port": options.port}
    try:
        settings = load_settings(config_file, os.environ, flags)
        if settings.port == 0:
            raise SettingsError("port 0 is any free port: name the broker's own with --port")
    except SettingsError as error:
        for line in str(error).splitlines():
            print(f"leveret: {line}", file=sys.stderr)
        return BAD_SETTINGS
    # What listens everywhere is reached from here as the machine itself.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    where = f"[{host}]:{settings.port}" if ":" in host else f"{host}:{settings.port}"
    shown: dict[str, object] = {"host": host, "port": settings.port}
    try:
        answer = ping(host, settings.port, options.timeout)
    except PingError as error:
        if options.json:
            print(json.dumps({"ok": False, **shown, "error": str(error)}))
        else:
            print(f"leveret: {where}: {error}", file=sys.stderr)
        return FAILED
    if options.json:
        print(json.dumps({"ok": True, **shown, **answer._asdict()}))
    else:
        said = f"{answer.product} {answer.version}"
        # Leveret introduces itself by another name; who pings wants to know its own.
        said = f"{said} ({answer.information})" if answer.information else said
        print(f"{where} answered in {answer.latency_ms:.1f} ms: {said}")
    return 0


def ping(host: str, port: int, timeout_s: float) -> Answer:
    """Ask once. Raises PingError, at the latest when the time is over."""
    begun = time.perf_counter()
    deadline = begun + timeout_s
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as peer:
            peer.settimeout(_left(deadline))
            peer.sendall(_PROTOCOL_HEADER)
            payload = _read_start(peer, deadline)
    except TimeoutError:
        raise PingError(f"no answer within {timeout_s:g} s") from None
    except ConnectionRefusedError:
        raise PingError("connection refused: no broker listens there") from None
    except socket.gaierror as error:
        raise PingError(f"the host cannot be found: {error.strerror}") from None
    except OSError as error:
        raise PingError(error.strerror or str(error)) from None
    latency_ms = (time.perf_counter() - begun) * 1000
    return Answer(round(latency_ms, 3), *_introduction(payload))


def _left(deadline: float) -> float:
    left = deadline - time.perf_counter()
    if left <= 0:
        raise TimeoutError
    return left


def _read_exactly(peer: socket.socket, size: int, deadline: float) -> bytes:
    read = bytearray()
    while len(read) < size:
        peer.settimeout(_left(deadline))
        chunk = peer.recv(size - len(read))
        if not chunk:
            raise PingError("the connection was closed before connection.start")
        read += chunk
    return bytes(read)


def _read_start(peer: socket.socket, deadline: float) -> bytes:
    """The payload of connection.start."""
    head = _read_exactly(peer, _HEAD.size, deadline)
    if head.startswith(b"AMQP"):
        raise PingError("it speaks another version of AMQP than 0-9-1")
    kind, channel, size = _HEAD.unpack(head)
    if (kind, channel) != (_METHOD, 0) or not len(_START) <= size <= _START_MAX:
        raise PingError("what answers there does not speak AMQP")
    frame = _read_exactly(peer, size + len(_END), deadline)
    if not frame.startswith(_START) or not frame.endswith(_END):
        raise PingError("what answers there does not speak AMQP")
    return frame[:-1]


def _introduction(payload: bytes) -> tuple[str, str, str]:
    """Product, version and information of a connection.start."""
    from leveret.protocol.codec import UnknownMethod, decode_method
    from leveret.protocol.errors import ConnectionException

    try:
        properties = decode_method(payload).server_properties  # type: ignore[attr-defined]
    except (ConnectionException, UnknownMethod) as error:
        raise PingError(f"its connection.start cannot be read: {error}") from None
    product, version, information = (
        str(properties[name].value) if name in properties else ""
        for name in ("product", "version", "information")
    )
    return product, version, information
