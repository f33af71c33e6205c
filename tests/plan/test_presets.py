"""Every model that ships plans on every cluster that ships, to something that fits or to what is
missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.core.base.env import specs_folder
from plait.core.base.errors import InfeasiblePlan
from plait.core.cluster.hardware import Cluster
from plait.core.job.spec import Job
from plait.core.step.memory.closed_memory import usable
from plait.plan.answer import Planner
from plait.plan.search.request import job_at
from plait.plan.search.search import search


def shipped(kind: str) -> list[str]:
    return sorted(file.stem for file in Path(specs_folder(), kind).glob("*.toml"))


SPACE = 200
"""Points of a space, about: enough to have every arrangement of ranks."""
COUNTS = (8, 64, 512, 2048)
EVERY = [
    (model, cluster, ranks)
    for model in shipped("models")
    for cluster in shipped("clusters")
    for ranks in ((4,) if cluster == "lab" else COUNTS)
]
SOME = {(model, "h100", 64) for model in shipped("models")} | {
    ("llama2-7b", cluster, 4 if cluster == "lab" else 512) for cluster in shipped("clusters")
}


@pytest.mark.parametrize(
    ("model", "cluster", "ranks"),
    [case if case in SOME else pytest.param(*case, marks=pytest.mark.contract) for case in EVERY],
)
def test_it_fits_or_says_what_is_missing(model: str, cluster: str, ranks: int) -> None:
    job = Job.from_dict(
        {
            "model": {"preset": model},
            "data": {"sequence_length": 128 if model.startswith("utransformer") else 2048},
            "train": {"global_batch_size": 2048, "precision": "bf16-mixed"},
            "cluster": {"preset": cluster, "ranks": ranks},
        }
    )
    there = Cluster.preset(cluster)
    planner = Planner(job, there, 32_000)
    try:
        found = search(planner.request, there, job.train.precision, keep=1, most=SPACE)
    except InfeasiblePlan as error:
        refused = str(error)
    else:
        assert found.memory[0] <= usable(there.device, there.overhead)
        assert job_at(job, found.points.row(0)).world_size == ranks
        return
    assert "more than the" in refused
    assert "ranks would do" in refused or "Use a smaller model" in refused
