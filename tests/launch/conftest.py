"""A small Slurm, a small Kubernetes, and ranks that do as a test tells, for the launchers that need
them."""

from __future__ import annotations

import selectors
from collections.abc import Iterator
from pathlib import Path

import pytest

from plait.launch import watch
from tests.launch.story import Clock, Story
from tests.support.kubernetes.cluster import SmallCluster
from tests.support.kubernetes.runs import small_cluster
from tests.support.kubernetes.scene import Scene
from tests.support.slurm import SlurmCluster, slurm_cluster


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


@pytest.fixture
def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Story]:
    """Ranks of which a test tells what they do, and their launcher's watch, on a clock of their
    own."""
    clock = Clock()

    class Held(selectors.DefaultSelector):
        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            clock.now, clock.held_up = clock.now + clock.held_up, 0.0
            return super().select(timeout)

    monkeypatch.setattr(selectors, "DefaultSelector", Held)
    monkeypatch.setattr(watch, "time", clock)
    monkeypatch.setattr("plait.core.runs.progress.time", clock)
    monkeypatch.setattr(watch, "LOOK", 0.001)
    found = Story(tmp_path, clock)
    yield found
    found.close()


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    """A run of two pods, and who follows it."""
    return Scene(monkeypatch)
