"""A planned run from its placement on: the same rank table is a zone of the replay, a reservation,
and where ranks are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.core.runs.attempts import read_attempts
from plait.core.topology.rank_table import RankTable
from tests.support.command import plait
from tests.support.managed import write_job
from tests.support.slurm import SlurmCluster, ask, environment
from tests.support.workloads import heavy_tailed

pytestmark = pytest.mark.slow
WITNESS = """
import os
if "RANK" in os.environ:
    with open({file!r}, "a") as file:
        names = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA"
        print(os.environ["RANK"], *(os.environ.get(name) for name in names), file=file)
"""


def test_what_place_writes_is_a_zone_a_reservation_and_a_run(cluster: SlurmCluster, tmp_path: Path) -> None:
    write_job(tmp_path, 10, dp=2)
    (tmp_path / "jobs.csv").write_text(heavy_tailed(200))
    (tmp_path / "witness").mkdir()
    (tmp_path / "witness" / "sitecustomize.py").write_text(WITNESS.format(file=str(tmp_path / "seen")))
    seen = {"PYTHONPATH": f"{tmp_path / 'witness'}:{environment(cluster)['PYTHONPATH']}"}
    topology = str(cluster.conf.parent / "topology.conf")

    def run(*words: str) -> str:
        done = plait(*words, folder=tmp_path, variables=environment(cluster) | seen)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("place", "job.toml", "place.gpus_per_node=2", "place.avoid=n1,n2,n5", "--topology", topology, "-o", "table")
    hosts = RankTable.read(tmp_path / "table").hosts
    assert len(hosts) == 2 and set(hosts) <= {"n3", "n4", "n6", "n7", "n8"}

    told = json.loads(run("queue", "replay", "jobs.csv", "nodes=8", "reserve=2@5h", "policy=fifo", "zone=table",
                          f"topology={topology}", "--json"))  # fmt: skip
    assert [one["nodes"] for one in told["planned"]] == [2]

    run("reserve", "table", "--name", "planned", "--duration", "10", "--start", "now")
    try:
        run("train", "job.toml", "--rank-table", "table", "slurm.reservation=planned", "run.network_interface=lo",
            'run.rdma_devices=["mlx5_0","mlx5_1"]', "--on", "slurm")  # fmt: skip
        [attempt] = read_attempts(tmp_path / "runs" / "job")
        assert (attempt.outcome, attempt.hosts) == ("finished", hosts)
    finally:
        ask(cluster, "scontrol", "delete", "ReservationName=planned")
    ranks = {tuple(line.split()) for line in (tmp_path / "seen").read_text().splitlines()}
    assert ranks == {(str(rank), "lo", "lo", "mlx5_0,mlx5_1") for rank in range(4)}
