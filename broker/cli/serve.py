"""``leveret serve``: run a broker in the foreground until a signal ends it.

Owns what belongs to the process rather than to the broker: settings, logging, the event loop,
signals, the garbage collector and the exit status. Downstream: ``broker/server.py``.

The first SIGINT or SIGTERM stops the broker in order, a second one exits at once: whoever is in
a hurry loses what was not confirmed, nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from leveret import __version__
from leveret.broker.config import ENV_PREFIX, SETTINGS, Settings, SettingsError, load_settings

if TYPE_CHECKING:
    from leveret.broker.server import Broker

FAILED = 1
BAD_SETTINGS = 2

# A full collection looks at every message in memory (50 ms for 300,000): make it rare.
GC_THRESHOLDS = (50_000, 50, 100)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class ServeError(Exception):
    """The broker cannot run here; the text tells a person why and what to do."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "serve",
        help="run a broker in the foreground",
        description="Run a broker in the foreground. Flags win over LEVERET_<NAME> variables, "
        "those over the file.",
        # Else a script's --max would break the day a second setting begins with it.
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", metavar="FILE", help=f"TOML file of settings (or {ENV_PREFIX}CONFIG)"
    )
    for setting in SETTINGS:
        # Everybody on the machine can read a command line.
        if setting.secret:
            continue
        about = f"{setting.about} Default: {setting.kind.write(setting.default)}".replace("%", "%%")
        metavar = setting.name.rpartition("_")[2].upper()
        parser.add_argument(setting.flag, dest=setting.name, metavar=metavar, help=about)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    names = (setting.name for setting in SETTINGS if not setting.secret)
    flags = {name: getattr(options, name) for name in names}
    config_file = options.config or os.environ.get(f"{ENV_PREFIX}CONFIG") or None
    try:
        settings = load_settings(config_file, os.environ, flags)
    except SettingsError as error:
        for line in str(error).splitlines():
            print(f"leveret: {line}", file=sys.stderr)
        return BAD_SETTINGS
    logging.basicConfig(
        level=settings.log_level.upper(),
        format="%(asctime)s %(levelname)-7s %(name)s %(message)s",
        stream=sys.stderr,
    )
    try:
        prepare_data_folder(settings.data)
        # Not before: wrong settings are to be refused at once, on any machine.
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings))
    except ServeError as error:
        print(f"leveret: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        # Before our own signal handlers were there.
        return 128 + signal.SIGINT
    return 0


async def serve(settings: Settings) -> None:
    """Start a broker, tell the user, wait for a signal, stop it."""
    from leveret.broker.event_log.compression import EventLogError
    from leveret.broker.server import Broker
    from leveret.storage.vhost_store import StoreError

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in _SIGNALS:
        loop.add_signal_handler(signum, _on_signal, signum, stop)
    # A container starts us with SIGTERM blocked: process 1 would lose it until we handle it.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    try:
        broker = Broker(settings)
    except EventLogError as error:
        raise ServeError(str(error)) from error
    try:
        await broker.start()
    except OSError as error:
        raise ServeError(explain_start_failure(error, settings)) from error
    except StoreError as error:
        raise ServeError(str(error)) from error
    try:
        for line in down_notices(broker):
            print(line, file=sys.stderr, flush=True)
        print(banner(settings, broker), flush=True)
        spare_the_collector()
        await stop.wait()
    finally:
        await broker.stop()
    print("leveret: stopped", flush=True)


def _on_signal(signum: int, stop: asyncio.Event) -> None:
    if stop.is_set():
        os._exit(128 + signum)
    print("leveret: stopping; once more to exit at once", flush=True)
    stop.set()


def prepare_data_folder(folder: Path) -> None:
    """Make the data folder; raises ServeError if the broker could not write there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ServeError(
            f"the data folder {folder} is a file: choose another with --data"
        ) from None
    except OSError as error:
        raise ServeError(
            f"cannot make the data folder {folder} ({error.strerror}): choose another with --data"
        ) from error
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise ServeError(
            f"cannot write to the data folder {folder}: change its owner, or choose another"
            " with --data"
        )


def explain_start_failure(error: OSError, settings: Settings) -> str:
    """What a person can do about a broker that did not start."""
    where = f"{settings.host}:{settings.port}"
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {settings.port} is in use on {settings.host}: stop the broker that runs there,"
            " or choose another port with --port"
        )
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return f"{settings.host} is no address of this machine: choose another with --host"
    if error.errno == errno.EACCES and error.filename is None:
        return f"not allowed to listen on {where}: choose a port above 1023 with --port"
    return f"cannot start: {error}"


def banner(settings: Settings, broker: Broker) -> str:
    """What a person needs to know about the broker that has just started."""
    from leveret.protocol.twin import COMPILED

    codec = "compiled" if COMPILED else "pure Python (slower; install with a C compiler)"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return "\n".join(
        (
            f"Leveret {__version__} listening on {host}:{broker.port}",
            f"  url    {shown_url(settings, broker.port)}",
            f"  user   {settings.default_user}",
            f"  data   {settings.data.absolute()}",
            f"  codec  {codec}",
            "  stop   Ctrl-C",
        )
    )


def down_notices(broker: Broker) -> Iterator[str]:
    """What nobody must overlook about a broker that has started, though not with all it has."""
    for name, reason in broker.vhosts.down.items():
        yield f"leveret: *** vhost '{name}' IS DOWN, clients cannot use it ***"
        yield f"leveret: {reason}"


def shown_url(settings: Settings, port: int) -> str:
    """A URL to copy; with the password only where everybody knows it."""
    user, password = quote(settings.default_user, safe=""), settings.default_pass
    secret = ":guest" if (settings.default_user, password) == ("guest", "guest") else ""
    # What listens everywhere is reached from here as the machine itself.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    host = f"[{host}]" if ":" in host else host
    return f"amqp://{user}{secret}@{host}:{port}/{quote(settings.default_vhost, safe='')}"


def spare_the_collector() -> None:
    """What was imported and built so far stays: never look at it again, and look less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
