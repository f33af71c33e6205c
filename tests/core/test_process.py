"""How processes of ours are started: nothing beside a job or in the working directory is executed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from plait.core.process import command_of

PACKAGE = Path(__file__).parents[2] / "plait"


@pytest.mark.system
def test_a_module_in_the_working_directory_is_not_imported(tmp_path: Path) -> None:
    for name in ("json", "secrets", "torch"):
        (tmp_path / f"{name}.py").write_text("open('was imported', 'w'); raise SystemExit(7)\n")
    done = subprocess.run(command_of("plait.cli.main", "--version"), cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0 and not (tmp_path / "was imported").exists()


def test_modules_are_started_in_one_way() -> None:
    """Which keeps the working directory out: no other command says ``-m``."""
    places = [
        str(path.relative_to(PACKAGE))
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value == "-m"
    ]
    assert places == ["core/process.py"]
    assert command_of("plait.train.worker", "a") == [sys.executable, "-P", "-m", "plait.train.worker", "a"]
