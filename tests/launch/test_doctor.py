"""``plait doctor`` on machines that lack something: each is named, with what to do. The real command, on this
machine with a part of it taken away; and the probes' own limits."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
import threading
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from plait.launch.doctor import DoctorFinding, Probe, answer_of, examine
from plait.launch.doctor_software import gpus, packages, torch_finding

pytestmark = pytest.mark.system
ROOT = Path(__file__).parents[2]
MOUNTS = answer_of("unshare", "--user", "--map-root-user", "--mount", "true")[0] == 0


def doctor(
    *words: str, before: str = "", python: str = sys.executable, variables: Mapping[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    """Exit status, and findings by what they are about. before: shell, in the process that becomes the
    command."""
    command = f"{before} exec {python} -c 'from plait.cli import run; run()' doctor --json {' '.join(words)}"
    done = subprocess.run(["/bin/bash", "-c", command], env=dict(os.environ) | dict(variables or {}), cwd=ROOT,
                          capture_output=True, text=True, timeout=200, check=False)  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    told = json.loads(done.stdout)
    assert done.returncode == bool(told["missing"])
    return done.returncode, {one["what"].partition(" (")[0]: one for one in told["findings"]}


def program(folder: Path, name: str, text: str) -> dict[str, str]:
    """A stand-in for a program, before all others on PATH."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_without_pytorch(tmp_path: Path) -> None:
    packages, own = tmp_path / "packages", tmp_path / "venv"
    packages.mkdir()
    for folder in (Path(one) for one in [*site.getsitepackages(), *sys.path] if one.endswith("site-packages")):
        for one in folder.iterdir():
            if not one.name.startswith(("torch", "functorch")) and not (packages / one.name).exists():
                (packages / one.name).symlink_to(one)
    venv.create(own, with_pip=False, symlinks=True)
    (next(own.glob("lib/python*/site-packages")) / "own.pth").write_text(f"{ROOT}\n{packages}\n")
    status, found = doctor(python=f"{own}/bin/python")
    assert status == 1
    assert (found["PyTorch"]["state"], found["PyTorch"]["found"]) == ("missing", "not installed")
    assert "pip install 'plait[train]'" in found["PyTorch"]["fix"]


def test_with_few_open_files() -> None:
    status, found = doctor(before="ulimit -n 64;")
    assert status == 1 and found["limits"]["state"] == "missing"
    assert "open files 64" in found["limits"]["found"] and "hard nofile 65536" in found["limits"]["fix"]


@pytest.mark.skipif(not MOUNTS, reason="needs namespaces of users and mounts")
def test_with_a_full_disk_and_hardly_any_shared_memory(tmp_path: Path) -> None:
    inside = f"mount -t tmpfs -o size=1m tmpfs {tmp_path} && mount -t tmpfs -o size=1m tmpfs /dev/shm &&"
    script = tmp_path.with_suffix(".sh")
    script.write_text(f"{inside} exec {sys.executable} -c 'from plait.cli import run; run()' \"$@\"\n")
    words = ["unshare", "--user", "--map-root-user", "--mount", "/bin/sh", str(script)]
    done = subprocess.run([*words, "doctor", "--folder", str(tmp_path / "runs")], cwd=ROOT, capture_output=True,
                          text=True, timeout=200, check=False)  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "cannot be written" in done.stdout and "No space left on device" in done.stdout
    assert "run.folder=FOLDER" in done.stdout
    assert "look /dev/shm: NCCL" in done.stdout and "--shm-size" in done.stdout


def test_without_a_compiler(tmp_path: Path) -> None:
    tmp_path.joinpath("bin").mkdir()
    _, found = doctor(before="unset CC CXX;", variables={"PATH": str(tmp_path / "bin")})
    assert found["compiler"]["state"] == "look" and "no cc, no g++" in found["compiler"]["found"]
    assert "apt-get install gcc g++" in found["compiler"]["fix"]


