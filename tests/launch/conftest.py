"""A small Slurm and a small Kubernetes for the launchers that need one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from plait.lab.slurm import SlurmCluster
from tests.support.kubernetes.cluster import SmallCluster
from tests.support.kubernetes.runs import small_cluster
from tests.support.slurm import slurm_cluster


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """Four nodes."""
    with slurm_cluster(4) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallCluster]:
    """Three nodes."""
    with small_cluster(tmp_path_factory.mktemp("kubernetes"), 3) as cluster:
        yield cluster
