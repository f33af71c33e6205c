"""The emulated Slurm: its files, and that nothing of it is left."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from plait.core.base.errors import JobError
from plait.lab.registry import start_time
from plait.lab.slurm import SlurmCluster, SlurmSpec, find, running, up
from tests.support.lab import wait_until
from tests.support.slurm import ask, slurm_cluster


@pytest.mark.parametrize("nodes", [1, 2, 3, 8, 16, 37, 250])
def test_a_tree_has_every_node_once_under_two_to_four_leaves(nodes: int) -> None:
    spec = SlurmSpec.tree(nodes)
    assert len(spec.nodes) == nodes
    assert spec.topology.count("leaf1 Nodes=") == 1
    assert sum("Nodes=" in line for line in spec.topology.splitlines()) <= 4


def test_two_clusters_at_once_and_nothing_is_left() -> None:
    with slurm_cluster(2) as first:
        second = up(SlurmSpec.tree(1), "other")
        assert [cluster.name for cluster in running()] == ["other", "slurm"]
        assert ask(first, "srun", "-N2", "hostname").split().__len__() == 2
        assert ask(second, "srun", "hostname").split() == ["n1"]
        assert ask(first, "srun", "-N1", "grep", "SigBlk", "/proc/self/status").split()[1].strip("0") == "", (
            "they hear all"
        )
        with pytest.raises(JobError, match="a cluster called 'other' is running already"):
            up(SlurmSpec.tree(1), "other")
        with pytest.raises(JobError, match="several clusters"):
            find()
        processes = everything_of(second)
        ask(second, "sbatch", "--output=/dev/null", "--wrap", "setsid sleep 600")
        wait_until(lambda: len(everything_of(second)) > len(processes), "the job did not start", seconds=10)
        os.kill(second.keeper, signal.SIGKILL)  # even so
        wait_until(lambda: not everything_of(second), "processes are left", seconds=10)
        assert [cluster.name for cluster in running()] == ["slurm"]
        mine = everything_of(first)
        assert mine
    wait_until(lambda: not any(start_time(pid) for pid in mine), "processes are left", seconds=10)


def test_a_node_is_switched_off_and_on() -> None:
    with slurm_cluster(2) as cluster:
        cluster.cut("n2")
        wait_until(lambda: "n2" not in idle(cluster), "n2 is still thought to be there", seconds=40)
        cluster.heal()
        wait_until(lambda: "n2" in idle(cluster), "n2 did not come back", seconds=40)
        with pytest.raises(JobError, match="there is no node 'n3'"):
            cluster.cut("n3")


def idle(cluster: SlurmCluster) -> set[str]:
    """Nodes that Slurm would use now."""
    return {node for node, state in cluster.states().items() if state == "idle"}


def everything_of(cluster: SlurmCluster) -> list[int]:
    """The keeper and all its descendants, of any session: they have its name as SLURM_CONF, or in their
    arguments."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                words = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
                if str(cluster.folder).encode() in words and start_time(int(entry.name)):
                    found.append(int(entry.name))
        except OSError:  # gone meanwhile
            pass
    return found
