"""A real Slurm of a few nodes on this machine, for tests."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import pytest

from tests.support.slurm.cluster import REPOSITORY, SlurmCluster, down, up, why_not
from tests.support.slurm.files import SlurmSpec
from tests.support.slurm.keeper import program

__all__ = ["SlurmCluster", "SlurmSpec", "ask", "down", "environment", "slurm_cluster", "up"]


@contextmanager
def slurm_cluster(nodes: int | SlurmSpec, gpus: int = 0, *, settings: str = "") -> Iterator[SlurmCluster]:
    """Up inside the block, with ``gpus`` in each node that nobody has, and further lines of
    slurm.conf; skips the test where this machine cannot run one, and says why."""
    spec = nodes if isinstance(nodes, SlurmSpec) else SlurmSpec.tree(nodes, gpus)
    if reason := why_not() or _too_old(spec):
        pytest.skip(reason)
    cluster = up(replace(spec, settings=settings))
    try:
        yield cluster
    finally:
        down(cluster)


def _too_old(spec: SlurmSpec) -> str | None:
    """Why this machine's Slurm cannot have that topology."""
    said = subprocess.run([program("slurmctld"), "-V"], check=False, capture_output=True, text=True).stdout.strip()
    found = re.search(r"(\d+)\.(\d+)", said)
    if spec.plugin == "tree" or (found and (int(found[1]), int(found[2])) >= (23, 11)):
        return None
    return f"{said} has no blocks, which came with 23.11; tests/support/newer_slurm.sh runs this beside a newer one"


def environment(cluster: SlurmCluster) -> dict[str, str]:
    """What reaches the cluster, and lets its jobs find Plait."""
    return {**os.environ, **cluster.variables, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}


def ask(cluster: SlurmCluster, *argv: str, variables: Mapping[str, str] | None = None) -> str:
    """What a command of Slurm prints; it must succeed."""
    env = environment(cluster) | dict(variables or {})
    done = subprocess.run(argv, check=False, capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 0, f"{argv}: {done.stderr}"
    return done.stdout
