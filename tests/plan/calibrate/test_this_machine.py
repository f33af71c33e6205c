"""The machine that plans, as a cluster: a rank for each core or GPU, and cores that are shared."""

from __future__ import annotations

from typing import Any

import pytest

from plait.core.base.errors import JobError
from plait.core.cluster.hardware import Cluster, Hosts
from plait.core.job.spec import Job
from plait.plan.explain import job_cluster as here
from plait.plan.search.fits import AvailableMemory

LAB = Cluster.preset("lab")
GIB = 1 << 30


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Four cores, 8 GiB, no GPU."""
    monkeypatch.setattr(here, "usable_cores", lambda: 4)
    monkeypatch.setattr(here, "gpus", list)
    monkeypatch.setattr(here, "room", lambda device, ranks: AvailableMemory(shared=8 * GIB))
    return monkeypatch


def job(device: str = "cpu", ranks: int = 0, **strategy: Any) -> Job:
    values: dict[str, Any] = {"model": {"preset": "gpt3-125m"}, "run": {"device": device}, "cluster": {"ranks": ranks}}
    return Job.from_dict(values | ({"strategy": strategy} if strategy else {}))


@pytest.mark.parametrize(
    ("device", "gpus", "on_cpu", "ranks"),
    [("auto", 2, None, 2), ("cuda", 2, 1, 2), ("cpu", 2, None, 4), ("shared", 2, None, 4), ("shared", 2, 6, 6),
     ("auto", 0, None, 4), ("auto", 0, 3, 3)],
)  # fmt: skip
def test_ranks_are_one_for_each_gpu_or_core(
    machine: pytest.MonkeyPatch, device: str, gpus: int, on_cpu: int | None, ranks: int
) -> None:
    machine.setattr(here, "gpus", lambda: [80 * GIB] * gpus)
    assert here.ranks_here(device, on_cpu=on_cpu) == ranks


@pytest.mark.parametrize(
    ("device", "gpus", "refused"),
    [("cuda", 0, True), ("shared", 0, True), ("auto", 1, True), ("cpu", 1, False), ("auto", 0, False)],
)
def test_gpus_that_nobody_described_are_refused(
    machine: pytest.MonkeyPatch, device: str, gpus: int, refused: bool
) -> None:
    machine.setattr(here, "gpus", lambda: [80 * GIB] * gpus)
    if refused:
        with pytest.raises(JobError, match="GPUs are not described" if gpus else "has no GPU") as caught:
            here.this_machine(job(device))
        assert caught.value.key == ("cluster.preset" if gpus else "run.device")
    else:
        assert here.this_machine(job(device)).device.kind == "cpu"


@pytest.mark.parametrize(
    ("asked", "ranks"),
    [(job(), 4), (job(ranks=2), 2), (job(dp=2, tp=1), 2), (job(tp="auto"), 4), (job(ranks=8, tp="auto"), 8)],
)
def test_ranks_are_the_jobs_or_as_many_as_cores(asked: Job, ranks: int) -> None:
    found = here.this_machine(asked)
    assert (found.name, found.nodes, found.ranks_per_node) == ("here", 1, ranks)
    assert [(tier.name, tier.ranks) for tier in found.tiers] == [("host", 0)]
    assert found.device.memory.value == 8 * GIB / ranks


@pytest.mark.parametrize(("ranks", "crowd"), [(2, 1.0), (4, 1.0), (8, 2.0)])
def test_cores_that_are_shared_are_slower(ranks: int, crowd: float) -> None:
    found = here.this_machine(job(ranks=ranks))
    assert found.crowd == crowd
    assert found.device.memory_rate.value == LAB.device.memory_rate.value / crowd
    assert {name: rate.value * crowd for name, rate in found.device.peak.items()} == {
        name: rate.value for name, rate in LAB.device.peak.items()
    }


def test_memory_that_nothing_tells_is_the_labs(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(here, "room", lambda device, ranks: None)
    assert here.this_machine(job()).device.memory.value == LAB.device.memory.value


@pytest.mark.parametrize("rate", [None, 1e8])
def test_hosts_of_a_lab_share_cores_and_each_its_link(machine: pytest.MonkeyPatch, rate: float | None) -> None:
    asked = list[tuple[str, int]]()
    machine.setattr(
        here, "room", lambda device, ranks: asked.append((device, ranks)) or AvailableMemory(shared=8 * GIB)
    )
    found = here.emulated(job(), Hosts(ranks_per_host=4, rate=rate), 3)
    assert (found.name, found.nodes, found.ranks_per_node, found.crowd) == ("lab", 3, 4, 3.0)
    assert asked == [("cpu", 12)]
    assert found.device.memory.value == pytest.approx(8 * GIB / 12)
    assert [(tier.name, tier.ranks) for tier in found.tiers] == [("host", 4), ("network", 0)]
    assert found.tiers[0].rate == LAB.tiers[0].rate
    assert found.tiers[1].rate.value == (LAB.tiers[1].rate.value if rate is None else rate / 4)
