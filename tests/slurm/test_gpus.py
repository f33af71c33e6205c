"""GPUs under Slurm: nodes of this one claim to have some; which ones ranks are given can be
seen."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.slurm.test_train import train
from tests.support.managed import write_job
from tests.support.slurm import SlurmCluster, SlurmSpec, environment, slurm_cluster

pytestmark = pytest.mark.slow
RANK = """
import os, sys
print(os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("PLAIT_GPUS"), file=open(sys.argv[1], "a"))
"""
LAUNCH = """
import sys
from pathlib import Path
from plait.core.base.errors import PlaitError
from plait.launch.slurm import job as slurm_job
from plait.core.cluster.hardware import HERE
from plait.core.job.spec import Job
from plait.plan.make import make_plan
from tests.support.managed import TINY as JOB
folder, device, *argv = sys.argv[1:]
plan = make_plan(Job.from_dict({**JOB, "run": {"name": "job", "device": device}}), HERE, vocab=16)
try:
    sys.exit(slurm_job.run(Path(folder), argv, 4, timeout=60, plan=plan))
except PlaitError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_status)
"""


@pytest.fixture(scope="module")
def gpus() -> Iterator[SlurmCluster]:
    """Two nodes of four."""
    with slurm_cluster(2, gpus=4) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def constrained() -> Iterator[SlurmCluster]:
    """Two nodes of four, where a process can open those alone that its step was given."""
    groups = Path("/sys/fs/cgroup/devices")
    if not (groups.is_dir() and os.access(groups, os.W_OK)):
        pytest.skip("devices cannot be constrained here: no control groups of devices (v1) that may be written")
    with slurm_cluster(replace(SlurmSpec.tree(2, gpus=4), constrained=True)) as cluster:
        yield cluster
    assert not list(Path("/sys/fs/cgroup").glob("*/slurm_n[12]"))


def run(
    cluster: SlurmCluster, folder: Path, device: str, *options: str, code: str = RANK
) -> tuple[int, str, list[str]]:
    """Two ranks on each of two nodes, in an allocation: its exit status, errors, what ranks saw."""
    rank = [sys.executable, "-I", "-S", "-c", code, str(folder / "seen")]
    argv = ["salloc", "--quiet", "--nodes=2", *options, sys.executable, "-c", LAUNCH, str(folder), device, *rank]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, env=environment(cluster), timeout=90)
    seen = (folder / "seen").read_text().splitlines() if (folder / "seen").exists() else []
    return done.returncode, done.stderr, seen


@pytest.mark.parametrize(
    ("device", "options", "seen"),
    [
        ("auto", ["--exclusive"], "0,1,2,3 4"),  # which gives a step none unless it asks
        ("cuda", ["--gpus-per-node=3"], "0,1,2 3"),
        ("shared", ["--gpus-per-task=1", "--ntasks-per-node=1"], "0 1"),
    ],
)
def test_ranks_are_given_the_gpus_of_their_job(
    gpus: SlurmCluster, tmp_path: Path, device: str, options: list[str], seen: str
) -> None:
    status, errors, found = run(gpus, tmp_path, device, *options)
    assert status == 0, errors
    assert found == [seen] * 4


OPENS = """
import errno, os, sys

def may(number):
    try:
        os.close(os.open(f"/dev/tty{number}", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK))
    except OSError as error:
        return error.errno != errno.EPERM
    return True

print(*(number for number in range(4) if may(number)), file=open(sys.argv[1], "a"))
"""


@pytest.mark.parametrize(
    ("options", "opened"),
    [(["--exclusive"], "0 1 2 3"), (["--gpus-per-node=3"], "0 1 2"), ([], "")],
)
def test_ranks_can_open_the_devices_that_were_planned(
    constrained: SlurmCluster, tmp_path: Path, options: list[str], opened: str
) -> None:
    """Devices that stand for GPUs, kept from all others by the kernel: a step that did not ask has
    none."""
    status, errors, found = run(constrained, tmp_path, "auto", *options, code=OPENS)
    assert status == 0, errors
    assert found == [opened] * 4


def test_a_run_that_was_to_have_gpus_does_not_train_without(gpus: SlurmCluster, tmp_path: Path) -> None:
    """Nobody has these GPUs, so torch finds none."""
    done = subprocess.run(train(write_job(tmp_path, 5)), check=False, capture_output=True, text=True, cwd=tmp_path,
                          env=environment(gpus), timeout=120)  # fmt: skip
    script = (tmp_path / "runs" / "job" / "slurm.sh").read_text().splitlines()
    assert {"#SBATCH --gres=gpu:2", "#SBATCH --nodes=1", "#SBATCH --mem=0"} <= set(script)
    assert done.returncode == 93, done.stdout + done.stderr
    assert "GPUs of this node were asked for, and local rank" in done.stdout
    assert not list((tmp_path / "runs" / "job" / "checkpoints").glob("step-*"))
