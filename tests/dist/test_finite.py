"""A NaN is found before it is applied or saved, by every rank, with the rank and the tensor it comes from."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.dist import finite
from tests.dist.finite import Strategy
from tests.support.ranks import Ranks

Pool = Callable[[int], Ranks]

TP, DP, PP = Strategy(tp=2), Strategy(dp=2), Strategy(pp=2)
ZERO2, FSDP = Strategy(dp=2, shard="zero2"), Strategy(dp=2, shard="fsdp")
SP = Strategy(tp=2, sequence_parallel=True)
ALWAYS = -1


PLANTED = pytest.mark.parametrize(
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
"""Strategies, the rank on which a gradient is made NaN, and the tensor that it is of."""


@PLANTED
def test_a_nan_is_traced_to_its_rank_and_tensor(pool: Pool, strategy: Strategy, culprit: int, tensor: str) -> None:
    for said, same in pool(2).run(finite.stopped, strategy, culprit, tensor, ALWAYS):
        assert said.startswith("step 2: the loss is ")
        assert "the norm of the gradients nan; " in said
        assert f"is the gradient of {tensor} on rank {culprit}. The update was not made." in said
        assert same, "weights, averages and counts of updates are those before"


def test_a_nan_that_does_not_come_again_points_to_the_machine(pool: Pool) -> None:
    for said, same in pool(2).run(finite.stopped, DP, 1, "layers.0.mlp.up.weight", 1):
        assert "is the gradient of layers.0.mlp.up.weight on rank 0. When the step was computed again" in said
        assert "a machine computes wrongly" in said
        assert same


@pytest.mark.parametrize("strategy", [TP, DP, FSDP, PP], ids=["tp", "dp", "fsdp", "pp"])
def test_an_update_left_out_is_as_if_its_step_had_never_been(pool: Pool, strategy: Strategy) -> None:
    for counts, same in pool(2).run(finite.skipped, strategy, 1, "layers.1.mlp.up.bias"):
        assert counts == [0, 1, 1]
        assert same


def test_too_many_left_out_in_a_row_end_the_run(pool: Pool) -> None:
    for count, said in pool(2).run(finite.for_ever, DP):
        assert count == 20
        assert said.startswith("step 20: ")
        assert "the gradient of norm.weight on rank 0" in said


@pytest.mark.parametrize(
    ("kind", "name"), [("master", "weight"), ("exp_avg", "first moment of"), ("exp_avg_sq", "second moment of")]
)
@pytest.mark.parametrize("strategy", [TP, FSDP, PP], ids=["tp", "fsdp", "pp"])
def test_a_state_that_is_not_finite_is_found_before_it_is_saved(
    pool: Pool, strategy: Strategy, kind: str, name: str
) -> None:
    said = pool(2).run(finite.bad_state, strategy, 1, kind)
    assert said[0] == said[1]
    assert said[0].startswith(f"step 1: the {name} ")
    assert "on rank 1 is not finite after this step, of which nothing is saved" in said[0]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("numbers", "fine"), [([3e38, 3e38], True), ([1.0, float("inf")], False), ([float("inf"), float("-inf")], False)]
)
def test_numbers_too_large_to_add_up_are_finite(numbers: list[float], fine: bool) -> None:
    assert finite.summed(0, numbers) is fine
