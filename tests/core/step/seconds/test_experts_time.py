"""Time of experts: what is sent and reduced, and published steps that nothing was fitted to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from plait.core.base.env import specs_folder
from plait.core.cluster.hardware import Cluster
from plait.core.model.experts import Experts
from plait.core.model.spec import ModelSpec
from plait.core.step.columns.points import OVERLAPS, SCHEDULES, Points
from plait.core.step.columns.shapes import Shapes
from plait.core.step.seconds.closed_form import Options, Seconds, step_seconds
from plait.core.step.seconds.experts_time import cut_by, of_experts

H100 = Cluster.preset("h100")
MIXTRAL = ModelSpec.preset("mixtral-8x7b", specs_folder() / "models")
GROK = ModelSpec.preset("grok-1", specs_folder() / "models")
LLAMA = ModelSpec.preset("llama3-8b", specs_folder() / "models")
ROW = {"dp": 16, "micro": 1, "num_micro": 8, "optim": 16}


def step(model: ModelSpec | Shapes, *rows: dict[str, int], **more: Any) -> Seconds:
    return step_seconds(model, Points.of(rows), H100, sequence=4096, **more)


@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6))
def test_factors_stay_a_chain_that_divides_the_ranks_with_the_same_experts(a: int, b: int, c: int) -> None:
    small, large, replicas = np.sort([2**a, 3 * 2**b, 3 * 2 ** max(a, b, c)])
    assume(large % small == replicas % large == 0)
    for ep in (d for d in range(1, replicas + 1) if replicas % d == 0):
        assert cut_by(large, ep) % cut_by(small, ep) == 0
        assert (replicas // ep) % cut_by(large, ep) == 0
        assert cut_by(replicas, ep) == replicas // ep


def test_replicas_of_experts_are_fewer_and_further_apart() -> None:
    own = of_experts(Points.of([{"dp": 8, "cp": 2, "tp": 4, "ep": 8, "params": 4, "optim": 16}]))
    assert (int(own.replicas[0]), int(own.tp[0]), int(own.params[0]), int(own.optim[0])) == (2, 32, 1, 2)


def test_a_model_without_experts_has_no_such_time() -> None:
    found = step(LLAMA, ROW)
    assert found.ep.tolist() == [0.0]


def test_columns_may_mix_models_with_experts_and_without() -> None:
    both = step(Shapes.stack([Shapes.of(LLAMA), Shapes.of(MIXTRAL)]), ROW, ROW | {"ep": 8})
    assert both.total[0] == pytest.approx(step(LLAMA, ROW).total[0])
    assert both.total[1] == pytest.approx(step(MIXTRAL, ROW | {"ep": 8}).total[0])


def test_one_expert_for_all_tokens_is_nearly_the_dense_model() -> None:
    one = replace(LLAMA, experts=Experts(count=1, per_token=1))
    found, dense = step(one, ROW), step(LLAMA, ROW)
    assert found.ep[0] == 0
    assert dense.linear[0] < found.linear[0] < 1.05 * dense.linear[0]
    assert found.sync[0] == pytest.approx(dense.sync[0], rel=0.1)


def test_tokens_travel_where_experts_are_shared_out_only() -> None:
    found = step(MIXTRAL, *(ROW | {"ep": ep} for ep in (1, 2, 8)))
    assert found.ep[0] == 0
    # What stays with its expert is 1/2 and 1/8; both within a node.
    assert (7 / 8) / (1 / 2) <= found.ep[2] / found.ep[1] < 2.2  # and more hops
    assert step(MIXTRAL, {**ROW, "dp": 16, "tp": 1, "ep": 8, "pp": 2}).ep[0] > 0


def test_more_tokens_of_an_expert_are_as_many_more_bytes() -> None:
    wide = replace(MIXTRAL, experts=replace(MIXTRAL.experts, per_token=4))  # type: ignore[type-var]
    few = replace(MIXTRAL, experts=replace(MIXTRAL.experts, capacity=0.5))  # type: ignore[type-var]
    row = ROW | {"ep": 8, "micro": 4}
    whole = step(MIXTRAL, row).ep[0]
    assert step(wide, row).ep[0] / whole == pytest.approx(2, rel=0.1)
    assert step(few, row).ep[0] / whole == pytest.approx(0.5, rel=0.1)


def test_gradients_of_experts_are_reduced_over_those_with_the_same_experts() -> None:
    alone = ROW | {"shard_overlap": 0}
    found = step(MIXTRAL, *(alone | {"ep": ep} for ep in (1, 4, 8)))
    assert found.sync[0] > found.sync[1] > found.sync[2]
    assert found.optimizer[0] == pytest.approx(found.optimizer[2], rel=1e-9)  # of each number one owner


def test_experts_with_few_tokens_cost_more_of_the_same_products() -> None:
    many = replace(MIXTRAL, experts=Experts(count=64, per_token=2))
    assert many.step_flops(4096, 1) == pytest.approx(MIXTRAL.step_flops(4096, 1), rel=0.001)
    assert step(many, ROW).linear[0] > 1.15 * step(MIXTRAL, ROW).linear[0]


@pytest.mark.parametrize(("precision", "nodes", "pp", "layers", "measured"), [
    ("bf16-mixed", 16, 2, 16, 20.64), ("bf16-mixed", 64, 8, 64, 20.83), ("fp8", 64, 8, 64, 16.69),
])  # fmt: skip
def test_published_steps_of_grok_are_met(precision: Any, nodes: int, pp: int, layers: int, measured: float) -> None:
    """NVIDIA dgxc-benchmarking, Grok-1 on H100: tp 4, cp 2, ep 8, 8 virtual stages, 1,024 x 8,192 tokens."""
    dp = nodes * 8 // (4 * pp * 2)
    row = {
        "tp": 4, "pp": pp, "cp": 2, "ring": 2, "dp": dp, "ep": 8, "micro": 1, "num_micro": 1024 // dp,
        "optim": 2 * dp, "virtual": 8, "schedule": SCHEDULES.index("interleaved"), "sequence_parallel": 1,
        "overlap": OVERLAPS.index("async"),
    }  # fmt: skip
    found = step_seconds(
        replace(GROK, num_layers=layers), Points.of([row]), H100, sequence=8192, precision=precision,
        options=Options(gradient_bytes=2.0),
    )  # fmt: skip
    assert found.total[0] == pytest.approx(measured, rel=0.12)
