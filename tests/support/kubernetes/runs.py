"""A small Kubernetes for tests, and runs to send to it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from plait.core.job.cluster_settings import KubernetesSection
from plait.core.topology.rank_table import RankTable
from plait.formats.kubernetes.manifests import PodRun, with_node_count
from tests.support.kubernetes.cluster import SmallCluster
from tests.support.ports import own_port

REPOSITORY = Path(__file__).resolve().parents[3]


@contextmanager
def small_cluster(
    folder: Path, nodes: int = 4, *, jobset: bool = False, gpus: int = 0, tick: float = 0.01
) -> Iterator[SmallCluster]:
    """Up inside the block; KUBECONFIG leads to it."""
    folder.mkdir(parents=True, exist_ok=True)
    made = SmallCluster(folder, nodes, jobset=jobset, gpus=gpus, tick=tick)
    with made.up() as cluster, pytest.MonkeyPatch.context() as patch:
        file = cluster.kubeconfig(folder / "config")
        patch.setenv("KUBECONFIG", str(file))
        patch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(file))
        yield cluster


def environment(cluster: SmallCluster) -> dict[str, str]:
    """What reaches the cluster from another process."""
    return {**os.environ, "KUBECONFIG": str(cluster.folder / "config"), "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1"}  # fmt: skip


def settings(folder: Path, **more: Any) -> KubernetesSection:
    """For pods that are processes of this machine and see ``folder``."""
    values = {"image": "plait:test", "python": sys.executable, "port": own_port(), "volumes": (f"{folder}:{folder}",),
              "grace": 20, "wait": 60}  # fmt: skip
    return KubernetesSection(**(values | more))


def options(folder: Path, **more: Any) -> list[str]:
    """The same as settings of ``plait train``."""
    import json

    one = settings(folder, **more).model_dump(exclude_unset=True)
    return [f"kubernetes.{key}={json.dumps(value)}" for key, value in one.items()]


def pod_run(
    folder: Path,
    argv: tuple[str, ...] = ("true",),
    world: int = 4,
    *,
    table: RankTable | None = None,
    name: str = "plait-test",
    more: Mapping[str, Any] | None = None,
    **fields: Any,
) -> PodRun:
    """A run of ``argv``; a rank to each pod unless ``more`` says otherwise."""
    found = with_node_count(settings(folder, **(more or {})), world, table)
    values: dict[str, Any] = {"kind": "Job", "timeout": 60.0, **fields}
    return PodRun(
        name=name, argv=argv, world_size=world, folder=folder, secret="sesame", settings=found, table=table, **values
    )  # fmt: skip
