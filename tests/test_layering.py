"""Imports point down the tree, never up, and every import goes through ``leveret``.

``import broker`` would work from the repository's root and give a second copy of every class.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("protocol", "storage", "broker", "spark_jobs")

# What a folder or module, and all below it, may never import.
FORBIDDEN = {
    "protocol": (
        "leveret.broker",
        "leveret.storage",
        "leveret.spark_jobs",
        "asyncio",
        "socket",
        "uvloop",
    ),
    "storage": ("leveret.broker", "leveret.spark_jobs"),
    "storage.backing_queue": ("leveret.storage",),
    "spark_jobs": ("leveret.broker",),
    "broker": ("leveret.spark_jobs",),
    # The message's path, from the socket down.
    "broker.channel": ("leveret.broker.connection", "leveret.broker.server", "leveret.broker.cli"),
    "broker.vhost": ("leveret.broker.channel", "leveret.broker.connection", "asyncio"),
    "broker.exchanges": (
        "leveret.broker.channel",
        "leveret.broker.connection",
        "leveret.broker.queues",
        "leveret.broker.vhost",
        "asyncio",
    ),
    "broker.delegate": ("leveret.broker.channel", "leveret.broker.connection"),
    "broker.queues": (
        "leveret.broker.channel",
        "leveret.broker.connection",
        "leveret.broker.exchanges",
        "leveret.broker.server",
        "leveret.broker.vhost",
    ),
    "broker.interceptors": ("leveret.broker.channel", "leveret.broker.queues"),
    "broker.flow": (
        "leveret.broker.channel",
        "leveret.broker.connection",
        "leveret.broker.queues",
        "leveret.storage",
        "asyncio",
    ),
    "broker.mailbox": ("leveret.broker.channel", "leveret.broker.queues"),
    "broker.clock": ("leveret",),
    "broker.config": ("leveret",),
}

# What is named there all the same: the one definition of an event that both sides share, and the
# one command that hands over to the analytics.
PERMITTED = {
    "spark_jobs": ("leveret.broker.event_log.schema",),
    # The broker of the demo, a process that only the demo starts.
    "spark_jobs.demo_broker": ("leveret.broker.config", "leveret.broker.server"),
    "broker.cli.analytics": ("leveret.spark_jobs",),
    # Compiled: it is asked for every run of messages.
    "broker.clock": ("leveret.protocol.twin.now_us",),
}


def sources() -> list[Path]:
    return sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(source: str) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported, also within functions.

    What only the type checker sees is left out: naming a type couples nothing at run time.
    """
    tree = ast.parse(source)
    for block in ast.walk(tree):
        if isinstance(block, ast.If) and ast.unparse(block.test).endswith("TYPE_CHECKING"):
            block.body.clear()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.name
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for name in node.names:
                yield node.lineno, f"{base}.{name.name}"


def is_within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def complaints(module: str, source: str) -> list[str]:
    found = []
    for line, name in imports_of(source):
        if name.startswith("."):
            found.append(f"{module}:{line} imports {name}: write it out, from leveret")
        elif name.split(".")[0] in FOLDERS:
            found.append(f"{module}:{line} imports {name}: must be leveret.{name}")
        if any(
            is_within(module, owner) and any(is_within(name, prefix) for prefix in permitted)
            for owner, permitted in PERMITTED.items()
        ):
            continue
        for owner, forbidden in FORBIDDEN.items():
            if is_within(module, owner) and any(is_within(name, prefix) for prefix in forbidden):
                found.append(f"{module}:{line} imports {name}: {owner} never does")
    return found


@pytest.mark.parametrize("file", sources(), ids=module_of)
def test_imports_point_down(file: Path) -> None:
    assert complaints(module_of(file), file.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        pytest.param("protocol.codec", "from leveret.broker import vhost", id="protocol-up"),
        pytest.param("protocol.codec", "import asyncio", id="protocol-loop"),
        pytest.param("protocol.codec", "from asyncio import Queue", id="protocol-loop-from"),
        pytest.param("storage.database", "import leveret.broker.clock", id="storage-up"),
        pytest.param("broker.server", "from leveret import spark_jobs", id="broker-to-spark"),
        pytest.param("spark_jobs.hot_keys", "from leveret.broker import config", id="spark-up"),
        pytest.param(
            "broker.queues.actor", "def f():\n  from leveret.broker.channel import acks", id="queue"
        ),
        pytest.param("broker.exchanges.topic", "import asyncio", id="exchange-loop"),
        pytest.param("broker.server", "from broker.config import Settings", id="second-copy"),
        pytest.param("broker.server", "import protocol.framing", id="second-copy-plain"),
        pytest.param("broker.server", "from .config import Settings", id="relative"),
    ],
)
def test_upward_import_would_be_found(module: str, line: str) -> None:
    assert len(complaints(module, line)) == 1


def test_types_may_be_named_upwards() -> None:
    source = "if TYPE_CHECKING:\n    from leveret.broker.channel.channel import Channel\n"
    assert complaints("broker.queues.actor", source) == []


def test_tests_and_examples_import_one_copy() -> None:
    files = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("examples/**/*.py")]
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file in files
        for line, name in imports_of(file.read_text(encoding="utf-8"))
        if name.split(".")[0] in FOLDERS
    ]
    assert wrong == []
