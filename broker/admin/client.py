"""The other end of the control socket: asks a broker on this machine, and waits.

Upstream: ``broker/cli/``. Blocking, for programs that do nothing else.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from leveret.broker.admin.control import PATH_MAX_BYTES, socket_path


class NotRunning(Exception):
    """No broker works on that data folder."""


class ControlError(Exception):
    """The broker said no, or nothing; the text is for people."""


def ask(
    data: Path,
    request: dict[str, object],
    on_progress: Callable[[dict[str, Any]], object] = lambda progress: None,
    timeout_s: float = 30.0,
) -> Any:
    """The result of a request. ``timeout_s`` is how long the broker may say nothing.

    Raises NotRunning, ControlError.
    """
    path = _short(socket_path(data))
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(timeout_s)
        try:
            peer.connect(path)
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
            raise NotRunning(f"no broker runs on the data folder {data}") from None
        except OSError as error:
            raise ControlError(f"cannot reach the broker at {path}: {error}") from error
        try:
            peer.sendall(json.dumps(request).encode() + b"\n")
            with peer.makefile("rb") as answers:
                for line in answers:
                    answer = json.loads(line)
                    if "progress" in answer:
                        on_progress(answer["progress"])
                    elif answer.get("ok"):
                        return answer["result"]
                    else:
                        raise ControlError(str(answer.get("error")))
        except TimeoutError:
            raise ControlError(f"the broker said nothing for {timeout_s:g} s") from None
        except (OSError, ValueError) as error:
            raise ControlError(f"the broker does not answer: {error}") from error
    raise ControlError("the broker hung up before it answered")


def _short(path: Path) -> str:
    """The path as a socket can take it; a long one may be short from here."""
    if not path.exists():
        raise NotRunning(f"no broker runs on the data folder {path.parent}")
    for shown in (str(path), os.path.relpath(path)):
        if len(os.fsencode(shown)) <= PATH_MAX_BYTES:
            return shown
    raise ControlError(f"{path} is too long for a socket: run the command in that folder")
