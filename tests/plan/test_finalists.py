"""What the closed form says of strategies is near what simulating them says: else the best would not be among
the finalists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.base.errors import InfeasiblePlan, JobError
from plait.core.cluster.hardware import Cluster
from plait.core.job.spec import Job
from plait.plan.answer import Planner
from plait.plan.space import enumerate_space

A100 = Cluster.preset("a100-80")
SMALL = {
    "family": "llama", "num_layers": 12, "hidden": 2048, "ffn_hidden": 5504, "num_heads": 16, "num_kv_heads": 8,
    "vocab": 32000, "max_sequence": 2048,
}  # fmt: skip


def planner(
    model: dict[str, Any],
    ranks: int,
    batch: int,
    strategy: dict[str, Any] | None = None,
    constraints: Sequence[str] = (),
    gib: float = 80,
) -> Planner:
    memory = A100.device.memory.model_copy(update={"value": gib * 2**30})
    small = A100.model_copy(update={"device": A100.device.model_copy(update={"memory": memory})})
    values: dict[str, Any] = {
        "model": model,
        "data": {"sequence_length": 2048},
        "train": {"global_batch_size": batch, "precision": "bf16-mixed"},
        "cluster": {"preset": "a100-80", "ranks": ranks},
        "plan": {"constraints": list(constraints), "points": 20_000, "top": 3},
    }
    if strategy:
        values |= {"strategy": strategy}
        values["train"]["micro_batch_size"] = 1
    return Planner(Job.from_dict(values), small, 32000)


@pytest.mark.parametrize("recompute", [
    "none", "selective", "full", {"kind": "full", "layers": 2},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("stages", [
    {}, {"pp": 2}, {"pp": 2, "schedule": "interleaved", "virtual_stages": 4}, {"pp": 2, "schedule": "zb-v"},
], ids=str)  # fmt: skip
def test_recomputation_takes_what_it_takes_when_simulated(stages: dict[str, Any], recompute: Any) -> None:
    """In every stage of a rank, if it has several; and of Plait's, which does not repeat what is summed."""
    strategy = {
        "tp": 4,
        "dp": 1,
        "sequence_parallel": True,
        "slices": {"batch": 1, "columns": 2},
        "recompute": recompute,
    } | stages
    one = planner({"preset": "llama2-7b"}, 4 * int(stages.get("pp", 1)), 16, strategy)
    found = one.predict(one.job)
    assert found.closed_form == pytest.approx(found.seconds, rel=0.05)


def test_some_layers_of_a_stage_are_fewer_than_it_has() -> None:
    points = enumerate_space(planner(SMALL, 4, 8, constraints=["pp > 1", "cp = 1"]).asked)
    layers = -(-12 // (points.pp * points.virtual))
    assert ((points.recompute_layers == -1) | (points.recompute_layers < layers)).all()
    assert (points.recompute_layers[points.virtual > 1] > 0).any()


@settings(max_examples=12)
@given(
    ranks=st.sampled_from([4, 8]),
    batch=st.sampled_from([8, 32]),
    gib=st.sampled_from([6.0, 10.0, 80.0]),
    conditions=st.lists(
        st.sampled_from([
            "pp = 1", "pp = 2", "tp = 1", "tp <= 2", "micro_batch_size = 1", "recompute = none", "recompute = full",
            "schedule = interleaved", "schedule in 1f1b, zb-h1", "cp = 1",
        ]),
        min_size=1, max_size=2, unique=True,
    ),
)  # fmt: skip
def test_a_condition_never_makes_the_best_better(ranks: int, batch: int, gib: float, conditions: Sequence[str]) -> None:
    free, bound = (planner(SMALL, ranks, batch, constraints=some, gib=gib) for some in ((), conditions))
    try:
        held = bound.answer().best
    except (InfeasiblePlan, JobError):
        return
    assert free.answer().best.seconds <= held.seconds * 1.005
