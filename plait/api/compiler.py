"""Whether this machine can compile for its processors, which ``strategy.compile`` asks for. No torch."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

from plait.core.base.env import cpp_compiler
from plait.core.base.errors import JobError

FIX = 'Install it, or use strategy.compile = "auto" or false'


def check_compiler() -> None:
    """Raise JobError where torch.compile lacks what it needs for a CPU: a C++ compiler and Python's
    headers."""
    compiler = cpp_compiler()
    if shutil.which(compiler) is None:
        problem = f"true needs a C++ compiler, and '{compiler}' is not here (CXX names another)"
        raise JobError(problem, key="strategy.compile", fix=FIX)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        problem = f"true needs Python's headers, and {header} is not here"
        raise JobError(problem, key="strategy.compile", fix=FIX)
