"""A small Slurm for the launchers that need one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from plait.lab.slurm import SlurmCluster
from tests.slurm.support import slurm_cluster


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """Four nodes."""
    with slurm_cluster(4) as cluster:
        yield cluster
