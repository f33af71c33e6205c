"""The command of the step that starts agents: what srun is asked for, and in which container they
run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from plait.core.base.errors import JobError, LaunchError
from plait.core.job.cluster_settings import SlurmSection
from plait.core.job.settings import RunSection
from plait.launch.slurm import commands as slurm
from plait.launch.slurm.nodes import srun

TIER = "unit"
FOLDER = Path("/shared/runs/job")
AGENT = ["-P", "-m", "plait.launch.local.agent"]


def step(gpus: int = 0, **settings: Any) -> list[str]:
    return srun(SlurmSection.model_validate(settings), FOLDER, 2, gpus)


@pytest.mark.parametrize(
    ("gpus", "settings", "asked"),
    [
        (0, {}, []),
        (8, {}, ["--gres=gpu:8"]),
        (8, {"gres": ["nic:2", "license:1"]}, ["--gres=gpu:8,nic:2,license:1"]),
        (0, {"gres": ["nic:2"]}, ["--gres=nic:2"]),
        (0, {"spares": 1}, ["--no-kill"]),
        (0, {"srun_options": ["--mpi=pmix", "--quit-on-interrupt"]}, ["--mpi=pmix", "--quit-on-interrupt"]),
    ],
)
def test_a_step_asks_for_what_the_job_has(gpus: int, settings: dict[str, Any], asked: list[str]) -> None:
    words, bare = step(gpus, **settings), step()
    assert [word for word in words if word not in bare] == asked
    assert words[-4:] == [sys.executable, *AGENT]


@pytest.mark.parametrize("bind", ["none", "verbose,mask_cpu:0xff"])
def test_one_task_of_a_node_is_not_bound_to_a_processor_of_which_all_ranks_would_have_to_live(bind: str) -> None:
    words = step(cpu_bind=bind) if bind != "none" else step()
    assert f"--cpu-bind={bind}" in words
    assert not any(word.startswith(("--cpus-per-task", "-c", "--exact")) for word in words)


def test_pyxis_gets_its_flags_by_srun_and_the_containers_python_runs_the_agent() -> None:
    words = step(8, container="nvcr.io#nvidia/pytorch:25.01", container_mounts=["/data", "/raid/x:/scratch:ro"],
                 container_options=["--no-container-mount-home"], python="/opt/venv/bin/python")  # fmt: skip
    assert "--container-image=nvcr.io#nvidia/pytorch:25.01" in words
    assert f"--container-mounts={FOLDER}:{FOLDER},/data:/data,/raid/x:/scratch:ro" in words
    assert "--no-container-mount-home" in words
    assert words[-4:] == ["/opt/venv/bin/python", *AGENT]


@pytest.mark.parametrize(("gpus", "options", "device"), [(8, [], ["--nv"]), (0, [], []), (8, ["--rocm"], ["--rocm"])])
def test_apptainer_is_a_command_in_the_step(gpus: int, options: list[str], device: list[str]) -> None:
    words = step(gpus, container="/images/plait.sif", container_runtime="apptainer", container_options=options)
    at = words.index("apptainer")
    assert words[at:] == ["apptainer", "exec", *[one for one in device if one == "--nv"], "--bind",
                          f"{FOLDER}:{FOLDER}", *options, "/images/plait.sif", "python", *AGENT]  # fmt: skip
    assert not any(word.startswith("--container") for word in words)


@pytest.mark.parametrize("mount", ["data", "/a,/b", "/a:b", ""])
def test_a_mount_that_no_runtime_would_take_is_refused(mount: str) -> None:
    with pytest.raises(JobError, match=r"^slurm\.container_mounts: has '.*'. Write /folder"):
        SlurmSection.model_validate({"container_mounts": [mount]})


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        ({"mem": "200G"}, ["--mem=200G"]),
        ({"exclusive": False, "mem": "8G"}, ["--mem=8G"]),
        ({}, ["--mem=0"]),
        ({"gpus": 4, "gres": ["nic:2"]}, ["--mem=0", "--gres=gpu:4,nic:2"]),
        ({"spares": 2}, ["--nodes=4", "--mem=0", "--no-kill"]),
        ({"segment": 2}, ["--mem=0", "--segment=2"]),
        ({"chain": True}, ["--mem=0", "--no-requeue"]),
    ],
)
def test_the_batch_script_asks_for_the_same(settings: dict[str, Any], lines: list[str]) -> None:
    section = SlurmSection.model_validate({"nodes": 2, "gpus": 0} | settings)
    text = slurm.Batch(
        folder=FOLDER, name="job", world_size=4, settings=slurm.resolve_resources(section, 4, None, RunSection())
    ).script()
    found = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    keys = ("--mem", "--gres", "--nodes=4", "--no-kill", "--segment", "--no-requeue")
    assert [line for line in found if line.startswith(keys)] == lines


def test_segments_are_refused_by_a_slurm_that_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = [LaunchError("Slurm refused: sbatch: unrecognized option '--segment=2'.")]

    def command(*argv: str) -> str:
        if argv[0] == "squeue":
            raise LaunchError("it went on")
        if argv[0] == "sbatch" and refused:
            raise refused.pop()
        return "slurm-wlm 22.05.8\n"

    monkeypatch.setattr(slurm, "command", command)
    settings = SlurmSection(nodes=2, segment=2)
    batch = slurm.Batch(folder=tmp_path, name="job", world_size=2, settings=settings)
    with pytest.raises(JobError, match=r"^slurm.segment: asks for blocks of 2 nodes, and slurm-wlm 22.05.8 has no"):
        slurm.submit(batch)
    with pytest.raises(LaunchError, match="it went on"):
        slurm.submit(batch)
