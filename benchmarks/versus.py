#!/usr/bin/env python3
"""Measure a broker beside RabbitMQ: the same load, alternately, on one machine, in one run.

    benchmarks/versus.py --start "CMD with {port} and {data}" [--only NAME,...] [--seconds 4] [--rounds 3] [--json F]
    benchmarks/versus.py --port 5672 [--pid PID] ...        a broker that is already running
    benchmarks/versus.py ... --peer NAME=PORT[:PID]         one more running broker in the same run

CMD starts the broker under test on {port}, with {data} as its empty data folder and guest/guest as a user.
RabbitMQ comes from Debian's package rabbitmq-server and is started on a port of its own.
Every figure is the median of the rounds; 'ratio' is ours over RabbitMQ's (CPU, RSS and latency: lower is better).
"""
import argparse, json, os, shlex, shutil, socket, statistics, subprocess, sys, tempfile, time

HERE = os.path.dirname(os.path.abspath(__file__))
SCENARIOS = {
    # name: (amqpload options, the figure compared)
    "fire-and-forget-100B": ("-s 100 -A 0", "consume_rate"),
    "confirmed-acked-100B": ("-s 100 -A 1 -q 300 -c 300", "consume_rate"),
    "confirmed-acked-16KB": ("-s 16384 -A 1 -q 300 -c 300", "consume_rate"),
    "persistent-confirmed-1KB": ("-s 1000 -f -A 1 -q 300 -c 300", "consume_rate"),
    "persistent-2x2-100B": ("-s 100 -f -A 10 -q 300 -c 1000 -x 2 -y 2 -Q 2", "consume_rate"),
    "persistent-one-at-a-time": ("-s 100 -f -A 1 -c 1", "publish_rate"),
    "fanout-to-10-queues": ("-s 100 -A 10 -q 300 -c 100 -e amq.fanout -Q 10 -y 10 -F 10", "consume_rate"),
    "many-8x8": ("-s 100 -A 1 -q 100 -c 100 -x 8 -y 8 -Q 8", "consume_rate"),
    "latency-at-1000-per-s": ("-s 100 -A 1 -r 1000 -q 300", "p99_us"),
    "latency-persistent-at-500-per-s": ("-s 1000 -f -A 1 -r 500 -q 300 -c 50", "p99_us"),
    "backlog-in": ("-s 1000 -f -c 1000 -y 0 -K -C {backlog}", "publish_rate"),
    "backlog-out": ("-s 1000 -f -D -y 1 -q 300 -A 10 -C {backlog}", "consume_rate"),
}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_port(port, seconds=60):
    start = time.time()
    while time.time() - start < seconds:
        with socket.socket() as s:
            s.settimeout(1)
            try:
                s.connect(("127.0.0.1", port))
                s.sendall(b"AMQP\0\0\x09\x01")
                if s.recv(8):
                    return time.time() - start
            except OSError:
                pass
        time.sleep(0.02)
    raise SystemExit(f"no AMQP answer on port {port}")


def tree(pid):
    out = [pid]
    for line in subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True).stdout.splitlines():
        a, b = map(int, line.split())
        if b in out:
            out.append(a)
    return out


def usage(pid):
    """CPU seconds and resident MiB of a process and its children."""
    cpu = rss = 0.0
    for p in tree(pid):
        try:
            f = open(f"/proc/{p}/stat").read().rsplit(")", 1)[1].split()
            cpu += (int(f[11]) + int(f[12])) / os.sysconf("SC_CLK_TCK")
            rss += int(f[21]) * os.sysconf("SC_PAGE_SIZE") / 2**20
        except OSError:
            pass
    return cpu, rss


