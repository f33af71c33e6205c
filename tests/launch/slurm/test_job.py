"""A run inside of a Slurm job whose commands are scripts: what is refused, and what srun is
told."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from plait.core.base.errors import JobError, LaunchError, PlacementError
from plait.core.cluster.hardware import HERE
from plait.core.job.plan import CHANGED
from plait.core.job.spec import Job
from plait.core.runs.attempts import read_attempts
from plait.core.runs.progress import Progress
from plait.core.topology.rank_table import NAME, RankTable
from plait.launch.local.agents import Rendezvous
from plait.launch.slurm import job as slurm_job
from plait.launch.slurm import nodes as slurm_nodes
from plait.launch.watch import RunGuard
from plait.plan.make import make_plan
from tests.support.managed import TINY as JOB

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
    """The folder of a run in job 7 on n1 and n2, whose srun fails at once; programs are in
    ``bin``."""
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
    return slurm_job.run(folder, ["true"], world, timeout=60, plan=plan)


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
    assert {"--ntasks=2", "--distribution=arbitrary", "--overlap"} <= set(words)
    assert words[-1] == "plait.launch.local.agent"


def test_more_ranks_on_a_node_than_gpus_have_to_be_meant(job: Path) -> None:
    (job / "bin" / "job").write_text(f"{GPUS}\n")
    for device in ("auto", "cuda"):
        with pytest.raises(JobError, match=r"^run\.device: each node of Slurm job 7 has 2 GPUs, and each runs 4 ranks"):
            run(job, 8, device)
    assert not (job / "srun").exists()
    (job / "bin" / "job").write_text("JobId=7\n")
    with pytest.raises(JobError, match=r"ranks are planned for GPUs, and Slurm job 7 has none.*--gres=gpu:4"):
        run(job, 8, "cuda")
    for device in ("shared", "cpu"):  # as advised
        with pytest.raises(LaunchError, match="srun ended"):
            run(job, 8, device)


class Step:
    """srun's process. stays: how many of its waits are in vain."""

    def __init__(self, stays: int = 0) -> None:
        self.stays, self.done = stays, list[str]()

    def poll(self) -> int | None:
        return None

    def wait(self, seconds: float | None = None) -> int:
        self.done.append(f"wait {seconds}")
        if self.stays and seconds is not None:
            self.stays -= 1
            raise subprocess.TimeoutExpired("srun", seconds)
        return 0

    def terminate(self) -> None:
        self.done.append("terminate")

    def kill(self) -> None:
        self.done.append("kill")


@pytest.mark.unit
@pytest.mark.parametrize(
    ("stays", "done"),
    [
        (0, ["hung up", "wait 15"]),
        (1, ["hung up", "wait 15", "terminate", "wait 15", "kill", "wait None"]),
        (2, ["hung up", "wait 15", "terminate", "wait 15", "kill", "wait None"]),
    ],
)
def test_a_step_that_stays_is_ended_by_force(stays: int, done: list[str]) -> None:
    step = Step(stays)
    agents = SimpleNamespace(__exit__=lambda *_: step.done.append("hung up"))
    slurm_job._finish(step, agents)  # type: ignore[arg-type]
    assert step.done == done


