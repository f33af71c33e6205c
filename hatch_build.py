"""Builds the one part of Plait that is not Python: the writer of rings (plait/core/record/_ring.c).

Where that cannot be compiled, ranks record in Python (plait/core/record/ring_plain.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext

FOLDER = Path("plait/core/record")


class Build(BuildHookInterface):
    """Beside its source, from where an editable installation takes it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = Path(self.root, FOLDER)
        for old in folder.glob("_ring.*.so"):
            old.unlink()
        extension = Extension(
            "plait.core.record._ring", [str(FOLDER / "_ring.c")], extra_compile_args=["-O2", "-std=c11"], optional=True
        )
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
                "On Debian and Ubuntu: apt-get install gcc libc6-dev python3-dev, and install it again"
            )
            return
        build_data |= {"pure_python": False, "infer_tag": True}
        build_data["artifacts"].append(f"{FOLDER}/_ring.*.so")
