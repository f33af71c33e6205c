"""Ranks forked from a process that is warm: what the contract of launchers does not ask."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from plait.core.base.process import usable_cores
from plait.launch import warm
from plait.launch.local import run_ranks
from plait.launch.warm import Warm, warm_starts
from tests.support.lab import children, wait_until
from tests.support.ports import own_port

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
RANK = """
import json, os, random, sys, threading
from pathlib import Path

IMPORTS = ("colorsys",)
imported_in = os.getpid()

def main():
    folder = Path(sys.argv[1])
    said = {"argv": sys.argv[1:], "warm": imported_in != os.getpid(), "parent": os.getppid(), "leads": os.getsid(0),
            "random": random.random(), "pid": os.getpid(), "imported": "colorsys" in sys.modules,
            "threads": len(os.listdir("/proc/self/task")), "rank": os.environ["RANK"]}
    draft = folder / f"draft{os.environ['RANK']}"
    draft.write_text(json.dumps(said))
    draft.rename(folder / f"rank{os.environ['RANK']}")
    print("said", os.environ["RANK"], file=sys.stderr)

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def argv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The arguments of a rank that says who it is."""
    (tmp_path / "warm_rank.py").write_text(RANK)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])]))
    return [str(tmp_path), "more"]


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of one core."""
    monkeypatch.setattr(warm, "usable_cores", lambda: 1)


def said(folder: Path, world: int) -> list[dict[str, object]]:
    return [json.loads((folder / f"rank{rank}").read_text()) for rank in range(world)]


def test_ranks_are_forked_where_they_are_more_than_cores(tmp_path: Path, argv: list[str], crowded: None) -> None:
    with warm_starts("warm_rank", argv, 3, own_port()) as starts:
        for _ in range(2):  # two attempts
            assert run_ranks(starts(), 3, tmp_path / "logs", timeout=60.0) == 0
    ranks = said(tmp_path, 3)
    for number, one in enumerate(ranks):
        assert one["warm"] and one["imported"] and one["argv"] == [str(tmp_path), "more"]
        assert one["rank"] == str(number) and one["threads"] == 1
        assert one["parent"] == os.getpid(), "the launcher's child"
        assert one["leads"] == one["pid"], "a session of its own"
    assert len({one["random"] for one in ranks}) == 3
    assert (tmp_path / "logs" / "rank-1.log").read_text() == "said 1\n"


def test_elsewhere_each_is_a_process_of_its_own(tmp_path: Path, argv: list[str]) -> None:
    with warm_starts("warm_rank", argv, min(2, usable_cores()), own_port()) as starts:
        assert run_ranks(starts(), min(2, usable_cores()), tmp_path / "logs", timeout=60.0) == 0
    assert not said(tmp_path, 1)[0]["warm"]


def test_a_run_does_not_need_it(
    tmp_path: Path, argv: list[str], crowded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before it could fork."""

    class Killed(Warm):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)  # type: ignore[arg-type]
            os.kill(self._process.pid, signal.SIGKILL)

    monkeypatch.setattr(warm, "Warm", Killed)
    with warm_starts("warm_rank", argv, 2, own_port()) as starts:
        assert run_ranks(starts(), 2, tmp_path / "logs", timeout=60.0) == 0
    assert not any(one["warm"] for one in said(tmp_path, 2))


def test_the_next_attempt_has_another(tmp_path: Path, argv: list[str], crowded: None) -> None:
    with warm_starts("warm_rank", argv, 2, own_port()) as starts:
        assert run_ranks(starts(), 2, tmp_path / "logs", timeout=60.0) == 0
        (pid,) = [one for one in children() if Path(f"/proc/{one}/comm").read_text() == "plait-warm\n"]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z", "it lives", seconds=20)
        found = list[bool]()
        for _ in range(2):
            assert run_ranks(starts(), 2, tmp_path / "logs", timeout=60.0) == 0
            found += [bool(one["warm"]) for one in said(tmp_path, 2)]
            assert not Path(f"/proc/{pid}").exists(), "it is left as a zombie"
    assert found == [False, False, True, True]


def test_a_signal_does_not_wait_for_its_imports(tmp_path: Path, argv: list[str]) -> None:
    """Which take ten minutes here."""
    path = tmp_path / "warm_rank.py"
    waits = f"open({str(tmp_path / 'imports')!r}, 'w'); time.sleep(600)"
    path.write_text(f"import os, time\nif 'RANK' not in os.environ: {waits}\n" + path.read_text())
    code = (
        "import sys; from pathlib import Path\n"
        "from plait.launch import warm; from plait.launch.local import run_ranks\n"
        "warm.usable_cores = lambda: 1\n"
        "with warm.warm_starts('warm_rank', sys.argv[2:], 2, 1) as starts:\n"
        "    print('ready', flush=True); sys.exit(run_ranks(starts(), 2, Path(sys.argv[1]), timeout=60.0))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "logs"), *argv]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout and launcher.stderr
        assert launcher.stdout.readline() == "ready\n"
        wait_until((tmp_path / "imports").exists, "nothing was started", seconds=60)
        launcher.send_signal(signal.SIGTERM)
        assert "SIGTERM" in launcher.stderr.readline()
        launcher.wait(60)


def test_it_ends_with_its_launcher(tmp_path: Path, argv: list[str]) -> None:
    code = (
        "import sys, time; from plait.launch.warm import Warm; one = Warm('warm_rank', sys.argv[1:]); "
        "print(one._process.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, *argv], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout
        pid = int(launcher.stdout.readline())
        named = Path(f"/proc/{pid}/comm")
        wait_until(lambda: named.read_text().startswith("plait-warm"), "it did not start", seconds=30)
        launcher.kill()
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "it is left", seconds=20)


@pytest.mark.parametrize("module", ["plait.train.worker", "plait.train.profiler"])
def test_what_ranks_import_starts_no_thread(module: str) -> None:
    code = (
        "import os, sys; from importlib import import_module; module = import_module(sys.argv[1])\n"
        "for name in module.IMPORTS: import_module(name)\n"
        "print(len(os.listdir('/proc/self/task')), 'torch' in sys.modules)"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code, module], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "True"]