def test_with_a_gpu_that_pytorch_cannot_use(tmp_path: Path) -> None:
    gpu = program(tmp_path / "bin", "nvidia-smi", "echo 'NVIDIA H100 80GB HBM3, 81559'")
    status, found = doctor(variables=gpu)
    said = found["GPUs"]
    if not said["values"]["torch"]:  # a real one would be used
        assert (
            status == 1 and said["state"] == "missing" and "1 x NVIDIA H100 80GB HBM3 with 79.65 GiB" in said["found"]
        )
        assert "built without CUDA" in said["found"] and "https://pytorch.org/get-started/locally" in said["fix"]


def test_with_a_broken_driver(tmp_path: Path) -> None:
    gpu = program(tmp_path / "bin", "nvidia-smi", "echo 'NVIDIA-SMI has failed'; exit 9")
    status, found = doctor(variables=gpu)
    assert status == 1 and found["GPUs"]["found"] == "nvidia-smi fails: NVIDIA-SMI has failed"


def test_with_a_clock_that_nobody_sets(tmp_path: Path) -> None:
    _, found = doctor(variables=program(tmp_path / "bin", "timedatectl", "echo no"))
    assert found["clock"]["state"] == "look" and found["clock"]["found"] == "not synchronised, says timedatectl"
    assert "timedatectl set-ntp true" in found["clock"]["fix"]
    _, found = doctor(variables=program(tmp_path / "bin", "timedatectl", "echo yes"))
    assert found["clock"]["state"] == "fine"


def test_with_a_slurm_that_does_not_answer(tmp_path: Path) -> None:
    program(tmp_path / "bin", "scontrol", "echo slurm 23.11.4")
    _, found = doctor(variables=program(tmp_path / "bin", "sinfo", "echo 'Unable to contact slurm controller'; exit 1"))
    assert found["Slurm"]["state"] == "missing" and "slurm 23.11.4" in found["Slurm"]["found"]
    assert "Unable to contact" in found["Slurm"]["found"] and "scontrol ping" in found["Slurm"]["fix"]


# ---- probes ----


def test_a_probe_that_hangs_is_told_and_the_others_are_answered() -> None:
    stuck = threading.Event()

    def hangs() -> DoctorFinding:
        stuck.wait()
        return DoctorFinding("disk", "late")

    def fails() -> DoctorFinding:
        raise OSError(5, "Input/output error")

    found = examine(
        [Probe("disk", hangs, 0.1), Probe("name", lambda: DoctorFinding("name", "here")), Probe("other", fails)]
    )
    stuck.set()
    assert [(one.what, one.state) for one in found] == [("disk", "missing"), ("name", "fine"), ("other", "look")]
    assert found[0].found == "no answer within 0 s" and "Input/output error" in found[2].found


def test_a_program_that_hangs_is_ended() -> None:
    assert answer_of("sleep", "60", limit=0.2) == (1, "no answer within 0 s")
    assert answer_of("no-such-program") == (-1, "")


H100 = {"gpus": [["NVIDIA H100", 80 << 30]] * 8, "complaint": ""}
TOLD = {"torch": "2.13.0+cu130", "cuda": "13.0", "rocm": "", "gloo": "", "nccl": "2.28.9", "why": ""}


@pytest.mark.parametrize(
    ("devices", "state"), [([], "missing"), ([["NVIDIA H100", 80 << 30]] * 3, "look"), (H100["gpus"], "fine")]
)
def test_gpus_of_the_driver_are_compared_with_pytorchs(devices: list[Any], state: str) -> None:
    assert gpus({**TOLD, "devices": devices}, H100).state == state


def test_packages_and_pytorch_of_this_machine_are_told() -> None:
    assert packages().state in ("fine", "look") and "pydantic" in packages().values
    assert torch_finding({**TOLD, "gloo": "no route"}).state == "missing"
    assert torch_finding(TOLD).state == "fine"
    assert shutil.which("python3") is None or answer_of("python3", "-c", "print(1)") == (0, "1")