def listener(port):
    """The process that listens on a port of this machine (from /proc; needs its owner's rights)."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in open(table).read().splitlines()[1:]:
            f = line.split()
            if f[3] == "0A" and int(f[1].rsplit(":", 1)[1], 16) == port:
                inodes.add(f"socket:[{f[9]}]")
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            for fd in os.listdir(f"/proc/{pid}/fd"):
                if os.readlink(f"/proc/{pid}/fd/{fd}") in inodes:
                    return int(pid)
        except OSError:
            pass
    return None


class Broker:
    def __init__(self, name, port, pid, proc=None):
        self.name, self.port, self.pid, self.proc = name, port, pid, proc

    def stop(self):
        if self.proc:
            self.proc.terminate()
            try:
                self.proc.wait(20)
            except subprocess.TimeoutExpired:
                self.proc.kill()


def start_rabbit(data):
    if not shutil.which("rabbitmq-server") and not os.path.exists("/usr/sbin/rabbitmq-server"):
        raise SystemExit("RabbitMQ is not installed: apt-get install rabbitmq-server")
    port, dist = free_port(), free_port()
    os.chmod(data, 0o777)
    env = dict(os.environ, RABBITMQ_NODE_PORT=str(port), RABBITMQ_DIST_PORT=str(dist), RABBITMQ_NODENAME=f"versus{port}@localhost",
               RABBITMQ_NODE_IP_ADDRESS="127.0.0.1", RABBITMQ_MNESIA_BASE=data, RABBITMQ_LOG_BASE=data,
               RABBITMQ_ENABLED_PLUGINS_FILE=os.path.join(data, "plugins"), RABBITMQ_PID_FILE=os.path.join(data, "pid"))
    t = time.time()
    proc = subprocess.Popen(["/usr/sbin/rabbitmq-server"], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    wait_port(port, 90)
    boot = time.time() - t
    time.sleep(2)
    pid = listener(port) or proc.pid
    b = Broker("rabbitmq", port, pid, proc)
    b.boot = boot
    return b


def stop_rabbit(b):
    """End the Erlang node that start_rabbit started, by its own id."""
    try:
        os.kill(b.pid, 15)
        for _ in range(200):
            os.kill(b.pid, 0)
            time.sleep(0.1)
        os.kill(b.pid, 9)
    except OSError:
        pass
    b.stop()


def start_ours(cmd, data):
    port = free_port()
    t = time.time()
    proc = subprocess.Popen(shlex.split(cmd.format(port=port, data=data)), stdout=open(os.path.join(data, "broker.out"), "wb"), stderr=subprocess.STDOUT)
    wait_port(port, 60)
    b = Broker("ours", port, proc.pid, proc)
    b.boot = time.time() - t
    return b


def load(binary, broker, options, seconds):
    c0, _ = usage(broker.pid)
    args = [binary, "--port", str(broker.port), *options.split()]
    if "-C" not in args:
        args += ["-z", str(seconds)]
    r = subprocess.run(args, capture_output=True, text=True, timeout=seconds * 10 + 180)
    if r.returncode:
        return {"error": r.stderr.strip()[-200:]}
    figures = json.loads(r.stdout)
    c1, rss = usage(broker.pid)
    moved = max(figures["published"], figures["consumed"], 1)
    figures["cpu_us_per_msg"] = round((c1 - c0) / moved * 1e6, 2)
    figures["rss_mib"] = round(rss, 1)
    return figures


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--start"); ap.add_argument("--port", type=int); ap.add_argument("--pid", type=int)
    ap.add_argument("--only", default=""); ap.add_argument("--seconds", type=int, default=4); ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--backlog", type=int, default=100000); ap.add_argument("--json"); ap.add_argument("--alone", action="store_true", help="without RabbitMQ")
    ap.add_argument("--peer", action="append", default=[], help="NAME=PORT[:PID] of another running broker")
    a = ap.parse_args()
    if not a.start and not a.port:
        ap.error("--start or --port")
    work = tempfile.mkdtemp(prefix="versus-")
    binary = os.path.join(work, "amqpload")
    subprocess.run(["cc", "-O2", "-pthread", "-o", binary, os.path.join(HERE, "amqpload.c")], check=True)
    ours_data, rabbit_data = os.path.join(work, "ours"), os.path.join(work, "rabbit")
    os.mkdir(ours_data); os.mkdir(rabbit_data); os.chmod(work, 0o755)
    ours = start_ours(a.start, ours_data) if a.start else Broker("ours", a.port, a.pid or os.getpid())
    brokers = [ours]
    if not a.alone:
        brokers.append(start_rabbit(rabbit_data))
    for peer in a.peer:
        name, _, where = peer.partition("=")
        port, _, pid = where.partition(":")
        brokers.append(Broker(name, int(port), int(pid or os.getpid())))
    result = {}
    try:
        if a.start:
            result["boot_s"] = {b.name: round(b.boot, 2) for b in brokers if hasattr(b, "boot")}
        names = [n for n in SCENARIOS if not a.only or n in a.only.split(",")]
        for name in names:
            options, figure = SCENARIOS[name]
            runs = {b.name: [] for b in brokers}
            for _ in range(1 if name.startswith("backlog") else a.rounds):
                for b in brokers:
                    runs[b.name].append(load(binary, b, options.format(backlog=a.backlog), a.seconds))
            row = {"figure": figure}
            for b in brokers:
                good = [r for r in runs[b.name] if "error" not in r]
                row[b.name] = ({k: statistics.median(r[k] for r in good) for k in good[0]} if good else runs[b.name][0])
                bad = len(runs[b.name]) - len(good)
                if bad:
                    row[b.name]["failed_rounds"] = bad
            us = row["ours"]
            for b in brokers[1:]:
                them = row[b.name]
                if figure not in us or figure not in them:
                    continue
                mark = "" if b.name == "rabbitmq" else "_" + b.name
                row["ratio" + mark] = round(us[figure] / max(them[figure], 1e-9), 2)
                row["cpu_ratio" + mark] = round(us["cpu_us_per_msg"] / max(them["cpu_us_per_msg"], 1e-9), 2)
                row["rss_ratio" + mark] = round(us["rss_mib"] / max(them["rss_mib"], 1e-9), 2)
            result[name] = row
            o = row["ours"]
            line = f"{name:34s} {figure:13s} ours {o.get(figure, o.get('error', '?'))!s:>9} lost {o.get('lost', '?')!s:>3} p99 {o.get('p99_us', 0)/1000:9.1f} ms cpu {o.get('cpu_us_per_msg', 0):6.1f} us rss {o.get('rss_mib', 0):6.0f}"
            for b in brokers[1:]:
                t, mark = row[b.name], "" if b.name == "rabbitmq" else "_" + b.name
                line += f" | {b.name} {t.get(figure, '?')!s:>9} p99 {t.get('p99_us', 0)/1000:9.1f} ms cpu {t.get('cpu_us_per_msg', 0):6.1f} us rss {t.get('rss_mib', 0):6.0f} ratio {row.get('ratio' + mark, '?')} cpu x{row.get('cpu_ratio' + mark, '?')}"
            print(line, flush=True)
    finally:
        ours.stop()
        if not a.alone:
            stop_rabbit(brokers[1])
        shutil.rmtree(work, ignore_errors=True)
    if a.json:
        with open(a.json, "w") as f:
            json.dump(result, f, indent=1)


if __name__ == "__main__":
    main()
