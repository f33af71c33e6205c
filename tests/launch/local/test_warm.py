"""Ranks forked from a process that is warm: what the contract of launchers does not ask."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from plait.launch.local import local as warm
from plait.launch.local.local import run_ranks, warm_starts
from tests.support.lab import wait_until
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


def test_it_ends_with_its_launcher(tmp_path: Path, argv: list[str]) -> None:
    code = (
        "import sys, time; from plait.launch.local.local import ForkServer; "
        "one = ForkServer('warm_rank', sys.argv[1:]); print(one._process.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, *argv], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout
        pid = int(launcher.stdout.readline())
        named = Path(f"/proc/{pid}/comm")
        wait_until(lambda: named.read_text().startswith("plait-warm"), "it did not start", seconds=30)
        launcher.kill()
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "it is left", seconds=20)


def test_what_ranks_import_starts_no_thread() -> None:
    code = (
        "import os, sys; from importlib import import_module\n"
        "for program in sys.argv[1:]:\n"
        "    for name in import_module(program).IMPORTS: import_module(name)\n"
        "print(len(os.listdir('/proc/self/task')), 'torch' in sys.modules)"
    )
    argv = [sys.executable, "-c", code, "plait.train.profiler", "plait.train.worker"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    assert subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout.split() == ["1", "True"]
