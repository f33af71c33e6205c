"""A run inside of a Slurm job whose commands are scripts: what is refused, and what srun is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.core.attempts import read_attempts
from plait.core.cluster import HERE
from plait.core.errors import JobError, LaunchError, PlacementError
from plait.core.job import Job
from plait.core.rank_table import NAME, RankTable
from plait.launch import slurm_job
from plait.plan.make import make_plan
from tests.launch.test_slurm_restarts import JOB

GPUS = "JobId=7 JOB_GRES=gpu:4   Nodes=n[1-2] CPU_IDs=0-63 Mem=0 GRES=gpu:2(IDX:0-1) MinCPUsNode=1"
SCONTROL = """#!/bin/sh
case "$*" in
*"show node"*) echo "NodeName=n1 NodeAddr=127.0.0.1"; echo "NodeName=n2 NodeAddr=127.0.0.1";;
*"show job"*) cat "$(dirname "$0")/job";;
*) exit 1;;
esac
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run in job 7 on n1 and n2, whose srun fails at once; programs are in ``bin``."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("scontrol", SCONTROL), ("srun", f'#!/bin/sh\necho "$*" > {tmp_path}/srun; exit 3\n')):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (programs / "job").write_text("JobId=7\n")
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    return tmp_path


def run(folder: Path, world: int, device: str = "") -> int:
    """Ranks of a plan, if a device is said: it is what the plan names."""
    plan = (
        make_plan(Job.from_dict({**JOB, "run": {"name": "job", "device": device}}), HERE, vocab=16) if device else None
    )
    return slurm_job.run(folder, ["true"], world, timeout=60, lock=None, plan=plan)


@pytest.mark.parametrize(
    ("world", "table", "match"),
    [
        (3, None, "3 ranks do not spread evenly over the 2 nodes of this job"),
        (2, RankTable(("n1", "n3"), 1), "The rank table has n3, which this Slurm job was not given"),
        (4, RankTable(("n1", "n2"), 1), "The rank table has 2 ranks, and the run needs 4"),
    ],
)
def test_ranks_that_do_not_fit_the_jobs_nodes_are_refused(
    job: Path, world: int, table: RankTable | None, match: str
) -> None:
    if table:
        table.write(job / slurm_job.PLACED)
    with pytest.raises(PlacementError, match=match):
        run(job, world)
    assert not (job / "srun").exists()


def test_a_step_that_ends_before_its_agents_came_is_named_and_in_the_history(job: Path) -> None:
    with pytest.raises(LaunchError, match="srun ended with status 3 before all nodes had answered"):
        run(job, 2, "cpu")
    [attempt] = read_attempts(job)
    assert (attempt.outcome, attempt.hosts, attempt.resumed) == ("failed", ("n1", "n2"), -1)
    assert RankTable.read(job / NAME).hosts == ("n1", "n2")
    assert not list(job.glob("slurm-hosts-*"))


@pytest.mark.parametrize(
    ("device", "there", "asks"),
    [
        ("auto", GPUS, True),
        ("cuda", GPUS, True),
        ("shared", GPUS, True),
        ("cpu", GPUS, False),
        ("auto", "JobId=7", False),
    ],
)
def test_srun_is_asked_for_the_gpus_that_the_job_has(job: Path, device: str, there: str, asks: bool) -> None:
    (job / "bin" / "job").write_text(f"{there}\n")
    with pytest.raises(LaunchError, match="srun ended"):
        run(job, 4, device)
    words = (job / "srun").read_text().split()
    assert ("--gres=gpu:2" in words) == asks
    assert {"--nodes=2", "--ntasks=2", "--distribution=arbitrary", "--overlap"} <= set(words)
    assert words[-1] == "plait.launch.agent"


def test_more_ranks_on_a_node_than_gpus_have_to_be_meant(job: Path) -> None:
    (job / "bin" / "job").write_text(f"{GPUS}\n")
    for device in ("auto", "cuda"):
        with pytest.raises(JobError, match=r"^run\.device: each node of Slurm job 7 has 2 GPUs, and each runs 4 ranks"):
            run(job, 8, device)
    assert not (job / "srun").exists()
    for device in ("shared", "cpu"):  # as advised
        with pytest.raises(LaunchError, match="srun ended"):
            run(job, 8, device)
