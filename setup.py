"""The compiled codec: built where a C compiler is, never required.

Everything else about the distribution stands in pyproject.toml. If Cython or the compiler is
missing or fails, the installation goes on and the pure twin ``leveret.protocol.hot`` is used.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCE = "leveret/protocol/_hot.pyx"


def go_without(reason: object) -> None:
    print(f"leveret: installing without the compiled codec: {reason}", file=sys.stderr)


class BuildOptionalExtension(build_ext):
    """Goes on after any failure: setuptools forgives only some of them in optional extensions."""

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except Exception as error:
            go_without(error)


def extensions() -> list[Extension]:
    if not Path(SOURCE).exists():
        return []
    try:
        from Cython.Build import cythonize
        from Cython.Compiler.Errors import CompileError
    except ImportError as error:
        go_without(error)
        return []
    try:
        built: list[Extension] = cythonize([Extension("leveret.protocol._hot", [SOURCE])])
    except CompileError as error:
        go_without(error)
        return []
    for extension in built:
        # An editable installation copies the result into the tree, if there is one.
        extension.optional = True
    return built


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildOptionalExtension})
