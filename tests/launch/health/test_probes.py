"""``plait doctor`` on machines that lack something: each is named, with what to do."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from plait.launch.health import doctor, probes
from plait.launch.health.doctor import compiler, gpus, installed_torch, nccl, packages, slurm
from plait.launch.health.nodes import NodeReport
from plait.launch.health.probes import (
    Probe,
    ProbeResult,
    answer_of,
    clock,
    examine,
    limits,
    memory,
    run_folder,
    shared_memory,
)

ROOT = Path(__file__).parents[3]
MOUNTS = answer_of("unshare", "--user", "--map-root-user", "--mount", "true")[0] == 0
DOCTOR = "from plait.cli import run; run()"
H100 = {"gpus": [("NVIDIA H100", 80 << 30)] * 8, "complaint": ""}
TORCH = {"torch": "2.13.0+cu130", "cuda": "13.0", "rocm": "", "gloo": "", "nccl": "2.28.9", "why": ""}
SEEN = {**TORCH, "devices": H100["gpus"]}


@pytest.mark.system
@pytest.mark.skipif(not MOUNTS, reason="needs namespaces of users and mounts")
def test_the_command_with_a_full_disk_hardly_any_shared_memory_and_few_files(tmp_path: Path) -> None:
    inside = f"mount -t tmpfs -o size=1m tmpfs {tmp_path} && mount -t tmpfs -o size=1m tmpfs /dev/shm && ulimit -n 64"
    words = ["unshare", "--user", "--map-root-user", "--mount", "/bin/bash", "-c"]
    command = f"{inside} && exec {sys.executable} -c '{DOCTOR}' doctor --json --folder {tmp_path}/runs"
    done = subprocess.run([*words, command], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    told = json.loads(done.stdout)
    assert done.returncode == 1, done.stderr
    assert told.keys() == {"version", "findings", "missing"}
    found = {one["what"].partition(" (")[0]: one for one in told["findings"]}
    assert all(one.keys() == {"what", "found", "state", "fix", "values"} for one in found.values())
    assert "No space left on device" in found["folder of runs"]["found"]
    assert "run.folder=FOLDER" in found["folder of runs"]["fix"]
    assert found["/dev/shm"]["state"] == "look" and "--shm-size" in found["/dev/shm"]["fix"]
    assert "open files 64" in found["limits"]["found"] and "hard nofile 65536" in found["limits"]["fix"]
    assert {"folder of runs", "limits"} <= {one.partition(" (")[0] for one in told["missing"]}


Hard = Mapping[int, int]
ENOUGH = {resource.RLIMIT_NOFILE: 1 << 20, resource.RLIMIT_NPROC: 1 << 20, resource.RLIMIT_MEMLOCK: -1}


@pytest.mark.parametrize(
    ("hard", "gpus", "state", "fix"),
    [
        ({}, 8, "fine", ""),
        ({resource.RLIMIT_NOFILE: 64}, 0, "missing", "Open files (ulimit -Hn) are 64: add '* hard nofile 65536'"),
        ({resource.RLIMIT_NOFILE: 4095}, 0, "look", "Open files (ulimit -Hn) are 4095"),
        ({resource.RLIMIT_NOFILE: 4096}, 0, "fine", ""),
        ({resource.RLIMIT_NPROC: 1000}, 0, "missing", "Processes (ulimit -Hu) are 1000: add '* hard nproc"),
        ({resource.RLIMIT_MEMLOCK: 1 << 16}, 0, "fine", ""),
        ({resource.RLIMIT_MEMLOCK: 1 << 16}, 1, "look", "Locked memory (ulimit -Hl) is 64 KiB, too little for RDMA"),
        ({resource.RLIMIT_MEMLOCK: 0, resource.RLIMIT_NPROC: 1}, 1, "missing", "; locked memory (ulimit -Hl) is "),
    ],
)
def test_limits(monkeypatch: pytest.MonkeyPatch, hard: Hard, gpus: int, state: str, fix: str) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda number: (0, {**ENOUGH, **hard}[number]))
    found = limits(gpus)
    assert found.state == state and fix in found.fix and bool(fix) == bool(found.fix)
    assert found.values.keys() == {"files", "processes", "locked"}
    assert found.summary.startswith("open files ") and ("unlimited" in found.summary) == (-1 in found.values.values())


@pytest.mark.parametrize(
    ("returned", "state", "says"),
    [
        (0, "fine", "synchronised, says the kernel"),
        (5, "look", "not synchronised"),
        (-1, "look", "its synchronisation is unknown"),
    ],
)
def test_a_clock(monkeypatch: pytest.MonkeyPatch, returned: int, state: str, says: str) -> None:
    library = type("Library", (), {"adjtimex": staticmethod(lambda buffer: returned)})
    monkeypatch.setattr(probes.ctypes, "CDLL", lambda name: library)
    found = clock()
    assert found.state == state and found.summary.startswith(says) and bool(found.fix) == (state == "look")


Answers = Mapping[str, tuple[int, str]]


@pytest.mark.parametrize(
    ("answers", "state", "found", "fix"),
    [
        ({"scontrol": (-1, "")}, "fine", "not here", ""),
        ({"scontrol": (1, "a\nno conf")}, "look", "its commands find no cluster: no conf", "SLURM_CONF"),
        ({"scontrol": (0, "slurm 23"), "sinfo": (1, "Unable")}, "missing", "does not answer: Unable", "scontrol ping"),
        ({"scontrol": (0, "slurm 23"), "sinfo": (0, "all* 2 x\n")}, "fine", "slurm 23; all* with 2 nodes", ""),
    ],
)
def test_slurm(monkeypatch: pytest.MonkeyPatch, answers: Answers, state: str, found: str, fix: str) -> None:
    monkeypatch.setattr(doctor, "answer_of", lambda *argv, **more: answers[argv[0]])
    one = slurm()
    assert one.state == state and found in one.summary and fix in one.fix


NO_DRIVER = {"gpus": [], "complaint": ""}


@pytest.mark.parametrize(
    ("found", "state", "says"),
    [
        (gpus(SEEN, H100), "fine", "8 x NVIDIA H100 with 80 GiB"),
        (gpus({**SEEN, "devices": H100["gpus"][:3]}, H100), "look", "PyTorch sees 3"),
        (gpus({**TORCH, "cuda": "", "devices": []}, H100), "missing", "is built without CUDA"),
        (gpus({**TORCH, "why": "no driver", "devices": []}, H100), "missing", "sees none: no driver"),
        (gpus({"absent": True}, H100), "missing", "no PyTorch to use them"),
        (gpus(SEEN, NO_DRIVER | {"complaint": "it has failed"}), "missing", "nvidia-smi fails: it has failed"),
        (gpus(SEEN, {}), "missing", "no answer from nvidia-smi"),
        (gpus(SEEN, NO_DRIVER), "fine", "8 x NVIDIA H100"),  # as on AMD's
        (installed_torch({"absent": True}), "missing", "not installed"),
        (installed_torch({"error": "no answer"}), "missing", "cannot be used: no answer"),
        (installed_torch({**TORCH, "gloo": "no route"}), "missing", "gloo does not start: no route"),
        (installed_torch(TORCH), "fine", "for CUDA 13.0; gloo works"),
        (nccl(TORCH), "fine", "2.28.9"), (nccl({}), "fine", "not needed"),
        (nccl({"devices": [1]}), "missing", "not there"),
        (memory(None), "look", "the free memory is unknown"),
        (memory(1 << 30), "look", "1 GiB"), (memory(4 << 30), "fine", "4 GiB"),
    ],
)  # fmt: skip
def test_what_is_asked_of_nobody(found: ProbeResult, state: str, says: str) -> None:
    assert found.state == state and says in found.summary and bool(found.fix) == (state != "fine")


def test_what_needs_no_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert packages().state in ("fine", "look") and "pydantic" in packages().values
    monkeypatch.setattr(doctor, "requirements", list)
    assert packages().summary == "unknown: Plait is not installed"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    found = compiler()
    assert found.state == "look" and "no cc, no g++" in found.summary and "apt-get install gcc g++" in found.fix


@pytest.mark.parametrize(
    ("free", "gpus", "state"), [(1 << 30, 8, "fine"), (1, 2, "missing"), (1, 1, "look"), (-1, 8, "look")]
)
def test_shared_memory(monkeypatch: pytest.MonkeyPatch, free: int, gpus: int, state: str) -> None:
    monkeypatch.setattr(probes, "look", lambda: NodeReport(shared=free))
    assert shared_memory(gpus).state == state


@pytest.mark.parametrize(
    ("disk", "nearly", "state", "says"),
    [
        ({"free": 1 << 40, "rate": 1e9}, "", "fine", "1 TiB free, 1,000 MB/s written"),
        ({"free": 1 << 30, "rate": 1e9}, "", "look", "1 GiB free"),
        ({"free": 1 << 20, "rate": 1e9}, "the disk of /x has 1 MiB free", "missing", "1 MiB free"),
        ({"error": "/x: Read-only file system"}, "", "missing", "cannot be written: /x: Read-only file system"),
    ],
)
def test_the_folder_of_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: dict[str, Any], nearly: str, state: str, says: str
) -> None:
    monkeypatch.setattr(probes, "disk_of", lambda folder: dict(disk))
    monkeypatch.setattr(probes, "nearly_full", lambda folder: nearly)
    found = run_folder(tmp_path / "runs")
    assert found.state == state and says in found.summary and nearly in found.fix


def test_a_probe_that_hangs_is_told_and_the_others_are_answered() -> None:
    stuck = threading.Event()

    def hangs() -> ProbeResult:
        stuck.wait()
        return ProbeResult("late")

    def fails() -> ProbeResult:
        raise OSError(5, "Input/output error")

    found = examine([Probe("disk", hangs, 0.1), Probe("name", lambda: ProbeResult("here")), Probe("other", fails)])
    stuck.set()
    assert [(one.what, one.state) for one in found] == [("disk", "missing"), ("name", "fine"), ("other", "look")]
    assert found[0].found == "no answer within 0 s" and "Input/output error" in found[2].found


def test_programs_are_answered_for_and_those_that_hang_are_ended() -> None:
    assert answer_of("sleep", "60", limit=0.2) == (1, "no answer within 0 s")
    assert answer_of("no-such-program") == (-1, "")
    assert answer_of("sh", "-c", "echo no >&2; exit 3") == (3, "no")
    assert answer_of("echo", "1") == (0, "1")
