"""What every lab test needs: a machine that can run a lab, a list of running labs of its own, and proof that nothing is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
sys.path.insert(0, str(HERE))  # for lab_measure, which is a script too

CLI = """
import sys
from plait.cli.lab import app
from plait.core.errors import PlaitError
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
    from plait.core.errors import LaunchError
    from plait.lab import Lab, LabSpec

    try:
        with Lab(LabSpec(hosts=1)):
            return None
    except LaunchError as error:
        return str(error)


@pytest.fixture(scope="session")
def needs_lab(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip where no lab can run, and say why."""
    if reason := why_no_lab():
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def own_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A list of running labs that no other test and no user's lab is in; every process of the test can be told by it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    return tmp_path


@pytest.fixture(autouse=True)
def nothing_left(own_list: Path) -> Iterator[None]:
    """Fail a test that leaves a process behind; a namespace lives as long as a process holds it."""
    yield
    wait_until(lambda: not processes_of(own_list), "the lab's processes are still there")


def processes_of(folder: Path) -> list[int]:
    """Living processes, but this one, whose environment names ``folder``: keepers, ranks and what ranks have started."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if f"XDG_RUNTIME_DIR={folder}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:  # gone meanwhile, or not ours
                pass
    return found


def wait_until(condition: Callable[[], object], otherwise: str, seconds: float = 5.0) -> None:
    """Wait for a condition, and fail with a message if it does not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(otherwise)
        time.sleep(0.02)


class PlaitLab:
    """The command line as another process."""

    def __call__(self, *words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        """Run to the end and check the exit status."""
        done = subprocess.run([sys.executable, "-c", CLI, *words], capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == status, f"status {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start, and go on."""
        return subprocess.Popen([sys.executable, "-c", CLI, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def plait_lab(needs_lab: None) -> PlaitLab:
    """``plait lab`` as a function."""
    return PlaitLab()


@pytest.fixture
def running_lab(plait_lab: PlaitLab, own_list: Path) -> Iterator[subprocess.Popen[str]]:
    """A lab of two ranks that sleep, each with a child in a session of its own."""
    process = plait_lab.start("run", "--", "sh", "-c", f"setsid sleep 60 & echo $$ > {own_list}/rank$RANK; sleep 60")
    try:
        wait_until(lambda: all((own_list / f"rank{rank}").exists() for rank in range(2)), "the ranks did not start")
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=10)


@pytest.fixture(scope="session")
def nobody_python() -> str:
    """A Python that an ordinary user can run, for a test that is itself run by root."""
    if os.geteuid() != 0:
        pytest.skip("not root: every other test takes the unprivileged path already")
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv (util-linux) to become an ordinary user")
    for candidate in (sys.executable, shutil.which("python3", path="/usr/bin:/usr/local/bin")):
        probe = "import sys, plait.core.errors; sys.exit(sys.version_info < (3, 11))"
        if candidate and subprocess.run([*as_nobody(candidate), "-c", probe], cwd=REPOSITORY, capture_output=True, check=False).returncode == 0:
            return candidate
    pytest.skip("no Python from 3.11 on, and no copy of plait, that an ordinary user may read")


def as_nobody(python: str) -> list[str]:
    """The command that runs Python as an ordinary user."""
    return ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", python, "-B"]
