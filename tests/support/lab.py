"""What lab tests share: the command line as another process, and which processes belong to a
test."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plait.cli.lab import app
from plait.core.base.errors import PlaitError

REPOSITORY = Path(__file__).resolve().parents[2]

CLI = """
import sys
from plait.cli.lab import app
from plait.core.base.errors import PlaitError
try:
    app()
except PlaitError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_status)
"""


def why_no_lab() -> str | None:
    """Why this machine cannot run a lab; None if it can."""
    if not sys.platform.startswith("linux"):
        return "the lab needs Linux"
    from plait.core.base.errors import LaunchError
    from plait.lab import Lab, LabSpec

    try:
        with Lab(LabSpec(hosts=1)):
            return None
    except LaunchError as error:
        return str(error)


def processes_of(folder: Path) -> list[int]:
    """Living processes, but this one, whose environment names ``folder``: keepers, ranks and what
    ranks have started."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if f"XDG_RUNTIME_DIR={folder}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:  # gone meanwhile, or not ours
                pass
    return found


def children(pid: int | None = None) -> list[int]:
    """The processes that a process has started, this one if not told, and those that it has
    adopted."""
    pid = pid or os.getpid()
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until(condition: Callable[[], object], otherwise: str, seconds: float = 60.0) -> None:
    """Wait for a condition, and fail with a message if it does not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(otherwise)
        time.sleep(0.02)


class PlaitLab:
    """The command line; ``run`` as another process, all else in this one."""

    def __call__(self, *words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        """Run to the end and check the exit status."""
        if words[0] == "run":
            argv = [sys.executable, "-c", CLI, *words]
            done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
        else:
            said = CliRunner().invoke(app, words)
            wrong = said.exception if isinstance(said.exception, PlaitError) else None
            code, told = (wrong.exit_status, str(wrong)) if wrong else (said.exit_code, said.stderr)
            done = subprocess.CompletedProcess(words, code, said.stdout, told)
        assert done.returncode == status, f"status {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start, and go on."""
        return subprocess.Popen(
            [sys.executable, "-c", CLI, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )


def as_nobody(python: str) -> list[str]:
    """The command that runs Python as an ordinary user."""
    return ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", python, "-B"]
