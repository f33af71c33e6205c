"""Blocks of nodes, which Slurm has since 23.11 (``topology/block``, ``--segment``): which ones a
job is given, and how its ranks lie in them.

Debian stable's Slurm has none: ``tests/support/newer_slurm.sh pytest tests/slurm/test_blocks.py``
runs these beside that of a newer release.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from plait.core.topology.rank_table import NAME, RankTable
from tests.slurm.test_train import goes_on, running, train
from tests.support.lab import wait_until
from tests.support.managed import write_job
from tests.support.slurm import SlurmCluster, SlurmSpec, ask, environment, slurm_cluster

pytestmark = pytest.mark.slow
SIZE = 4
MINIPOD = {f"n{number}": (number - 1) // SIZE for number in range(1, 13)}


@pytest.fixture(scope="module")
def blocks() -> Iterator[SlurmCluster]:
    """Twelve nodes in three blocks of four."""
    with slurm_cluster(SlurmSpec.blocks(12, SIZE)) as cluster:
        yield cluster


@pytest.fixture
def busy(blocks: SlurmCluster) -> Iterator[SlurmCluster]:
    """The same, where others have three nodes of the first block, and one of the second."""
    for node in ("n1", "n2", "n3", "n5"):
        ask(blocks, "sbatch", f"--nodelist={node}", "--exclusive", "-N1", "-J", "others", "-o", "/dev/null",
            "--wrap", "sleep 600")  # fmt: skip
    wait_until(lambda: ask(blocks, "squeue", "-h", "-t", "R", "-o", "%A").split().__len__() == 4, "no", seconds=30)
    yield blocks
    ask(blocks, "scancel", "-u", "root")
    wait_until(lambda: not ask(blocks, "squeue", "-h", "-o", "%A").strip(), "the jobs go on", seconds=60)


def trained(cluster: SlurmCluster, argv: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, check=False, capture_output=True, text=True, cwd=folder, env=environment(cluster),
                          timeout=240)  # fmt: skip


def table_of(folder: Path) -> RankTable:
    return RankTable.read(folder / "runs" / "job" / NAME)


@pytest.mark.parametrize("segment", [2, 4])
def test_segments_lie_in_one_block_each(busy: SlurmCluster, tmp_path: Path, segment: int) -> None:
    job = write_job(tmp_path, 10, dp=2)
    argv = [*train(job), "slurm.nodes=4", f"slurm.segment={segment}"]
    done = trained(busy, argv, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    hosts = table_of(tmp_path).hosts
    each = [MINIPOD[host] for host in sorted(hosts, key=lambda host: int(host[1:]))]
    assert all(each.count(block) % segment == 0 for block in set(each)), hosts
    assert "nodes are ordered by the placer" in done.stdout


def test_pipelines_lie_in_one_block_each(busy: SlurmCluster, tmp_path: Path) -> None:
    """Two nodes are left in one block, two in another: n4 and n6 to n8, n9 to n12."""
    argv = [*train(write_job(tmp_path, 10, dp=2)), "slurm.nodes=4", "place.alpha=0.0", "slurm.segment=2",
            'slurm.options=["--exclude=n4,n8,n11,n12"]']  # fmt: skip
    done = trained(busy, argv, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    hosts = table_of(tmp_path).hosts  # ranks by pipeline stage, then by replica
    assert sorted(hosts) == ["n10", "n6", "n7", "n9"]
    assert {MINIPOD[hosts[0]], MINIPOD[hosts[1]]} == {1, 2}
    assert MINIPOD[hosts[0]] == MINIPOD[hosts[2]] and MINIPOD[hosts[1]] == MINIPOD[hosts[3]], hosts


def test_a_segment_that_no_block_has_is_refused_by_slurm(blocks: SlurmCluster, tmp_path: Path) -> None:
    argv = [*train(write_job(tmp_path, 10)), "slurm.nodes=2", "slurm.segment=3"]
    done = trained(blocks, argv, tmp_path)
    assert done.returncode != 0
    assert "Slurm refused" in done.stderr


def test_a_run_outlives_a_node_of_a_block(blocks: SlurmCluster, tmp_path: Path) -> None:
    try:
        with running(blocks, tmp_path, "slurm.nodes=2", "slurm.segment=2") as number:
            lost = table_of(tmp_path).hosts[-1]
            blocks.cut(lost)
            goes_on(tmp_path, number)
            assert lost not in table_of(tmp_path).hosts
    finally:
        blocks.heal()
