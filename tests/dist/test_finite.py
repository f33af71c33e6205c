"""A NaN is found before it is applied or saved, by every rank, with the rank and the tensor it
comes from.

Ranks are threads where no more than their numbers matters.
"""

from __future__ import annotations

from typing import Any

import pytest

from plait.train.engine.steps import MAX_SKIPPED
from tests.dist import finite
from tests.dist.equality import Pool
from tests.dist.finite import Strategy
from tests.support.threads import threads

TP, DP, PP = Strategy(tp=2), Strategy(dp=2), Strategy(pp=2)
ZERO2, FSDP = Strategy(dp=2, shard="zero2"), Strategy(dp=2, shard="fsdp")
SP = Strategy(tp=2, sequence_parallel=True)
ALWAYS = -1
SOME = pytest.mark.parametrize("strategy", [TP, DP, FSDP, PP], ids=["tp", "dp", "fsdp", "pp"])


def assert_traced(ranks: Any, strategy: Strategy, culprit: int, tensor: str) -> None:
    for said, same in ranks.run(finite.stopped, strategy, {culprit: [tensor]}, ALWAYS):
        assert said.startswith("step 2: the loss is ") and "the norm of the gradients nan; " in said
        assert f"is the gradient of {tensor} on rank {culprit}. The update was not made." in said
        assert same, "weights, averages and counts of updates are those before"


@pytest.mark.unit
@pytest.mark.parametrize(
    ("strategy", "culprit", "tensor"),
    [
        pytest.param(TP, 1, "layers.1.attn.k.weight", id="tp"),
        pytest.param(TP, 0, "embedding.weight", id="tp-embedding"),
        pytest.param(SP, 1, "layers.0.mlp.norm.bias", id="sequence-parallel"),
        pytest.param(DP, 1, "layers.0.mlp.up.weight", id="dp"),
        pytest.param(DP, 1, "layers.1.attn.norm.weight", id="dp-vector"),
        pytest.param(ZERO2, 1, "layers.1.mlp.down.weight", id="zero2"),
        pytest.param(FSDP, 1, "layers.0.attn.q.weight", id="fsdp"),
        pytest.param(PP, 1, "layers.1.attn.o.weight", id="pp"),
        pytest.param(PP, 0, "positions.weight", id="pp-first-stage"),
    ],
)
def test_a_nan_is_traced_to_its_rank_and_tensor(strategy: Strategy, culprit: int, tensor: str) -> None:
    """Strategies, the rank on which a gradient is made NaN, and the tensor that it is of."""
    assert_traced(threads(2), strategy, culprit, tensor)


@pytest.mark.parametrize(("strategy", "tensor"), [(SP, "layers.0.mlp.norm.bias"), (FSDP, "layers.0.attn.q.weight")])
def test_so_it_is_between_processes(pool: Pool, strategy: Strategy, tensor: str) -> None:
    assert_traced(pool(2), strategy, 1, tensor)


@pytest.mark.unit
@pytest.mark.parametrize("strategy", [TP, FSDP], ids=["tp", "fsdp"])
def test_of_several_tensors_the_models_first_is_named(strategy: Strategy) -> None:
    planted = {
        0: ["layers.1.attn.q.weight"],
        1: ["layers.1.mlp.down.weight", "layers.0.mlp.down.weight", "layers.0.mlp.up.weight"],
    }
    for said, same in threads(2).run(finite.stopped, strategy, planted, ALWAYS):
        assert "is the gradient of layers.0.mlp.up.weight on rank 1. The update was not made." in said and same


@pytest.mark.unit
def test_a_nan_that_does_not_come_again_points_to_the_machine() -> None:
    for said, same in threads(2).run(finite.stopped, DP, {1: ["layers.0.mlp.up.weight"]}, 1):
        assert "is the gradient of layers.0.mlp.up.weight on rank 0. When the step was computed again" in said
        assert "a machine computes wrongly" in said and same


@pytest.mark.unit
@SOME
def test_an_update_left_out_is_as_if_its_step_had_never_been(strategy: Strategy) -> None:
    for found in threads(2).run(finite.skipped, strategy, 1, "layers.1.mlp.up.bias"):
        assert found == ([0, 1, 1], True)


@pytest.mark.unit
def test_too_many_left_out_in_a_row_end_the_run() -> None:
    for count, said in threads(2).run(finite.for_ever, DP):
        assert count == MAX_SKIPPED == 20
        assert said.startswith("step 20: ") and "the gradient of norm.weight on rank 0" in said


@pytest.mark.unit
@pytest.mark.parametrize(
    ("kind", "name"), [("master", "weight"), ("exp_avg", "first moment of"), ("exp_avg_sq", "second moment of")]
)
@SOME
def test_a_state_that_is_not_finite_is_found_before_it_is_saved(strategy: Strategy, kind: str, name: str) -> None:
    said = threads(2).run(finite.bad_state, strategy, 1, kind)
    assert said[0] == said[1] and said[0].startswith(f"step 1: the {name} ")
    assert "on rank 1 is not finite after this step, so no checkpoint of it is saved" in said[0]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("numbers", "fine"), [([3e38, 3e38], True), ([1.0, float("inf")], False), ([float("inf"), float("-inf")], False)]
)
def test_numbers_too_large_to_add_up_are_finite(numbers: list[float], fine: bool) -> None:
    assert finite.summed(0, numbers) is fine
