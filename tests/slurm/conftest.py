"""A Slurm of eight nodes for the whole folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.slurm import SlurmCluster, ask, slurm_cluster


@pytest.fixture(scope="session")
def eight() -> Iterator[SlurmCluster]:
    """Eight nodes under four leaves, two minipods and a core switch."""
    with slurm_cluster(8) as cluster:
        yield cluster


@pytest.fixture
def cluster(eight: SlurmCluster) -> Iterator[SlurmCluster]:
    """The same, with nothing running afterwards and all nodes on."""
    yield eight
    jobs = ask(eight, "squeue", "-h", "-o", "%A").split()
    if jobs:
        ask(eight, "scancel", "--signal=KILL", "--full", *jobs)
        ask(eight, "scancel", *jobs)
    eight.heal()
