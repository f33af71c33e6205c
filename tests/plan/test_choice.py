"""The finalists of the closed form are enough: of many more, none is better by much when
simulated."""

from __future__ import annotations

import pytest

from plait.core.base.errors import PlaitError
from plait.core.cluster.hardware import Cluster
from plait.core.job.spec import Job
from plait.plan.answer import Planner
from plait.plan.search.request import job_at
from plait.plan.search.search import search

JOBS = {
    "7B, one micro-batch a rank": ("llama2-7b", "a800", 1024, 4096, 1024),
    "13B, one sequence a rank": ("llama2-13b", "a100-40", 64, 4096, 64),
    "70B, few sequences": ("llama2-70b", "h100", 256, 4096, 64),
    "70B, little memory": ("llama3-70b", "a100-40", 128, 4096, 256),
    "175B, deep pipelines": ("gpt3-175b", "a100-80", 1024, 2048, 1024),
}
MANY = 40
CLOSE = 0.005
"""By how much the best of many may be faster than the chosen."""


@pytest.mark.contract
@pytest.mark.parametrize("name", JOBS)
def test_the_chosen_is_the_best_of_many_more(name: str) -> None:
    preset, machine, ranks, sequence, batch = JOBS[name]
    job = Job.from_dict(
        {
            "model": {"preset": preset},
            "data": {"sequence_length": sequence},
            "train": {"global_batch_size": batch, "precision": "bf16-mixed"},
            "cluster": {"preset": machine, "ranks": ranks},
            "plan": {"points": 60_000},
        }
    )
    planner = Planner(job, Cluster.preset(machine), vocab=32000)
    ranked = search(planner.request, planner.cluster, "bf16-mixed", keep=MANY, most=job.plan.points)
    best = float("inf")
    for at in range(len(ranked.points)):
        try:
            one = planner.predict(job_at(job, ranked.points.row(at)))
        except PlaitError:
            continue
        best = min(best, one.seconds if one.memory.fits else best)
    assert planner.answer().best.seconds <= best * (1 + CLOSE)
