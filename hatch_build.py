"""Builds the one part of Plait that is not Python: the writer of rings (plait/core/record/_ring.c).

It asks of Python only what is the same in every version since 3.11 (Py_LIMITED_API,
https://docs.python.org/3/c-api/stable.html), so one wheel serves all of them on machines like this one. Where
it cannot be compiled, the wheel is pure Python and serves every machine; ranks then record in Python
(plait/core/record/ring_plain.py). docs/adr/0059-packaging.md says why.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext

FOLDER = Path("plait/core/record")
OLDEST = "0x030B0000"
"""Python 3.11, of which the compiler is given no more."""


class Build(BuildHookInterface):
    """Beside its source, from where an editable installation takes it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = Path(self.root, FOLDER)
        for old in folder.glob("_ring.*.so"):
            old.unlink()
        extension = Extension(
            "plait.core.record._ring", [str(FOLDER / "_ring.c")], extra_compile_args=["-O2", "-std=c11"], optional=True,
            define_macros=[("Py_LIMITED_API", OLDEST)], py_limited_api=True,
        )  # fmt: skip
        command = build_ext(
            Distribution({"ext_modules": [extension], "packages": ["plait", "plait.core", "plait.core.record"]})
        )
        command.inplace = True
        command.build_temp = "build"
        command.ensure_finalized()
        command.run()
        if not list(folder.glob("_ring.*.so")):
            self.app.display_warning(
                "Plait records in Python, two to four times as slowly, since its writer in C was not built. "
                "On Debian and Ubuntu: apt-get install gcc libc6-dev python3-dev, and build it again"
            )
            return
        machine = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data |= {"pure_python": False, "tag": f"cp311-abi3-{machine}"}
        build_data["artifacts"].append(f"{FOLDER}/_ring.*.so")
