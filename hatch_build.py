"""Builds the one part of Plait that is not Python: the writer of rings (plait/core/_ring.c)."""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext


class Build(BuildHookInterface):
    """Beside its source, from where an editable installation takes it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        extension = Extension("plait.core._ring", ["plait/core/_ring.c"], extra_compile_args=["-O2", "-std=c11"])
        command = build_ext(Distribution({"ext_modules": [extension], "packages": ["plait", "plait.core"]}))
        command.inplace = True
        command.build_temp = "build"
        command.ensure_finalized()
        command.run()
        build_data |= {"pure_python": False, "infer_tag": True}
        build_data["artifacts"].append("plait/core/_ring.*.so")
