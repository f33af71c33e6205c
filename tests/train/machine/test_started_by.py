"""Ranks that srun, mpirun or a shell have started: who they are, by each starter's own variables
and by a table."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from plait.core.base.env import RankEnv
from plait.core.base.errors import LaunchError, PlacementError
from plait.core.topology.rank_table import RankTable
from plait.train.machine.rank_process import set_rank_variables, tasks_of_nodes
from tests.support.managed import write_job
from tests.support.ports import own_port

OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
SRUN = {
    "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "10", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),2", "SLURM_STEP_NODELIST": "n[07-09]",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "head",
}  # fmt: skip
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "MASTER_ADDR": "head"}


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*OURS, *SRUN, *OPEN_MPI, *HYDRA, "PLAIT_RANK_TABLE", "SLURMD_NODENAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def started(patch: pytest.MonkeyPatch, env: Mapping[str, str]) -> RankEnv:
    for name, value in env.items():
        patch.setenv(name, value)
    set_rank_variables()
    return RankEnv.read()


@pytest.mark.parametrize(
    ("env", "who"),
    [
        (SRUN, RankEnv(rank=5, world_size=10, local_rank=1, local_world_size=4, node_rank=1, master_addr="n07")),
        (SRUN | {"MASTER_ADDR": "ib-n07", "MASTER_PORT": "7"},
         RankEnv(rank=5, world_size=10, local_rank=1, local_world_size=4, node_rank=1, master_addr="ib-n07",
                 master_port=7)),
        (OPEN_MPI, RankEnv(rank=3, world_size=4, local_rank=1, local_world_size=2, node_rank=1, master_addr="head")),
        (HYDRA, RankEnv(rank=3, world_size=4, local_rank=1, local_world_size=2, node_rank=1, master_addr="head")),
        # srun --mpi=pmi2 has the variables of both, and Hydra starts its own helpers by srun
        (SRUN | {"PMI_RANK": "5", "PMI_SIZE": "10"},
         RankEnv(rank=5, world_size=10, local_rank=1, local_world_size=4, node_rank=1, master_addr="n07")),
        (SRUN | HYDRA,
         RankEnv(rank=3, world_size=4, local_rank=1, local_world_size=2, node_rank=1, master_addr="head")),
        (OPEN_MPI | {"NODE_RANK": "77", "GROUP_RANK": "78"},
         RankEnv(rank=3, world_size=4, local_rank=1, local_world_size=2, node_rank=1, master_addr="head")),
        ({}, RankEnv()),
        # what somebody has said, or a batch script that is no step of srun's
        (OPEN_MPI | {"RANK": "0", "WORLD_SIZE": "1"}, RankEnv(master_addr="head")),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}, RankEnv()),
    ],
)  # fmt: skip
def test_who_a_rank_is_says_its_starter(bare: pytest.MonkeyPatch, env: dict[str, str], who: RankEnv) -> None:
    assert started(bare, env) == who


@pytest.mark.parametrize(
    ("env", "match"),
    [
        (SRUN | {"SLURM_NODEID": "3"}, "srun says that this is node 3, and has tasks on 3"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4(x"}, "cannot be parsed"),
        (SRUN | {"SLURM_NODEID": "x"}, "srun says that this is node 'x', which is no number"),
        (SRUN | {"SLURM_STEP_NODELIST": "n[1-"}, r"srun says that its nodes are 'n\[1-', which cannot be read"),
        (SRUN | {"SLURM_STEP_NODELIST": ""}, "srun says that its nodes are '', which cannot be read"),
        ({key: value for key, value in OPEN_MPI.items() if "LOCAL" not in key}, "LOCAL_WORLD_SIZE is not set"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "4"}, "RANK is 4. Allowed: 0 to 3"),
    ],
)
def test_variables_that_contradict_each_other_are_named(
    bare: pytest.MonkeyPatch, env: dict[str, str], match: str
) -> None:
    with pytest.raises(LaunchError, match=match):
        started(bare, env)


def test_tasks_of_nodes() -> None:
    assert tasks_of_nodes("2") == [2] and tasks_of_nodes("1,3(x3)") == [1, 3, 3, 3]


def test_a_table_orders_ranks_whoever_started_them(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table = tmp_path / "rank_table.json"
    RankTable(("n9", "n8"), 2).write(table)
    env = OPEN_MPI | {"MASTER_ADDR": "", "PLAIT_RANK_TABLE": str(table), "SLURMD_NODENAME": "n9"}
    assert started(bare, env | {"OMPI_COMM_WORLD_RANK": "3"}) == RankEnv(
        rank=1, world_size=4, local_rank=1, local_world_size=2, node_rank=0, master_addr="n9"
    )


@pytest.mark.parametrize(
    ("hosts", "each", "match"),
    [(("n1", "n2"), 2, "The host n9 is not in the rank table"), (("n9",), 2, "4 ranks were started, 2 of them on")],
)
def test_a_table_of_other_hosts_or_ranks_is_refused(
    bare: pytest.MonkeyPatch, tmp_path: Path, hosts: tuple[str, ...], each: int, match: str
) -> None:
    table = tmp_path / "rank_table.json"
    RankTable(hosts, each).write(table)
    with pytest.raises(PlacementError, match=match):
        started(bare, OPEN_MPI | {"PLAIT_RANK_TABLE": str(table), "SLURMD_NODENAME": "n9"})


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.parametrize("names", [
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
], ids=["Open MPI", "Hydra"])  # fmt: skip
def test_a_job_trains_under_mpirun(tmp_path: Path, names: tuple[str, ...]) -> None:
    """In whose place the test starts two ranks with the variables that it sets."""
    job, port = write_job(tmp_path, 10), str(own_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-P", "-m", "plait.train.worker", str(job)],
            cwd=tmp_path, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **dict(zip(names, (str(rank), "2", str(rank), "2"), strict=True)), "MASTER_PORT": port},
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert "trained 10 steps" in said[0]


@pytest.mark.system
@pytest.mark.slow
def test_the_loop_over_ssh_of_the_documentation_trains(tmp_path: Path) -> None:
    """With an ssh that runs what it is given here, whichever host is meant."""
    text = (Path(__file__).parents[3] / "docs" / "running.md").read_text()
    lines = text.partition("## Over ssh\n")[2].partition("`hosts` has a host")[0].splitlines()
    script = "\n".join(line[4:] for line in lines if line.startswith("    "))
    write_job(tmp_path, 10, dp=2)
    (tmp_path / "hosts").write_text("127.0.0.1\nlocalhost\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text('#!/bin/sh\nshift 2\nexec sh -c "$1"\n')
    (tmp_path / "bin" / "ssh").chmod(0o755)
    env = {**os.environ, "PYTHON": sys.executable, "MASTER_PORT": str(own_port()),
           "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}  # fmt: skip
    argv = ["bash", "-c", script]
    done = subprocess.run(argv, check=False, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert "trained 10 steps" in done.stdout, done.stdout + done.stderr
