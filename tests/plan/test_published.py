"""Strategies that published planners found, asked of ours in the space that they searched."""

from __future__ import annotations

import pytest

from plait.core.cluster import Cluster
from plait.core.job import Job
from plait.plan.answer import Planner


@pytest.mark.slow
def test_256k_tokens_on_128_gpus_need_32_ranks_a_sequence_and_no_recomputation() -> None:
    """InternEvo's example (arXiv 2401.09149): 7B on 128 A100-80G. Its space has Ulysses and full recomputing;
    with rings and selective recomputation ours finds shorter steps."""
    job = Job.from_dict(
        {
            "model": {"preset": "llama2-7b", "max_sequence": 262144},
            "data": {"sequence_length": 262144},
            "train": {"global_batch_size": 16, "precision": "bf16-mixed"},
            "cluster": {"preset": "a100-80", "ranks": 128},
            "plan": {"constraints": ["recompute in none, full", "ring = 1", "pp = 1", "tp = 1"], "points": 50_000},
        }
    )
    best = Planner(job, Cluster.preset("a100-80"), vocab=32000).chosen()
    assert best.job.strategy.recompute == "none"
    assert best.point["cp"] == 32
    assert best.point["params"] <= 8  # no parameters are gathered across nodes
