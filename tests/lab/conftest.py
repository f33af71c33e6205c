"""What every lab test needs: a machine that can run a lab, a list of running labs of its own, and
proof that nothing is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.lab import REPOSITORY, PlaitLab, as_nobody, processes_of, wait_until, why_no_lab


@pytest.fixture(scope="session")
def needs_lab() -> None:
    """Skip where no lab can run, and say why."""
    if reason := why_no_lab():
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def own_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A list of running labs that no other test and no user's lab is in; every process of the test
    can be told by it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    return tmp_path


@pytest.fixture(autouse=True)
def nothing_left(own_list: Path) -> Iterator[None]:
    """Fail a test that leaves a process behind; a namespace lives as long as a process holds it."""
    yield
    try:
        wait_until(lambda: not processes_of(own_list), "the lab's processes are still there")
    finally:
        for pid in processes_of(own_list):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def plait_lab(needs_lab: None) -> PlaitLab:
    """``plait lab`` as a function."""
    return PlaitLab()


@pytest.fixture
def running_lab(plait_lab: PlaitLab, own_list: Path) -> Iterator[subprocess.Popen[str]]:
    """A lab of two ranks that sleep, each with a child in a session of its own."""
    code = f"setsid sleep 60 & echo $$ > {own_list}/rank$RANK; sleep 60"
    process = plait_lab.start("run", "2x1@1gbit", "--", "sh", "-c", code)
    try:
        wait_until(lambda: all((own_list / f"rank{rank}").exists() for rank in range(2)), "the ranks did not start")
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


@pytest.fixture(scope="session")
def nobody_python() -> str:
    """A Python that an ordinary user can run, for a test that is itself run by root."""
    if os.geteuid() != 0:
        pytest.skip("not root: every other test takes the unprivileged path already")
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv (util-linux) to become an ordinary user")
    for candidate in (sys.executable, shutil.which("python3", path="/usr/bin:/usr/local/bin")):
        # setpriv may still start what the user could not, so a child of the first Python is the one that
        # counts.
        child = "import plait.core.base.env, typing; typing.Self"
        probe = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', '{child}']))"
        if not candidate:
            continue
        tried = subprocess.run(
            [*as_nobody(candidate), "-c", probe], cwd=REPOSITORY, stderr=subprocess.DEVNULL, check=False
        )
        if not tried.returncode:
            return candidate
    pytest.skip("no Python from 3.11 on, and no copy of plait, that an ordinary user may read")