@pytest.mark.unit
def test_ranks_of_the_jobs_nodes_are_watched_to_their_end(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What srun gets, what is watched, and what is left of it."""
    step, given, made = Step(), dict[str, Any](), dict[str, Any]()

    class Made:
        variables: ClassVar[dict[str, str]] = {"PLAIT_AGENT": "here"}
        agents: ClassVar[dict[int, str]] = {0: "one", 1: "two"}
        lost: ClassVar[set[str]] = set()

        def __init__(self, table: RankTable, argv: list[str], logs: Path, at: Rendezvous, **options: Any) -> None:
            made.update(options, table=table, argv=argv, logs=logs, host=at.host)

        def __enter__(self) -> Made:
            return self

        def __exit__(self, *_: object) -> None:
            step.done.append("hung up")

        def ranks(self, still: Callable[[], None]) -> list[str]:
            still()  # as long as srun runs
            assert Path(given["env"]["SLURM_HOSTFILE"]).read_text() == "n1\nn2\n"
            return ["rank 0", "rank 1"]

    def start(argv: list[str], **options: Any) -> Step:
        given.update(options, argv=argv)
        return step

    def watched(ranks: list[str], logs: Path, **options: Any) -> int:
        options["guard"].progress.heard(0, 4, 1.0)
        given.update(watched=(ranks, logs, options))
        return 7

    (job / "bin" / "job").write_text(f"{GPUS}\n")
    monkeypatch.setattr(slurm_job, "Agents", Made)
    monkeypatch.setattr(slurm_job.subprocess, "Popen", start)
    monkeypatch.setattr(slurm_job, "watched", watched)
    monkeypatch.setattr(slurm_job.slurm, "command", lambda *argv: "")
    monkeypatch.setattr(slurm_job.slurm, "gpus_of_job", lambda job: 2)
    monkeypatch.setattr(slurm_job.slurm, "node_addresses", lambda nodes: {"n1": "10.0.0.1", "n2": "10.0.0.2"})
    assert slurm_job.run(job, ["rank"], 4, timeout=60) == 7
    table = RankTable(("n1", "n2"), 2)
    assert made == {
        "table": table, "argv": ["rank"], "logs": job / "logs", "host": "10.0.0.1", "numbered": True,
        "addresses": {"n1": "10.0.0.1", "n2": "10.0.0.2"},
    }  # fmt: skip
    ranks, logs, options = given["watched"]
    assert (ranks, logs) == (["rank 0", "rank 1"], job / "logs")
    assert (options["timeout"], options["sources"]) == (60, ["one", "two"])
    assert (options["guard"].lock, options["guard"].suspicion) == (None, None)
    assert given["env"]["PLAIT_AGENT"] == "here" and given["start_new_session"] is True
    assert given["stdin"] == subprocess.DEVNULL
    assert "--gres=gpu:2" in given["argv"]
    assert step.done == ["hung up", "wait 15", "hung up"]
    assert not list(job.glob("slurm-hosts-*"))
    assert not read_attempts(job)  # it is no training
    plan = make_plan(Job.from_dict({**JOB, "run": {"name": "job", "device": "cpu"}}), HERE, vocab=16)
    plan = replace(plan, notes={CHANGED: "from two nodes"})  # by whoever asks for the first start

    def guarded(progress: Progress) -> RunGuard:
        return RunGuard(suspicion=cast("Any", "it"), progress=progress)

    assert slurm_job.run(job, ["rank"], 4, timeout=60, plan=plan, hooks=slurm_job.SlurmHooks(guarded)) == 7
    [attempt] = read_attempts(job)
    assert (attempt.outcome, attempt.world, attempt.step, attempt.plan) == ("finished", 4, 4, plan.key)
    assert attempt.changed == "from two nodes"
    assert given["watched"][2]["guard"].suspicion == "it"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    step.done.clear()
    assert slurm_job.run(job, ["rank"], 4, timeout=60, plan=plan) == 7
    assert [one.changed for one in read_attempts(job)] == ["from two nodes", ""]
    assert "--gres=gpu:2" not in given["argv"]  # of a job on the processor


@pytest.mark.parametrize(
    ("world", "table", "says"),
    [
        (3, None, "3 ranks do not spread evenly over the 2 nodes of this job"),
        (2, ("n1", "n3"), "The rank table has n3, which this Slurm job was not given"),
        (2, ("n4", "n3"), "The rank table has n4, n3, which"),
        (4, ("n1", "n2"), "The rank table has 2 ranks, and the run needs 4"),
        (1, ("n2",), ""),
        (4, None, ""),
    ],
)
def test_ranks_lie_on_the_jobs_own_nodes(
    world: int, table: tuple[str, ...] | None, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table that fits is followed. Without one the order is that of the switches, if there are
    any."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    asked = list[tuple[str, ...]]()

    def command(*argv: str) -> str:
        asked.append(argv)
        if "topology" in argv:
            raise LaunchError("Slurm refused: no topology.")
        return GPUS if "job" in argv else ""

    started = list[RankTable]()
    monkeypatch.setattr(slurm_job.slurm, "command", command)
    monkeypatch.setattr(slurm_job._Step, "run", lambda step, table, *rest: started.append(table) or step.gpus)
    if table:
        RankTable(table, 1).write(tmp_path / slurm_nodes.PLACED)
    if says:
        with pytest.raises(PlacementError, match=says):
            run(tmp_path, world)
        assert not started
    else:
        assert run(tmp_path, world) == 2, "each node has two GPUs"
        assert started == [RankTable(table or ("n1", "n2"), 1 if table else 2)]
    assert any("topology" in argv for argv in asked) == (table is None and world == 4)
