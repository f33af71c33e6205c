"""Pairs of ranks that send each other anything, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from plait.core.job.spec import Job
from plait.core.step.memory.estimate import PipelineRankMemory
from plait.plan.make import job_step
from plait.plan.search.volumes import pairs_of


def step_of(optimizer: str = "adamw", **strategy: Any):
    return job_step(Job.from_dict({
        "model": {"family": "gpt", "num_layers": 4, "hidden": 64, "num_heads": 4, "vocab": 256, "max_sequence": 32,
                  "tied_embeddings": False},
        "data": {"sequence_length": 32},
        "train": {"global_batch_size": 16, "micro_batch_size": 0, "optimizer": optimizer},
        "strategy": strategy,
    }), 256)  # fmt: skip


def test_rings_along_tp_and_dp_and_counterparts_along_pp() -> None:
    found = pairs_of(step_of(tp=2, dp=3, pp=2, shard="ddp"))
    tp = {(at, at + 1) for at in range(0, 12, 2)}
    dp = {(first + at, first + other) for first in (0, 6) for at, other in
          ((0, 2), (2, 4), (0, 4), (1, 3), (3, 5), (1, 5))}  # fmt: skip
    pp = {(at, at + 6) for at in range(6)}
    assert set(found.sent) == tp | dp | pp and found.ranks == 12
    assert found.silent == pytest.approx(1 - (6 + 12 + 6) / 66)


def test_bytes_are_the_planners() -> None:
    step = step_of(tp=1, dp=2, pp=2, shard="ddp", schedule="1f1b")
    sent, known = pairs_of(step).sent, PipelineRankMemory(step, 0).sent()
    assert sent[0, 1] == sum(count for axis, count in known.items() if axis != "pp")
    assert sent[0, 2] == known["pp"] + PipelineRankMemory(step, 1).sent()["pp"], "activations one way, gradients back"


def test_matrices_go_between_all_ranks_that_share_them() -> None:
    """Of 12 ranks of a pp rank, tp 2 and 6 replicas; rings alone leave most of them without each
    other."""
    plain, muon = (pairs_of(step_of(optimizer, tp=2, dp=6, shard="ddp")).sent for optimizer in ("adamw", "muon"))
    assert len(muon) == 12 * 11 // 2 > len(plain)
    each = {count - plain.get(pair, 0) for pair, count in muon.items()}
    assert len(each) == 1
    sent = PipelineRankMemory(step_of("muon", tp=2, dp=6, shard="ddp"), 0).sent()["matrices"]
    assert sum(each) == pytest.approx(2 * sent / 11, abs=1)


def test_of_many_ranks_hardly_any_pair_talks() -> None:
    assert pairs_of(step_of(tp=4, dp=4, pp=4)).silent > 0.9
    assert pairs_of(step_of()).silent == 1.0
