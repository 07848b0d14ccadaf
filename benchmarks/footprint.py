#!/usr/bin/env python3
"""What a broker costs before it does anything: time to start, idle memory, memory per connection.

    benchmarks/footprint.py --start "leveret serve --port {port} --data {data}" [--starts 5]

Prints one JSON object. Starts: seconds from the command to the first AMQP answer, best of all.
Connections are opened as any client opens them (heartbeat off) and then left alone.
"""

import argparse
import json
import shlex
import socket
import struct
import subprocess
import tempfile
import time

CONNECTIONS = 1000


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def first_answer(port: int, deadline: float) -> None:
    while time.perf_counter() < deadline:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as sock:
                sock.sendall(b"AMQP\0\0\x09\x01")
                if sock.recv(8):
                    return
        except OSError:
            time.sleep(0.002)
    raise SystemExit(f"no AMQP answer on port {port}")


def resident_kib(pid: int) -> int:
    with open(f"/proc/{pid}/status") as status:
        for line in status:
            if line.startswith("VmRSS:"):
                return int(line.split()[1])
    raise SystemExit("no VmRSS")


def method(class_id: int, method_id: int, arguments: bytes) -> bytes:
    payload = struct.pack(">HH", class_id, method_id) + arguments
    return struct.pack(">BHI", 1, 0, len(payload)) + payload + b"\xce"


def read_frame(sock: socket.socket) -> None:
    need = 7
    data = b""
    while len(data) < need:
        data += sock.recv(need - len(data))
        if len(data) == 7:
            need = 8 + int(struct.unpack(">I", data[3:7])[0])


def open_connection(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(b"AMQP\0\0\x09\x01")
    read_frame(sock)
    response = b"\0guest\0guest"
    start_ok = struct.pack(">I", 0) + b"\x05PLAIN" + struct.pack(">I", len(response)) + response
    sock.sendall(method(10, 11, start_ok + b"\x05en_US"))
    read_frame(sock)
    sock.sendall(method(10, 31, struct.pack(">HIH", 2047, 131072, 0)))
    sock.sendall(method(10, 40, b"\x01/\x00\x00"))
    read_frame(sock)
    return sock


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--start", required=True)
    parser.add_argument("--starts", type=int, default=5)
    options = parser.parse_args()
    starts = []
    for turn in range(options.starts):
        with tempfile.TemporaryDirectory() as data:
            port = free_port()
            command = shlex.split(options.start.format(port=port, data=data))
            begun = time.perf_counter()
            broker = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                first_answer(port, begun + 30)
                starts.append(round(time.perf_counter() - begun, 3))
                if turn == options.starts - 1:
                    time.sleep(0.5)
                    idle = resident_kib(broker.pid)
                    sockets = [open_connection(port) for _ in range(CONNECTIONS)]
                    time.sleep(0.5)
                    busy = resident_kib(broker.pid)
                    for sock in sockets:
                        sock.close()
            finally:
                broker.terminate()
                broker.wait(30)
    print(
        json.dumps(
            {
                "starts_s": starts,
                "best_start_s": min(starts),
                "idle_mib": round(idle / 1024, 1),
                "kib_per_idle_connection": round((busy - idle) / CONNECTIONS, 1),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
