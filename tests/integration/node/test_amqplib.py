"""amqplib, the AMQP client of Node.js, against the broker: one test for each script beside this.

The scripts use Node's own test runner, so nothing but amqplib is installed: once, from the npm
registry, as package-lock.json pins it, into a cache folder named after that file's contents.
Without Node, npm or a registry there is nothing to run, and the tests say so and skip.
"""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
INSTALL_TIMEOUT_S = 90
SCRIPT_TIMEOUT_S = 100
# How npm names a registry that cannot be reached; any other failure to install is our own.
UNREACHABLE = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "ENETUNREACH")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def node() -> str:
    found = shutil.which("node")
    if found is None:
        pytest.skip("Node.js is not installed")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True)
    if int(version.stdout.lstrip("v").split(".")[0]) < 20:
        pytest.skip(f"Node.js {version.stdout.strip()} is older than 20")
    return found


@pytest.fixture(scope="module")
def node_modules() -> Path:
    """The folder to import amqplib from."""
    lock = (HERE / "package-lock.json").read_bytes()
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = caches / "leveret-tests" / f"amqplib-{hashlib.sha256(lock).hexdigest()[:16]}"
    if not folder.exists():
        _install(folder)
    return folder / "node_modules"


def _install(folder: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    # Made aside and renamed: neither a second run nor an interrupted one sees half of it.
    aside = folder.with_name(f"{folder.name}.{os.getpid()}")
    aside.mkdir(parents=True, exist_ok=True)
    try:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(HERE / name, aside)
        try:
            done = subprocess.run(
                [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"],
                cwd=aside,
                capture_output=True,
                text=True,
                timeout=INSTALL_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"npm could not install amqplib in {INSTALL_TIMEOUT_S} s")
        if done.returncode:
            unreachable = [sign for sign in UNREACHABLE if sign in done.stderr]
            assert unreachable, done.stderr
            pytest.skip(f"npm cannot reach its registry: {unreachable[0]}")
        try:
            aside.rename(folder)
        except OSError:
            # Another run was quicker, with the same contents.
            assert folder.exists()
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@pytest.mark.parametrize("script", [path.name for path in sorted(HERE.glob("*.test.js"))])
def test_script(script: str, node: str, node_modules: Path, amqp_url: str) -> None:
    done = subprocess.run(
        [node, "--test", "--test-reporter=spec", "--test-timeout=30000", str(HERE / script)],
        env={
            **os.environ,
            "LEVERET_TEST_AMQP_URL": amqp_url,
            "NODE_PATH": str(node_modules),
            "NO_COLOR": "1",
        },
        capture_output=True,
        text=True,
        timeout=SCRIPT_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # A runner that found no tests is content as well.
    assert "tests 0" not in done.stdout, done.stdout
