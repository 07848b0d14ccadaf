"""``leveret ping``: what it finds out, what it prints, and how it ends."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pamqp import commands

from leveret import __version__
from leveret.broker.cli import ping
from leveret.broker.cli.main import main
from leveret.protocol.codec import make, method_frame
from leveret.protocol.field_table import table_from_python
from tests.support.broker_process import BrokerProcess

HEADER = b"AMQP\x00\x00\x09\x01"
TIMEOUT_S = 20.0


def start(**properties: object) -> bytes:
    method = make(
        commands.Connection.Start,
        version_major=0,
        version_minor=9,
        server_properties=table_from_python(properties),
        mechanisms="PLAIN",
        locales="en_US",
    )
    return method_frame(0, method)


@contextmanager
def listening(serve: Callable[[socket.socket], None], address: str = "127.0.0.1") -> Iterator[int]:
    """A server for one connection; its port."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
        listener.bind((address, 0))
        listener.listen()
        listener.settimeout(TIMEOUT_S)

        def accept() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.settimeout(TIMEOUT_S)
                serve(peer)

        thread = threading.Thread(target=accept)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


def answer_with(reply: bytes) -> Callable[[socket.socket], None]:
    def serve(peer: socket.socket) -> None:
        assert peer.recv(len(HEADER), socket.MSG_WAITALL) == HEADER
        peer.sendall(reply)

    return serve


def wait_for_hangup(peer: socket.socket) -> None:
    while peer.recv(1024):
        pass


def test_broker_that_answers_is_told_with_its_latency(
    broker_process: BrokerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ping", "--port", str(broker_process.port)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"127.0.0.1:{broker_process.port} answered in ")
    assert f" ms: RabbitMQ 3.10.8 (Leveret {__version__}: " in out
    assert err == ""


def test_json_is_one_object(
    broker_process: BrokerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ping", "--json", "--port", str(broker_process.port)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert 0 < told.pop("latency_ms") < ping.DEFAULT_TIMEOUT_S * 1000
    assert told.pop("information").startswith(f"Leveret {__version__}")
    assert told == {
        "ok": True,
        "host": "127.0.0.1",
        "port": broker_process.port,
        "product": "RabbitMQ",
        "version": "3.10.8",
    }


@pytest.mark.parametrize("listen_on", ["127.0.0.1", "0.0.0.0"])
def test_broker_of_the_same_environment_is_asked(
    broker_process: BrokerProcess,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    listen_on: str,
) -> None:
    """A health check has the container's variables and no flags."""
    monkeypatch.setenv("LEVERET_HOST", listen_on)
    monkeypatch.setenv("LEVERET_PORT", str(broker_process.port))
    assert main(["ping"]) == 0
    assert capsys.readouterr().out.startswith(f"127.0.0.1:{broker_process.port} ")


def test_broker_of_the_same_file_is_asked(
    broker_process: BrokerProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "leveret.toml"
    file.write_text(f"port = {broker_process.port}\n")
    assert main(["ping", "--config", str(file)]) == 0
    monkeypatch.setenv("LEVERET_CONFIG", str(file))
    assert main(["ping"]) == 0


def test_ipv6_address_is_written_in_brackets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with listening(answer_with(start(product="P", version="1")), "::1") as port:
        monkeypatch.setenv("LEVERET_HOST", "::")
        assert main(["ping", "--port", str(port)]) == 0
    assert capsys.readouterr().out.startswith(f"[::1]:{port} answered in ")


def test_answer_in_pieces_is_read_whole() -> None:
    def trickle(peer: socket.socket) -> None:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for octet in start(product="P", version="1", information="I"):
            peer.sendall(bytes([octet]))
        wait_for_hangup(peer)

    with listening(trickle) as port:
        answer = ping.ping("127.0.0.1", port, TIMEOUT_S)
    assert answer[1:] == ("P", "1", "I")


def test_broker_without_an_introduction_answers_too(capsys: pytest.CaptureFixture[str]) -> None:
    with listening(answer_with(start())) as port:
        assert main(["ping", "--port", str(port)]) == 0
    assert " answered in " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        pytest.param(b"", "closed before", id="closed-at-once"),
        pytest.param(start()[:20], "closed before", id="closed-within"),
        pytest.param(b"AMQP\x00\x01\x00\x00", "another version", id="another-amqp"),
        pytest.param(b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak AMQP", id="http"),
        pytest.param(b"\x01\x00\x01" + start()[3:], "does not speak AMQP", id="wrong-channel"),
        pytest.param(
            struct.pack(">BHI", 1, 0, 2**32 - 1), "does not speak AMQP", id="endless-frame"
        ),
        pytest.param(struct.pack(">BHI", 1, 0, 0) + b"\xce", "does not speak AMQP", id="empty"),
        pytest.param(start()[:-1] + b"\x00", "does not speak AMQP", id="wrong-frame-end"),
        pytest.param(
            method_frame(0, make(commands.Connection.CloseOk)), "does not speak AMQP", id="no-start"
        ),
        pytest.param(
            struct.pack(">BHIHH", 1, 0, 4, 10, 10) + b"\xce", "cannot be read", id="bare-start"
        ),
    ],
)
def test_anything_but_a_start_is_a_failure(
    capsys: pytest.CaptureFixture[str], reply: bytes, reason: str
) -> None:
    with listening(answer_with(reply)) as port:
        assert main(["ping", "--port", str(port)]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"leveret: 127.0.0.1:{port}: ")
    assert reason in line


def test_nobody_there_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        # Bound and not listening: nobody else can take the port meanwhile.
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        assert main(["ping", "--port", str(port)]) == 1
        assert "connection refused" in capsys.readouterr().err
        assert main(["ping", "--json", "--port", str(port)]) == 1
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert "connection refused" in told.pop("error")
    assert told == {"ok": False, "host": "127.0.0.1", "port": port}
    assert err == ""


def test_silence_is_a_failure_once_the_time_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    """As from a broker whose process stands still: its socket still accepts."""
    with listening(wait_for_hangup) as port:
        assert main(["ping", "--port", str(port), "--timeout", "0.05"]) == 1
    assert "no answer within 0.05 s" in capsys.readouterr().err


def test_time_is_for_the_whole_answer() -> None:
    """A byte now and then does not keep the question open."""

    def dribble(peer: socket.socket) -> None:
        try:
            for octet in start(information="x" * 1000):
                peer.sendall(bytes([octet]))
                # Paced by the wire's own clock: nothing arrives here until the client leaves.
                peer.settimeout(0.02)
                try:
                    peer.recv(1024)
                except TimeoutError:
                    continue
        except OSError:
            return

    with listening(dribble) as port, pytest.raises(ping.PingError, match="no answer"):
        ping.ping("127.0.0.1", port, 0.2)


def test_host_that_does_not_exist_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ping", "--host", "host.invalid"]) == 1
    assert "cannot be found" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        pytest.param(["--port", "http"], "port = 'http'", id="port"),
        pytest.param(["--port", "0"], "--port", id="any-port"),
        pytest.param(["--config", "/nowhere.toml"], "cannot read /nowhere.toml", id="file"),
    ],
)
def test_wrong_settings_are_refused(
    capsys: pytest.CaptureFixture[str], flags: list[str], reason: str
) -> None:
    assert main(["ping", *flags]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("leveret: ")
    assert reason in line


@pytest.mark.parametrize("timeout", ["0", "-1", "nan", "3601", "soon"])
def test_wrong_timeout_is_refused(capsys: pytest.CaptureFixture[str], timeout: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["ping", "--timeout", timeout])
    assert ended.value.code == 2
    assert "--timeout" in capsys.readouterr().err
