"""An emulated Slurm for tests, with a list of clusters of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from plait.lab.slurm import SlurmCluster, SlurmSpec, down, up
from plait.lab.slurm.programs import why_not

REPOSITORY = Path(__file__).resolve().parents[2]


@contextmanager
def slurm_cluster(nodes: int, gpus: int = 0, *, settings: str = "") -> Iterator[SlurmCluster]:
    """Up inside the block, with ``gpus`` in each node that nobody has, and further lines of slurm.conf; skips
    the test where this machine cannot run one, and says why."""
    if reason := why_not():
        pytest.skip(reason)
    folder = tempfile.mkdtemp(prefix="slurm-")  # short: the path of a socket may have 107 bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", folder)
        try:
            cluster = up(replace(SlurmSpec.tree(nodes, gpus), settings=settings))
            try:
                yield cluster
            finally:
                down(cluster)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def environment(cluster: SlurmCluster) -> dict[str, str]:
    """What reaches the cluster, and lets its jobs find Plait."""
    return {**os.environ, **cluster.variables, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}


def ask(cluster: SlurmCluster, *argv: str, variables: Mapping[str, str] | None = None) -> str:
    """What a command of Slurm prints; it must succeed."""
    env = environment(cluster) | dict(variables or {})
    done = subprocess.run(argv, check=False, capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 0, f"{argv}: {done.stderr}"
    return done.stdout
