"""Options that a job has for sbatch and srun: those that would undo what Plait asks for are
refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from plait.api.places.slurm import SlurmTarget
from plait.core.base.errors import JobError
from plait.core.job.cluster_settings import SlurmSection
from plait.core.job.settings import RunSection
from plait.core.job.spec import Job
from plait.core.topology.rank_table import RankTable
from plait.formats.slurm.options import check_gres
from plait.launch.slurm import commands as slurm
from plait.launch.slurm import job as slurm_chain
from plait.launch.slurm.commands import resolve_resources

TIER = "unit"
FOLDER = Path("/shared/runs/job")


def ask(table: RankTable | None = None, device: str = "cpu", **settings: Any) -> SlurmSection:
    section = SlurmSection.model_validate({"nodes": 0 if table else 2} | settings)
    return resolve_resources(section, 4, table, RunSection.model_validate({"device": device}))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"options": ["--nodes=3"]}, "options: has '--nodes=3': .* Write slurm.nodes"),
        ({"options": ["-N3"]}, "options: has '-N3': .* Write slurm.nodes"),
        ({"options": ["--partition gpu"]}, "options: has '--partition gpu': .* Write slurm.partition"),
        ({"options": ["--array=1-8%2"]}, "options: .* each job of an array would be this one run"),
        ({"options": ["--qos=high", "--output=a"]}, "options: has '--output=a': what a job prints is followed"),
        ({"options": ["--signal=B:USR1@9"]}, "options: .* Write slurm.signal_time"),
        ({"options": ["--no-requeue"]}, "options: .* Write slurm.requeue"),
        ({"options": ["--wait"]}, "options: .* no job to follow"),
        ({"options": ["constraint=h100"]}, "options: has 'constraint=h100', which is no option"),
        ({"options": [""]}, "options: has '', which is no option"),
        ({"options": ["--comment=a #1"]}, "options: .* of which Slurm drops what follows '#'"),
        ({"options": ['--comment="a']}, "options: .* no closing quotation"),
        ({"srun_options": ["--nodes=1"]}, "srun_options: has '--nodes=1': every node has one task"),
        ({"srun_options": ["--mpi=none", "-n 3"]}, "srun_options: has '-n 3'"),
        ({"srun_options": ["--export=NONE"]}, "srun_options: .* Write --export=ALL,NAME=VALUE"),
        ({"srun_options": ["--distribution=block"]}, "srun_options: .* in its order"),
        ({"srun_options": ["--mpi=none", "pmix"]}, "srun_options: has 'pmix', which srun would take for a program"),
        ({"srun_options": [""]}, "srun_options: has '', which srun would take for a program"),
        ({"gres": ["nic:2", "gpu:4"]}, "gres: has 'gpu:4'. Say in slurm.gpus"),
        ({"gres": ["nic:2,gres:gpu"]}, "gres: has 'nic:2,gres:gpu'. Say in slurm.gpus"),
        ({"container_mounts": ["/data"]}, "container_mounts: .* Name its image in slurm.container"),
        ({"container_options": ["--rocm"]}, "container_options: .* Name its image in slurm.container"),
        ({"chain": True, "requeue": False}, "chain: .* slurm.requeue = false that none does"),
        ({"time": "1"}, r"signal_time: is 60 s, and a job's time limit \(slurm.time = '1'\) 60 s"),
        ({"time": "0:30", "signal_time": 40}, "signal_time: is 40 s, and a job's time limit"),
        ({"signal_time": 65536}, "signal_time: .* takes 65535 seconds at most"),
        ({"gres": ["nic:2"], "options": ["--gres=gpu:2"]}, "options: has '--gres=gpu:2', which replaces --gres=nic:2"),
    ],
)
def test_what_would_undo_something_is_refused_by_its_key(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(JobError, match=f"^slurm.{says}"):
        ask(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"options": ["--constraint=h100", "--qos=a", "-A me", "--comment='a #1'", "--begin=now+1hour", "--mem=9G"]},
        {"srun_options": ["--label", "--mpi", "none", "--export=ALL,A=1", "--network=sn_all"]},
        {"container": "/a.sqsh", "container_mounts": ["/data"], "container_options": ["--rocm"]},
        {"chain": True, "time": "1", "signal_time": 59},
        {"time": "INFINITE", "signal_time": 65535},
    ],
)
def test_all_else_is_passed_on(settings: dict[str, Any]) -> None:
    assert ask(**settings)


def test_gpus_that_are_planned_are_not_taken_back_by_an_option_that_asks_for_something_else() -> None:
    with pytest.raises(JobError, match=r"^slurm.options: has '--gres=nic:1', which replaces --gres=gpu:2"):
        ask(device="cuda", options=["--gres=nic:1"])
    with pytest.raises(JobError, match=r"^slurm.srun_options: has '--gres=none', which replaces --gres=gpu:2"):
        check_gres(SlurmSection(srun_options=("--gres=none",)), 2, "srun_options")


def test_a_rank_tables_hosts_are_not_asked_for_beside_others() -> None:
    with pytest.raises(JobError, match=r"^slurm.options: has '-w n9', and the rank table has hosts of its own"):
        ask(RankTable(("n1", "n2"), 2), options=["-w n9"])
    assert ask(options=["-w n9"])


UNDOING = {"SBATCH_TIMELIMIT": "7", "SBATCH_ARRAY_INX": "1-2", "SBATCH_REQUEUE": "1"}
KEPT = {"SBATCH_ACCOUNT": "me", "SBATCH_QOS": "high", "SBATCH_NO_REQUEUE": "1"}


def test_variables_of_sbatch_do_not_undo_what_the_script_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """They count for more than a script: sbatch(1), and Slurm 22.05."""
    for name, value in (UNDOING | KEPT).items():
        monkeypatch.setenv(name, value)
    seen: list[set[str]] = []

    def submitted(*argv: str) -> str:
        seen.append({name for name in os.environ if name in UNDOING | KEPT})
        return "8\n"

    monkeypatch.setattr(slurm, "command", submitted)
    (tmp_path / slurm.SCRIPT).write_text("#!/bin/bash\n#SBATCH --time=5\n#SBATCH --no-requeue\nexec true\n")
    assert slurm.sbatch(tmp_path / slurm.SCRIPT) == "8"
    said = capfd.readouterr().err
    assert all(name in said for name in UNDOING) and not any(name in said for name in KEPT)
    slurm_chain.begin_next(tmp_path, "7")
    assert seen == [set(KEPT), set(KEPT)]


def test_gpus_are_looked_for_in_the_partition_that_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"gpu": "gpu|gpu:2\n", "cpu": "cpu|(null)\n"}
    monkeypatch.setattr(slurm, "command", lambda *argv: told[argv[argv.index("-p") + 1]] if "-p" in argv else "all*|\n")
    file = tmp_path / "job.toml"
    file.write_text("[model]\nfamily = 'gpt'\nnum_layers = 2\nhidden = 8\nnum_heads = 2\nmax_sequence = 32\n"
                    "[data]\nsequence_length = 32\n[strategy]\ndp = 4\n")  # fmt: skip
    monkeypatch.setenv("SBATCH_PARTITION", "gpu")
    batch = SlurmTarget().batch(Job.read(file), FOLDER, 4)
    assert (batch.settings.partition, batch.settings.gpus, batch.nodes) == ("gpu", 2, 2)
    assert SlurmTarget("cpu").batch(Job.read(file, ["slurm.nodes=2"]), FOLDER, 4).settings.partition == "cpu"


def test_a_jobs_state_is_what_slurm_says_and_not_its_name_or_comment(monkeypatch: pytest.MonkeyPatch) -> None:
    told = ("JobId=7 JobName=a JobState=FAILED UserId=root(0) GroupId=root(0) JobState=RUNNING Reason=None "
            "ExitCode=0:0 NodeList=n[1-2] Comment=ExitCode=a:b NodeList=n[ WorkDir=/a JobState=X\n")  # fmt: skip
    monkeypatch.setattr(slurm, "command", lambda *argv: told)
    assert slurm.state("7") == slurm.SlurmJobState("RUNNING", 0, ("n1", "n2"), "None")
