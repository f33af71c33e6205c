"""Builds the one part of Plait that is not Python: the writer of rings (plait/core/record/_ring.c)."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext


class Build(BuildHookInterface):
    """Beside its source, from where an editable installation takes it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if missing := _missing():
            self.app.abort(
                f"Plait's build does not find {' and '.join(missing)}. "
                "On Debian and Ubuntu: apt-get install gcc libc6-dev python3-dev"
            )
        extension = Extension(
            "plait.core.record._ring", ["plait/core/record/_ring.c"], extra_compile_args=["-O2", "-std=c11"]
        )
        command = build_ext(
            Distribution({"ext_modules": [extension], "packages": ["plait", "plait.core", "plait.core.record"]})
        )
        command.inplace = True
        command.build_temp = "build"
        command.ensure_finalized()
        command.run()
        build_data |= {"pure_python": False, "infer_tag": True}
        build_data["artifacts"].append("plait/core/record/_ring.*.so")


def _missing() -> list[str]:
    """What the compilation needs and this machine has not."""
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    headers = Path(sysconfig.get_path("include"), "Python.h")
    found = [] if shutil.which(compiler) else [f"a C compiler ({compiler})"]
    return found if headers.is_file() else [*found, f"Python's headers ({headers})"]
