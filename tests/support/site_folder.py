"""A folder of installed packages, to be put on a broker's PYTHONPATH.

What an installer leaves behind is a package beside its ``.dist-info``; that is what is written
here, so that nothing need be built or downloaded.
"""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path

SAMPLE = Path(__file__).parent / "sample_extension"

EntryPoints = Mapping[str, Mapping[str, str]]


class SiteFolder:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def install_project(self, project: Path) -> None:
        """Install a source folder: its pyproject.toml says what it is."""
        about = tomllib.loads((project / "pyproject.toml").read_text())["project"]
        package = about["name"].replace("-", "_")
        shutil.copytree(
            project / package,
            self.folder / package,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        self._register(about["name"], about["version"], about["entry-points"])

    def install_module(self, name: str, code: str, entry_points: EntryPoints) -> None:
        """Install a package that is one module of this code."""
        (self.folder / f"{name}.py").write_text(code)
        self._register(name, "1.0", entry_points)

    def _register(self, name: str, version: str, entry_points: EntryPoints) -> None:
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "INSTALLER").write_text("leveret's tests\n")
        lines = []
        for group, names in entry_points.items():
            lines.append(f"[{group}]")
            lines += [f"{entry} = {where}" for entry, where in names.items()]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
