"""The control socket: how the command line reaches a broker that runs.

Upstream: ``admin/client.py``. Downstream: ``admin/handlers.py``. Started last and stopped first.

A Unix socket ``control.sock`` in the data folder. Who may open it may do everything, so only the
broker's own user may (mode 0600), and there is no password. A path that is too long for a socket
is replaced by one in the system's folder for temporary files, written down in ``control.path``.

One request per connection, one JSON object a line: ``{"command": ...}``, answered by any number of
``{"progress": ...}`` and one ``{"ok": true, "result": ...}`` or ``{"ok": false, "error": ...}``.
A client that hangs up has changed its mind: what it asked for is cancelled.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from leveret.broker.events import ACTING_USER, CLI_USER

log = logging.getLogger(__name__)

SOCKET_FILE = "control.sock"
PATH_FILE = "control.path"
# Of sun_path the smallest there is, 104 bytes on some systems, less the zero at the end.
PATH_MAX_BYTES = 103
REQUEST_MAX_BYTES = 1 << 16
# How long what a client asked for may take to end when the broker stops.
STOP_S = 10.0

Progress = Callable[[object], None]
Handler = Callable[[Mapping[str, Any], Progress], Awaitable[object]]


class Refused(Exception):
    """A request that cannot be done; the text is for the person who asked."""


def socket_path(data: Path) -> Path:
    """Where the socket of a data folder's broker is, if there is one."""
    try:
        return Path((data / PATH_FILE).read_text(encoding="utf-8").rstrip("\n"))
    except OSError:
        return data / SOCKET_FILE


class ControlSocket:
    def __init__(self, data: Path, handlers: Mapping[str, Handler]) -> None:
        """The data folder must be locked: a socket that is already there is then a stale one."""
        # Absolute: a client may name it so, and must then find it short enough.
        self._data = data.absolute()
        self._handlers = handlers
        self._server: asyncio.Server | None = None
        self._temporary: Path | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def path(self) -> Path:
        return self._temporary / SOCKET_FILE if self._temporary else self._data / SOCKET_FILE

    async def start(self) -> None:
        """Listen. Where that is not possible the broker runs without, and says so."""
        self._remove_stale()
        listening = None
        try:
            if len(os.fsencode(self.path)) > PATH_MAX_BYTES:
                self._move_to_temporary()
            listening = self._listen()
            self._server = await asyncio.start_unix_server(
                self._serve, sock=listening, limit=REQUEST_MAX_BYTES
            )
        except OSError as error:
            if listening is not None:
                listening.close()
            self._remove()
            log.warning("no control socket, leveret status and backup will not work: %s", error)

    def _listen(self) -> socket.socket:
        listening = socket.socket(socket.AF_UNIX)
        try:
            listening.bind(os.fspath(self.path))
            # Before it listens: nobody can have connected while others might.
            self.path.chmod(0o600)
            listening.listen(16)
            listening.setblocking(False)
        except BaseException:
            listening.close()
            raise
        return listening

    def _move_to_temporary(self) -> None:
        for parent in (tempfile.gettempdir(), "/tmp"):
            # Made with mode 0700. The names below the parent take 31 bytes.
            if len(os.fsencode(parent)) <= PATH_MAX_BYTES - 32:
                self._temporary = Path(tempfile.mkdtemp(prefix="leveret-", dir=parent))
                (self._data / PATH_FILE).write_text(f"{self.path}\n", encoding="utf-8")
                return

    def _remove_stale(self) -> None:
        """What a broker left behind that was killed."""
        (self._data / SOCKET_FILE).unlink(missing_ok=True)
        if (self._data / PATH_FILE).exists():
            left = socket_path(self._data)
            (self._data / PATH_FILE).unlink(missing_ok=True)
            # Only what we make ourselves: the file may have come with a restored folder.
            if left.name == SOCKET_FILE and left.parent.name.startswith("leveret-"):
                left.unlink(missing_ok=True)
                try:
                    left.parent.rmdir()
                except OSError:
                    pass  # gone already, or not ours to remove

    def _remove(self) -> None:
        try:
            self.path.unlink(missing_ok=True)
            (self._data / PATH_FILE).unlink(missing_ok=True)
        except OSError as error:
            log.warning("cannot remove %s: %s", self.path, error)
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None

    async def stop(self) -> None:
        """Nobody is served afterwards; what was asked for and is not done is cancelled."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_S)
        self._remove()

    # --- one client ------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)

        def tell(answer: Mapping[str, object]) -> None:
            if not writer.is_closing():
                writer.write(json.dumps(answer).encode() + b"\n")

        try:
            tell(await self._answer(reader, tell))
            await writer.drain()
        except OSError:
            pass  # it has hung up
        except asyncio.CancelledError:
            # The broker stops. Not raised again: asyncio logs a stream's handler that was.
            tell({"ok": False, "error": "the broker stops"})
        except Exception:
            log.exception("control socket")
            tell({"ok": False, "error": "the broker failed at it; its log tells more"})
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(
        self, reader: asyncio.StreamReader, tell: Callable[[Mapping[str, object]], None]
    ) -> Mapping[str, object]:
        try:
            request = json.loads(await reader.readuntil())
            if not isinstance(request, dict):
                raise ValueError
        except (ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return {"ok": False, "error": "not a request: one JSON object on one line is"}
        handler = self._handlers.get(str(request.get("command")))
        if handler is None:
            known = ", ".join(sorted(self._handlers))
            return {"ok": False, "error": f"unknown command, there are: {known}"}
        ACTING_USER.set(CLI_USER)
        work = asyncio.ensure_future(handler(request, lambda what: tell({"progress": what})))
        hangup = asyncio.ensure_future(_hangup(reader))
        try:
            await asyncio.wait({work, hangup}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hangup.cancel()
            if not work.done():
                work.cancel()
            await asyncio.wait({work, hangup})
        if work.cancelled():
            raise ConnectionResetError
        try:
            return {"ok": True, "result": work.result()}
        except Refused as error:
            return {"ok": False, "error": str(error)}


async def _hangup(reader: asyncio.StreamReader) -> None:
    """Return when the client has closed its end; what it says before is read over."""
    try:
        while await reader.read(REQUEST_MAX_BYTES):
            pass
    except OSError:
        pass
